//! A mounted tree: reading it, and the commands it takes.
//!
//! Commands here leave no trace; [`crate::Session`] is what writes down how to undo them.

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

/// How long to wait for another program's lock, and for counters that still drain.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Failures that may come from resctrl itself, which then says why in `last_cmd_status`. After the others (no such file, read-only) that
/// file still speaks of an earlier command.
const SPOKEN: [Errno; 7] = [Errno::EINVAL, Errno::ENOSPC, Errno::EBUSY, Errno::ESRCH, Errno::EPERM, Errno::ERANGE, Errno::EOVERFLOW];

/// A mounted tree.
pub struct Tree {
    root: PathBuf,
    kernel: Box<dyn Kernel>,
}

/// The lock of a tree that all its users respect, held until it is dropped.
pub(crate) type TreeLock = Flock<File>;

impl Tree {
    /// The tree mounted at `root`.
    ///
    /// # Errors
    /// `Absent` or `NotMounted`, or whatever [`discover`] cannot read.
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

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What can be partitioned.
    ///
    /// # Errors
    /// See [`Info::read`].
    pub fn info(&self) -> Result<Info> {
        Info::read(&self.root.join("info"))
    }

    /// Whether there is such a group.
    ///
    /// # Errors
    /// When one may not look.
    pub fn has(&self, group: &GroupPath) -> Result<bool> {
        files::exists(&self.file(group, "tasks"))
    }

    /// Every group: a control group, then its monitor groups.
    ///
    /// # Errors
    /// When a directory cannot be read.
    pub fn groups(&self) -> Result<Vec<GroupPath>> {
        let mut paths = Vec::new();
        for group in group::read_all(&self.root)? {
            let parent = GroupPath::try_from(group.name).map_err(|cause| Error::refused("list groups", cause))?;
            let monitors = group.mon_groups.into_iter().filter_map(|monitor| parent.monitor(&monitor.name).ok());
            paths.extend([parent.clone()].into_iter().chain(monitors));
        }
        Ok(paths)
    }

    /// What a group may use.
    ///
    /// # Errors
    /// When its file cannot be read or understood.
    pub fn schemata(&self, group: &GroupPath) -> Result<Schemata> {
        Schemata::read(&self.file(group, "schemata"))
    }

    /// CPUs of a group.
    ///
    /// # Errors
    /// When its file cannot be read or understood.
    pub fn cpus(&self, group: &GroupPath) -> Result<CpuSet> {
        let path = self.file(group, "cpus_list");
        files::read(&path)?.parse().map_err(|cause| Error::Format { path, cause })
    }

    /// Thread ids in a group; those of its monitor groups are among them.
    ///
    /// # Errors
    /// When its file cannot be read or understood.
    pub fn tasks(&self, group: &GroupPath) -> Result<Vec<i32>> {
        let path = self.file(group, "tasks");
        let tids: std::result::Result<_, std::num::ParseIntError> = files::read(&path)?.lines().map(str::parse).collect();
        tids.map_err(|e| Error::Format { path, cause: e.to_string() })
    }

    /// Counters of a group.
    ///
    /// # Errors
    /// When a file that was listed cannot be read.
    pub fn counters(&self, group: &GroupPath) -> Result<Vec<Counter>> {
        monitor::read(&group.below(&self.root))
    }

    /// Puts threads into a group; returns how many. Threads that have ended are passed over. The owner of the group's `tasks` file may
    /// do this with threads of their own, others need root.
    ///
    /// # Errors
    /// When the kernel refuses a thread; those before it have been moved.
    pub fn add_tasks(&self, group: &GroupPath, tids: &[i32]) -> Result<usize> {
        let mut added = 0;
        for tid in tids {
            // One at a time: of a list that fails in the middle nobody knows how far it went.
            match self.write(group, "tasks", &format!("{tid}\n")) {
                Ok(()) => added += 1,
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(Errno::ESRCH as i32) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(added)
    }

    /// Puts the calling thread into a group. Threads that it starts afterwards inherit the group.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn join(&self, group: &GroupPath) -> Result<()> {
        self.add_tasks(group, &[gettid().as_raw()]).map(drop)
    }

    /// Waits for the lock that every writer of this tree takes around what it reads and then writes.
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

    /// Makes a group. Counters of a removed one stay taken until its lines have left the cache, so this waits a little for them.
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

    /// Removes a group, whose threads and CPUs fall back to the default group, or of a monitor group to its control group.
    pub(crate) fn remove(&self, group: &GroupPath) -> Result<()> {
        let dir = group.below(&self.root);
        self.kernel.remove(&dir).map_err(|source| Error::io("remove", &dir, source))
    }

    /// Gives a group exactly `cpus`; other groups lose them, and what it had and keeps not goes to the default group.
    pub(crate) fn set_cpus(&self, group: &GroupPath, cpus: &CpuSet) -> Result<()> {
        self.write(group, "cpus_list", &format!("{cpus}\n"))
    }

    /// Allots `wanted` after checking it; returns what was rounded.
    pub(crate) fn set_schemata(&self, group: &GroupPath, wanted: &Schemata) -> Result<Vec<Rounded>> {
        let command = self.schemata(group)?.command(wanted, &self.info()?);
        let command = command.map_err(|cause| Error::refused(format!("schemata of {group}"), cause))?;
        self.write(group, "schemata", &command)?;
        Ok(self.schemata(group)?.rounded(wanted))
    }

    /// Lets `user` put their own threads into a group.
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
        let spoken = source.raw_os_error().is_some_and(|code| SPOKEN.contains(&Errno::from_raw(code)));
        let status = if spoken { self.last_cmd_status() } else { None };
        Error::Io { operation, path: path.into(), source, status }
    }

    /// What resctrl says about the last command, if that failed. In kernels to 6.12 lines of earlier commands may come first; a line
    /// that only says which task it was about comes last.
    fn last_cmd_status(&self) -> Option<String> {
        let text = files::read(&self.root.join("info/last_cmd_status")).ok()?;
        let last = text.lines().rev().find(|line| !line.starts_with("Error while processing task"))?.trim();
        (last != "ok" && !last.is_empty()).then(|| last.to_owned())
    }
}
