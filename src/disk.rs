//! File operations with errors that name operation and path.
//!
//! Everything that changes the disk goes through `attempt`, which is where the tests make the n-th operation fail.

mod dir;
mod lock;
mod out_file;
mod result_file;

pub(crate) use dir::{Dir, FileKind, TmpDir};
pub(crate) use lock::{Lock, try_lock};
pub(crate) use out_file::OutFile;
pub(crate) use result_file::{ResultFile, ResultKind};

use crate::error::{Error, Result};
use out_file::attempt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Removes a directory and everything in it.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    attempt("remove", path, || fs::remove_dir_all(path))
}

/// This program's directory in the user's cache; `None` where the environment names no home.
pub(crate) fn user_cache() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("superoffload"))
}

/// Creates a file, writes `bytes` and syncs it.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = OutFile::create(path)?;
    file.write(bytes)?;
    file.sync()
}

/// Puts a file with `bytes` in the place of `path`, whole or not at all: written beside as `<path>.tmp`, synced and renamed. What a
/// killed process left under that name is removed first.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut tmp = path.as_os_str().to_owned();
    tmp.push(".tmp");
    let tmp = PathBuf::from(tmp);
    if tmp.symlink_metadata().is_ok() {
        attempt("remove", &tmp, || fs::remove_file(&tmp))?;
    }
    write_file(&tmp, bytes)?;
    attempt("rename", &tmp, || fs::rename(&tmp, path))
}

/// Tells without reading a file whether it is the one that it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Stamp {
    pub(crate) bytes: u64,
    /// When it was last written, in seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
    /// Its number in its file system.
    pub(crate) inode: u64,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()), inode: metadata.ino() }
    }
}

/// A regular file open for reading at offsets. Opening anything else is an error at once: a pipe would block, a device may
/// have no end.
pub(crate) struct InFile {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl InFile {
    /// Opens `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let read = |e| Error::io("read", path, e);
        let regular = |metadata: &fs::Metadata| metadata.is_file().then_some(()).ok_or_else(|| Error::format(path, "not a regular file"));
        regular(&fs::metadata(path).map_err(read)?)?;
        // Another file may have taken the name since: the open does not wait for a pipe, and what was opened is asked again.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        regular(&metadata)?;
        Ok(Self { file, path: path.to_path_buf(), bytes: metadata.len() })
    }

    /// Size when it was opened.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What tells whether it changes.
    pub(crate) fn stamp(&self) -> Result<Stamp> {
        self.file.metadata().map(|metadata| Stamp::of(&metadata)).map_err(|e| Error::io("read", &self.path, e))
    }

    /// The file once more, for a reader of its own; both move together.
    #[cfg(feature = "parquet")]
    pub(crate) fn clone_file(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| Error::io("read", &self.path, e))
    }

    /// Fills `out` from byte `offset`.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("read", &self.path, e))
    }
}

/// Reads a whole regular file of at most `bytes_max`.
pub(crate) fn read_small(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let file = InFile::open(path)?;
    let mut bytes = Vec::new();
    // The limit holds even if the file grows while it is read.
    (&file.file).take(bytes_max + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    if bytes.len() as u64 > bytes_max {
        return Err(Error::format(path, format_args!("larger than the {bytes_max} bytes it may have")));
    }
    Ok(bytes)
}

/// Reads a whole regular file of at most `bytes_max` bytes of UTF-8.
pub(crate) fn read_small_text(path: &Path, bytes_max: u64) -> Result<String> {
    String::from_utf8(read_small(path, bytes_max)?)
        .map_err(|e| Error::format(path, format_args!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// As [`read_small`], or `None` when the directory does not list the name; a link that leads nowhere is an error.
pub(crate) fn read_if_present(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => read_small(path, bytes_max).map(Some),
    }
}

/// Whether `name` stays inside the directory it is joined to, as a file directly in it.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
        std::os::unix::fs::symlink("loop", path("loop")).unwrap();
        for name in ["pipe", "zero", "."] {
            let message = read_small(&path(name), 10).unwrap_err().to_string();
            assert!(message.ends_with("not a regular file"), "{message}");
        }
        assert!(matches!(read_small(&path("loop"), 10), Err(Error::Io { .. })));
        fs::write(path("file"), "12345").unwrap();
        assert_eq!(read_small(&path("file"), 5).unwrap(), b"12345");
        assert!(read_small(&path("file"), 4).unwrap_err().to_string().ends_with("larger than the 4 bytes it may have"));
        assert_eq!(read_if_present(&path("none"), 4).unwrap(), None);
    }
}

#[cfg(test)]
pub(crate) mod faults {
    //! Makes the n-th operation of this thread fail, and records all of them.

    use std::cell::RefCell;
    use std::io;
    use std::path::{Path, PathBuf};

    /// What the failing operation leaves behind.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) enum Mode {
        /// The operation fails; the program goes on and cleans up.
        Error,
        /// The program died: nothing after it happens either.
        Crash,
    }

    #[derive(Default)]
    struct FaultPlan {
        fail: Option<(usize, Mode)>,
        seen: Vec<(&'static str, PathBuf)>,
    }

    thread_local!(static PLAN: RefCell<FaultPlan> = RefCell::default());

    /// From now on records operations; the one with index `at` fails.
    pub(crate) fn arm(fail: Option<(usize, Mode)>) {
        PLAN.replace(FaultPlan { fail, seen: Vec::new() });
    }

    /// Back to normal; returns the operations since [`arm`].
    pub(crate) fn disarm() -> Vec<(&'static str, PathBuf)> {
        PLAN.take().seen
    }

    /// Called before every operation.
    pub(super) fn next(operation: &'static str, path: &Path) -> io::Result<()> {
        PLAN.with_borrow_mut(|plan| {
            let index = plan.seen.len();
            plan.seen.push((operation, path.to_path_buf()));
            let fails = plan.fail.is_some_and(|(at, mode)| index == at || (mode == Mode::Crash && index > at));
            // ENOSPC: the disk is full.
            if fails { Err(io::Error::from_raw_os_error(28)) } else { Ok(()) }
        })
    }
}
