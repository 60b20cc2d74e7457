//! The group of a thread, and the start time that identifies the thread.

use crate::{GroupPath, Result, Tree};
use std::collections::BTreeMap;

/// The group of every thread; the monitor group if the thread is in one.
pub(crate) fn groups_of_tasks(tree: &Tree) -> Result<BTreeMap<i32, GroupPath>> {
    let mut groups = BTreeMap::new();
    for group in tree.groups()? {
        // `groups` returns a control group before its monitor groups. The control group also lists the threads of its monitor groups.
        groups.extend(tree.tasks(&group)?.into_iter().map(|tid| (tid, group.clone())));
    }
    Ok(groups)
}

/// Start time of thread `tid` in clock ticks since boot; `None` if there is no such thread.
pub(crate) fn started(tid: i32) -> Option<u64> {
    // The name in parentheses may contain any text, including ") ".
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
