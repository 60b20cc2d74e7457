//! Free memory of memory nodes. The kernel lets a process bind any amount of memory to a full node, and kills the process when it touches
//! the memory.

use crate::hardware::parse;
use crate::units::Bytes;
use std::fs;
use std::path::Path;

/// File caches, which the kernel frees on demand.
const RECLAIMABLE: [&str; 3] = ["Active(file)", "Inactive(file)", "SReclaimable"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// The kernel's own pages, including transparent huge pages.
    Any,
    /// Reserved pages of this size in bytes.
    Reserved(usize),
}

/// Checks that `nodes` together have `bytes` of free memory in `pages`, according to the `sys` file system below `root` (normally `/`).
/// Concurrent allocations are unknown, and swap is not counted.
///
/// # Errors
/// The free memory, and for reserved pages the command to reserve more.
pub(super) fn check(root: &Path, nodes: &[usize], pages: Pages, bytes: u64) -> Result<(), String> {
    let left: Option<u64> = nodes.iter().map(|&node| left_bytes(root, node, pages)).sum();
    let Some(left) = left.filter(|&left| left < bytes) else { return Ok(()) };
    let names: Vec<_> = nodes.iter().map(|node| format!("node {node}")).collect();
    let names = names.join(" and ");
    Err(match (pages, nodes) {
        (Pages::Reserved(page), [node, ..]) => format!(
            "too few huge pages of {} are free on {names}, {} of {}: echo N > {}",
            Bytes(page as u64),
            Bytes(left),
            Bytes(bytes),
            pool_size(Some(*node), page as u64),
        ),
        _ => format!("{} are left on {names}", Bytes(left)),
    })
}

/// The file with the number of reserved pages of `page_bytes` on `node`, or on all nodes.
pub(super) fn pool_size(node: Option<usize>, page_bytes: u64) -> String {
    let owner = node.map_or("kernel/mm".into(), |node| format!("devices/system/node/node{node}"));
    format!("/sys/{owner}/hugepages/hugepages-{}kB/nr_hugepages", page_bytes >> 10)
}

/// Free bytes; `None` if the kernel does not report them.
fn left_bytes(root: &Path, node: usize, pages: Pages) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(root.join(format!("sys/devices/system/node/node{node}/{file}"))).ok();
    match pages {
        Pages::Reserved(page) => {
            let free: u64 = read(&format!("hugepages/hugepages-{}kB/free_hugepages", page >> 10))?.trim().parse().ok()?;
            Some(free.saturating_mul(page as u64))
        }
        Pages::Any => {
            let meminfo = read("meminfo")?;
            let bytes = |key: &str| parse::meminfo_bytes(&meminfo, key);
            Some(RECLAIMABLE.iter().filter_map(|key| bytes(key)).fold(bytes("MemFree")?, u64::saturating_add))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::tests::tree;

    #[test]
    fn available_memory_includes_reclaimable_memory() {
        let meminfo = "Node 0 MemFree: 1024 kB\nNode 0 Active(file): 512 kB\nNode 0 Inactive(file): 256 kB\nNode 0 SReclaimable: 256 kB\n";
        let dir = tree(&[
            ("sys/devices/system/node/node0/meminfo", meminfo),
            ("sys/devices/system/node/node1/meminfo", "Node 1 MemFree: 4096 kB\n"),
            ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "3\n"),
        ]);
        let check = |nodes: &[usize], pages, mib: u64| check(dir.path(), nodes, pages, mib << 20);
        assert_eq!(check(&[0], Pages::Any, 2), Ok(()));
        assert_eq!(check(&[0], Pages::Any, 3), Err("2.0 MiB are left on node 0".into()));
        assert_eq!(check(&[0, 1], Pages::Any, 6), Ok(()));
        assert_eq!(check(&[0, 1], Pages::Any, 7), Err("6.0 MiB are left on node 0 and node 1".into()));
        assert_eq!(check(&[0], Pages::Reserved(2 << 20), 6), Ok(()));
        let more = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
        let few = format!("too few huge pages of 2.0 MiB are free on node 0, 6.0 MiB of 8.0 MiB: echo N > {more}");
        assert_eq!(check(&[0], Pages::Reserved(2 << 20), 8), Err(few));
        assert_eq!(check(&[0, 7], Pages::Any, 1 << 20), Ok(()), "a kernel that does not tell is asked by touching");
    }
}
