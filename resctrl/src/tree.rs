//! A mounted tree: its state and its commands.
//!
//! Commands of this module are not recorded. [`crate::Session`] records how to undo them.

use crate::files::{Kernel, Linux};
use crate::{Counter, CpuSet, Discovery, Error, GroupPath, Info, Result, Rounded, Schemata, discover, files, group, monitor};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{Uid, gettid};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Limit for waiting for another program's lock, and for counters that are still draining.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Errors that may come from resctrl itself, which then writes a message to `last_cmd_status`. After other errors (missing file, read-only)
/// that file describes an earlier command.
const WITH_STATUS: [Errno; 7] = [Errno::EINVAL, Errno::ENOSPC, Errno::EBUSY, Errno::ESRCH, Errno::EPERM, Errno::ERANGE, Errno::EOVERFLOW];

/// A mounted tree.
pub struct Tree {
    root: PathBuf,
    kernel: Box<dyn Kernel>,
}

/// The lock that all programs changing a tree respect. Dropping it releases the lock.
pub(crate) type TreeLock = Flock<File>;

impl Tree {
    /// Opens the tree mounted at `root`.
    ///
    /// # Errors
    /// `Absent` or `NotMounted`; errors of [`discover`].
    pub fn open(root: &Path) -> Result<Self> {
        Self::with_kernel(root, Box::new(Linux))
    }

    pub(crate) fn with_kernel(root: &Path, kernel: Box<dyn Kernel>) -> Result<Self> {
        match discover(root)? {
            Discovery::NoMountPoint => Err(Error::Absent(root.into())),
            Discovery::NotMounted => Err(Error::NotMounted(root.into())),
            Discovery::Mounted(_) => Ok(Self { root: root.into(), kernel }),
        }
    }

    /// Root of the tree.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Reads the resources that can be partitioned.
    ///
    /// # Errors
    /// See [`Info::read`].
    pub fn info(&self) -> Result<Info> {
        Info::read(&self.root.join("info"))
    }

    /// Whether the group exists.
    ///
    /// # Errors
    /// An error if the permission to find out is missing.
    pub fn has(&self, group: &GroupPath) -> Result<bool> {
        files::exists(&self.file(group, "tasks"))
    }

    /// Paths of all groups: each control group, followed by its monitor groups.
    ///
    /// # Errors
    /// An error if a directory cannot be read.
    pub fn groups(&self) -> Result<Vec<GroupPath>> {
        let mut paths = Vec::new();
        for group in group::read_all(&self.root)? {
            let parent = GroupPath::try_from(group.name).map_err(|cause| Error::refused("list groups", cause))?;
            let monitors = group.mon_groups.into_iter().filter_map(|monitor| parent.monitor(&monitor.name).ok());
            paths.extend([parent.clone()].into_iter().chain(monitors));
        }
        Ok(paths)
    }

    /// Limits of a group.
    ///
    /// # Errors
    /// An error if the file cannot be read or parsed.
    pub fn schemata(&self, group: &GroupPath) -> Result<Schemata> {
        Schemata::read(&self.file(group, "schemata"))
    }

    /// CPUs of a group.
    ///
    /// # Errors
    /// An error if the file cannot be read or parsed.
    pub fn cpus(&self, group: &GroupPath) -> Result<CpuSet> {
        let path = self.file(group, "cpus_list");
        files::read(&path)?.parse().map_err(|cause| Error::Format { path, cause })
    }

    /// IDs of the threads in a group, including threads in its monitor groups.
    ///
    /// # Errors
    /// An error if the file cannot be read or parsed.
    pub fn tasks(&self, group: &GroupPath) -> Result<Vec<i32>> {
        let path = self.file(group, "tasks");
        let tids: std::result::Result<_, std::num::ParseIntError> = files::read(&path)?.lines().map(str::parse).collect();
        tids.map_err(|e| Error::Format { path, cause: e.to_string() })
    }

    /// Counters of a group.
    ///
    /// # Errors
    /// An error if a listed file cannot be read.
    pub fn counters(&self, group: &GroupPath) -> Result<Vec<Counter>> {
        monitor::read(&group.below(&self.root))
    }

    /// Moves threads into a group. Returns the number of moved threads. Threads that have ended are skipped. The owner of the group's
    /// `tasks` file may move their own threads; other threads need root.
    ///
    /// # Errors
    /// An error if the kernel rejects a thread; the threads before it have been moved.
    pub fn add_tasks(&self, group: &GroupPath, tids: &[i32]) -> Result<usize> {
        let mut added = 0;
        for tid in tids {
            // Threads are written one at a time: if a list failed halfway, the number of moved threads would be unknown.
            match self.write(group, "tasks", &format!("{tid}\n")) {
                Ok(()) => added += 1,
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(Errno::ESRCH as i32) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(added)
    }

    /// Moves the calling thread into a group. Threads that it starts later inherit the group.
    ///
    /// # Errors
    /// An error if the kernel rejects the thread.
    pub fn join(&self, group: &GroupPath) -> Result<()> {
        self.add_tasks(group, &[gettid().as_raw()]).map(drop)
    }

    /// Waits for the lock of the tree. Every program that changes the tree holds the lock while it reads and then writes.
    pub(crate) fn lock(&self) -> Result<TreeLock> {
        let mut file = File::open(&self.root).map_err(|e| Error::io("open", &self.root, e))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    return Err(Error::Locked { path: self.root.clone(), holder: "another program is changing partitions".into() });
                }
                Err((again, Errno::EWOULDBLOCK | Errno::EINTR)) => file = again,
                Err((_, errno)) => return Err(Error::io("lock", &self.root, errno)),
            }
            sleep(PAUSE);
        }
    }

    /// Creates a group. The hardware ID of a removed group stays in use until its cache lines are evicted, so this function retries for up
    /// to [`PATIENCE`].
    pub(crate) fn create(&self, group: &GroupPath) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let dir = group.below(&self.root);
        loop {
            match self.kernel.create(&dir) {
                Err(e) if e.raw_os_error() == Some(Errno::EBUSY as i32) && Instant::now() < deadline => sleep(PAUSE),
                outcome => return outcome.map_err(|source| self.failed("create", &dir, source)),
            }
        }
    }

    /// Removes a group. Its threads and CPUs return to the default group, or from a monitor group to its control group.
    pub(crate) fn remove(&self, group: &GroupPath) -> Result<()> {
        let dir = group.below(&self.root);
        self.kernel.remove(&dir).map_err(|source| Error::io("remove", &dir, source))
    }

    /// Sets the CPUs of a group to exactly `cpus`. Other groups lose these CPUs, and CPUs that the group loses return to the default group.
    pub(crate) fn set_cpus(&self, group: &GroupPath, cpus: &CpuSet) -> Result<()> {
        self.write(group, "cpus_list", &format!("{cpus}\n"))
    }

    /// Checks and sets the limits `wanted`. Returns the limits that the kernel rounded.
    pub(crate) fn set_schemata(&self, group: &GroupPath, wanted: &Schemata) -> Result<Vec<Rounded>> {
        let command = self.schemata(group)?.command(wanted, &self.info()?);
        let command = command.map_err(|cause| Error::refused(format!("schemata of {group}"), cause))?;
        self.write(group, "schemata", &command)?;
        Ok(self.schemata(group)?.rounded(wanted))
    }

    /// Lets `user` move their own threads into a group.
    pub(crate) fn give_tasks_to(&self, group: &GroupPath, user: Uid) -> Result<()> {
        let path = self.file(group, "tasks");
        std::os::unix::fs::chown(&path, Some(user.as_raw()), None).map_err(|e| Error::io("change owner of", &path, e))
    }

    fn file(&self, group: &GroupPath, name: &str) -> PathBuf {
        group.below(&self.root).join(name)
    }

    fn write(&self, group: &GroupPath, file: &str, command: &str) -> Result<()> {
        let path = self.file(group, file);
        self.kernel.write(&path, command).map_err(|source| self.failed("write", &path, source))
    }

    fn failed(&self, operation: &'static str, path: &Path, source: io::Error) -> Error {
        let has_status = source.raw_os_error().is_some_and(|code| WITH_STATUS.contains(&Errno::from_raw(code)));
        let status = if has_status { self.last_cmd_status() } else { None };
        Error::Io { operation, path: path.into(), source, status }
    }

    /// The message of resctrl about the last command, if that failed. Up to kernel 6.12, messages of earlier commands may come first; a
    /// line that only names the thread comes last.
    fn last_cmd_status(&self) -> Option<String> {
        let text = files::read(&self.root.join("info/last_cmd_status")).ok()?;
        let last = text.lines().rev().find(|line| !line.starts_with("Error while processing task"))?.trim();
        (last != "ok" && !last.is_empty()).then(|| last.to_owned())
    }
}
