//! A file that is what a command makes: its place is checked before there is one, it is written beside and renamed. Nothing is replaced
//! that is not of its kind.

use super::{Dir, FileKind};
use crate::error::{Error, Result};
use nix::fcntl::OFlag;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
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
            drop(result.dir.recreate_file(result.beside()).map_err(|e| result.wrong(e))?);
            result.dir.remove(result.beside())?;
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

    /// Whether it lies in `dir` and has one of those names.
    pub(crate) fn is_in(&self, dir: &Dir, is_name: impl FnOnce(&str) -> bool) -> Result<bool> {
        Ok(self.dir.is(dir)? && is_name(&self.name.to_string_lossy()))
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
        let file = self.dir.recreate_file(self.beside()).map_err(|e| self.wrong(e))?.into_file();
        let written = write_all(file).and_then(|()| self.dir.rename(self.beside(), &self.name));
        // The error that ended the writing is the one to report.
        written.inspect_err(|_| drop(self.dir.remove(self.beside())))
    }

    /// A terminal or `/dev/null` is written as it is: what was renamed there would replace it.
    fn is_device(&self) -> Result<bool> {
        Ok(self.dir.kind(&self.name)? == Some(FileKind::CharDevice))
    }

    /// An empty file is what earlier versions left when they ended before their timeline.
    fn refuse_what_is_not_ours(&self) -> Result<()> {
        let is_ours = match self.dir.kind(&self.name)? {
            None | Some(FileKind::File(0)) => true,
            Some(FileKind::File(_)) => self.begins_as_ours()?,
            Some(_) => false,
        };
        let path = self.path();
        let refusal = || {
            format!(
                "{}: not a {} of this program, and not replaced; remove it, or name another file with {}",
                path.display(),
                self.kind.name,
                self.kind.flag
            )
        };
        if is_ours { Ok(()) } else { Err(Error::usage(refusal())) }
    }

    fn begins_as_ours(&self) -> Result<bool> {
        let Some(file) = self.dir.open_file(&self.name)? else { return Ok(true) };
        let mut head = vec![];
        file.take(self.kind.head.len() as u64).read_to_end(&mut head).map_err(|e| Error::io("read", self.path(), e))?;
        Ok(head == self.kind.head.as_bytes())
    }

    fn beside(&self) -> String {
        format!(".{}.tmp-{}", self.name.to_string_lossy(), std::process::id())
    }

    /// An error about the file beside is one about this place.
    fn wrong(&self, error: Error) -> Error {
        match error {
            Error::Io { source, .. } => Error::io(self.kind.operation, self.path(), source),
            other => other,
        }
    }
}
