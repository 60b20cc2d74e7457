//! Undoing what a journal says, as far as it was done.

use crate::journal::{Entry, Moved, Taken};
use crate::tasks::{groups_of_tasks, started};
use crate::{GroupPath, Result, Tree, mount};

/// Undoes `entries`, the newest first, and returns a line for each thing undone. Doing it again changes nothing, so that it may be
/// interrupted anywhere.
///
/// # Errors
/// The first failure; what does not depend on it is undone all the same.
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
    // A mount in use cannot be undone, and a lock uses it.
    drop(lock);
    outcome?;
    if let Some(Entry::Mount { at_ns }) = entries.first() {
        notes.push(unmount(tree, *at_ns)?);
    }
    Ok(notes)
}

/// Threads and CPUs that are still in the group fall back to the default group.
fn remove(tree: &Tree, group: &GroupPath) -> Result<Option<String>> {
    if !tree.has(group)? {
        return Ok(None);
    }
    tree.remove(group)?;
    Ok(Some(format!("removed group {group}")))
}

/// Gives back to control groups the CPUs that are still where the session put them. What the default group had falls back to it by itself;
/// telling the kernel would clear the CPUs of its monitor groups.
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

/// Gives monitor groups what they had of the CPUs that their control group has again.
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

/// Gives back the threads that are still where the session put them, or on their way back.
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

/// Unmounts what the session mounted, unless others have come to use it.
fn unmount(tree: &Tree, at_ns: i128) -> Result<String> {
    let root = tree.root();
    if !mount::is_mount_of(root, at_ns)? || tree.groups()?.len() > 1 {
        return Ok(format!("left {} mounted: others use it", root.display()));
    }
    mount::unmount_tree(root)?;
    Ok(format!("unmounted {}", root.display()))
}
