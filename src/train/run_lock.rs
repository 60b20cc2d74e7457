//! The owner of an output directory is the process that holds the lock on a file in it, for as long as it lives.

use crate::disk::{self, Dir, Lock, OwnMark, OwnedName};
use crate::error::{Error, Result, printable};
use crate::hardware::topology::host_name;
use crate::units::date_and_time;
use nix::fcntl::OFlag;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The lock file in the output directory names the holder. The file stays when the run ends; the lock goes with the process.
pub(super) const LOCK: OwnedName = OwnedName { pattern: ".lock", kind: "lock", mark: OwnMark::Head("pid ") };
/// Bytes read from a file that should hold one line.
const HOLDER_BYTES_MAX: u64 = 300;

/// The lock, or that there can be none.
#[derive(Debug)]
pub(super) struct RunLock {
    file: File,
    supported: bool,
}

impl RunLock {
    /// Takes the lock of `dir` and writes the holder into it.
    ///
    /// # Errors
    /// `Resource` that names the holder; `Io` and `Format` when the lock file cannot be opened or written.
    pub(super) fn take(dir: &Dir) -> Result<Self> {
        Self::take_by(dir, disk::try_lock)
    }

    fn take_by(dir: &Dir, try_lock: impl Fn(&File) -> io::Result<Lock>) -> Result<Self> {
        loop {
            let file = open(dir)?;
            let lock = try_lock(&file).map_err(|e| Error::io("lock", dir.join(LOCK.pattern), e))?;
            if lock == Lock::Taken {
                return Err(refusal(dir, file));
            }
            if !LOCK.is_own(dir, LOCK.pattern)? && dir.holds(LOCK.pattern, &file)? {
                let cause = "not a lock of this program; move it away, or name another --output-dir";
                return Err(Error::format(dir.join(LOCK.pattern), cause));
            }
            if has_another_name(dir, &file)? {
                // Its content is somebody else's, too, a backup's perhaps: from now on it lacks this name.
                dir.remove(LOCK.pattern)?;
                continue;
            }
            // It may have been removed after it was opened: then it locks nothing.
            if dir.holds(LOCK.pattern, &file)? {
                let text = file.set_len(0).and_then(|()| file.write_all_at(this_process().as_bytes(), 0));
                text.map_err(|e| Error::io("write", dir.join(LOCK.pattern), e))?;
                return Ok(Self { file, supported: lock == Lock::Held });
            }
        }
    }

    /// The refusal that names the run that holds the lock of `dir`, if one does. Creates no file, and holds no lock afterwards.
    pub(super) fn refusal_of_holder(dir: &Dir) -> Option<Error> {
        let file = dir.open_file(LOCK.pattern).ok().flatten()?;
        matches!(disk::try_lock(&file), Ok(Lock::Taken)).then(|| refusal(dir, file))
    }

    /// Whether it keeps others out: not on a file system that knows no locks.
    pub(super) fn is_supported(&self) -> bool {
        self.supported
    }

    /// Whether it still is the lock of `dir`, and not of a file that was removed.
    ///
    /// # Errors
    /// `Io` when the directory cannot be read.
    pub(super) fn is_of(&self, dir: &Dir) -> Result<bool> {
        dir.holds(LOCK.pattern, &self.file)
    }
}

fn open(dir: &Dir) -> Result<File> {
    let path = dir.join(LOCK.pattern);
    let file = dir.open_at(LOCK.pattern, OFlag::O_RDWR | OFlag::O_CREAT).map_err(|e| Error::io("create", &path, e))?;
    if !file.metadata().map_err(|e| Error::io("read", &path, e))?.is_file() {
        return Err(Error::format(path, "not a regular file"));
    }
    Ok(file)
}

/// Whether the lock's file is reached by a hard link elsewhere.
fn has_another_name(dir: &Dir, file: &File) -> Result<bool> {
    let links = file.metadata().map_err(|e| Error::io("read", dir.join(LOCK.pattern), e))?.nlink();
    Ok(links > 1 && dir.holds(LOCK.pattern, file)?)
}

fn refusal(dir: &Dir, file: File) -> Error {
    // The holder writes its process id right after taking the lock; until then the line is that of the previous run.
    sleep(Duration::from_millis(50));
    let mut holder = vec![];
    let _ = file.take(HOLDER_BYTES_MAX).read_to_end(&mut holder);
    let holder = printable(String::from_utf8_lossy(&holder).trim());
    let process = if holder.is_empty() { "its process id is unknown" } else { &holder };
    let cause = format_args!("another run is using it: {process}; end that one or wait for it, or name another --output-dir");
    Error::resource(format_args!("use {}", printable(dir.path().display())), cause)
}

/// `pid 4711 on host node7, started 2026-11-22 18:03:59 UTC`.
fn this_process() -> String {
    let host = host_name().unwrap_or_else(|| "(unknown)".into());
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!("pid {} on host {host}, started {}\n", std::process::id(), date_and_time(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::fs;

    fn dir() -> (tempfile::TempDir, Dir) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        (tmp, dir)
    }

    #[test]
    fn the_second_holder_gets_the_name_of_the_first() {
        let (tmp, dir) = dir();
        fs::write(tmp.path().join(LOCK.pattern), "pid 1 and a much longer line of an earlier run".repeat(9)).unwrap();
        let first = RunLock::take(&dir).unwrap();
        let refused = RunLock::take(&dir).unwrap_err();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let words =
            [format!("pid {} on host {}, started 20", std::process::id(), host.trim()), " UTC; end that".into(), "--output-dir".into()];
        assert!(words.iter().all(|word| refused.to_string().contains(word)) && refused.exit_code() == 1, "{refused}");
        assert_eq!(RunLock::refusal_of_holder(&dir).unwrap().to_string(), refused.to_string());
        drop(first);
        assert!(RunLock::refusal_of_holder(&dir).is_none());
        assert!(RunLock::take(&dir).unwrap().is_supported());
    }

    #[test]
    fn a_file_that_was_removed_is_no_lock() {
        let (tmp, dir) = dir();
        let first = RunLock::take(&dir).unwrap();
        assert!(first.is_of(&dir).unwrap());
        fs::remove_file(tmp.path().join(LOCK.pattern)).unwrap();
        assert!(!first.is_of(&dir).unwrap());
        // Removed between the opening and the locking: the lock that counts is that of the new file.
        let is_first = Cell::new(true);
        let race = |file: &File| {
            if is_first.replace(false) {
                fs::remove_file(tmp.path().join(LOCK.pattern))?;
            }
            disk::try_lock(file)
        };
        assert!(RunLock::take_by(&dir, race).unwrap().is_of(&dir).unwrap());
    }

    #[test]
    fn without_locks_a_run_continues_and_irregular_files_are_refused() {
        let (tmp, dir) = dir();
        assert!(!RunLock::take_by(&dir, |_| Ok(Lock::Unsupported)).unwrap().is_supported());
        fs::remove_file(tmp.path().join(LOCK.pattern)).unwrap();
        nix::unistd::mkfifo(&tmp.path().join(LOCK.pattern), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(RunLock::take(&dir).unwrap_err().to_string().ends_with(".lock: not a regular file"));
        fs::remove_file(tmp.path().join(LOCK.pattern)).unwrap();
        fs::write(tmp.path().join("victim"), "mine").unwrap();
        std::os::unix::fs::symlink("victim", tmp.path().join(LOCK.pattern)).unwrap();
        assert!(RunLock::take(&dir).unwrap_err().to_string().contains(".lock: "));
        assert_eq!(fs::read_to_string(tmp.path().join("victim")).unwrap(), "mine");
    }

    #[test]
    fn a_hard_link_to_a_lock_keeps_its_content_and_locks_nothing() {
        let (tmp, dir) = dir();
        let [lock, backup] = [LOCK.pattern, "backup"].map(|name| tmp.path().join(name));
        fs::write(&backup, "pid 7 of an earlier run").unwrap();
        fs::hard_link(&backup, &lock).unwrap();
        let held = RunLock::take(&dir).unwrap();
        assert_eq!(fs::read_to_string(&backup).unwrap(), "pid 7 of an earlier run");
        assert!(held.is_of(&dir).unwrap() && fs::read_to_string(&lock).unwrap().starts_with("pid ") && RunLock::take(&dir).is_err());
        fs::hard_link(&lock, tmp.path().join("second")).unwrap();
        assert!(RunLock::take(&dir).is_err(), "it is held, however many names it has");
    }

    #[test]
    fn files_that_are_not_locks_are_not_written() {
        let (tmp, dir) = dir();
        fs::write(tmp.path().join(LOCK.pattern), "mine").unwrap();
        assert!(RunLock::take(&dir).unwrap_err().to_string().contains(".lock: not a lock of this program"));
        assert_eq!(fs::read_to_string(tmp.path().join(LOCK.pattern)).unwrap(), "mine");
    }

    #[test]
    fn a_foreign_line_cannot_colour_the_refusal() {
        let (tmp, dir) = dir();
        let _first = RunLock::take(&dir).unwrap();
        fs::write(tmp.path().join(LOCK.pattern), b"\x1b[31mEVIL\nerror: second \xff").unwrap();
        let refused = RunLock::take(&dir).unwrap_err().to_string();
        assert!(refused.contains("\\u{1b}[31mEVIL\\nerror: second") && !refused.contains(['\n', '\x1b']), "{refused}");
    }
}
