//! Policy for a run's host memory on this machine: page sizes, memory nodes, threads that fault the memory in. No system calls.

use crate::error::{Error, Result};
use crate::hardware::cpu_list::CpuList;
use crate::hardware::topology::{HugePages, Topology};
use crate::host::free_memory;
use crate::host::worker_nodes::WorkerNodes;
use crate::units::Bytes;
use clap::ValueEnum;
use std::ops::Range;

/// Page sizes of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HugePagesChoice {
    /// Transparent huge pages where the kernel makes them in a useful size.
    Auto,
    /// Pages that were reserved for it; too few are an error.
    Explicit,
    /// The kernel's smallest pages.
    Off,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageSizes {
    /// The kernel's smallest pages only.
    Smallest,
    /// The kernel's default.
    Default,
    /// Huge pages if the kernel can provide them.
    Transparent { bytes: usize },
    /// The smallest pages, for address ranges that need not be backed by memory because little of them is touched.
    Unbacked,
    /// Pages from the kernel's pools of reserved huge pages.
    Reserved {
        /// Page sizes, descending.
        bytes: Vec<usize>,
    },
}

/// A thread that faults memory in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Toucher {
    /// CPU of the thread; `None`: any.
    pub cpu: Option<usize>,
    /// Index of its node in [`MemoryPolicy::nodes`].
    pub node: usize,
}

/// Sources of host memory, and the threads that fault it in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    pub pages: PageSizes,
    /// Nodes for host memory: the nodes of the CPUs in use, never a GPU's memory. Empty if there is only one node.
    pub nodes: Vec<usize>,
    /// Threads that fault the memory in before use; if empty, the first access to a page does.
    pub(crate) touchers: Vec<Toucher>,
    /// Notes on page sizes that are not available.
    pub(crate) notes: Vec<String>,
}

impl Default for MemoryPolicy {
    /// A hint for huge pages of the usual size.
    fn default() -> Self {
        Self { pages: PageSizes::Transparent { bytes: 2 << 20 }, nodes: Vec::new(), touchers: Vec::new(), notes: Vec::new() }
    }
}

/// Maximum useful size of transparent huge pages: a larger page needs so much contiguous memory that it is rarely available. Kernels with
/// 64 KiB pages have huge pages of 512 MiB.
const TRANSPARENT_BYTES_MAX: u64 = 64 << 20;

/// Minimum useful size of reserved pages; Arm also has pools of 64 KiB pages.
const WORTH_BYTES: u64 = 2 << 20;

/// Minimum reserved pages of a block; on average half of the last page is unused.
const RESERVED_PAGES_MIN: usize = 8;

/// Minimum huge pages of a node's part of a bucket; smaller parts are divided at base pages.
const HUGE_PAGES_PER_PART_MIN: usize = 4;

impl MemoryPolicy {
    /// The policy for a process on the machine of `topology`. The optimizer's workers run on the CPUs `workers`; if that is empty they are
    /// not pinned, and there are `threads` of them.
    ///
    /// # Errors
    /// `Resource` when reserved pages were requested and there are none.
    pub fn new(topology: &Topology, choice: HugePagesChoice, workers: &[usize], threads: usize) -> Result<Self> {
        let (pages, note) = page_sizes(topology, choice, nodes(topology).first().copied())?;
        Ok(Self { pages, notes: note.into_iter().collect(), ..Self::default() }.within(topology, workers, threads))
    }

    /// This policy's page sizes with the memory nodes of `topology`, a part of the machine, and its `workers` or `threads`.
    pub(crate) fn within(&self, topology: &Topology, workers: &[usize], threads: usize) -> Self {
        let nodes = nodes(topology);
        let node_of = |cpu: usize| {
            let node = topology.cpus.iter().find(|known| known.id == cpu).and_then(|cpu| cpu.numa_node);
            nodes.iter().position(|&id| Some(id) == node).unwrap_or(0)
        };
        let pinned = workers.iter().map(|&cpu| Toucher { cpu: Some(cpu), node: node_of(cpu) });
        let anywhere = (0..threads).map(|i| Toucher { cpu: None, node: i % nodes.len().max(1) });
        let touchers = if workers.is_empty() { anywhere.collect() } else { pinned.collect() };
        Self { nodes, touchers, ..self.clone() }
    }

    /// The policy for a simulation, which touches almost none of its memory.
    pub fn unbacked() -> Self {
        Self { pages: PageSizes::Unbacked, ..Self::default() }
    }

    pub(super) fn is_backed(&self) -> bool {
        !matches!(self.pages, PageSizes::Unbacked)
    }

    /// The memory nodes of the workers; there is one worker for each toucher.
    pub fn worker_nodes(&self) -> WorkerNodes {
        WorkerNodes { nodes: self.nodes.len().max(1), of_worker: self.touchers.iter().map(|toucher| toucher.node).collect() }
    }

    /// Alignment of a block of `bytes`.
    pub(super) fn align(&self, bytes: usize) -> usize {
        match self.pages {
            PageSizes::Transparent { bytes: page } if bytes >= page => page,
            _ => 1,
        }
    }

    /// Sizes of reserved pages for a block of `bytes`, largest first; empty if base pages are better.
    pub(super) fn reserved(&self, bytes: usize) -> impl Iterator<Item = usize> {
        let sizes: &[usize] = if let PageSizes::Reserved { bytes } = &self.pages { bytes } else { &[] };
        sizes.iter().copied().filter(move |page| page.saturating_mul(RESERVED_PAGES_MIN) <= bytes)
    }

    /// Divides `bytes` among the nodes. In memory with a period of `period_bytes` (buckets, slots), each period has one part for each node.
    /// A job's pieces are then spread evenly over the nodes, the first ones on the first node. Parts are whole pages of `page_bytes`, or
    /// whole huge pages if a part has several.
    pub(super) fn parts(&self, bytes: usize, period_bytes: usize, page_bytes: usize) -> Vec<(Range<usize>, usize)> {
        let count = self.nodes.len();
        if count <= 1 || period_bytes == 0 {
            return vec![(0..bytes, 0)];
        }
        let huge = self.align(bytes);
        let grain = if period_bytes / count >= HUGE_PAGES_PER_PART_MIN * huge { huge.max(page_bytes) } else { page_bytes };
        let cut = |at: usize| if at < bytes { at / grain * grain } else { bytes };
        let border = |period: usize, node: usize| cut(period * period_bytes + period_bytes * node / count);
        let parts = (0..bytes.div_ceil(period_bytes)).flat_map(|period| (0..count).map(move |node| (period, node)));
        let range = |(period, node)| (border(period, node)..border(period, node + 1), node);
        parts.map(range).filter(|(range, _)| !range.is_empty()).collect()
    }

    /// The ranges of `parts` that each toucher faults in: an equal share of every part of its node, divided at multiples of `grain`. All
    /// touchers share the parts of a node without touchers.
    pub(super) fn ranges_by_thread(&self, parts: &[(Range<usize>, usize)], grain: usize) -> Vec<Vec<Range<usize>>> {
        let mut ranges_by_thread = vec![Vec::new(); self.touchers.len()];
        for (range, node) in parts {
            let on_node = |i: &usize| self.touchers[*i].node == *node;
            let everyone = 0..self.touchers.len();
            let writers: Vec<_> =
                if everyone.clone().any(|i| on_node(&i)) { everyone.filter(on_node).collect() } else { everyone.collect() };
            let part_len = range.len().div_ceil(writers.len().max(1)).next_multiple_of(grain);
            let starts = range.clone().step_by(part_len);
            writers.into_iter().zip(starts).for_each(|(i, start)| ranges_by_thread[i].push(start..range.end.min(start + part_len)));
        }
        ranges_by_thread
    }
}

/// See [`MemoryPolicy::nodes`].
fn nodes(topology: &Topology) -> Vec<usize> {
    let cpus = topology.usable_cpus().map_or_else(CpuList::default, |usable| usable.affinity);
    if topology.nodes_with_memory().count() > 1 { topology.nodes_beside(&cpus) } else { Vec::new() }
}

fn page_sizes(topology: &Topology, choice: HugePagesChoice, first_node: Option<usize>) -> Result<(PageSizes, Option<String>)> {
    match choice {
        HugePagesChoice::Off => Ok((PageSizes::Smallest, None)),
        HugePagesChoice::Explicit => reserved(topology, first_node).map(|bytes| (PageSizes::Reserved { bytes }, None)),
        HugePagesChoice::Auto => Ok(match topology.thp_bytes {
            None => (PageSizes::Default, Some("this kernel makes no transparent huge pages".into())),
            Some(bytes) if bytes > TRANSPARENT_BYTES_MAX => (PageSizes::Default, Some(too_coarse(bytes))),
            Some(bytes) => (PageSizes::Transparent { bytes: bytes as usize }, None),
        }),
    }
}

fn too_coarse(bytes: u64) -> String {
    format!("transparent huge pages of {} are too large to use; reserve pages for --huge-pages explicit", Bytes(bytes))
}

/// Sizes of reserved pages. Pages reserved for the whole machine are spread over all nodes, including a GPU's memory, so the error names
/// the pool of one node.
fn reserved(topology: &Topology, first_node: Option<usize>) -> Result<Vec<usize>> {
    let mut sizes: Vec<_> =
        topology.huge_pages.iter().filter(|pool| pool.total.is_some_and(|total| total > 0)).map(|pool| pool.page_bytes as usize).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    if sizes.is_empty() {
        let pools = &topology.huge_pages;
        let pool = pools.iter().find(|pool| pool.page_bytes >= WORTH_BYTES).or(pools.first());
        let how = |pool: &HugePages| format!("none are reserved: echo N > {}", free_memory::pool_size(first_node, pool.page_bytes));
        let cause = pool.map_or("this kernel has none".into(), how);
        return Err(Error::resource("use --huge-pages explicit", cause));
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::{grace, two_sockets};
    use proptest::prelude::*;

    fn on_grace(choice: HugePagesChoice) -> MemoryPolicy {
        let process = Process { affinity: CpuList::parse("0-71"), memlock_bytes: None, ..Process::default() };
        MemoryPolicy::new(&Topology::read(grace().path(), process), choice, &[7, 8], 2).unwrap()
    }

    #[test]
    fn memory_of_a_gpu_is_never_used_for_the_host() {
        let policy = on_grace(HugePagesChoice::Auto);
        assert_eq!(policy.nodes, [0]);
        assert_eq!(policy.touchers, [7, 8].map(|cpu| Toucher { cpu: Some(cpu), node: 0 }));
    }

    #[test]
    fn pages_are_those_that_the_kernel_has() {
        let policy = on_grace(HugePagesChoice::Auto);
        assert_eq!(policy.pages, PageSizes::Default);
        assert!(policy.notes[0].contains("512.0 MiB are too large"), "{:?}", policy.notes);
        let explicit = on_grace(HugePagesChoice::Explicit);
        assert_eq!(explicit.pages, PageSizes::Reserved { bytes: vec![2 << 20] });
        let sizes = |bytes| explicit.reserved(bytes).collect::<Vec<_>>();
        assert_eq!((sizes(16 << 20), sizes((16 << 20) - 1)), (vec![2 << 20], vec![]));
        assert_eq!((on_grace(HugePagesChoice::Off).pages, on_grace(HugePagesChoice::Off).notes.len()), (PageSizes::Smallest, 0));
    }

    #[test]
    fn missing_reserved_pages_are_an_error_with_the_remedy() {
        let mut topology = Topology::read(two_sockets().path(), Process::default());
        topology.huge_pages[0].total = Some(0);
        let error = MemoryPolicy::new(&topology, HugePagesChoice::Explicit, &[], 1).unwrap_err().to_string();
        assert!(error.contains("none are reserved") && error.contains("hugepages-2048kB/nr_hugepages"), "{error}");
    }

    #[test]
    fn two_sockets_share_every_bucket() {
        let topology = Topology { thp_bytes: Some(2 << 20), ..Topology::read(two_sockets().path(), Process::default()) };
        let policy = MemoryPolicy::new(&topology, HugePagesChoice::Auto, &[], 3).unwrap();
        assert_eq!(policy.nodes, [0, 1]);
        assert_eq!(policy.touchers.iter().map(|t| (t.cpu, t.node)).collect::<Vec<_>>(), [(None, 0), (None, 1), (None, 0)]);
        let mib = |parts: Vec<(Range<usize>, usize)>| parts.into_iter().map(|(r, n)| (r.start >> 20, r.end >> 20, n)).collect::<Vec<_>>();
        assert_eq!(mib(policy.parts(80 << 20, 32 << 20, 4096)), [(0, 16, 0), (16, 32, 1), (32, 48, 0), (48, 64, 1), (64, 80, 0)]);
        // Huge pages are not divided, and small parts are not rounded to huge pages.
        assert_eq!(mib(policy.parts(34 << 20, 34 << 20, 4096)), [(0, 16, 0), (16, 34, 1)]);
        assert_eq!(mib(policy.parts(2 << 20, 2 << 20, 4096)), [(0, 1, 0), (1, 2, 1)]);
    }

    #[test]
    fn every_thread_touches_its_share_of_its_node() {
        let touchers = [0, 1, 0].map(|node| Toucher { cpu: None, node }).to_vec();
        let policy = MemoryPolicy { nodes: vec![0, 1], touchers, ..MemoryPolicy::default() };
        let ranges_by_thread = |policy: &MemoryPolicy, parts: &[(Range<usize>, usize)], grain| -> Vec<(usize, usize, usize)> {
            let ranges_by_thread = policy.ranges_by_thread(parts, grain).into_iter().enumerate();
            ranges_by_thread.flat_map(|(i, ranges)| ranges.into_iter().map(move |range| (i, range.start, range.end))).collect()
        };
        let parts = [(0..100, 0), (100..200, 1), (200..210, 0)];
        assert_eq!(ranges_by_thread(&policy, &parts, 10), [(0, 0, 50), (0, 200, 210), (1, 100, 200), (2, 50, 100)]);
        let alone = MemoryPolicy { touchers: vec![Toucher { cpu: None, node: 1 }], ..policy };
        assert_eq!(ranges_by_thread(&alone, &parts[..1], 30), [(0, 0, 100)]);
        assert!(MemoryPolicy::default().ranges_by_thread(&[(0..100, 0)], 10).is_empty());
    }

    proptest! {
        #[test]
        fn parts_are_all_of_the_memory_in_order(
            nodes in 1usize..5, bytes in 1usize..1 << 28, period in 1usize << 16..1 << 27, huge in prop::sample::select(vec![1usize << 21, 1 << 25])
        ) {
            let pages = PageSizes::Transparent { bytes: huge };
            let policy = MemoryPolicy { pages, nodes: (0..nodes).collect(), ..MemoryPolicy::default() };
            let parts = policy.parts(bytes, period, 4096);
            prop_assert!(parts[0].0.start == 0 && parts[parts.len() - 1].0.end == bytes);
            prop_assert!(parts.windows(2).all(|w| w[0].0.end == w[1].0.start && w[0].0.end.is_multiple_of(4096)));
            prop_assert!(parts.iter().all(|(range, node)| *node < nodes && !range.is_empty()));
        }
    }
}
