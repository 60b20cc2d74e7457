//! Undoes the changes in a journal.

use crate::journal::{Entry, Moved, Taken};
use crate::tasks::{groups_of_tasks, started};
use crate::{GroupPath, Result, Tree, mount};

/// Undoes `entries`, newest first, and returns a line for each undone change. The function is idempotent, so it may be interrupted at any
/// point.
///
/// # Errors
/// The first failure; changes that do not depend on it are undone all the same.
pub(crate) fn undo(tree: &Tree, entries: &[Entry]) -> Result<Vec<String>> {
    let lock = tree.lock()?;
    let (mut notes, mut outcome) = (Vec::new(), Ok(()));
    for entry in entries.iter().rev() {
        let undone = match entry {
            Entry::Group(group) => remove(tree, group),
            Entry::Cpus { to, taken } => return_cpus(tree, to, taken),
            Entry::Tasks { to, moved } => return_tasks(tree, to, moved),
            Entry::Mount { .. } | Entry::Kept => Ok(None),
        };
        match undone {
            Ok(note) => notes.extend(note),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    for entry in entries {
        if let Entry::Cpus { taken, .. } = entry {
            outcome = outcome.and(return_monitored_cpus(tree, taken));
        }
    }
    // The open lock file would keep the mount busy.
    drop(lock);
    outcome?;
    if let Some(Entry::Mount { at_ns }) = entries.first() {
        notes.push(unmount(tree, *at_ns)?);
    }
    Ok(notes)
}

/// Removes a group. Threads and CPUs that are still in the group return to the default group.
fn remove(tree: &Tree, group: &GroupPath) -> Result<Option<String>> {
    if !tree.has(group)? {
        return Ok(None);
    }
    tree.remove(group)?;
    Ok(Some(format!("removed group {group}")))
}

/// Returns CPUs that the group `to` still has to their former control groups. CPUs of the default group return by themselves when the group
/// is removed; writing them would clear the CPUs of the default group's monitor groups.
fn return_cpus(tree: &Tree, to: &GroupPath, taken: &[Taken]) -> Result<Option<String>> {
    if !tree.has(to)? {
        return Ok(None);
    }
    let held = tree.cpus(to)?;
    let mut returned = Vec::new();
    for Taken { group, cpus } in taken.iter().filter(|taken| !taken.group.is_monitor() && taken.group != GroupPath::root()) {
        let cpus = cpus.and(&held);
        if !cpus.is_empty() && tree.has(group)? {
            tree.set_cpus(group, &tree.cpus(group)?.or(&cpus))?;
            returned.push(format!("{cpus} to {group}"));
        }
    }
    Ok((!returned.is_empty()).then(|| format!("returned CPUs {}", returned.join(", "))))
}

/// Restores the CPUs of monitor groups, as far as their control group has these CPUs again.
fn return_monitored_cpus(tree: &Tree, taken: &[Taken]) -> Result<()> {
    for Taken { group, cpus } in taken.iter().filter(|taken| taken.group.is_monitor()) {
        if !tree.has(group)? {
            continue;
        }
        let has = tree.cpus(group)?;
        let had = has.or(&cpus.and(&tree.cpus(&group.control_group())?));
        if had != has {
            tree.set_cpus(group, &had)?;
        }
    }
    Ok(())
}

/// Returns the threads that are still in the group `to`, or that an interrupted restore has already moved to their former control group.
fn return_tasks(tree: &Tree, to: &GroupPath, moved: &[Moved]) -> Result<Option<String>> {
    if !tree.has(to)? {
        return Ok(None);
    }
    let now_in = groups_of_tasks(tree)?;
    let mut returned = 0;
    for Moved { tid, from, .. } in moved.iter().filter(|moved| started(moved.tid) == Some(moved.started)) {
        let control = from.control_group();
        let moving = [to, &control].map(|group| now_in.get(tid) == Some(group));
        if !tree.has(from)? || !moving.contains(&true) {
            continue;
        }
        if moving[0] {
            returned += tree.add_tasks(&control, &[*tid])?;
        }
        if from.is_monitor() {
            tree.add_tasks(from, &[*tid])?;
        }
    }
    Ok((returned > 0).then(|| format!("returned {returned} threads")))
}

/// Unmounts a tree that the session mounted, unless other programs have started to use it.
fn unmount(tree: &Tree, at_ns: i128) -> Result<String> {
    let root = tree.root();
    if !mount::is_mount_of(root, at_ns)? || tree.groups()?.len() > 1 {
        return Ok(format!("left {} mounted: others use it", root.display()));
    }
    mount::unmount_tree(root)?;
    Ok(format!("unmounted {}", root.display()))
}
