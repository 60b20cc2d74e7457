//! `probe`: measures a machine in about a minute and writes a [`Profile`] of it.
//!
//! All device work is timed by the device's clock and between events, as a step experiences it, so a simulated device can be measured like
//! a real one. The files:
//!
//! - [`arithmetic`] of [`product`], [`grouped`], [`attention`], [`kernels`]: compute rates, device memory, launches
//! - [`copies`]: the link by size and direction, in one direction and in both; managed memory
//! - [`host`]: memory, optimizer passes and casts by threads, wake-up, over [`states`], by [`workers`]
//! - [`contention`]: concurrent products, copies and optimizer; [`sharing`]: products and optimizer on the same CPUs
//! - [`together`]: several busy GPUs
//!
//! The host is measured first, because only a rested GPU shows its burst rate.
#![allow(unsafe_code)]

pub(crate) mod arithmetic;
pub(crate) mod attention;
pub(crate) mod contention;
pub(crate) mod copies;
mod facts;
mod fp8;
pub(crate) mod grouped;
pub(crate) mod host;
pub(crate) mod kernels;
mod options;
pub(crate) mod product;
mod profile_file;
pub(crate) mod samples;
pub(crate) mod sharing;
mod sizes;
pub(crate) mod states;
pub(crate) mod timer;
pub(crate) mod together;
mod work_done;
pub(crate) mod workers;

use crate::config::settings::Settings;
use crate::device::cpu::StreamOrder;
use crate::device::{Attention, DeviceKind, Engines, ExpertProducts, Kernels};
use crate::dtype::Dtype;
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::hardware::gpu::GpuId;
use crate::hardware::profile::{Contention, CpuDevice as CpuRates, Gpu, Host, Link, Profile, Together, VERSION};
use crate::hardware::sourced::Curve;
use crate::hardware::topology::Topology;
use crate::host::affinity::workers_beside_others;
use crate::host::doorbell::Doorbell;
use crate::host::pinned::HostMemory;
use crate::launch::peer_links::PeerLinks;
use crate::launch::{devices, gpu, open};
use crate::memory::{Addressing, DeviceMemory};
use crate::planner::machine::GroupedLayouts;
use arithmetic::Arithmetic;
use contention::Contenders;
use copies::Copies;
use facts::ProfileFacts;
pub use options::ProbeOptions;
use product::Product;
use samples::sourced;
use sharing::Sharers;
pub(crate) use sizes::ProbeSizes;
use states::States;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use timer::Timer;
use together::{JointProbe, RankPart};
use workers::{Workers, memory_policy};

/// Measures this machine. `log` prints progress lines.
///
/// # Errors
/// `Resource` if threads, memory or a device are not available, or with the name of a number that is out of range.
pub(crate) fn run(options: &ProbeOptions, log: &mut dyn FnMut(&dyn Display)) -> Result<Profile> {
    let topology = Topology::this_machine();
    let settings = Settings { device: options.device(), cuda_libraries: options.cuda_libraries.clone(), ..Settings::default() };
    let chosen = devices::choose(&settings, &topology)?;
    if options.gpus.is_some() && !chosen.is_gpu() {
        return Err(Error::usage("--gpus: needs GPUs, and the device is the CPU"));
    }
    let gpus = if chosen.is_gpu() { options.joint_probe(gpu::visible()?, log)? } else { Vec::new() };
    if let Some(why) = &chosen.note {
        log(&format_args!("no GPU and no link are measured: {why}"));
    }
    let (cpus, time_s) = (chosen.machine.cpus, options.seconds as f64);
    // Users of the memory are declared later, so they are dropped earlier.
    let mut memory = HostMemory::new(memory_policy(&topology, cpus)?);
    log(&format_args!("host: memory, optimizer and casts by threads"));
    // SAFETY: measurements run one job at a time, and wait for it before `memory` is dropped.
    let states = unsafe { States::new(&topology, &mut memory) }?;
    let host_share = if chosen.is_gpu() { 0.3 } else { 0.4 };
    let host = host::measure(&topology, cpus, &states, host_share * time_s)?;
    let (device, sections) = match (chosen.machine.kind, chosen.machine.device) {
        (DeviceKind::Cpu, _) => {
            let bell = Arc::new(Doorbell::default());
            let mut dev = open::cpu(cpus, StreamOrder::Threads, bell.clone(), 0)?;
            log(&format_args!("cpus: matrix products, attention, memory, launches"));
            let mut timer = Timer::new(&mut dev)?;
            let arithmetic = Arithmetic::measure(&mut timer, ProbeSizes::CPUS, 0.4 * time_s)?;
            log(&format_args!("cpus: products and the optimizer at the same time"));
            let pool = Workers::ringing(bell.clone(), &topology, cpus)?.pool;
            let mut sharers = Sharers { product: arithmetic.products.large, states: &states, pool, bell };
            let sharing = sharers.measure(&mut timer, 0.2 * time_s)?;
            (crate::device::Device::describe(&dev), Sections { cpu_device: Some(arithmetic.cpu_device(sharing)), ..Sections::default() })
        }
        (DeviceKind::Gpu, DeviceMemory::Shared) => {
            return Err(Error::Unsupported("probe: a GPU that shares the host's memory is not measured yet; use a shipped profile".into()));
        }
        (DeviceKind::Gpu, DeviceMemory::Own { bytes, addressing }) => {
            let pool = Workers::new(&topology, workers_beside_others(cpus))?.pool;
            let engines = Engines { attention: Attention::Cudnn { deterministic: true }, ..Engines::OWN };
            let mut dev = gpu::open(0, options.libraries(), engines, 0, false)?;
            let context = ProbeContext { free_bytes: bytes, addressing, memory: &mut memory, states: &states, pool };
            let share = if gpus.len() > 1 { 0.5 } else { 0.7 };
            let (mut gpu, link, contention) = measure_device(&mut dev, ProbeSizes::GPU, context, share * time_s, log)?;
            let device = crate::device::Device::describe(&dev);
            drop(dev);
            gpu.cublaslt_grouped_flops_by_rows = measure_grouped_layouts(options, 0.04 * time_s, log)?;
            let together = if gpus.len() > 1 { Some(measure_together(options, &topology, &gpus, 0.2 * time_s, log)?) } else { None };
            (device, Sections { gpu: Some(gpu), link: Some(link), contention: Some(contention), cpu_device: None, together })
        }
    };
    profile(options, ProfileFacts::new(&topology, &device), host, sections)
}

/// Measured sections of a machine other than its host.
#[derive(Default)]
struct Sections {
    gpu: Option<Gpu>,
    link: Option<Link>,
    cpu_device: Option<CpuRates>,
    contention: Option<Contention>,
    together: Option<Together>,
}

/// Resources next to a measured device.
pub(crate) struct ProbeContext<'a> {
    pub free_bytes: u64,
    /// The device's access to host memory.
    pub addressing: Addressing,
    /// Source of pinned memory, which outlives the device.
    pub memory: &'a mut HostMemory,
    pub states: &'a States,
    pub pool: Pool<StepJob>,
}

/// Measures a device with its own memory for about `time_s`.
///
/// # Errors
/// Errors of the device and the pool.
pub(crate) fn measure_device<D: Kernels>(
    dev: &mut D,
    sizes: ProbeSizes,
    context: ProbeContext<'_>,
    time_s: f64,
    log: &mut dyn FnMut(&dyn Display),
) -> Result<(Gpu, Link, Contention)> {
    let ProbeContext { free_bytes, addressing, memory, states, pool } = context;
    let mut timer = Timer::new(dev)?;
    log(&format_args!("gpu: matrix products, attention, memory, launches"));
    let Arithmetic { products, grouped_by_rows, attention, small } = Arithmetic::measure(&mut timer, sizes, 0.53 * time_s)?;
    let in_fp8 = fp8::measure(&mut timer, products.large, 0.03 * time_s)?;
    log(&format_args!("link: copies by size and way"));
    let copies = Copies::new(timer.dev, memory, sizes.copy_bytes)?;
    let link = copies.measure(&mut timer, addressing, 0.24 * time_s)?;
    log(&format_args!("all at the same time"));
    let mut contenders = Contenders { product: products.large, copies, states, pool };
    let contention = contenders.measure(&mut timer, link.both_ways_bytes_per_s.value, 0.2 * time_s)?;
    let gpu = Gpu {
        addressing,
        shares_host_memory: false,
        memory_bytes: sourced(free_bytes as f64, "free now"),
        memory_bytes_per_s: small.memory_bytes_per_s.sourced(),
        matmul_flops: products.sustained.sourced(),
        matmul_burst_flops: products.burst.sourced(),
        matmul_share_by_least_dim: products.share_by_least_dim,
        fp8_matmul_flops: in_fp8.map(|samples| samples.sourced()),
        grouped_flops_by_rows: Some(grouped_by_rows),
        cublaslt_grouped_flops_by_rows: None,
        attention_forward_flops: attention.forward.sourced(),
        attention_backward_flops: attention.backward.sourced(),
        launch_s: small.launch_s.sourced(),
        kernel_s: small.kernel_s.sourced(),
    };
    Ok((gpu, link, contention))
}

/// Measures expert products by cuBLASLt on the first GPU, if it supports them.
///
/// # Errors
/// Errors of the device.
fn measure_grouped_layouts(options: &ProbeOptions, time_s: f64, log: &mut dyn FnMut(&dyn Display)) -> Result<Option<Curve>> {
    if let GroupedLayouts::Unusable(why) = gpu::grouped_layouts(&options.libraries()) {
        log(&format_args!("gpu: products of experts by this program's kernels alone: {why}"));
        return Ok(None);
    }
    log(&format_args!("gpu: products of experts by cuBLASLt"));
    let engines = Engines { expert_products: ExpertProducts::Cublaslt, ..Engines::OWN };
    let mut dev = gpu::open(0, options.libraries(), engines, 0, false)?;
    let memory = Product::new(&mut dev, Dtype::Bfloat16, ProbeSizes::GPU.product)?;
    grouped::measure(&mut Timer::new(&mut dev)?, memory, time_s).map(Some)
}

/// Measures `gpus` of the machine of `topology` for about `time_s`, all busy at the same time.
fn measure_together(
    options: &ProbeOptions,
    topology: &Topology,
    gpus: &[GpuId],
    time_s: f64,
    log: &mut dyn FnMut(&dyn Display),
) -> Result<Together> {
    let (links, gpu_nodes) = (PeerLinks::between(gpus)?, gpu::gpu_nodes(gpus, topology));
    for line in &links.lines() {
        log(line);
    }
    log(&format_args!("{} GPUs at once: links, pulls from each other, optimizers", gpus.len()));
    let joint_probe = JointProbe {
        topology,
        gpu_nodes: &gpu_nodes,
        route: links.route(),
        are_gpus: true,
        copy_bytes: ProbeSizes::GPU.copy_bytes,
        time_s,
    };
    let make = |part: &RankPart| {
        let dev = gpu::open(part.rank, options.libraries(), Engines::OWN, 0, false)?;
        Ok((dev, Workers::ringing(part.bell.clone(), &part.topology, part.threads)?.pool))
    };
    together::measure(&joint_probe, make)
}

/// Assembles the profile and checks its numbers.
fn profile(options: &ProbeOptions, facts: ProfileFacts, host: Host, sections: Sections) -> Result<Profile> {
    let ProfileFacts { machine, facts, date } = facts;
    let Sections { gpu, link, cpu_device, contention, together } = sections;
    let name = options.out.as_deref().and_then(Path::file_stem).map_or("this-machine".into(), |stem| stem.to_string_lossy().into_owned());
    let profile =
        Profile { version: VERSION, name, machine, date, facts, gpu, link, host, cpu_device, contention, together, network: None };
    profile.check().map_err(|why| Error::resource("probe this machine", why))?;
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::profile_file::ProfileFile;
    use super::*;
    use crate::config::options::{DeviceChoice, GpuCount};
    use crate::device::sim::SimDevice;
    use crate::hardware::rates::Rates;
    use crate::hardware::sourced::Points;
    use crate::host::memory_policy::MemoryPolicy;
    use crate::planner::machine::Machine;

    /// This machine without caches, which would require large buckets.
    fn small_caches() -> Topology {
        Topology { caches: Vec::new(), memory_available_bytes: Some(1 << 28), ..Topology::this_machine() }
    }

    fn of_the_cpu() -> ProbeOptions {
        ProbeOptions { device: DeviceChoice::Cpu, gpus: None, seconds: 1, out: None, save: false, cuda_libraries: None }
    }

    #[test]
    fn gpus_of_several_models_are_measured_alone_unless_requested() {
        let gpu = |index: usize, model: &str| GpuId { index, pci: String::new(), model: model.into() };
        let mixed = || vec![gpu(0, "H200"), gpu(1, "H200"), gpu(2, "H100")];
        let (mut messages, mut joint_probe) = (Vec::new(), Vec::new());
        for gpus in [None, Some(GpuCount::Count(2)), Some(GpuCount::All)] {
            let options = ProbeOptions { gpus, ..of_the_cpu() };
            joint_probe.push(options.joint_probe(mixed(), &mut |line| messages.push(line.to_string())).map(|gpus| gpus.len()).ok());
        }
        assert_eq!(joint_probe, [Some(0), Some(2), None]);
        assert!(messages.len() == 1 && messages[0].contains("GPU 2 () is a H100"), "{messages:?}");
    }

    #[test]
    fn gpus_are_refused_for_the_cpu_before_anything_is_measured() {
        let options = ProbeOptions { gpus: Some(GpuCount::All), ..of_the_cpu() };
        let refused = run(&options, &mut |line| panic!("{line}")).unwrap_err().to_string();
        assert!(refused.contains("--gpus: needs GPUs"), "{refused}");
    }

    #[test]
    fn a_device_with_its_own_memory_is_measured_whole() {
        let topology = small_caches();
        let mut memory = HostMemory::default();
        let states = States::leaked(&topology);
        let pool = Workers::new(&topology, 1).unwrap().pool;
        let mut dev = open::cpu(1, StreamOrder::Threads, Default::default(), 0).unwrap();
        let context = ProbeContext { free_bytes: 1 << 30, addressing: Addressing::Managed, memory: &mut memory, states: &states, pool };
        let (sizes, mut logged) = (ProbeSizes { product: 128, seq_length: 64, copy_bytes: 1 << 20 }, 0);
        let (gpu, link, contention) = measure_device(&mut dev, sizes, context, 0.5, &mut |_| logged += 1).unwrap();
        assert_eq!((logged, gpu.addressing, gpu.memory_bytes.value), (3, Addressing::Managed, 1_074_000_000.0));
        let dims: Vec<_> = gpu.matmul_share_by_least_dim.value.0.iter().map(|point| point.0).collect();
        // As many sizes as half a second permits.
        assert!([32.0, 64.0, 128.0].starts_with(&dims) && !dims.is_empty(), "{dims:?}");
        let rows: Vec<_> = gpu.grouped_flops_by_rows.as_ref().unwrap().value.0.iter().map(|point| point.0 as usize).collect();
        assert!(rows == [8] || rows == [16] || rows == [32], "a fourth of a product's columns: {rows:?}");
        let sizes: Vec<_> = link.to_host_share_by_bytes.value.0.iter().map(|point| point.0 as usize).collect();
        assert_eq!(sizes, [64 << 10, 256 << 10, 1 << 20]);
        assert!(link.managed_bytes_per_s.is_some() && contention.adam_under_copies.value <= 1.0);
        let host = Profile::load("h200-pcie5").unwrap().host;
        let options = ProbeOptions { out: Some("here/my-box.toml".into()), ..of_the_cpu() };
        let sections = Sections { gpu: Some(gpu), link: Some(link), contention: Some(contention), ..Sections::default() };
        let profile = profile(&options, ProfileFacts::new(&topology, "cpu"), host, sections).unwrap();
        assert_eq!(profile.name, "my-box");
        assert_eq!(Profile::parse(&profile.to_string(), Path::new("x")).unwrap(), profile);
    }

    /// Numbers of a section with their names; curves point by point.
    fn numbers(rates: &Rates, gpu: &Gpu, link: &Link, contention: &Contention) -> Vec<(&'static str, f64)> {
        let mut numbers = vec![
            ("memory_bytes_per_s", gpu.memory_bytes_per_s.value),
            ("matmul_flops", gpu.matmul_flops.value),
            ("fp8_matmul_flops", gpu.fp8_matmul_flops.as_ref().map_or(rates.fp8_flops(8192), |flops| flops.value)),
            ("attention_forward_flops", gpu.attention_forward_flops.value),
            ("attention_backward_flops", gpu.attention_backward_flops.value),
            ("launch_s", gpu.launch_s.value),
            ("kernel_s", gpu.kernel_s.value),
            ("to_host_bytes_per_s", link.to_host_bytes_per_s.value),
            ("to_device_bytes_per_s", link.to_device_bytes_per_s.value),
            ("both_ways_bytes_per_s", link.both_ways_bytes_per_s.value),
            ("latency_s", link.latency_s.value),
            ("managed_bytes_per_s", link.managed_bytes_per_s.as_ref().unwrap().value),
            ("matmul_under_copies", contention.matmul_under_copies.value),
            ("copies_under_adam", contention.copies_under_adam.value),
            ("adam_under_copies", contention.adam_under_copies.value),
        ];
        let grouped = gpu.grouped_flops_by_rows.as_ref().map(|curve| curve.value.clone());
        let grouped = grouped.unwrap_or(Points([512.0, 2048.0].map(|rows| (rows, rates.grouped_flops(rows as usize, 2048))).into()));
        numbers.extend([512.0, 2048.0].map(|rows| ("grouped_flops", grouped.at(rows))));
        numbers.extend([128.0, 1024.0, 8192.0].map(|dim| ("matmul_share", gpu.matmul_share_by_least_dim.value.at(dim))));
        numbers.extend([65_536.0, 1_048_576.0, 67_108_864.0].map(|size| ("to_host_share", link.to_host_share_by_bytes.value.at(size))));
        numbers.extend([65_536.0, 1_048_576.0, 67_108_864.0].map(|size| ("to_device_share", link.to_device_share_by_bytes.value.at(size))));
        numbers
    }

    #[test]
    fn a_simulated_machine_is_measured_as_in_its_profile() {
        let profile = Profile::load("h200-pcie5").unwrap();
        let (machine, rates) = (Machine::of(&profile), Rates::of(&profile));
        let (mut memory, topology) = (HostMemory::new(MemoryPolicy::unbacked()), small_caches());
        let states = States::leaked(&topology);
        let (mut dev, pool) = SimDevice::new(
            "h200",
            &rates,
            (machine.kind, machine.device),
            (15, crate::optim::simd::Isa::Avx2, crate::optim::moments::Moments::Float32),
            0,
        );
        let pool = Pool::Simulated(pool);
        let context = ProbeContext { free_bytes: 1, addressing: Addressing::Managed, memory: &mut memory, states: &states, pool };
        let (gpu, link, contention) = measure_device(&mut dev, ProbeSizes::GPU, context, 2.0, &mut |_| ()).unwrap();
        let wanted = numbers(&rates, profile.gpu.as_ref().unwrap(), profile.link.as_ref().unwrap(), profile.contention.as_ref().unwrap());
        let pairs = numbers(&rates, &gpu, &link, &contention).into_iter().zip(wanted);
        // A small product also takes the minimum duration of a kernel.
        let off: Vec<_> = pairs.filter(|((_, measured), (_, wanted))| (measured / wanted - 1.0).abs() > 0.05).collect();
        assert!(off.is_empty(), "{off:?}");
    }

    #[test]
    fn a_measurement_that_failed_leaves_the_files_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new.toml"), dir.path().join("old.toml"));
        std::fs::write(&old, "old").unwrap();
        for path in [&new, &old] {
            drop(ProfileFile::open(path).unwrap());
        }
        assert!(!new.exists() && std::fs::read_to_string(&old).unwrap() == "old");
        ProfileFile::open(&new).unwrap().write(&Profile::load("h200-pcie5").unwrap()).unwrap();
        assert!(Profile::load(new.to_str().unwrap()).is_ok());
    }

    #[test]
    fn a_written_profile_is_complete_or_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("cache").join("kept.toml");
        let files = || std::fs::read_dir(kept.parent().unwrap()).unwrap().map(|file| file.unwrap().file_name()).collect::<Vec<_>>();
        drop(ProfileFile::beside(&kept).unwrap());
        assert!(files().is_empty());
        // A file of a probe that was killed.
        std::fs::write(kept.with_extension("1.part"), "").unwrap();
        for name in ["gb200", "h200-pcie5"] {
            let profile = Profile::load(name).unwrap();
            let file = ProfileFile::beside(&kept).unwrap();
            assert_eq!(kept.exists(), name != "gb200");
            file.write(&profile).unwrap();
            assert_eq!((Profile::load(kept.to_str().unwrap()).unwrap(), files()), (profile, vec!["kept.toml".into()]));
        }
    }

    #[test]
    fn a_number_that_makes_no_sense_is_named() {
        let options = of_the_cpu();
        let mut host = Profile::load("h200-pcie5").unwrap().host;
        host.memory_bytes.value = 0.0;
        let error =
            profile(&options, ProfileFacts::new(&Topology::this_machine(), "cpu"), host, Sections::default()).unwrap_err().to_string();
        assert!(error.starts_with("probe this machine: host.memory_bytes: 0 is not"), "{error}");
    }
}
