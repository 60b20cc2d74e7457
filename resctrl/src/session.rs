//! Changing partitions so that everything is as it was afterwards, however the changing ends.

use crate::journal::{self, Entry, Journal, Moved, Record, Taken};
use crate::tasks::{groups_of_tasks, started};
use crate::undo::undo;
use crate::{CpuSet, Discovery, Error, GroupPath, Result, Rounded, Schemata, Tree, discover, files, mount};
use nix::unistd::Uid;
use std::path::Path;

/// The right to change a tree. It makes groups of its own and changes only those. What they take from others (CPUs, threads) is in the
/// journal before it is taken, and given back by [`Session::restore`], when this is dropped, or by whoever opens the journal next.
pub struct Session {
    tree: Tree,
    journal: Journal,
    kept: bool,
}

impl Session {
    /// Locks the journal, undoes what it says an earlier session left, and opens the tree at `root`, which is mounted if nobody did.
    /// Also returns a line for each thing that was undone.
    ///
    /// # Errors
    /// `Locked` while another session has the journal; whatever [`restore`] and mounting can say.
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

    /// The tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Makes a group, whose name starts with [`crate::PREFIX`] or whose control group's name does.
    ///
    /// # Errors
    /// `Refused` for another name or one that is taken; when the kernel has no group left.
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

    /// Allots `wanted` to a group of this session; returns what the kernel rounded.
    ///
    /// # Errors
    /// `Refused` for another's group, or for what this machine cannot allot; nothing has been written then.
    pub fn set_schemata(&mut self, group: &GroupPath, wanted: &Schemata) -> Result<Vec<Rounded>> {
        self.check_made("set schemata of", group)?;
        let _lock = self.tree.lock()?;
        self.tree.set_schemata(group, wanted)
    }

    /// Adds `cpus` to those of a group of this session; others lose them. Threads in the default group are allotted by the group of the CPU
    /// that they run on.
    ///
    /// # Errors
    /// `Refused` for another's group; when the kernel refuses (a CPU is offline).
    pub fn add_cpus(&mut self, group: &GroupPath, cpus: &CpuSet) -> Result<()> {
        self.check_made("assign CPUs to", group)?;
        let _lock = self.tree.lock()?;
        let taken = self.taken(group, cpus)?;
        let cpus = self.tree.cpus(group)?.or(cpus);
        self.journal.append(self.tree.root(), Entry::Cpus { to: group.clone(), taken })?;
        self.tree.set_cpus(group, &cpus)
    }

    /// Puts threads, also of others, into a group of this session; returns how many. Threads that have ended are passed over.
    ///
    /// # Errors
    /// `Refused` for another's group; when the kernel refuses a thread.
    pub fn move_tasks(&mut self, group: &GroupPath, tids: &[i32]) -> Result<usize> {
        self.check_made("move threads to", group)?;
        let _lock = self.tree.lock()?;
        let groups = groups_of_tasks(&self.tree)?;
        let moved = |&tid: &i32| Some(Moved { tid, started: started(tid)?, from: groups.get(&tid)?.clone() });
        let moved = tids.iter().filter_map(moved).collect();
        self.journal.append(self.tree.root(), Entry::Tasks { to: group.clone(), moved })?;
        self.tree.add_tasks(group, tids)
    }

    /// Lets `user` put their own threads into a group of this session, without any other right.
    ///
    /// # Errors
    /// `Refused` for another's group; when the system refuses.
    pub fn give_tasks_to(&mut self, group: &GroupPath, user: Uid) -> Result<()> {
        self.check_made("hand over", group)?;
        self.tree.give_tasks_to(group, user)
    }

    /// Leaves everything in place until someone calls [`restore`], or starts a session with the same journal.
    ///
    /// # Errors
    /// When the journal cannot be written; then everything is undone.
    pub fn keep(mut self) -> Result<()> {
        self.journal.append(self.tree.root(), Entry::Kept)?;
        self.kept = true;
        Ok(())
    }

    /// Undoes everything; returns a line for each thing that was undone.
    ///
    /// # Errors
    /// The first thing that could not be undone. The others are, and the journal keeps what the next start needs.
    pub fn restore(mut self) -> Result<Vec<String>> {
        undo_all(&self.tree, &mut self.journal)
    }

    /// What others have of `cpus`, and all that their monitor groups have: the kernel clears those whenever it is told a group's CPUs.
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
        // Whoever wants to know of an error calls `restore`; the journal keeps what was not undone for the next start.
        if !self.kept {
            let _ = undo_all(&self.tree, &mut self.journal);
        }
    }
}

/// Undoes what the journal says about the tree at `root`; returns a line for each thing that was undone.
///
/// # Errors
/// `Locked` while a session has the journal; `Refused` when it is about another tree; the first thing that could not be undone.
pub fn restore(root: &Path, journal: &Path) -> Result<Vec<String>> {
    recover(root, &mut Journal::open(journal)?)
}

/// In words, what a journal says is to be undone; `None` when there is nothing.
///
/// # Errors
/// When the journal cannot be read or understood.
pub fn describe_journal(journal: &Path) -> Result<Option<String>> {
    let Some(Record { header, entries }) = journal::peek(journal)? else { return Ok(None) };
    let name = |entry: &Entry| if let Entry::Group(group) = entry { Some(group.to_string()) } else { None };
    let groups: Vec<_> = entries.iter().filter_map(name).collect();
    let groups = if groups.is_empty() { "no group".into() } else { groups.join(", ") };
    let kept = if entries.contains(&Entry::Kept) { "prepared by" } else { "in the hands of, or left by," };
    Ok(Some(format!("{groups}: {kept} process {} ({} changes to undo)", header.pid, entries.len())))
}

/// Undoes what an earlier session left.
fn recover(root: &Path, journal: &mut Journal) -> Result<Vec<String>> {
    let Some(record) = journal.record() else { return Ok(Vec::new()) };
    if record.header.root != root {
        let cause = format!("it is about {}: restore that first", record.header.root.display());
        return Err(Error::refused("use this journal", cause));
    }
    match Tree::open(root) {
        Ok(tree) => undo_all(&tree, journal),
        // Without a tree its groups are gone, too.
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
