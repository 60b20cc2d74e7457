//! The journal records each change of a session on disk before the change is made, so that the next start can undo the changes of a killed
//! session.
//!
//! The file has one JSON value per line: a header, then one [`Entry`] per change. An incomplete last line was being written when the
//! process died, and its change had not begun. An empty file means that there is nothing to undo. The file is also a lock: only the process
//! that holds it changes partitions.

use crate::{CpuSet, Error, GroupPath, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Path of the journal of the privileged program. The file disappears in a reboot, like the partitions.
pub const DEFAULT_JOURNAL: &str = "/run/superoffload-resctrl/journal";

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Origin of the entries that follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The kernel's boot ID. Entries of an earlier boot are obsolete, because a reboot removes all partitions.
    pub boot_id: String,
    /// Root of the changed tree.
    pub root: PathBuf,
    /// ID of the process that made the changes.
    pub pid: u32,
}

/// A change that is about to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Entry {
    /// The tree is mounted at this time, in nanoseconds since 1970.
    Mount { at_ns: i128 },
    /// A group is created.
    Group(GroupPath),
    /// CPUs are assigned to the group `to`. `taken` has the CPUs that other control groups lose, and all CPUs of the monitor groups of
    /// those control groups.
    Cpus { to: GroupPath, taken: Vec<Taken> },
    /// Threads are moved to the group `to`.
    Tasks { to: GroupPath, moved: Vec<Moved> },
    /// The session's changes stay until a restore is requested.
    Kept,
}

/// CPUs that belonged to a group before the change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Taken {
    pub group: GroupPath,
    pub cpus: CpuSet,
}

/// A thread and its former group. Thread IDs are reused; together with the start time, an ID is unique.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub tid: i32,
    pub started: u64,
    pub from: GroupPath,
}

/// The locked journal file.
#[derive(Debug)]
pub(crate) struct Journal {
    file: Flock<File>,
    path: PathBuf,
    record: Option<Record>,
}

/// The content of a journal that is not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub header: Header,
    pub entries: Vec<Entry>,
}

impl Journal {
    /// Opens and locks the journal at `path`. Creates the file and its folder if they do not exist. Discards entries of an earlier boot.
    pub fn open(path: &Path) -> Result<Self> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(|e| Error::io("create", dir, e))?;
        // Root obeys the journal's lines, so a symbolic link of another user must not be followed.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o644).custom_flags(OFlag::O_NOFOLLOW.bits());
        let file = options.open(path).map_err(|e| Error::io("open", path, e))?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => return Err(Error::Locked { path: path.into(), holder: holder(path) }),
            Err((_, errno)) => return Err(Error::io("lock", path, errno)),
        };
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|e| Error::io("read", path, e))?;
        let record = parse(&text).map_err(|cause| Error::Format { path: path.into(), cause })?;
        let mut journal = Self { file, path: path.into(), record };
        match &journal.record {
            Some(record) if record.header.boot_id == boot_id()? => journal.cut(text.rfind('\n').map_or(0, |end| end + 1))?,
            _ => journal.clear()?,
        }
        Ok(journal)
    }

    /// The changes to undo, oldest first.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Appends `entry`, which is about to be applied to the tree at `root`, and waits until the entry is on disk.
    pub fn append(&mut self, root: &Path, entry: Entry) -> Result<()> {
        let mut text = String::new();
        if self.record.is_none() {
            let header = Header { boot_id: boot_id()?, root: root.into(), pid: std::process::id() };
            text += &line(&header);
            self.record = Some(Record { header, entries: Vec::new() });
        }
        text += &line(&entry);
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| Error::io("write", &self.path, e))?;
        self.record.as_mut().expect("set above").entries.push(entry);
        Ok(())
    }

    /// Empties the journal after everything has been undone.
    pub fn clear(&mut self) -> Result<()> {
        self.record = None;
        self.cut(0)
    }

    fn cut(&mut self, bytes: usize) -> Result<()> {
        let end = bytes as u64;
        let cut = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end))).and_then(|_| self.file.sync_all());
        cut.map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Reads a journal without taking its lock; `None` if there is nothing to undo.
pub(crate) fn peek(path: &Path) -> Result<Option<Record>> {
    if !crate::files::exists(path)? {
        return Ok(None);
    }
    let record = parse(&crate::files::read(path)?).map_err(|cause| Error::Format { path: path.into(), cause })?;
    let boot_id = boot_id()?;
    Ok(record.filter(|record| record.header.boot_id == boot_id))
}

fn holder(path: &Path) -> String {
    let pid = peek(path).ok().flatten().map(|record| record.header.pid);
    pid.map_or("another process is starting".into(), |pid| format!("process {pid} keeps partitions"))
}

fn boot_id() -> Result<String> {
    fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned()).map_err(|e| Error::io("read", BOOT_ID, e))
}

fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("names, numbers and lists have a JSON form") + "\n"
}

/// Parses the complete lines of `text`.
fn parse(text: &str) -> std::result::Result<Option<Record>, String> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut lines = whole.lines().enumerate();
    let Some((_, first)) = lines.next() else { return Ok(None) };
    let header = serde_json::from_str(first).map_err(|e| format!("line 1: {e}"))?;
    let entry = |(index, line): (usize, &str)| serde_json::from_str(line).map_err(|e| format!("line {}: {e}", index + 1));
    Ok(Some(Record { header, entries: lines.map(entry).collect::<std::result::Result<_, _>>()? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn adam() -> GroupPath {
        GroupPath::control("superoffload-adam").unwrap()
    }

    fn entries() -> Vec<Entry> {
        let taken = vec![Taken { group: GroupPath::root(), cpus: "7-71".parse().unwrap() }];
        let moved = vec![Moved { tid: 41, started: 9, from: GroupPath::root().monitor("m0").unwrap() }];
        let (cpus, tasks) = (Entry::Cpus { to: adam(), taken }, Entry::Tasks { to: adam(), moved });
        vec![Entry::Mount { at_ns: 1 }, Entry::Group(adam()), cpus, tasks, Entry::Kept]
    }

    fn written(path: &Path) -> String {
        let mut journal = Journal::open(path).unwrap();
        entries().into_iter().for_each(|entry| journal.append(Path::new("/r"), entry).unwrap());
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn outlives_its_writer_and_ends_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/journal");
        written(&path);
        let mut journal = Journal::open(&path).unwrap();
        let record = journal.record().unwrap();
        assert_eq!((record.entries.clone(), record.header.root.to_str()), (entries(), Some("/r")));
        journal.clear().unwrap();
        drop(journal);
        assert_eq!(Journal::open(&path).unwrap().record(), None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn one_holder_at_a_time_and_the_second_gets_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut first = Journal::open(&path).unwrap();
        assert!(Journal::open(&path).unwrap_err().to_string().ends_with("journal: another process is starting"));
        first.append(Path::new("/r"), Entry::Kept).unwrap();
        let error = Journal::open(&path).unwrap_err();
        assert!(error.to_string().ends_with(&format!("process {} keeps partitions", std::process::id())), "{error}");
        assert_eq!(error.condition(), crate::Condition::Locked);
    }

    #[test]
    fn another_boots_entries_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let text = written(&path).replace(&boot_id().unwrap(), "of-yesterday");
        fs::write(&path, &text).unwrap();
        assert_eq!(peek(&path).unwrap(), None);
        assert_eq!(Journal::open(&path).unwrap().record(), None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    /// The last write is cut at every position: the lines before it are valid, and the next write starts a new line.
    #[test]
    fn a_torn_line_is_no_entry() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let text = written(&path);
        for end in (0..=text.len()).step_by(11) {
            fs::write(&path, &text[..end]).unwrap();
            let lines = text[..end].matches('\n').count();
            let mut journal = Journal::open(&path).unwrap();
            assert_eq!(journal.record().map_or(0, |record| record.entries.len()), lines.saturating_sub(1));
            journal.append(Path::new("/r"), Entry::Kept).unwrap();
            drop(journal);
            assert_eq!(peek(&path).unwrap().unwrap().entries.len(), lines.saturating_sub(1) + 1);
        }
    }

    #[test]
    fn damage_is_an_error_that_names_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let text = written(&path).replacen("superoffload-adam", "../../etc", 1);
        fs::write(&path, text).unwrap();
        let error = Journal::open(&path).unwrap_err().to_string();
        assert!(error.contains("journal: line 3: \"../../etc\" is not the path of a group"), "{error}");
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(Journal::open(&path).unwrap_err().to_string().contains("open "));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(\\{\"(boot_id|group|kept|cpus)\":?[\"a-z{}:,]{0,20}\n?|[ -~]{0,20}\n){0,4}") {
            let _ = parse(&text);
        }
    }
}
