//! Sessions change partitions and undo all changes afterwards, however the process ends.

use crate::journal::{self, Entry, Journal, Moved, Record, Taken};
use crate::tasks::{groups_of_tasks, started};
use crate::undo::undo;
use crate::{CpuSet, Discovery, Error, GroupPath, Result, Rounded, Schemata, Tree, discover, files, mount};
use nix::unistd::Uid;
use std::path::Path;

/// Exclusive permission to change a tree. A session creates its own groups and changes only those. CPUs and threads that other groups lose
/// are recorded in the journal before the change. They are returned by [`Session::restore`], when the session is dropped, or at the next
/// start with the same journal.
pub struct Session {
    tree: Tree,
    journal: Journal,
    kept: bool,
}

impl Session {
    /// Locks the journal, undoes changes that an earlier session left, and opens the tree at `root`. Mounts the tree if it is not mounted.
    /// Also returns a line for each undone change.
    ///
    /// # Errors
    /// `Locked` while another session holds the journal; errors of [`restore`] and of mounting.
    pub fn start(root: &Path, journal: &Path) -> Result<(Self, Vec<String>)> {
        if !files::exists(root)? {
            return Err(Error::Absent(root.into()));
        }
        let mut journal = Journal::open(journal)?;
        let notes = recover(root, &mut journal)?;
        if discover(root)? != Discovery::NotMounted {
            return Ok((Self { tree: Tree::open(root)?, journal, kept: false }, notes));
        }
        journal.append(root, Entry::Mount { at_ns: mount::now_ns() })?;
        match mount::mount_tree(root).and_then(|()| Tree::open(root)) {
            Ok(tree) => Ok((Self { tree, journal, kept: false }, notes)),
            Err(error) => {
                recover(root, &mut journal)?;
                Err(error)
            }
        }
    }

    /// The tree that the session changes.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Creates a group. The name of the group, or of its control group, must start with [`crate::PREFIX`].
    ///
    /// # Errors
    /// `Refused` for a name without the prefix or an existing group; an error if the kernel has no free group.
    pub fn create(&mut self, group: &GroupPath) -> Result<()> {
        let refuse = |cause: &str| Err(Error::refused(format!("create group {group}"), cause));
        if !group.is_ours() {
            return refuse(&format!("groups of ours are called {}NAME", crate::PREFIX));
        }
        let _lock = self.tree.lock()?;
        if self.tree.has(group)? {
            return refuse("it exists and is in no journal; remove it with rmdir if nobody uses it");
        }
        self.journal.append(self.tree.root(), Entry::Group(group.clone()))?;
        self.tree.create(group)
    }

    /// Sets the limits of a group of this session. Returns the limits that the kernel rounded.
    ///
    /// # Errors
    /// `Refused` for a group of another session, or for limits that this machine does not support; nothing has been written then.
    pub fn set_schemata(&mut self, group: &GroupPath, wanted: &Schemata) -> Result<Vec<Rounded>> {
        self.check_made("set schemata of", group)?;
        let _lock = self.tree.lock()?;
        self.tree.set_schemata(group, wanted)
    }

    /// Adds `cpus` to a group of this session; other groups lose these CPUs. A thread in the default group has the limits of the group that
    /// owns its current CPU.
    ///
    /// # Errors
    /// `Refused` for a group of another session; an error if the kernel rejects the CPUs, for example an offline CPU.
    pub fn add_cpus(&mut self, group: &GroupPath, cpus: &CpuSet) -> Result<()> {
        self.check_made("assign CPUs to", group)?;
        let _lock = self.tree.lock()?;
        let taken = self.taken(group, cpus)?;
        let cpus = self.tree.cpus(group)?.or(cpus);
        self.journal.append(self.tree.root(), Entry::Cpus { to: group.clone(), taken })?;
        self.tree.set_cpus(group, &cpus)
    }

    /// Moves threads of any process into a group of this session. Returns the number of moved threads. Threads that have ended are skipped.
    ///
    /// # Errors
    /// `Refused` for a group of another session; an error if the kernel rejects a thread.
    pub fn move_tasks(&mut self, group: &GroupPath, tids: &[i32]) -> Result<usize> {
        self.check_made("move threads to", group)?;
        let _lock = self.tree.lock()?;
        let groups = groups_of_tasks(&self.tree)?;
        let moved = |&tid: &i32| Some(Moved { tid, started: started(tid)?, from: groups.get(&tid)?.clone() });
        let moved = tids.iter().filter_map(moved).collect();
        self.journal.append(self.tree.root(), Entry::Tasks { to: group.clone(), moved })?;
        self.tree.add_tasks(group, tids)
    }

    /// Lets `user` move their own threads into a group of this session. The user gets no other permission.
    ///
    /// # Errors
    /// `Refused` for a group of another session; an error if the owner cannot be changed.
    pub fn give_tasks_to(&mut self, group: &GroupPath, user: Uid) -> Result<()> {
        self.check_made("hand over", group)?;
        self.tree.give_tasks_to(group, user)
    }

    /// Keeps all changes until [`restore`] is called or a session starts with the same journal.
    ///
    /// # Errors
    /// An error if the journal cannot be written; then all changes are undone.
    pub fn keep(mut self) -> Result<()> {
        self.journal.append(self.tree.root(), Entry::Kept)?;
        self.kept = true;
        Ok(())
    }

    /// Undoes all changes. Returns a line for each undone change.
    ///
    /// # Errors
    /// The first failure. All other changes are undone, and the journal keeps the entries for the next start.
    pub fn restore(mut self) -> Result<Vec<String>> {
        undo_all(&self.tree, &mut self.journal)
    }

    /// The CPUs in `cpus` that other control groups have, and all CPUs of the monitor groups of those control groups: the kernel clears
    /// these whenever the CPUs of a group are written.
    fn taken(&self, group: &GroupPath, cpus: &CpuSet) -> Result<Vec<Taken>> {
        let (mut taken, mut losing) = (Vec::new(), false);
        for other in self.tree.groups()?.into_iter().filter(|other| other.control_group() != *group) {
            let has = self.tree.cpus(&other)?;
            let cpus = if other.is_monitor() { has } else { has.and(cpus) };
            losing = if other.is_monitor() { losing } else { !cpus.is_empty() };
            if losing && !cpus.is_empty() {
                taken.push(Taken { group: other, cpus });
            }
        }
        Ok(taken)
    }

    fn check_made(&self, operation: &str, group: &GroupPath) -> Result<()> {
        let made = self.journal.record().is_some_and(|record| record.entries.contains(&Entry::Group(group.clone())));
        if made { Ok(()) } else { Err(Error::refused(format!("{operation} {group}"), "this session did not make it")) }
    }

    #[cfg(test)]
    pub(crate) fn with_tree(tree: Tree, journal: &Path) -> Result<Self> {
        Ok(Self { tree, journal: Journal::open(journal)?, kept: false })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A caller that needs the error calls `restore`. After a failure the journal keeps its entries for the next start.
        if !self.kept {
            let _ = undo_all(&self.tree, &mut self.journal);
        }
    }
}

/// Undoes the changes in the journal to the tree at `root`. Returns a line for each undone change.
///
/// # Errors
/// `Locked` while a session holds the journal; `Refused` if the journal is about another tree; the first failure to undo a change.
pub fn restore(root: &Path, journal: &Path) -> Result<Vec<String>> {
    recover(root, &mut Journal::open(journal)?)
}

/// Describes the changes in a journal; `None` if there is nothing to undo.
///
/// # Errors
/// An error if the journal cannot be read or parsed.
pub fn describe_journal(journal: &Path) -> Result<Option<String>> {
    let Some(Record { header, entries }) = journal::peek(journal)? else { return Ok(None) };
    let name = |entry: &Entry| if let Entry::Group(group) = entry { Some(group.to_string()) } else { None };
    let groups: Vec<_> = entries.iter().filter_map(name).collect();
    let groups = if groups.is_empty() { "no group".into() } else { groups.join(", ") };
    let kept = if entries.contains(&Entry::Kept) { "prepared by" } else { "in the hands of, or left by," };
    Ok(Some(format!("{groups}: {kept} process {} ({} changes to undo)", header.pid, entries.len())))
}

/// Undoes changes that an earlier session left.
fn recover(root: &Path, journal: &mut Journal) -> Result<Vec<String>> {
    let Some(record) = journal.record() else { return Ok(Vec::new()) };
    if record.header.root != root {
        let cause = format!("it is about {}: restore that first", record.header.root.display());
        return Err(Error::refused("use this journal", cause));
    }
    match Tree::open(root) {
        Ok(tree) => undo_all(&tree, journal),
        // Unmounting the tree has removed its groups.
        Err(Error::Absent(_) | Error::NotMounted(_)) => journal.clear().map(|()| Vec::new()),
        Err(error) => Err(error),
    }
}

fn undo_all(tree: &Tree, journal: &mut Journal) -> Result<Vec<String>> {
    let Some(record) = journal.record() else { return Ok(Vec::new()) };
    let notes = undo(tree, &record.entries)?;
    journal.clear().map(|()| notes)
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
