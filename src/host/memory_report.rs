//! The pages and nodes that the kernel granted for a run's host memory, read back.

use crate::hardware::parse;
use crate::units::Bytes;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Pages and nodes of a memory range. Empty if the kernel does not report them.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryReport {
    /// Bytes mapped.
    pub bytes: u64,
    /// Resident bytes by page size, largest first.
    pub pages: Vec<PageBytes>,
    /// Resident bytes by node.
    pub nodes: Vec<NodeBytes>,
    /// Nodes to which the memory is bound; empty if there is only one node.
    pub bound_to: Vec<usize>,
    /// Notes on pages and nodes that are not available.
    pub(crate) notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PageBytes {
    pub page_bytes: u64,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NodeBytes {
    pub node: usize,
    pub bytes: u64,
}

impl MemoryReport {
    /// Finds the memory at `addresses` in `proc/self/smaps` and `proc/self/numa_maps` below `root`. An area that the kernel has merged with
    /// a neighbouring area counts as a whole.
    pub fn read(root: &Path, addresses: &[Range<usize>]) -> Self {
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let thp_bytes = read("sys/kernel/mm/transparent_hugepage/hpage_pmd_size").trim().parse().unwrap_or(0);
        let (smaps, numa_maps) = (read("proc/self/smaps"), read("proc/self/numa_maps"));
        let areas: Vec<_> = areas(&smaps).into_iter().filter(|area| area.is_part_of(addresses)).collect();
        let (mut pages, mut nodes) = (BTreeMap::new(), BTreeMap::new());
        for (size, bytes) in areas.iter().flat_map(|area| area.pages(thp_bytes)) {
            add(&mut pages, size, bytes);
        }
        let own_pages = |line: &&str| first_address(line).is_some_and(|at| areas.iter().any(|area| area.addresses.start == at));
        for (node, bytes) in numa_maps.lines().filter(own_pages).flat_map(bytes_on_nodes) {
            add(&mut nodes, node, bytes);
        }
        Self {
            bytes: addresses.iter().map(|range| range.len() as u64).sum(),
            pages: pages.into_iter().rev().filter(|p| p.1 > 0).map(|(page_bytes, bytes)| PageBytes { page_bytes, bytes }).collect(),
            nodes: nodes.into_iter().map(|(node, bytes)| NodeBytes { node, bytes }).collect(),
            ..Self::default()
        }
    }
}

/// Adds with saturation, because a damaged file may hold any number.
fn add<K: Ord>(sums: &mut BTreeMap<K, u64>, key: K, bytes: u64) {
    let sum = sums.entry(key).or_default();
    *sum = sum.saturating_add(bytes);
}

/// One mapped area of `smaps`; sizes in bytes.
#[derive(Default)]
struct Area {
    addresses: Range<usize>,
    page_bytes: u64,
    resident: u64,
    transparent: u64,
    reserved: u64,
}

impl Area {
    fn is_part_of(&self, ranges: &[Range<usize>]) -> bool {
        ranges.iter().any(|range| range.start < self.addresses.end && self.addresses.start < range.end)
    }

    /// Reserved pages do not count as resident.
    fn pages(&self, thp_bytes: u64) -> [(u64, u64); 2] {
        [(thp_bytes, self.transparent), (self.page_bytes, self.resident.saturating_sub(self.transparent).saturating_add(self.reserved))]
    }
}

/// Parses the areas of `smaps`: a line that begins with an address range, then one attribute on each line.
fn areas(smaps: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in smaps.lines() {
        if let Some(addresses) = address_range(line) {
            areas.push(Area { addresses, ..Area::default() });
        } else if let (Some(area), Some((name, _))) = (areas.last_mut(), line.split_once(':')) {
            let bytes = || parse::meminfo_bytes(line, name).unwrap_or(0);
            match name {
                "KernelPageSize" => area.page_bytes = bytes(),
                "Rss" => area.resident = bytes(),
                "AnonHugePages" => area.transparent = bytes(),
                "Private_Hugetlb" => area.reserved = bytes(),
                _ => {}
            }
        }
    }
    areas
}

/// Address range of a line such as `7f00-7fff rw-p ...`.
fn address_range(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// Address of a line such as `7f00 bind:0 anon=3 N0=2 N1=1 kernelpagesize_kB=4`.
fn first_address(line: &str) -> Option<usize> {
    usize::from_str_radix(line.split(' ').next()?, 16).ok()
}

fn bytes_on_nodes(line: &str) -> Vec<(usize, u64)> {
    let fields = || line.split(' ').filter_map(|field| field.split_once('='));
    let page_kib: u64 = fields().find(|(name, _)| *name == "kernelpagesize_kB").and_then(|(_, kib)| kib.parse().ok()).unwrap_or(0);
    let node = |(name, pages): (&str, &str)| {
        Some((name.strip_prefix('N')?.parse().ok()?, pages.parse::<u64>().ok()?.saturating_mul(page_kib.saturating_mul(1024))))
    };
    fields().filter_map(node).collect()
}

impl fmt::Display for MemoryReport {
    /// For example `54.5 GiB: 54.0 GiB in pages of 2.0 MiB, 512.0 MiB of 4.0 KiB; on node 0 54.5 GiB (bound)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Bytes(self.bytes))?;
        // The kernel merges neighbouring areas, which then count as a whole.
        let is_more = self.pages.iter().map(|p| p.bytes).fold(0, u64::saturating_add) > self.bytes;
        if is_more {
            f.write_str("; with memory that the kernel keeps beside it")?;
        }
        let pages: Vec<_> = self.pages.iter().map(|p| format!("{} in pages of {}", Bytes(p.bytes), Bytes(p.page_bytes))).collect();
        let nodes: Vec<_> = self.nodes.iter().map(|n| format!("{} on node {}", Bytes(n.bytes), n.node)).collect();
        let how = if self.bound_to.is_empty() { "" } else { " (bound)" };
        let mut mark = if is_more { ": " } else { "; " };
        for (facts, how) in [(pages, ""), (nodes, how)].into_iter().filter(|(facts, _)| !facts.is_empty()) {
            write!(f, "{mark}{}{how}", facts.join(", "))?;
            mark = "; ";
        }
        self.notes.iter().try_for_each(|note| write!(f, "; {note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::tests::tree;
    use proptest::prelude::*;

    const SMAPS: &str = "\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \nSize:               8192 kB\nKernelPageSize:        4 kB\nRss:                8192 kB\n\
AnonHugePages:      6144 kB\nVmFlags: rd wr mr mw me ac hg \n\
7f0000800000-7f0000a00000 rw-p 00000000 00:0f 3 /anon_hugepage (deleted)\nKernelPageSize:     2048 kB\nRss:                   0 kB\n\
AnonHugePages:         0 kB\nPrivate_Hugetlb:    2048 kB\n\
7f0001000000-7f0001001000 rw-p 00000000 00:00 0 \nKernelPageSize:        4 kB\nRss:                   4 kB\n";
    const NUMA_MAPS: &str = "\
7f0000000000 bind:0 anon=2048 dirty=2048 active=0 N0=1536 N1=512 kernelpagesize_kB=4\n\
7f0000800000 bind:0 file=/anon_hugepage\\040(deleted) huge anon=1 dirty=1 N0=1 kernelpagesize_kB=2048\n\
7f0001000000 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n";

    #[test]
    fn pages_and_nodes_are_those_of_our_memory_alone() {
        let thp = ("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
        let dir = tree(&[("proc/self/smaps", SMAPS), ("proc/self/numa_maps", NUMA_MAPS), thp]);
        let report = MemoryReport::read(dir.path(), &[0x7f0000000000..0x7f0000800000, 0x7f0000800000..0x7f0000a00000]);
        let pages: Vec<_> = report.pages.iter().map(|p| (p.page_bytes, p.bytes >> 20)).collect();
        assert_eq!(pages, [(2 << 20, 8), (4096, 2)]);
        assert_eq!(report.nodes.iter().map(|n| (n.node, n.bytes >> 20)).collect::<Vec<_>>(), [(0, 8), (1, 2)]);
        let report = MemoryReport { bound_to: vec![0], notes: vec!["a note".into()], ..report };
        let line =
            "10.0 MiB; 8.0 MiB in pages of 2.0 MiB, 2.0 MiB in pages of 4.0 KiB; 8.0 MiB on node 0, 2.0 MiB on node 1 (bound); a note";
        assert_eq!(report.to_string(), line);
        let small = MemoryReport { bytes: 1 << 20, bound_to: vec![], notes: vec![], nodes: vec![], ..report };
        let line = "1.0 MiB; with memory that the kernel keeps beside it: 8.0 MiB in pages of 2.0 MiB, 2.0 MiB in pages of 4.0 KiB";
        assert_eq!(small.to_string(), line, "areas that were merged with others count whole");
    }

    #[test]
    fn a_kernel_without_feedback_is_trusted() {
        let report = MemoryReport::read(tree(&[]).path(), &[0..2048, 2048..4096]);
        assert_eq!(report.to_string(), "4.0 KiB");
    }

    proptest! {
        #[test]
        fn odd_files_do_not_panic(text in "(7f00-7fff |7f00 )?\\PC{0,20}(:|=|-|\\n|N0=|Rss: )[0-9]{0,20}( kB)?\\PC{0,9}") {
            let dir = tree(&[("proc/self/smaps", &text), ("proc/self/numa_maps", &format!("7f00 {text} kernelpagesize_kB=4"))]);
            let _ = MemoryReport::read(dir.path(), &[0..1, 1..usize::MAX]).to_string();
        }
    }
}
