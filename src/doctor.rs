//! `superoffload doctor`: prints hardware and settings that affect performance, one fact a line, and advice.

pub(crate) mod disk;
pub(crate) mod gpu;
pub(crate) mod products;

use crate::error::Result;
use crate::facts::{BuildFacts, MachineFacts};
use crate::hardware::cpu_list::CpuList;
use crate::hardware::limits;
use crate::hardware::selected_profile::{AUTO, MachineId, SelectedProfile};
use crate::hardware::topology::{Cache, NumaNode, Topology};
use crate::host::affinity::{CpuPlacement, workers_beside_others};
use crate::host::memory_policy::HugePagesChoice;
use crate::host::memory_policy::MemoryPolicy;
use crate::host::perf::{WorkerCounters, WorkerCounts};
use crate::host::wakeup::WakeUp;
use crate::units::{Bytes, counted};
use disk::DiskRates;
use gpu::GpuReport;
use products::ModelProducts;
use serde::Serialize;
use std::fmt::{self, Display};
use std::path::Path;

/// Width of the name column: the longest name is `transparent huge pages`.
const NAME_CHARS: usize = 24;

/// Facts that are found by trying, not by reading files.
#[derive(Debug)]
pub(crate) struct Probes {
    /// Whether a GPU exists and CUDA can open it.
    pub gpu: GpuReport,
    /// The algorithms that cuBLASLt chooses for the products of known models, if there is a GPU.
    pub products: Result<Vec<ModelProducts>>,
    /// Wake-up latency of the optimizer's pool.
    pub wake_up: Result<WakeUp>,
    /// Performance counters that are available for a thread.
    pub counters: Result<WorkerCounts>,
    /// The rates of a directory for saves, if one was named.
    pub disk: Option<Result<DiskRates>>,
}

impl Probes {
    /// Runs all probes on this machine, and measures the disk of `output_dir`; `topology` lists its CPUs. This takes about a second.
    pub(crate) fn this_machine(topology: &Topology, output_dir: Option<&Path>) -> Self {
        let workers = workers(topology);
        let wake_up = WakeUp::measure(workers, CpuPlacement::on(topology, workers));
        let gpu = GpuReport::this_machine();
        let products = if gpu.usable.is_ok() { products::of_presets() } else { Ok(Vec::new()) };
        let counters = WorkerCounters::of_this_thread().read();
        Self { gpu, products, wake_up, counters, disk: output_dir.map(DiskRates::measure) }
    }
}

/// Optimizer workers of a run on a GPU.
fn workers(topology: &Topology) -> usize {
    workers_beside_others(topology.usable_cpus().map_or(1, |usable| usable.count()))
}

/// Facts in the order in which they are printed, and advice.
#[derive(Debug, Serialize)]
pub(crate) struct DoctorReport {
    program: BuildFacts,
    machine: MachineFacts,
    facts: Vec<NamedFact>,
    advice: Vec<String>,
}

/// A fact. Several facts may have the same name, such as memory nodes.
#[derive(Debug, Serialize)]
struct NamedFact {
    name: &'static str,
    value: String,
}

impl DoctorReport {
    /// Builds the report on `topology`. `isa` is the instruction set of the optimizer's kernels (`avx512`, `avx2`, `scalar`); `probes` are
    /// the results of the probes; `resctrl_root` is the resctrl mount point, normally `/sys/fs/resctrl`.
    pub(crate) fn new(topology: &Topology, isa: &str, probes: &Probes, resctrl_root: &Path) -> Self {
        let partitions = Partitions::discover(topology, resctrl_root);
        let facts = facts(topology, isa, probes, &partitions).into_iter().map(|(name, value)| NamedFact { name, value }).collect();
        let mut advice = advice(topology, isa, &partitions);
        advice.extend(gpu_advice(&probes.gpu));
        Self { program: BuildFacts::this_program(), machine: MachineFacts::new(topology), facts, advice }
    }
}

impl Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for NamedFact { name, value } in &self.facts {
            writeln!(f, "{:<NAME_CHARS$}{value}", format!("{name}:"))?;
        }
        write!(f, "\nwould make it faster:")?;
        if self.advice.is_empty() {
            write!(f, "\n  nothing found")?;
        }
        self.advice.iter().try_for_each(|text| write!(f, "\n  - {text}"))
    }
}

fn facts(topology: &Topology, isa: &str, probes: &Probes, partitions: &Partitions) -> Vec<(&'static str, String)> {
    let gpu = &probes.gpu;
    let mut facts = vec![
        // The first line: a new user checks this first.
        ("cuda device", cuda_device(gpu)),
        ("cpu", format!("{} ({})", or_unknown(topology.cpu_model.as_deref()), topology.arch)),
        ("isa", isa.to_owned()),
        ("cpus online", cpus(topology)),
        ("cpus usable", topology.usable_cpus().map_or_else(unknown, |usable| usable.to_string())),
        ("optimizer threads", threads(topology)),
        ("pool wake-up", or_error(&probes.wake_up, ToString::to_string)),
        ("caches", caches(&topology.caches)),
        ("memory", memory(topology)),
        ("memory limit", memory_limit(topology)),
    ];
    facts.extend(topology.numa_nodes.iter().map(|node| ("numa node", numa_node(node))));
    facts.extend([
        ("host memory from", memory_nodes(topology)),
        ("page size", size(topology.page_bytes.map(|bytes| bytes as u64))),
        ("transparent huge pages", thp(topology)),
        ("huge pages", huge_pages(topology)),
        ("locked memory", memlock(topology)),
        ("resctrl", partitions.state.clone()),
    ]);
    facts.extend(partitions.groups.iter().map(|group| ("resctrl group", group.clone())));
    facts.extend([
        ("perf", perf(topology)),
        ("perf counters", or_error(&probes.counters, WorkerCounts::availability)),
        ("gpu", gpu_name(topology, gpu)),
        ("gpu interrupts", interrupts(topology)),
    ]);
    match &gpu.several {
        Ok(several) => {
            facts.extend(several.ranks(topology).into_iter().map(|rank| ("gpu of a rank", rank)));
            facts.extend(several.links.pairs().into_iter().map(|pair| ("gpu link", pair)));
        }
        Err(cause) => facts.push(("gpu links", cause.to_string())),
    }
    facts.extend(gpu.libraries.iter().map(|(name, path)| ("library", format!("{name}: {}", or_error(path, |p| p.display().to_string())))));
    facts.extend(gpu.usable.as_ref().ok().map(|addressing| ("addressing", addressing.to_string())));
    match &probes.products {
        Ok(models) => facts.extend(models.iter().map(|model| ("matrix products", model.to_string()))),
        Err(cause) => facts.push(("matrix products", cause.to_string())),
    }
    let rates_from = gpu.facts.as_ref().map(|gpu| SelectedProfile::of(Path::new(AUTO), Ok(MachineId::of(topology, gpu)), 1));
    facts.extend(rates_from.ok().map(|rates_from| ("rates", or_error(&rates_from, ToString::to_string))));
    facts.extend(probes.disk.as_ref().map(|rates| ("disk", or_error(rates, ToString::to_string))));
    facts.push(("kernel", or_unknown(topology.kernel.as_deref()).to_owned()));
    facts
}

fn unknown() -> String {
    "unknown".into()
}

fn or_error<T>(result: &Result<T>, print: impl Fn(&T) -> String) -> String {
    result.as_ref().map_or_else(ToString::to_string, print)
}

fn or_unknown(text: Option<&str>) -> &str {
    text.unwrap_or("unknown")
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(unknown, |bytes| Bytes(bytes).to_string())
}

fn cpus(topology: &Topology) -> String {
    if topology.cpus.is_empty() {
        return unknown();
    }
    let count = |number: Option<usize>, noun| number.map_or_else(|| format!("{noun}s unknown"), |number| counted(number, noun));
    let (cores, packages) = (count(topology.cores(), "core"), count(topology.packages(), "package"));
    format!("{}, {cores}, {packages}", counted(topology.cpus.len(), "thread"))
}

/// The CPUs of the optimizer's threads. Beside a GPU one CPU is left for the driver; the CPU device computes and steps on all CPUs.
fn threads(topology: &Topology) -> String {
    let workers = workers(topology);
    let beside_a_gpu = match CpuPlacement::on(topology, workers) {
        Some(place) => format!("{workers} on CPUs {}, all else on {}", CpuList::from_iter(place.workers), place.others),
        None => format!("{workers}, not pinned (under a quota, CPUs are shared)"),
    };
    let cpus = topology.usable_cpus().map_or(1, |usable| usable.count());
    format!("beside a GPU {beside_a_gpu}; on the CPU device {cpus}")
}

/// Memory nodes beside the CPUs in use; memory of a GPU is never among them.
fn memory_nodes(topology: &Topology) -> String {
    let (all, cpus) = (topology.nodes_with_memory().count(), topology.usable_cpus().map(|usable| usable.affinity));
    match cpus.map(|cpus| topology.nodes_beside(&cpus)) {
        Some(nodes) if all > 1 && !nodes.is_empty() => format!("node {} of {all} with memory", CpuList::from_iter(nodes)),
        _ if all > 1 => "any node: no node with memory is near the CPUs".into(),
        _ => "the only node".into(),
    }
}

fn thp(topology: &Topology) -> String {
    let Some(choice) = &topology.thp else { return "not in this kernel".into() };
    topology.thp_bytes.map_or_else(|| choice.clone(), |bytes| format!("{choice}, {}", Bytes(bytes)))
}

fn interrupts(topology: &Topology) -> String {
    if topology.gpu_interrupts.is_empty() { "none seen".into() } else { format!("on CPUs {}", topology.gpu_interrupts) }
}

/// `L1d 48.0 KiB x2, L2 1.0 MiB x2, L3 32.0 MiB`; instruction caches are left out, since they do not affect the optimizer.
fn caches(caches: &[Cache]) -> String {
    let data: Vec<_> = caches.iter().filter(|cache| cache.kind != "Instruction").map(cache_name).collect();
    let print = |same: &[String]| if same.len() == 1 { same[0].clone() } else { format!("{} x{}", same[0], same.len()) };
    let kinds: Vec<_> = data.chunk_by(|a, b| a == b).map(print).collect();
    if kinds.is_empty() { unknown() } else { kinds.join(", ") }
}

fn cache_name(cache: &Cache) -> String {
    let suffix = if cache.kind == "Data" { "d" } else { "" };
    format!("L{}{suffix} {}", cache.level, size(cache.bytes))
}

fn memory(topology: &Topology) -> String {
    format!("{}, {} available", size(topology.memory_total_bytes), size(topology.memory_available_bytes))
}

fn memory_limit(topology: &Topology) -> String {
    let limit = topology.cgroup.memory_bytes.as_ref();
    limit.map_or_else(|| "none".into(), |limit| format!("{} ({})", Bytes(limit.value), limit.file.display()))
}

fn numa_node(node: &NumaNode) -> String {
    format!("{}: {}, cpus {}", node.id, size(node.memory_bytes), node.cpus)
}

fn huge_pages(topology: &Topology) -> String {
    let pool = |pool: &crate::hardware::topology::HugePages| {
        let count = |number: Option<u64>| number.map_or_else(unknown, |number| number.to_string());
        format!("{} of {} free at {}", count(pool.free), count(pool.total), Bytes(pool.page_bytes))
    };
    let pools: Vec<_> = topology.huge_pages.iter().map(pool).collect();
    if pools.is_empty() { "not in this kernel".into() } else { pools.join(", ") }
}

fn memlock(topology: &Topology) -> String {
    let limit = match topology.process.memlock_bytes {
        Some(u64::MAX) => "unlimited".into(),
        bytes => size(bytes),
    };
    if topology.ipc_lock == Some(true) { format!("{limit}, not enforced (CAP_IPC_LOCK)") } else { limit }
}

fn perf(topology: &Topology) -> String {
    let Some(paranoid) = topology.perf_event_paranoid else { return "not in this kernel".into() };
    let is_pmu = |name: &String| name.starts_with("cpu") || name.starts_with("armv8_pmu");
    let counters = if topology.perf_sources.iter().any(is_pmu) { "hardware counters" } else { "software events only" };
    let scope = match paranoid {
        ..=0 => "whole machine",
        1..=2 => "own processes",
        _ => "needs CAP_PERFMON",
    };
    format!("{counters}, {scope} (perf_event_paranoid {paranoid})")
}

/// Facts of the GPU from NVML, or from the kernel's driver files if NVML is not available.
fn gpu_name(topology: &Topology, gpu: &GpuReport) -> String {
    match (&gpu.facts, &topology.nvidia_driver) {
        (Ok(facts), _) => facts.to_string(),
        (Err(cause), Some(version)) => format!("NVIDIA driver {version}, {}; {cause}", counted(topology.nvidia_devices, "GPU")),
        (Err(_), None) if topology.nvidia_devices > 0 => {
            format!("{} but no NVIDIA driver loaded", counted(topology.nvidia_devices, "device file"))
        }
        (Err(_), None) => "no NVIDIA driver".into(),
    }
}

/// Names of the GPUs on which this program was measured.
const MEASURED: [&str; 2] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];

fn cuda_device(gpu: &GpuReport) -> String {
    let name = or_unknown(gpu.facts.as_ref().ok().and_then(|facts| facts.name.as_deref()));
    let is_measured = MEASURED.iter().any(|measured| name.starts_with(measured));
    let state = if is_measured { "measured" } else { "not yet measured: please send the output of `superoffload selftest --json`" };
    or_error(&gpu.usable, |_| format!("ready (--device cuda), {name}: supported, {state}"))
}

/// Description of cache and bandwidth partitions, and advice about them.
#[derive(Default)]
struct Partitions {
    state: String,
    groups: Vec<String>,
    advice: Option<String>,
}

impl Partitions {
    #[cfg(not(feature = "mpam"))]
    fn discover(_: &Topology, _: &Path) -> Self {
        Self { state: "compiled out (cargo feature mpam)".into(), ..Self::default() }
    }

    #[cfg(feature = "mpam")]
    fn discover(topology: &Topology, root: &Path) -> Self {
        use superoffload_resctrl::Discovery;
        match superoffload_resctrl::discover(root) {
            Ok(Discovery::Mounted(found)) => {
                Self { state: found.info.to_string(), groups: found.groups.iter().map(ToString::to_string).collect(), advice: None }
            }
            Ok(Discovery::NotMounted) => Self {
                state: "supported, not mounted".into(),
                advice: Some(
                    "partition caches and bandwidth: superoffload-resctrl prepare --profile cache-only --user USER, as root".into(),
                ),
                ..Self::default()
            },
            Ok(Discovery::NoMountPoint) => Self::without_mount_point(topology),
            Err(error) => Self { state: error.to_string(), ..Self::default() },
        }
    }

    /// The kernel creates no mount point when it found nothing to partition. Only x86 CPUs report their own support in flags.
    #[cfg(feature = "mpam")]
    fn without_mount_point(topology: &Topology) -> Self {
        let features: Vec<_> = ["cat_l3", "cat_l2", "mba", "cqm_llc"].into_iter().filter(|flag| topology.has_flag(flag)).collect();
        if features.is_empty() {
            return Self { state: "not offered by this CPU or kernel".into(), ..Self::default() };
        }
        let advice = match topology.resctrl_in_kernel {
            Some(true) => "the CPU can partition caches and bandwidth, the kernel turned it off: see rdt= on its command line",
            _ => "the CPU can partition caches and bandwidth, the kernel cannot: boot one with CONFIG_X86_CPU_RESCTRL",
        };
        Self { state: format!("CPU has {}, kernel offers none", features.join(" ")), groups: Vec::new(), advice: Some(advice.into()) }
    }
}

fn advice(topology: &Topology, isa: &str, partitions: &Partitions) -> Vec<String> {
    let advice = [
        vector_isa(topology, isa),
        small_memory(topology),
        thp_off(topology),
        thp_too_coarse(topology),
        spilling(topology),
        closed_counters(topology),
        small_memlock(topology),
        partitions.advice.clone(),
    ];
    limits::reasons(topology).into_iter().chain(advice.into_iter().flatten()).collect()
}

/// Reasons why no GPU can be used.
fn gpu_advice(gpu: &GpuReport) -> Vec<String> {
    let absent = gpu.usable.as_ref().err().map(|cause| format!("a GPU, if present: {cause}"));
    let missing = gpu.libraries.iter().filter_map(|(_, path)| path.as_ref().err().map(ToString::to_string));
    absent.into_iter().chain(missing).collect()
}

/// Arm's vector kernels need no advice: every aarch64 CPU has NEON.
fn vector_isa(topology: &Topology, isa: &str) -> Option<String> {
    let (has_avx2, has_avx512) = (topology.has_flag("avx2"), topology.has_flag("avx512f"));
    let unused = if has_avx512 { isa != "avx512" } else { has_avx2 && isa != "avx2" };
    if topology.arch != "x86_64" || topology.cpu_flags.is_empty() {
        None
    } else if unused {
        Some(format!("the optimizer runs on {isa}, the CPU has {}", if has_avx512 { "AVX-512" } else { "AVX2" }))
    } else if !has_avx2 {
        Some("the CPU has no AVX2: the optimizer runs on scalar code".into())
    } else {
        (!has_avx512).then(|| "the CPU has no AVX-512: the optimizer runs on AVX2".into())
    }
}

fn small_memory(topology: &Topology) -> Option<String> {
    let limit = topology.cgroup.memory_bytes.as_ref()?;
    let total = topology.memory_total_bytes?;
    (limit.value < total).then(|| format!("the cgroup grants {} of {}: raise {}", Bytes(limit.value), Bytes(total), limit.file.display()))
}

fn thp_off(topology: &Topology) -> Option<String> {
    let off = topology.thp.as_deref() == Some("never");
    off.then(|| "transparent huge pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".into())
}

/// The first note of `--huge-pages auto` on this machine.
fn thp_too_coarse(topology: &Topology) -> Option<String> {
    let notes = MemoryPolicy::new(topology, HugePagesChoice::Auto, &[], 1).ok()?.notes;
    topology.thp_bytes.and(notes.into_iter().next())
}

/// Advice if no memory node beside the process's CPUs may be used.
fn spilling(topology: &Topology) -> Option<String> {
    let nodes = topology.nodes_beside(&topology.usable_cpus()?.affinity);
    let far = topology.nodes_with_memory().count() > 1 && nodes.is_empty();
    far.then(|| "no memory node beside the CPUs may be used: widen cpuset.mems, or move the CPUs".into())
}

fn closed_counters(topology: &Topology) -> Option<String> {
    let closed = topology.perf_event_paranoid.is_some_and(|paranoid| paranoid > 2);
    closed.then(|| "performance counters are closed: sysctl kernel.perf_event_paranoid=2 opens a process's own".into())
}

/// Optimizer states are locked in memory, so a limit below half of the usable memory is reported.
fn small_memlock(topology: &Topology) -> Option<String> {
    let (limit, usable) = (topology.process.memlock_bytes?, topology.memory_usable_bytes()?);
    let limits = limit < usable / 2 && topology.ipc_lock != Some(true);
    limits.then(|| format!("only {} may be locked: ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1)", Bytes(limit)))
}

#[cfg(test)]
mod tests {
    use super::gpu::SeveralGpus;
    use super::*;
    use crate::error::Error;
    use crate::hardware::cgroup::Limit;
    use crate::hardware::gpu::GpuFacts;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::{container, grace, tree, two_sockets};
    use crate::host::wakeup::Latency;
    use crate::memory::Addressing;

    /// The machine of the topology's tests, as an x86-64 build sees it.
    fn server() -> Topology {
        let process = Process { affinity: CpuList::parse("0-6"), memlock_bytes: Some(8 << 20), ..Process::default() };
        Topology { arch: "x86_64", ..Topology::read(two_sockets().path(), process) }
    }

    fn no_gpu() -> GpuReport {
        let cause = || Error::resource("find an NVIDIA GPU", "no driver");
        GpuReport { facts: Err(cause()), usable: Err(cause()), libraries: Vec::new(), several: Ok(SeveralGpus::default()) }
    }

    fn probes() -> Probes {
        let latency = Latency { ns_median: 1500, ns_p99: 3000 };
        let missing = vec!["cycles: not here".into()];
        let counters = WorkerCounts { threads: 1, counts: [("page_faults", 0)].into_iter().collect(), missing };
        Probes {
            gpu: no_gpu(),
            products: Ok(Vec::new()),
            wake_up: Ok(WakeUp { workers: 6, spinning: latency, parked: latency }),
            counters: Ok(counters),
            disk: None,
        }
    }

    fn facts_of(topology: &Topology) -> Vec<String> {
        let report = DoctorReport::new(topology, "scalar", &probes(), Path::new("/nowhere")).to_string();
        report.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    fn advice_of(change: impl FnOnce(&mut Topology), isa: &str) -> Vec<String> {
        let mut topology = server();
        topology.cpu_flags = vec!["avx2".into(), "avx512f".into()];
        (topology.thp, topology.process.memlock_bytes) = (Some("madvise".into()), Some(u64::MAX));
        change(&mut topology);
        advice(&topology, isa, &Partitions::default())
    }

    #[test]
    fn prints_one_fact_a_line_and_advice() {
        let report = DoctorReport::new(&server(), "avx2", &probes(), Path::new("/nowhere")).to_string();
        let facts: Vec<_> = report.lines().take_while(|line| !line.is_empty()).collect();
        let expected = [
            "cuda device:            find an NVIDIA GPU: no driver",
            "cpu:                    Example CPU @ 2.00GHz (x86_64)",
            "isa:                    avx2",
            "cpus online:            7 threads, 4 cores, 2 packages",
            "cpus usable:            7 of 7 CPUs (affinity 0-6, no cgroup quota)",
            "optimizer threads:      beside a GPU 6 on CPUs 1-6, all else on 0; on the CPU device 7",
            "pool wake-up:           1.5 us (99 %: 3.0) spinning, 1.5 us (99 %: 3.0) parked, 6 workers",
            "caches:                 L1d 48.0 KiB x4, L2 2.0 MiB x4, L3 32.0 MiB x2",
            "memory:                 64.0 GiB, 48.0 GiB available",
            "memory limit:           none",
            "numa node:              0: 32.0 GiB, cpus 0-1,4-5",
            "numa node:              1: 32.0 GiB, cpus 2-3,6",
            "host memory from:       node 0-1 of 2 with memory",
            "page size:              unknown",
            "transparent huge pages: never",
            "huge pages:             4 of 16 free at 2.0 MiB, unknown of 0 free at 1.0 GiB",
            "locked memory:          8.0 MiB",
        ];
        assert_eq!(facts[..expected.len()], expected);
        let rest = [
            "perf:                   software events only, own processes (perf_event_paranoid 2)",
            "perf counters:          page_faults; not counted: cycles: not here",
            "gpu:                    no NVIDIA driver",
            "gpu interrupts:         none seen",
            "kernel:                 6.12.1",
        ];
        assert_eq!(facts[expected.len() + 1..], rest);
        for advice in ["no AVX-512", "echo madvise", "only 8.0 MiB may be locked", "a GPU, if present: find an NVIDIA GPU: no driver"] {
            assert!(report.contains(advice), "{advice} in\n{report}");
        }
    }

    #[test]
    fn a_gpu_is_named_by_its_library_or_by_the_kernel() {
        let facts = GpuFacts { name: Some("NVIDIA H200".into()), ..GpuFacts::default() };
        let found =
            GpuReport { facts: Ok(facts), usable: Ok(Addressing::Managed), libraries: Vec::new(), several: Ok(SeveralGpus::default()) };
        assert_eq!(gpu_name(&server(), &found), "NVIDIA H200");
        assert_eq!(cuda_device(&found), "ready (--device cuda), NVIDIA H200: supported, measured");
        let unmeasured = "not yet measured: please send the output of `superoffload selftest --json`";
        let others = ["NVIDIA GeForce RTX 4090", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe"].map(|name| (name, unmeasured));
        for (name, state) in [("NVIDIA H100 80GB HBM3", "measured")].into_iter().chain(others) {
            let facts = GpuFacts { name: Some(name.into()), ..GpuFacts::default() };
            let other =
                GpuReport { facts: Ok(facts), usable: Ok(Addressing::Managed), libraries: Vec::new(), several: Ok(SeveralGpus::default()) };
            assert!(cuda_device(&other).ends_with(&format!("{name}: supported, {state}")));
        }
        let missing = GpuReport {
            facts: Ok(GpuFacts::default()),
            usable: Ok(Addressing::Managed),
            libraries: vec![("cuBLASLt", Err(Error::resource("open libcublasLt.so.13", "not found")))],
            several: Ok(SeveralGpus::default()),
        };
        assert_eq!(gpu_advice(&missing), ["open libcublasLt.so.13: not found"], "what is missing is not `nothing found`");
        let report = DoctorReport::new(&server(), "avx2", &Probes { gpu: found, ..probes() }, Path::new("/nowhere")).to_string();
        assert!(report.contains("\naddressing:             managed memory with pages that move\n"), "{report}");
        let driver = Topology { nvidia_driver: Some("580.1".into()), nvidia_devices: 2, ..server() };
        assert_eq!(gpu_name(&driver, &no_gpu()), "NVIDIA driver 580.1, 2 GPUs; find an NVIDIA GPU: no driver");
        let unloaded = Topology { nvidia_devices: 1, ..server() };
        assert_eq!(gpu_name(&unloaded, &no_gpu()), "1 device file but no NVIDIA driver loaded");
    }

    #[test]
    fn a_grace_keeps_its_gpus_memory_and_its_coarse_pages_out() {
        let facts = facts_of(&Topology::read(
            grace().path(),
            Process { affinity: CpuList::parse("0-71"), memlock_bytes: None, ..Process::default() },
        ));
        for fact in [
            "optimizer threads: beside a GPU 65 on CPUs 6-39,41-71, all else on 0-5,40; on the CPU device 72",
            "numa node: 1: 96.0 GiB, cpus none",
            "host memory from: node 0 of 2 with memory",
            "page size: 64.0 KiB",
            "transparent huge pages: madvise, 512.0 MiB",
            "huge pages: 51200 of 51200 free at 2.0 MiB, 0 of 0 free at 512.0 MiB",
            "gpu interrupts: on CPUs 40",
            "- transparent huge pages of 512.0 MiB are too large to use; reserve pages for --huge-pages explicit",
        ] {
            assert!(facts.iter().any(|line| line == fact), "{fact} in\n{}", facts.join("\n"));
        }
    }

    #[test]
    fn a_container_report_names_its_limits() {
        let root = container();
        let process = Process { affinity: CpuList::parse("8-11"), memlock_bytes: Some(8 << 20), ..Process::default() };
        let facts = facts_of(&Topology { perf_event_paranoid: Some(4), ..Topology::read(root.path(), process) });
        let dir = root.path().join("sys/fs/cgroup");
        for fact in [
            "cpus usable: 2 of 72 CPUs (affinity 8-11, cgroup quota 2.0)".into(),
            "optimizer threads: beside a GPU 1, not pinned (under a quota, CPUs are shared); on the CPU device 2".into(),
            format!("memory limit: 16.0 GiB ({})", dir.join("memory.max").display()),
            format!("- the cgroup grants 2.0 of 4 CPUs' time: raise {}", dir.join("cpu.max").display()),
            format!("- only 4 of 72 CPUs are allowed (8-11): widen {}", dir.join("cpuset.cpus.effective").display()),
            "- performance counters are closed: sysctl kernel.perf_event_paranoid=2 opens a process's own".into(),
        ] {
            assert!(facts.contains(&fact), "{fact} in\n{}", facts.join("\n"));
        }
    }

    #[test]
    fn an_unknown_machine_is_shown_as_unknown() {
        let unknown = Topology::read(tree(&[]).path(), Process::default());
        let found = GpuReport {
            facts: Ok(GpuFacts::default()),
            usable: Ok(Addressing::Managed),
            libraries: Vec::new(),
            several: Ok(SeveralGpus::default()),
        };
        let report = DoctorReport::new(&unknown, "scalar", &Probes { gpu: found, ..probes() }, Path::new("/nowhere")).to_string();
        assert!(report.contains("cpu:                    unknown"));
        assert!(report.contains("perf:                   not in this kernel"));
        assert!(report.ends_with("would make it faster:\n  nothing found"), "{report}");
    }

    #[test]
    fn each_limit_has_its_advice() {
        assert_eq!(advice_of(|_| {}, "avx512"), Vec::<String>::new());
        assert_eq!(advice_of(|_| {}, "avx2"), ["the optimizer runs on avx2, the CPU has AVX-512"]);
        let quota = |t: &mut Topology| t.cgroup.cpu_quota = Some(Limit { value: 2.0, file: "/c/cpu.max".into() });
        assert_eq!(advice_of(quota, "avx512"), ["the cgroup grants 2.0 of 7 CPUs' time: raise /c/cpu.max"]);
        let mask = |t: &mut Topology| t.process.affinity = CpuList::parse("0-1");
        assert_eq!(advice_of(mask, "avx512"), ["only 2 of 7 CPUs are allowed (0-1): start without taskset or numactl"]);
        let memory = |t: &mut Topology| t.cgroup.memory_bytes = Some(Limit { value: 1 << 30, file: "/c/memory.max".into() });
        assert_eq!(advice_of(memory, "avx512"), ["the cgroup grants 1.0 GiB of 64.0 GiB: raise /c/memory.max"]);
        let locked = |t: &mut Topology| (t.process.memlock_bytes, t.ipc_lock) = (Some(0), Some(true));
        assert_eq!(advice_of(locked, "avx512"), Vec::<String>::new());
    }

    #[cfg(feature = "mpam")]
    #[test]
    fn partitions_are_found_or_explained() {
        let topology = server();
        let none = Partitions::discover(&topology, Path::new("/nowhere"));
        assert_eq!(none.state, "CPU has cat_l3 mba, kernel offers none");
        assert!(none.advice.unwrap().contains("rdt="));

        let root = tree(&[]);
        let unmounted = Partitions::discover(&topology, root.path());
        assert_eq!(unmounted.state, "supported, not mounted");
        assert!(unmounted.advice.unwrap().contains("superoffload-resctrl prepare"));

        let root = tree(&[("info/MB/min_bandwidth", "10\n"), ("schemata", "MB:0=100\n"), ("tasks", "1\n"), ("cpus_list", "0-1\n")]);
        let mounted = Partitions::discover(&topology, root.path());
        assert_eq!((mounted.state.as_str(), mounted.advice), ("MB min_bandwidth 10", None));
        assert_eq!(mounted.groups, ["/: MB:0=100, cpus 0-1, 1 tasks"]);
    }

    #[cfg(not(feature = "mpam"))]
    #[test]
    fn partitions_are_compiled_out() {
        assert_eq!(Partitions::discover(&server(), Path::new("/")).state, "compiled out (cargo feature mpam)");
    }
}
