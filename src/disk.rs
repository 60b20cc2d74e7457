//! File operations with errors that name the operation and the path.
//!
//! Everything that changes the disk goes through `attempt`, where tests make the n-th operation fail.

mod dir;
mod direct_read;
mod lock;
mod moves;
mod nearest;
mod out_file;
mod owned;
mod placed_file;
mod records;
mod result_file;

pub(crate) use dir::{Dir, FileKind, TmpDir};
pub(crate) use direct_read::AlignedBytes;
pub(crate) use lock::{Lock, try_lock};
pub(crate) use nearest::{did_you_mean, named_by};
pub(crate) use out_file::{FileId, OutFile};
pub(crate) use owned::{OwnMark, OwnedName, canonical};
pub(crate) use placed_file::{DIRECT_ALIGN, PlacedFile};
pub(crate) use records::{RECORDS, RECORDS_MANIFEST, Records, RunRecord};
pub(crate) use result_file::{ResultFile, ResultKind};

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// This program's directory in the user's cache; `None` if the environment names no home.
pub(crate) fn user_cache() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("superoffload"))
}

/// Replaces the file at `path` atomically by one with `bytes`: written to a temporary file, synced and renamed.
#[cfg(feature = "hub")]
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let not_a_file = || Error::io("write", path, io::ErrorKind::InvalidFilename.into());
    let (dir, name) = Dir::of(path)?.ok_or_else(not_a_file)?;
    dir.replace_file(name, bytes)
}

/// Metadata that shows, without reading, whether a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Stamp {
    pub(crate) bytes: u64,
    /// Time of the last modification, in seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
    /// Inode number in the file system.
    pub(crate) inode: u64,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()), inode: metadata.ino() }
    }
}

/// A regular file open for reading at offsets. Opening anything else fails at once: a pipe would block, and a device may have no end.
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
        // The name may have been replaced since the check. The open does not block on a pipe, and the opened file is checked again.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        regular(&metadata)?;
        Ok(Self { file, path: path.to_path_buf(), bytes: metadata.len() })
    }

    /// Opens the regular file `name` in `dir` without following links.
    pub(crate) fn open_in(dir: &Dir, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let file = dir.open_file(name)?.ok_or_else(|| Error::io("read", &path, io::ErrorKind::NotFound.into()))?;
        let bytes = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        Ok(Self { file, path, bytes })
    }

    /// Size of the file when it was opened.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata by which a later change is detected.
    pub(crate) fn stamp(&self) -> Result<Stamp> {
        self.file.metadata().map(|metadata| Stamp::of(&metadata)).map_err(|e| Error::io("read", &self.path, e))
    }

    /// Duplicates the descriptor for another reader. Both share one offset.
    #[cfg(feature = "parquet")]
    pub(crate) fn clone_file(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| Error::io("read", &self.path, e))
    }

    /// Reads the whole file, which may have at most `bytes_max` bytes.
    pub(crate) fn read_all(&self, bytes_max: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // The limit holds even if the file grows during the read.
        (&self.file).take(bytes_max + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", &self.path, e))?;
        if bytes.len() as u64 > bytes_max {
            return Err(Error::format(&self.path, format_args!("larger than the {bytes_max} bytes it may have")));
        }
        Ok(bytes)
    }

    /// Fills `out` from byte `offset`.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("read", &self.path, e))
    }
}

/// Reads a whole regular file of at most `bytes_max`.
pub(crate) fn read_small(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    InFile::open(path)?.read_all(bytes_max)
}

/// Reads a whole regular file of at most `bytes_max` bytes of UTF-8.
pub(crate) fn read_small_text(path: &Path, bytes_max: u64) -> Result<String> {
    String::from_utf8(read_small(path, bytes_max)?)
        .map_err(|e| Error::format(path, format_args!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// Reads a file like [`read_small`]; `None` if the name does not exist. A dangling link is an error.
pub(crate) fn read_if_present(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => read_small(path, bytes_max).map(Some),
    }
}

/// `run` for another thread. In tests its operations count as operations of this thread.
pub(crate) fn continued<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
    #[cfg(test)]
    let plan = faults::plan();
    move || {
        #[cfg(test)]
        faults::adopt(plan);
        run()
    }
}

/// Whether `name`, joined to a directory, is a direct entry of it.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn irregular_files_are_refused_at_once() {
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
    //! Makes the n-th operation of this thread fail, and records all operations. Threads that continue its work share its plan.

    use std::cell::RefCell;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::{Arc, Mutex, PoisonError};

    /// Effect of a failing operation.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) enum Mode {
        /// The operation fails. The program continues and cleans up.
        Error,
        /// The program died: all later operations fail, too.
        Crash,
    }

    #[derive(Default)]
    pub(crate) struct FaultPlan {
        fail: Option<(usize, Mode)>,
        seen: Vec<(&'static str, PathBuf)>,
        /// Directories that cannot be renamed.
        lower: Vec<PathBuf>,
        /// An action of another process before an operation.
        meanwhile: Option<(usize, Box<dyn FnOnce() + Send>)>,
    }

    thread_local!(static PLAN: RefCell<Arc<Mutex<FaultPlan>>> = RefCell::default());

    fn replace(plan: FaultPlan) {
        PLAN.replace(Arc::new(Mutex::new(plan)));
    }

    /// The plan of this thread.
    pub(super) fn plan() -> Arc<Mutex<FaultPlan>> {
        PLAN.with_borrow(Arc::clone)
    }

    /// Makes `plan` that of this thread.
    pub(super) fn adopt(plan: Arc<Mutex<FaultPlan>>) {
        PLAN.replace(plan);
    }

    /// Starts to record operations. The operation with index `at` of `fail` fails.
    pub(crate) fn arm(fail: Option<(usize, Mode)>) {
        replace(FaultPlan { fail, ..FaultPlan::default() });
    }

    /// Starts to record without failures on an overlay file system. Renaming one of the lower-layer directories `lower` gives EXDEV.
    pub(crate) fn arm_overlay(lower: Vec<PathBuf>) {
        replace(FaultPlan { lower, ..FaultPlan::default() });
    }

    /// Starts to record without failures. Before operation `at`, another process performs `act`.
    pub(crate) fn arm_meanwhile(at: usize, act: impl FnOnce() + Send + 'static) {
        replace(FaultPlan { meanwhile: Some((at, Box::new(act))), ..FaultPlan::default() });
    }

    /// Stops recording. Returns the operations since [`arm`].
    pub(crate) fn disarm() -> Vec<(&'static str, PathBuf)> {
        std::mem::take(&mut PLAN.take().lock().unwrap_or_else(PoisonError::into_inner).seen)
    }

    /// Called before every operation.
    pub(super) fn next(operation: &'static str, path: &Path) -> io::Result<()> {
        let plan = plan();
        let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
        let index = plan.seen.len();
        plan.seen.push((operation, path.to_path_buf()));
        if let Some((_, act)) = plan.meanwhile.take_if(|(at, _)| *at == index) {
            act();
        }
        if operation == "rename" && plan.lower.iter().any(|lower| lower == path) && path.is_dir() {
            return Err(io::Error::from_raw_os_error(libc::EXDEV));
        }
        let fails = plan.fail.is_some_and(|(at, mode)| index == at || (mode == Mode::Crash && index > at));
        // ENOSPC: the disk is full.
        if fails { Err(io::Error::from_raw_os_error(28)) } else { Ok(()) }
    }
}
