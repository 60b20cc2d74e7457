//! A file that a command produces. Its location is checked first; the content is written to a temporary file and renamed. Only files of the
//! same kind are replaced.

use super::owned::{OwnMark, OwnedName};
use super::{Dir, FileKind};
use crate::error::{Error, Result};
use nix::fcntl::OFlag;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A kind of result file.
#[derive(Debug)]
pub(crate) struct ResultKind {
    /// Name of the kind.
    pub(crate) name: &'static str,
    /// Text with which every file of the kind begins.
    pub(crate) head: &'static str,
    /// The flag that sets the path.
    pub(crate) flag: &'static str,
    /// The write operation's name in errors.
    pub(crate) operation: &'static str,
}

/// A checked location of a result file.
#[derive(Debug)]
pub(crate) struct ResultFile {
    dir: Dir,
    name: OsString,
    kind: &'static ResultKind,
}

impl ResultFile {
    /// Checks the location `path` without writing the result.
    ///
    /// # Errors
    /// `Usage` if a file of another kind exists there; `Io` if the location is not writable.
    pub(crate) fn open(path: &Path, kind: &'static ResultKind) -> Result<Self> {
        let place = Dir::of(path).map_err(|e| match e {
            Error::Io { source, .. } => Error::io(kind.operation, path, source),
            other => other,
        })?;
        let (dir, name) = place.ok_or_else(|| Error::usage(format_args!("{} {}: not a name for a file", kind.flag, path.display())))?;
        Self::in_dir(dir, name, kind)
    }

    /// Checks the location `name` in `dir`.
    pub(crate) fn in_dir(dir: Dir, name: OsString, kind: &'static ResultKind) -> Result<Self> {
        let result = Self { dir, name, kind };
        if !result.is_device()? {
            result.refuse_foreign()?;
            let (file, beside) = result.dir.create_beside(&result.name).map_err(|e| result.wrong(e))?;
            drop(file);
            result.dir.remove(beside)?;
        }
        Ok(result)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Whether a result file exists, of this run or of an earlier one.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    pub(crate) fn exists(&self) -> Result<bool> {
        Ok(self.dir.kind(&self.name)?.is_some())
    }

    /// Writes the file with `write`.
    ///
    /// # Errors
    /// Errors of [`ResultFile::open`], in case the location has changed.
    pub(crate) fn write(&self, write: impl Fn(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
        let io = |e: io::Error| Error::io(self.kind.operation, self.path(), e);
        let write_all = |file: File| {
            let mut out = BufWriter::new(file);
            write(&mut out).and_then(|()| out.flush()).map_err(io)
        };
        if self.is_device()? {
            return write_all(self.dir.open_at(&self.name, OFlag::O_WRONLY).map_err(io)?);
        }
        self.refuse_foreign()?;
        let (file, beside) = self.dir.create_beside(&self.name).map_err(|e| self.wrong(e))?;
        let written = write_all(file.into_file()).and_then(|()| self.dir.rename(&beside, &self.name));
        // The write error is the one to report.
        written.inspect_err(|_| drop(self.dir.remove(&beside)))
    }

    /// Whether the location is a terminal or `/dev/null`, which is written directly, because a rename would replace it.
    fn is_device(&self) -> Result<bool> {
        Ok(self.dir.kind(&self.name)? == Some(FileKind::CharDevice))
    }

    /// Rejects a file of another kind. An empty file is accepted: earlier versions left one if they ended before writing their timeline.
    fn refuse_foreign(&self) -> Result<()> {
        let owned = OwnedName { pattern: "", kind: self.kind.name, mark: OwnMark::Head(self.kind.head) };
        if self.dir.kind(&self.name)?.is_none() || owned.is_own(&self.dir, &self.name)? {
            return Ok(());
        }
        let (path, kind, flag) = (self.path(), self.kind.name, self.kind.flag);
        let refusal =
            format_args!("{}: not a {kind} of this program, and not replaced; remove it, or name another file with {flag}", path.display());
        Err(Error::usage(refusal))
    }

    /// Attributes an error of the temporary file to this location.
    fn wrong(&self, error: Error) -> Error {
        match error {
            Error::Io { source, .. } => Error::io(self.kind.operation, self.path(), source),
            other => other,
        }
    }
}
