//! The parts of a machine: CPUs, NUMA nodes, caches, pools of huge pages, and GPUs on its PCI bus.

use super::cpu_list::CpuList;

/// A GPU on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PciGpu {
    /// `0000:0f:00.0`.
    pub(crate) address: String,
    /// The nearest memory node.
    pub(crate) numa_node: Option<usize>,
}

/// A logical CPU. Cores and caches are identified by their lowest CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    pub id: usize,
    /// Socket.
    pub(crate) package: Option<u32>,
    /// Physical core: CPUs with the same value are SMT siblings.
    pub(crate) core: Option<usize>,
    pub(crate) numa_node: Option<usize>,
    /// Last-level cache of level 3.
    pub(crate) l3: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    pub id: usize,
    /// CPUs next to this memory.
    pub cpus: CpuList,
    pub(crate) memory_bytes: Option<u64>,
    /// Unused memory.
    pub free_bytes: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cache {
    /// Level 1, 2 or 3.
    pub(crate) level: u32,
    /// `Data`, `Instruction` or `Unified`.
    pub kind: String,
    pub bytes: Option<u64>,
    /// CPUs that share it.
    pub cpus: CpuList,
}

/// A pool of huge pages of one size.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HugePages {
    /// Size of one page.
    pub page_bytes: u64,
    /// Reserved.
    pub total: Option<u64>,
    /// Reserved and unused.
    pub free: Option<u64>,
}
