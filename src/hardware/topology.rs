//! Facts about this machine from `/proc` and `/sys`. An unavailable fact is `None` or empty; nothing is guessed.
//!
//! All paths are relative to a root, so that a tree recorded on one machine can be read on another.

use super::cgroup::CgroupLimits;
use super::cpu_list::CpuList;
use super::machine_files::{MachineFiles, cpu_flags, cpu_model, numbered};
pub(crate) use super::machine_parts::{Cache, Cpu, HugePages, NumaNode, PciGpu};
use super::parse;
pub(crate) use super::process::Process;
pub(crate) use super::usable_cpus::UsableCpus;
use std::fs;
use std::path::Path;

/// A machine, and the limits of this process on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// Architecture that this program was built for: `x86_64`, `aarch64`.
    pub arch: &'static str,
    /// Kernel release.
    pub kernel: Option<String>,
    pub cpu_model: Option<String>,
    /// Features of the instruction set and the platform, as named by the kernel: `avx2`, `sve2`, `mba`.
    pub cpu_flags: Vec<String>,
    /// Online CPUs, ascending.
    pub cpus: Vec<Cpu>,
    /// Memory nodes, ascending. Nodes of a GPU have no CPUs.
    pub numa_nodes: Vec<NumaNode>,
    /// All caches, each once.
    pub caches: Vec<Cache>,
    pub memory_total_bytes: Option<u64>,
    /// Memory available without swapping.
    pub memory_available_bytes: Option<u64>,
    pub page_bytes: Option<usize>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub thp: Option<String>,
    pub thp_bytes: Option<u64>,
    /// Pools of huge pages, ascending by page size.
    pub huge_pages: Vec<HugePages>,
    pub cgroup: CgroupLimits,
    /// Memory nodes that this process may use.
    pub allowed_nodes: Option<CpuList>,
    pub process: Process,
    /// Whether locked memory is exempt from its limit (`CAP_IPC_LOCK`).
    pub ipc_lock: Option<bool>,
    /// `perf_event_paranoid`: a lower value permits more measurements. `None` if the kernel has no perf.
    pub perf_event_paranoid: Option<i64>,
    /// Sources of performance events. `cpu` or `armv8_pmuv3_0` are the hardware's counters.
    pub perf_sources: Vec<String>,
    /// Whether the kernel has the resctrl filesystem built in.
    pub resctrl_in_kernel: Option<bool>,
    /// Release of the NVIDIA kernel driver, if it is loaded; `unknown` if it reports none.
    pub nvidia_driver: Option<String>,
    /// Device files of NVIDIA GPUs.
    pub nvidia_devices: usize,
    /// CPUs that handle the GPUs' interrupts.
    pub gpu_interrupts: CpuList,
    /// NVIDIA's GPUs on the PCI bus, ascending by address.
    pub(crate) pci_gpus: Vec<PciGpu>,
}

/// Memory of a control group that plans leave free. Thread stacks, the allocator, page tables and dirty pages are charged to the group,
/// too, and the kernel kills the process at the limit.
const GROUP_RESERVE_BYTES: u64 = 32 << 20;

/// Plans leave one part in this many of the machine's memory free. Page tables take 1/512 of a process's memory, and the kernel counts some
/// used memory as available, such as the pages of libraries. A run with 0.4 of 252 GiB left was killed.
const MACHINE_RESERVE: u64 = 128;

impl Topology {
    /// Facts of this machine for the calling thread. Call it before any thread is pinned.
    pub fn this_machine() -> Self {
        Self::read(Path::new("/"), Process::current())
    }

    /// Facts of the machine with its `proc`, `sys` and `dev` below `root`.
    pub fn read(root: &Path, process: Process) -> Self {
        let tree = MachineFiles(root);
        let cpuinfo = tree.text("proc/cpuinfo").unwrap_or_default();
        let meminfo = tree.text("proc/meminfo").unwrap_or_default();
        let numa_nodes = tree.numa_nodes();
        let caches = tree.caches();
        Self {
            arch: std::env::consts::ARCH,
            kernel: tree.text("proc/sys/kernel/osrelease"),
            cpu_model: cpu_model(&cpuinfo),
            cpu_flags: cpu_flags(&cpuinfo),
            cpus: tree.cpus(&numa_nodes, &caches),
            numa_nodes,
            caches,
            memory_total_bytes: parse::meminfo_bytes(&meminfo, "MemTotal"),
            memory_available_bytes: parse::meminfo_bytes(&meminfo, "MemAvailable"),
            page_bytes: tree.page_bytes(),
            thp: tree.text("sys/kernel/mm/transparent_hugepage/enabled").and_then(|text| parse::chosen(&text).map(str::to_owned)),
            thp_bytes: tree.number("sys/kernel/mm/transparent_hugepage/hpage_pmd_size"),
            huge_pages: tree.huge_pages(),
            allowed_nodes: tree.allowed_nodes(),
            cgroup: CgroupLimits::read(root),
            process,
            ipc_lock: tree.ipc_lock(),
            perf_event_paranoid: tree.number("proc/sys/kernel/perf_event_paranoid"),
            perf_sources: tree.names("sys/bus/event_source/devices"),
            resctrl_in_kernel: tree.text("proc/filesystems").map(|text| text.split_whitespace().any(|word| word == "resctrl")),
            nvidia_driver: tree.text("proc/driver/nvidia/version").map(|text| parse::version(&text).unwrap_or("unknown").to_owned()),
            nvidia_devices: numbered(&tree.names("dev"), "nvidia").len(),
            gpu_interrupts: tree.gpu_interrupts(),
            pci_gpus: tree.pci_gpus(),
        }
    }

    /// The CPUs that this process can use; `None` if neither its affinity nor the online CPUs are known.
    pub fn usable_cpus(&self) -> Option<UsableCpus> {
        let online: CpuList = self.cpus.iter().map(|cpu| cpu.id).collect();
        let count = online.len();
        let affinity = self.process.affinity.clone().or_else(|| (count > 0).then_some(online))?;
        // The kernel keeps affinities inside the cpuset; a recorded mask may be wider.
        let within = self.cgroup.cpus.as_ref().map(|limit| affinity.intersection(&limit.value)).filter(|cpus| !cpus.is_empty());
        let affinity = within.unwrap_or(affinity);
        let online = count.max(affinity.len());
        Some(UsableCpus { affinity, quota: self.cgroup.cpu_quota.as_ref().map(|limit| limit.value), online })
    }

    /// Number of online physical cores; `None` if the kernel does not report cores.
    pub(crate) fn cores(&self) -> Option<usize> {
        self.count(|cpu| cpu.core)
    }

    /// Number of sockets; `None` if the kernel does not report them.
    pub(crate) fn packages(&self) -> Option<usize> {
        self.count(|cpu| cpu.package)
    }

    /// Memory that this process can plan with: the available memory of nodes with CPUs, minus a reserve, within the limits of control
    /// groups and the process.
    pub(crate) fn memory_usable_bytes(&self) -> Option<u64> {
        let limit = self.cgroup.memory_bytes.as_ref().map(|limit| limit.value.saturating_sub(self.process.rss_bytes + GROUP_RESERVE_BYTES));
        // A GPU's memory may be a node of the machine. The kernel counts it as available, but it is not host memory.
        let without_cpus: u64 = self.numa_nodes.iter().filter(|node| node.cpus.is_empty()).filter_map(|node| node.free_bytes).sum();
        let reserve = self.memory_total_bytes.unwrap_or(0) / MACHINE_RESERVE;
        let available =
            self.memory_available_bytes.or(self.memory_total_bytes).map(|bytes| bytes.saturating_sub(without_cpus.saturating_add(reserve)));
        [available, limit, self.process.free_address_bytes].into_iter().flatten().min()
    }

    /// Free memory in pools of huge pages. No other allocation can use it, and it does not count as available.
    pub(crate) fn reserved_free_bytes(&self) -> u64 {
        self.huge_pages.iter().map(|pool| pool.page_bytes.saturating_mul(pool.free.unwrap_or(0))).fold(0, u64::saturating_add)
    }

    pub fn nodes_with_memory(&self) -> impl Iterator<Item = &NumaNode> {
        self.numa_nodes.iter().filter(|node| node.memory_bytes.is_some_and(|bytes| bytes > 0))
    }

    /// Nodes with memory next to one of `cpus` that this process may use.
    pub(crate) fn nodes_beside(&self, cpus: &CpuList) -> Vec<usize> {
        let allowed = |node: &&NumaNode| self.allowed_nodes.as_ref().is_none_or(|nodes| nodes.contains(node.id));
        let beside = |node: &&NumaNode| node.cpus.iter().any(|cpu| cpus.contains(cpu));
        self.nodes_with_memory().filter(allowed).filter(beside).map(|node| node.id).collect()
    }

    /// Whether the CPU has the feature that the kernel names `flag`.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.cpu_flags.iter().any(|known| known == flag)
    }

    /// Number of distinct values of `of` over all CPUs; `None` if a value is unknown.
    fn count<T: Ord>(&self, of: impl Fn(&Cpu) -> Option<T>) -> Option<usize> {
        let mut values = self.cpus.iter().map(of).collect::<Option<Vec<_>>>()?;
        values.sort_unstable();
        values.dedup();
        (!values.is_empty()).then_some(values.len())
    }
}

/// The host name, if available.
pub(crate) fn host_name() -> Option<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Some(name.trim().to_string()).filter(|name| !name.is_empty())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A directory that contains `files`.
    pub(crate) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            write(dir.path(), path, text);
        }
        dir
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    impl Topology {
        /// Puts GPUs on the PCI bus: address and memory node.
        pub(crate) fn place_gpus(&mut self, gpus: &[(&str, usize)]) {
            self.pci_gpus = gpus.iter().map(|(pci, node)| PciGpu { address: pci.to_string(), numa_node: Some(*node) }).collect();
        }
    }

    /// Two sockets of two cores with two threads each. Siblings are numbered four apart, as on servers, and CPU 7 is offline.
    pub(crate) fn two_sockets() -> tempfile::TempDir {
        let dir = tree(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Example CPU @ 2.00GHz\nflags\t\t: fpu avx2 cat_l3 mba\n\nprocessor\t: 1\n"),
            ("proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   50331648 kB\n"),
            ("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n"),
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("proc/sys/kernel/perf_event_paranoid", "2\n"),
            ("proc/filesystems", "nodev\tsysfs\nnodev\tresctrl\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "16\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
            ("sys/devices/system/cpu/online", "0-6\n"),
            ("sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       33554432 kB\n"),
            ("sys/devices/system/node/node1/cpulist", "2-3,6\n"),
            ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       33554432 kB\n"),
        ]);
        for cpu in 0..7 {
            let (core, package) = (cpu % 4, cpu % 4 / 2);
            let siblings = if core == 3 { "3".into() } else { format!("{core},{}", core + 4) };
            let l3 = ["0-1,4-5", "2-3,6"][package];
            let base = format!("sys/devices/system/cpu/cpu{cpu}");
            write(dir.path(), &format!("{base}/topology/core_cpus_list"), &siblings);
            write(dir.path(), &format!("{base}/topology/physical_package_id"), &package.to_string());
            for (index, level, kind, size, shared) in [
                (0, "1", "Data", "48K", siblings.as_str()),
                (2, "2", "Unified", "2048K", siblings.as_str()),
                (3, "3", "Unified", "32768K", l3),
            ] {
                for (file, text) in [("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)] {
                    write(dir.path(), &format!("{base}/cache/index{index}/{file}"), text);
                }
            }
        }
        dir
    }

    /// A Grace Hopper: 72 cores, 64 KiB pages, and the GPU's memory as a node without CPUs.
    pub(crate) fn grace() -> tempfile::TempDir {
        let dir = tree(&[
            ("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve sve2 bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"),
            ("proc/meminfo", "MemTotal:       603979776 kB\nMemAvailable:   595591168 kB\n"),
            ("proc/self/status", "CapEff:\t0000000000000000\nMems_allowed_list:\t0-1\n"),
            ("proc/irq/301/effective_affinity_list", "40\n"),
            ("proc/irq/301/nvidia/x", ""),
            ("proc/irq/9/effective_affinity_list", "3\n"),
            ("proc/irq/9/acpi/x", ""),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "536870912\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "51200\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "51200\n"),
            ("sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages", "0\n"),
            ("sys/devices/system/cpu/online", "0-71\n"),
            ("sys/devices/system/node/node0/cpulist", "0-71\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       503316480 kB\nNode 0 MemFree:        494927872 kB\n"),
            ("sys/devices/system/node/node1/cpulist", "\n"),
            ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       100663296 kB\nNode 1 MemFree:        100663296 kB\n"),
        ]);
        // The relevant pairs of the vector: a page size of 64 KiB, and the end.
        let auxv: Vec<u8> = [6usize, 65536, 0, 0].into_iter().flat_map(usize::to_ne_bytes).collect();
        fs::write(dir.path().join("proc/self/auxv"), auxv).unwrap();
        for cpu in 0..72 {
            let base = format!("sys/devices/system/cpu/cpu{cpu}");
            write(dir.path(), &format!("{base}/topology/core_cpus_list"), &cpu.to_string());
            write(dir.path(), &format!("{base}/topology/physical_package_id"), "0");
            for (file, text) in [("level", "3"), ("type", "Unified"), ("size", "116736K"), ("shared_cpu_list", "0-71")] {
                write(dir.path(), &format!("{base}/cache/index3/{file}"), text);
            }
        }
        dir
    }

    /// A container on that Grace Hopper: four CPUs by cpuset, the time of two CPUs, 16 GiB.
    pub(crate) fn container() -> tempfile::TempDir {
        let dir = grace();
        for (path, text) in [
            ("proc/self/mountinfo", "41 31 0:38 / /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw\n"),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cpu.max", "200000 100000\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "8-11\n"),
            ("sys/fs/cgroup/memory.max", "17179869184\n"),
        ] {
            write(dir.path(), path, text);
        }
        dir
    }

    #[test]
    fn a_gpus_memory_is_a_node_that_is_not_the_hosts() {
        let topology = Topology::read(grace().path(), Process::default());
        assert_eq!((topology.page_bytes, topology.thp_bytes, topology.cores()), (Some(65536), Some(512 << 20), Some(72)));
        assert_eq!(topology.nodes_with_memory().count(), 2);
        assert_eq!(topology.gpu_interrupts.as_slice(), [40]);
        assert_eq!(topology.nodes_beside(&CpuList::parse("0-71").unwrap()), [0]);
        let usable = (472 << 30) - (576 << 30) / MACHINE_RESERVE;
        assert_eq!(topology.memory_usable_bytes(), Some(usable), "568 GiB are available, 96 of them the GPU's");
        assert_eq!(topology.reserved_free_bytes(), 100 << 30);
        let none = Topology { allowed_nodes: CpuList::parse("1"), ..topology };
        assert_eq!(none.nodes_beside(&CpuList::parse("0-71").unwrap()), Vec::<usize>::new());
    }

    #[test]
    fn reads_a_server() {
        let dir = two_sockets();
        let topology = Topology::read(dir.path(), Process::default());
        assert_eq!(topology.cpu_model.as_deref(), Some("Example CPU @ 2.00GHz"));
        assert!(topology.has_flag("mba") && !topology.has_flag("avx512f"));
        assert_eq!((topology.cpus.len(), topology.cores(), topology.packages()), (7, Some(4), Some(2)));
        assert_eq!(topology.cpus[5], Cpu { id: 5, package: Some(0), core: Some(1), numa_node: Some(0), l3: Some(0) });
        assert_eq!(topology.cpus[6], Cpu { id: 6, package: Some(1), core: Some(2), numa_node: Some(1), l3: Some(2) });
        assert_eq!(
            topology.numa_nodes[1],
            NumaNode { id: 1, cpus: CpuList::parse("2-3,6").unwrap(), memory_bytes: Some(32 << 30), free_bytes: None }
        );
        let l3: Vec<_> = topology.caches.iter().filter(|cache| cache.level == 3).map(|cache| cache.bytes).collect();
        assert_eq!(l3, [Some(32 << 20); 2]);
        assert_eq!(topology.caches.len(), 4 + 4 + 2);
        assert_eq!(topology.memory_total_bytes, Some(64 << 30));
        assert_eq!(topology.thp.as_deref(), Some("never"));
        assert_eq!(topology.huge_pages[0], HugePages { page_bytes: 2 << 20, total: Some(16), free: Some(4) });
        assert_eq!(topology.huge_pages[1], HugePages { page_bytes: 1 << 30, total: Some(0), free: None });
        assert_eq!((topology.ipc_lock, topology.perf_event_paranoid, topology.resctrl_in_kernel), (Some(false), Some(2), Some(true)));
        assert_eq!((topology.nvidia_driver, topology.nvidia_devices), (None, 0));
    }

    #[test]
    fn reads_an_arm_server_with_a_gpu() {
        let dir = tree(&[
            ("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve2\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"),
            (
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.124.06  Release Build\nGCC version: 13.2\n",
            ),
            ("proc/self/status", "CapEff:\t0000000000004000\n"),
            ("dev/nvidia0", ""),
            ("dev/nvidia-uvm", ""),
            ("dev/nvidiactl", ""),
            ("dev/nvidia1", ""),
        ]);
        let topology = Topology::read(dir.path(), Process::default());
        assert_eq!(topology.cpu_model.as_deref(), Some("Arm Neoverse V2"));
        assert!(topology.has_flag("sve2"));
        assert_eq!(topology.ipc_lock, Some(true));
        assert_eq!((topology.nvidia_driver.as_deref(), topology.nvidia_devices), (Some("570.124.06"), 2));
    }

    #[test]
    fn usable_cpus_are_the_mask_within_the_quota() {
        let mut topology = Topology::read(two_sockets().path(), Process::default());
        let usable = topology.usable_cpus().unwrap();
        assert_eq!((usable.count(), usable.to_string().as_str()), (7, "7 of 7 CPUs (affinity 0-6, no cgroup quota)"));
        topology.process.affinity = CpuList::parse("0-3");
        topology.cgroup.cpu_quota = Some(super::super::cgroup::Limit { value: 1.5, file: "cpu.max".into() });
        let usable = topology.usable_cpus().unwrap();
        assert_eq!((usable.count(), usable.to_string().as_str()), (2, "2 of 7 CPUs (affinity 0-3, cgroup quota 1.5)"));
    }

    #[test]
    fn a_container_uses_the_cpus_of_affinity_cpuset_and_quota() {
        let dir = container();
        let topology =
            Topology::read(dir.path(), Process { affinity: CpuList::parse("0-71"), memlock_bytes: Some(8 << 20), ..Process::default() });
        let usable = topology.usable_cpus().unwrap();
        assert_eq!((usable.count(), usable.to_string().as_str()), (2, "2 of 72 CPUs (affinity 8-11, cgroup quota 2.0)"));
        assert_eq!(topology.memory_usable_bytes(), Some((16 << 30) - GROUP_RESERVE_BYTES));
    }

    #[test]
    fn memory_is_bounded_by_the_limits_of_the_process() {
        let process = Process { free_address_bytes: Some(3 << 20), ..Process::default() };
        assert_eq!(Topology::read(two_sockets().path(), process).memory_usable_bytes(), Some(3 << 20));
    }

    #[test]
    fn memory_is_bounded_by_the_cgroup() {
        let mut topology = Topology::read(two_sockets().path(), Process::default());
        assert_eq!(topology.memory_usable_bytes(), Some((48 << 30) - (64 << 30) / MACHINE_RESERVE));
        topology.cgroup.memory_bytes = Some(super::super::cgroup::Limit { value: 1 << 30, file: "memory.max".into() });
        assert_eq!(topology.memory_usable_bytes(), Some((1 << 30) - GROUP_RESERVE_BYTES));
        topology.process.rss_bytes = 100 << 20;
        assert_eq!(
            topology.memory_usable_bytes(),
            Some((1 << 30) - (100 << 20) - GROUP_RESERVE_BYTES),
            "the group's memory holds this program already"
        );
    }

    #[test]
    fn an_empty_tree_states_nothing() {
        let topology = Topology::read(tree(&[]).path(), Process::default());
        assert_eq!((topology.usable_cpus(), topology.cores(), topology.memory_usable_bytes()), (None, None, None));
        assert!(topology.caches.is_empty() && topology.kernel.is_none() && topology.perf_event_paranoid.is_none());
    }

    #[test]
    fn this_machine_is_known() {
        let topology = Topology::this_machine();
        let usable = topology.usable_cpus().unwrap();
        assert!(usable.count() >= 1 && usable.count() <= usable.online, "{usable}");
        assert!(topology.page_bytes.is_some_and(usize::is_power_of_two));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn odd_files_do_not_panic(text in "\\PC{0,60}(:|=|,|-|\\n)\\PC{0,20}") {
            let files = [
                "proc/cpuinfo", "proc/meminfo", "proc/self/status", "proc/self/auxv", "proc/self/mountinfo", "proc/self/cgroup",
                "sys/devices/system/cpu/online", "sys/devices/system/cpu/cpu0/topology/core_cpus_list",
                "sys/devices/system/cpu/cpu0/cache/index0/level", "sys/devices/system/cpu/cpu0/cache/index0/type",
                "sys/devices/system/node/node0/cpulist", "sys/kernel/mm/transparent_hugepage/enabled",
                "sys/kernel/mm/hugepages/hugepages-kB/nr_hugepages", "proc/driver/nvidia/version",
            ];
            let dir = tree(&files.map(|file| (file, text.as_str())));
            let topology = Topology::read(dir.path(), Process::default());
            let _ = (topology.usable_cpus(), topology.cores(), topology.memory_usable_bytes());
        }
    }
}
