//! Reads facts about a machine from its files in `proc`, `sys` and `dev`, below any root.

use super::cpu_list::CpuList;
use super::machine_parts::{Cache, Cpu, HugePages, NumaNode, PciGpu};
use super::parse;
use std::fs;
use std::path::Path;

/// The CPU name that the kernel prints. Arm kernels print numbers instead, which are mapped for known server cores.
pub(super) fn cpu_model(cpuinfo: &str) -> Option<String> {
    if let Some(name) = parse::field(cpuinfo, "model name") {
        return Some(name.to_owned());
    }
    let implementer = parse::field(cpuinfo, "CPU implementer")?;
    let part = parse::field(cpuinfo, "CPU part")?;
    let known = match (implementer, part) {
        ("0x41", "0xd0c") => "Arm Neoverse N1",
        ("0x41", "0xd40") => "Arm Neoverse V1",
        ("0x41", "0xd49") => "Arm Neoverse N2",
        ("0x41", "0xd4f") => "Arm Neoverse V2",
        ("0x41", "0xd84") => "Arm Neoverse V3",
        ("0x41", "0xd8e") => "Arm Neoverse N3",
        _ => return Some(format!("implementer {implementer} part {part}")),
    };
    Some(known.to_owned())
}

pub(super) fn cpu_flags(cpuinfo: &str) -> Vec<String> {
    let flags = parse::field(cpuinfo, "flags").or_else(|| parse::field(cpuinfo, "Features"));
    flags.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// The numbers N in the names `prefixN`, ascending.
pub(super) fn numbered(names: &[String], prefix: &str) -> Vec<usize> {
    let mut numbers: Vec<_> = names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// The files of a machine below a root.
pub(super) struct MachineFiles<'a>(pub(super) &'a Path);

impl MachineFiles<'_> {
    pub(super) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.0.join(path)).ok().map(|text| text.trim().to_owned())
    }

    pub(super) fn number<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    pub(super) fn cpu_list(&self, path: &str) -> Option<CpuList> {
        CpuList::parse(&self.text(path)?)
    }

    /// Names in a directory, sorted.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.0.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    pub(super) fn cpus(&self, numa_nodes: &[NumaNode], caches: &[Cache]) -> Vec<Cpu> {
        let online = self.cpu_list("sys/devices/system/cpu/online").unwrap_or_default();
        let cpu = |id| {
            let topology = format!("sys/devices/system/cpu/cpu{id}/topology");
            let siblings = ["core_cpus_list", "thread_siblings_list"].iter().find_map(|file| self.cpu_list(&format!("{topology}/{file}")));
            Cpu {
                id,
                package: self.number(&format!("{topology}/physical_package_id")),
                core: siblings.and_then(|cpus| cpus.first()),
                numa_node: numa_nodes.iter().find(|node| node.cpus.contains(id)).map(|node| node.id),
                l3: caches.iter().find(|cache| cache.level == 3 && cache.cpus.contains(id)).and_then(|cache| cache.cpus.first()),
            }
        };
        online.iter().map(cpu).collect()
    }

    pub(super) fn numa_nodes(&self) -> Vec<NumaNode> {
        let ids = numbered(&self.names("sys/devices/system/node"), "node");
        let node = |id| {
            let dir = format!("sys/devices/system/node/node{id}");
            let meminfo = self.text(&format!("{dir}/meminfo")).unwrap_or_default();
            let cpus = self.cpu_list(&format!("{dir}/cpulist")).unwrap_or_default();
            let bytes = |key| parse::meminfo_bytes(&meminfo, key);
            NumaNode { id, cpus, memory_bytes: bytes("MemTotal"), free_bytes: bytes("MemFree") }
        };
        ids.into_iter().map(node).collect()
    }

    pub(super) fn caches(&self) -> Vec<Cache> {
        let mut caches = Vec::new();
        for cpu in numbered(&self.names("sys/devices/system/cpu"), "cpu") {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/cache");
            let indices = numbered(&self.names(&dir), "index");
            caches.extend(indices.into_iter().filter_map(|index| self.cache(&format!("{dir}/index{index}"))));
        }
        caches.sort();
        caches.dedup();
        caches
    }

    pub(super) fn cache(&self, dir: &str) -> Option<Cache> {
        Some(Cache {
            level: self.number(&format!("{dir}/level"))?,
            kind: self.text(&format!("{dir}/type"))?,
            bytes: self.text(&format!("{dir}/size")).and_then(|text| parse::size_bytes(&text)),
            cpus: self.cpu_list(&format!("{dir}/shared_cpu_list"))?,
        })
    }

    pub(super) fn huge_pages(&self) -> Vec<HugePages> {
        let pool = |name: &String| {
            let page_bytes = parse::size_bytes(name.strip_prefix("hugepages-")?.strip_suffix('B')?.to_uppercase().as_str())?;
            let count = |file: &str| self.number(&format!("sys/kernel/mm/hugepages/{name}/{file}"));
            Some(HugePages { page_bytes, total: count("nr_hugepages"), free: count("free_hugepages") })
        };
        let mut pools: Vec<_> = self.names("sys/kernel/mm/hugepages").iter().filter_map(pool).collect();
        pools.sort();
        pools
    }

    /// The page size in the auxiliary vector of the process, which `sysconf` reports, too.
    pub(super) fn page_bytes(&self) -> Option<usize> {
        const AT_PAGESZ: usize = 6;
        parse::auxv(&fs::read(self.0.join("proc/self/auxv")).ok()?, AT_PAGESZ)
    }

    /// CPUs of the GPUs' interrupts. The directory of an interrupt has an entry named after its driver: `proc/irq/123/nvidia`.
    pub(super) fn gpu_interrupts(&self) -> CpuList {
        let of_gpu = |irq: &usize| self.names(&format!("proc/irq/{irq}")).iter().any(|name| name.starts_with("nvidia"));
        let irqs = numbered(&self.names("proc/irq"), "").into_iter().filter(of_gpu);
        let served_by = irqs.filter_map(|irq| self.cpu_list(&format!("proc/irq/{irq}/effective_affinity_list")));
        served_by.flat_map(|cpus| cpus.as_slice().to_vec()).collect()
    }

    /// NVIDIA's devices of the display class, which includes compute GPUs. A node of -1 means none.
    pub(super) fn pci_gpus(&self) -> Vec<PciGpu> {
        let gpu = |address: &String| {
            let fact = |file: &str| self.text(&format!("sys/bus/pci/devices/{address}/{file}"));
            let is_gpu = fact("vendor")? == "0x10de" && fact("class")?.starts_with("0x03");
            is_gpu.then(|| PciGpu { numa_node: fact("numa_node").and_then(|node| node.parse().ok()), address: address.clone() })
        };
        self.names("sys/bus/pci/devices").iter().filter_map(gpu).collect()
    }

    pub(super) fn allowed_nodes(&self) -> Option<CpuList> {
        CpuList::parse(parse::field(&self.text("proc/self/status")?, "Mems_allowed_list")?)
    }

    pub(super) fn ipc_lock(&self) -> Option<bool> {
        const CAP_IPC_LOCK: u64 = 1 << 14;
        let status = self.text("proc/self/status")?;
        let effective = u64::from_str_radix(parse::field(&status, "CapEff")?, 16).ok()?;
        Some(effective & CAP_IPC_LOCK != 0)
    }
}
