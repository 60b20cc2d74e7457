//! Operations that change the disk, each with its name for errors, and files that the program writes.

use crate::error::{Error, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Runs an operation. Its error has the operation's name and path.
pub(super) fn attempt<T>(operation: &'static str, path: &Path, act: impl FnOnce() -> io::Result<T>) -> Result<T> {
    #[cfg(test)]
    super::faults::next(operation, path).map_err(|e| Error::io(operation, path, e))?;
    act().map_err(|e| Error::io(operation, path, e))
}

/// Identity and size of a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(crate) bytes: u64,
}

pub(crate) struct OutFile {
    file: File,
    path: PathBuf,
    /// Bytes appended so far, and those of them that the disk has begun to write.
    appended: u64,
    begun: u64,
}

impl OutFile {
    /// Wraps `file`, which was created at `path`.
    pub(super) fn new(file: File, path: PathBuf) -> Self {
        Self { file, path, appended: 0, begun: 0 }
    }

    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        attempt("write", &self.path, || self.file.write_all(bytes))?;
        self.appended += bytes.len() as u64;
        Ok(())
    }

    /// Lets the disk begin to write what was appended since the last call, if that is at least `least` bytes.
    pub(crate) fn begin_writing_back(&mut self, least: u64) {
        let bytes = self.appended - self.begun;
        if bytes >= least {
            // Advice: a file system that does not take it writes at the next sync.
            let _ = posix_fadvise(&self.file, self.begun as i64, bytes as i64, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
            self.begun = self.appended;
        }
    }

    /// Identity and present size of the file.
    pub(crate) fn id(&self) -> Result<FileId> {
        let metadata = self.file.metadata().map_err(|e| Error::io("read", &self.path, e))?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino(), bytes: metadata.len() })
    }

    /// Returns the underlying file.
    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// Syncs the file's content to disk.
    pub(crate) fn sync(&self) -> Result<()> {
        attempt("fsync", &self.path, || self.file.sync_all())
    }
}
