//! What memory nodes have left. The kernel lets a process bind any amount of memory to a full node, and ends it when it touches that.

use crate::hardware::parse;
use crate::units::Bytes;
use std::fs;
use std::path::Path;

/// Caches of files: the kernel gives them up when memory is asked for.
const RECLAIMABLE: [&str; 3] = ["Active(file)", "Inactive(file)", "SReclaimable"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// The kernel's own, transparent huge ones among them.
    Any,
    /// Those that were reserved, of so many bytes each.
    Reserved(usize),
}

/// Checks that `nodes` together have `bytes` left in `pages`, as far as the `sys` below `root` (normally `/`) tells. What else is
/// asked for at the same time is not known, and swap is not counted.
///
/// # Errors
/// What there is instead, and for reserved pages how to get more.
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

/// The file that says how many pages of `page_bytes` are reserved on `node`, or on all of them.
pub(super) fn pool_size(node: Option<usize>, page_bytes: u64) -> String {
    let owner = node.map_or("kernel/mm".into(), |node| format!("devices/system/node/node{node}"));
    format!("/sys/{owner}/hugepages/hugepages-{}kB/nr_hugepages", page_bytes >> 10)
}

/// `None` if the kernel does not tell.
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
    fn what_is_free_and_what_can_be_given_up_is_left() {
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
