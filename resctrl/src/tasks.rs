//! Which group a thread is in, and whether it is still the same thread.

use crate::{GroupPath, Result, Tree};
use std::collections::BTreeMap;

/// The group of every thread: its monitor group if it is in one.
pub(crate) fn groups_of_tasks(tree: &Tree) -> Result<BTreeMap<i32, GroupPath>> {
    let mut groups = BTreeMap::new();
    for group in tree.groups()? {
        // A control group comes before its monitor groups, whose threads it lists, too.
        groups.extend(tree.tasks(&group)?.into_iter().map(|tid| (tid, group.clone())));
    }
    Ok(groups)
}

/// When thread `tid` started, in clock ticks since boot; `None` when there is no such thread.
pub(crate) fn started(tid: i32) -> Option<u64> {
    // The name in parentheses may hold anything, also ") ".
    let stat = std::fs::read_to_string(format!("/proc/{tid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_when_a_thread_started() {
        let parent = started(std::process::id() as i32).unwrap();
        let child = std::thread::spawn(|| started(nix::unistd::gettid().as_raw())).join().unwrap().unwrap();
        assert!(0 < parent && parent <= child, "{parent} {child}");
        assert_eq!(started(i32::MAX), None);
    }
}
