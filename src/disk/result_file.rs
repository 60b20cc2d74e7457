//! A file that is what a command makes: its place is checked before there is one, it is written beside and renamed. Nothing is replaced
//! that is not of its kind.

use super::owned::{OwnMark, OwnedName};
use super::{Dir, FileKind};
use crate::error::{Error, Result};
use nix::fcntl::OFlag;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// What such a file is.
#[derive(Debug)]
pub(crate) struct ResultKind {
    /// In words.
    pub(crate) name: &'static str,
    /// How every one of them begins.
    pub(crate) head: &'static str,
    /// The flag that names its place.
    pub(crate) flag: &'static str,
    /// What writing it is called in errors.
    pub(crate) operation: &'static str,
}

/// A place that was found fit for a result.
#[derive(Debug)]
pub(crate) struct ResultFile {
    dir: Dir,
    name: OsString,
    kind: &'static ResultKind,
}

impl ResultFile {
    /// The place `path`; nothing is written yet.
    ///
    /// # Errors
    /// `Usage` when something is there that is not of this kind; `Io` when it cannot be written.
    pub(crate) fn open(path: &Path, kind: &'static ResultKind) -> Result<Self> {
        let place = Dir::of(path).map_err(|e| match e {
            Error::Io { source, .. } => Error::io(kind.operation, path, source),
            other => other,
        })?;
        let (dir, name) = place.ok_or_else(|| Error::usage(format_args!("{} {}: not a name for a file", kind.flag, path.display())))?;
        Self::in_dir(dir, name, kind)
    }

    /// The place `name` in `dir`.
    pub(crate) fn in_dir(dir: Dir, name: OsString, kind: &'static ResultKind) -> Result<Self> {
        let result = Self { dir, name, kind };
        if !result.is_device()? {
            result.refuse_what_is_not_ours()?;
            let (file, beside) = result.dir.create_beside(&result.name).map_err(|e| result.wrong(e))?;
            drop(file);
            result.dir.remove(beside)?;
        }
        Ok(result)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Whether one is there: this run's, or an earlier one's.
    ///
    /// # Errors
    /// `Io` when the directory cannot be read.
    pub(crate) fn exists(&self) -> Result<bool> {
        Ok(self.dir.kind(&self.name)?.is_some())
    }

    /// Writes what `write` writes.
    ///
    /// # Errors
    /// As [`ResultFile::open`], for what has taken the place since.
    pub(crate) fn write(&self, write: impl Fn(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
        let io = |e: io::Error| Error::io(self.kind.operation, self.path(), e);
        let write_all = |file: File| {
            let mut out = BufWriter::new(file);
            write(&mut out).and_then(|()| out.flush()).map_err(io)
        };
        if self.is_device()? {
            return write_all(self.dir.open_at(&self.name, OFlag::O_WRONLY).map_err(io)?);
        }
        self.refuse_what_is_not_ours()?;
        let (file, beside) = self.dir.create_beside(&self.name).map_err(|e| self.wrong(e))?;
        let written = write_all(file.into_file()).and_then(|()| self.dir.rename(&beside, &self.name));
        // The error that ended the writing is the one to report.
        written.inspect_err(|_| drop(self.dir.remove(&beside)))
    }

    /// A terminal or `/dev/null` is written as it is: what was renamed there would replace it.
    fn is_device(&self) -> Result<bool> {
        Ok(self.dir.kind(&self.name)? == Some(FileKind::CharDevice))
    }

    /// An empty file is what earlier versions left when they ended before their timeline.
    fn refuse_what_is_not_ours(&self) -> Result<()> {
        let owned = OwnedName { pattern: "", kind: self.kind.name, mark: OwnMark::Head(self.kind.head) };
        if self.dir.kind(&self.name)?.is_none() || owned.is_own(&self.dir, &self.name)? {
            return Ok(());
        }
        let (path, kind, flag) = (self.path(), self.kind.name, self.kind.flag);
        let refusal =
            format_args!("{}: not a {kind} of this program, and not replaced; remove it, or name another file with {flag}", path.display());
        Err(Error::usage(refusal))
    }

    /// An error about the file beside is one about this place.
    fn wrong(&self, error: Error) -> Error {
        match error {
            Error::Io { source, .. } => Error::io(self.kind.operation, self.path(), source),
            other => other,
        }
    }
}
