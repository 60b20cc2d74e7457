//! What changes the disk: every operation by name, and a new file.

use crate::error::{Error, Result};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Runs one operation and names it in its error.
pub(super) fn attempt<T>(operation: &'static str, path: &Path, act: impl FnOnce() -> io::Result<T>) -> Result<T> {
    #[cfg(test)]
    super::faults::next(operation, path).map_err(|e| Error::io(operation, path, e))?;
    act().map_err(|e| Error::io(operation, path, e))
}

pub(crate) struct OutFile {
    file: File,
    path: PathBuf,
}

impl OutFile {
    /// `file`, which was created at `path`.
    pub(super) fn new(file: File, path: PathBuf) -> Self {
        Self { file, path }
    }

    /// Creates `path`, which must not exist.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = attempt("create", path, || File::create_new(path))?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        attempt("write", &self.path, || self.file.write_all(bytes))
    }

    /// The file itself, for a writer of its own.
    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// Makes the content durable.
    pub(crate) fn sync(&self) -> Result<()> {
        attempt("fsync", &self.path, || self.file.sync_all())
    }
}
