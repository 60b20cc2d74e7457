//! Where a timeline goes: checked before there is one, written beside, renamed. Nothing is replaced that is not a timeline.

use super::{HEAD, Recorder, write_chrome};
use crate::disk::{Dir, FileKind};
use crate::error::{Error, Result};
use nix::fcntl::OFlag;
use std::ffi::OsString;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// A place that was found fit for a timeline.
#[derive(Debug)]
pub(crate) struct TraceFile {
    dir: Dir,
    name: OsString,
}

impl TraceFile {
    /// The place `path`; nothing is written yet.
    ///
    /// # Errors
    /// `Usage` when something is there that is not a timeline of this program; `Io` when it cannot be written.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let place = Dir::of(path).map_err(|e| match e {
            Error::Io { source, .. } => Error::io("write trace", path, source),
            other => other,
        })?;
        let (dir, name) = place.ok_or_else(|| Error::usage(format_args!("--trace {}: not a name for a file", path.display())))?;
        Self::in_dir(dir, name)
    }

    /// The place `name` in `dir`.
    pub(crate) fn in_dir(dir: Dir, name: OsString) -> Result<Self> {
        let trace = Self { dir, name };
        if !trace.is_device()? {
            trace.refuse_what_is_not_ours()?;
            drop(trace.dir.recreate_file(trace.beside()).map_err(|e| trace.wrong(e))?);
            trace.dir.remove(trace.beside())?;
        }
        Ok(trace)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Whether a timeline is there: this run's, or an earlier one's.
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

    /// Writes the tracks. Returns the spans that no longer fitted their recorders.
    ///
    /// # Errors
    /// As [`TraceFile::open`], for what has taken the place since.
    pub(crate) fn write(&self, tracks: &[Recorder]) -> Result<u64> {
        let io = |e: io::Error| Error::io("write trace", self.path(), e);
        if self.is_device()? {
            let device = self.dir.open_at(&self.name, OFlag::O_WRONLY).map_err(io)?;
            write_all(device, tracks).map_err(io)?;
        } else {
            self.refuse_what_is_not_ours()?;
            let file = self.dir.recreate_file(self.beside()).map_err(|e| self.wrong(e))?.into_file();
            let written = write_all(file, tracks).map_err(io).and_then(|()| self.dir.rename(self.beside(), &self.name));
            // The error that ended the writing is the one to report.
            written.inspect_err(|_| drop(self.dir.remove(self.beside())))?;
        }
        Ok(tracks.iter().map(Recorder::dropped).sum())
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
            format!("{}: not a timeline of this program, and not replaced; remove it, or name another file with --trace", path.display())
        };
        if is_ours { Ok(()) } else { Err(Error::usage(refusal())) }
    }

    fn begins_as_ours(&self) -> Result<bool> {
        let Some(file) = self.dir.open_file(&self.name)? else { return Ok(true) };
        let mut head = vec![];
        file.take(HEAD.len() as u64).read_to_end(&mut head).map_err(|e| Error::io("read", self.path(), e))?;
        Ok(head == HEAD.as_bytes())
    }

    fn beside(&self) -> String {
        format!(".{}.tmp-{}", self.name.to_string_lossy(), std::process::id())
    }

    /// An error about the file beside is one about this place.
    fn wrong(&self, error: Error) -> Error {
        match error {
            Error::Io { source, .. } => Error::io("write trace", self.path(), source),
            other => other,
        }
    }
}

fn write_all(file: std::fs::File, tracks: &[Recorder]) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    write_chrome(&mut out, tracks)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::now_ns;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn tracks() -> [Recorder; 1] {
        let mut track = Recorder::new("compute", 1);
        track.span("matmul", 3, now_ns());
        track.span("late", 4, now_ns());
        [track]
    }

    #[test]
    fn a_timeline_replaces_a_timeline_and_leaves_nothing_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        fs::write(&path, "").unwrap();
        for _ in 0..2 {
            let trace = TraceFile::open(&path).unwrap();
            assert_eq!(trace.write(&tracks()).unwrap(), 1);
            assert!(fs::read_to_string(&path).unwrap().contains("matmul") && trace.exists().unwrap());
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn nothing_else_is_replaced_nor_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("data.txt"), "{\"displayTimeUnit\":\"ms\",\"other\":[]}").unwrap();
        fs::create_dir(path("dir")).unwrap();
        symlink(path("data.txt"), path("link")).unwrap();
        symlink("nowhere", path("dangling")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["data.txt", "dir", "link", "dangling", "pipe"] {
            let refused = TraceFile::open(&path(name)).unwrap_err();
            assert!(refused.exit_code() == 2 && refused.to_string().contains(&format!("{name}: not a timeline")), "{refused}");
        }
        // And what took the place after the check is left alone, too.
        let trace = TraceFile::open(&path("late")).unwrap();
        fs::write(path("late"), "mine").unwrap();
        trace.write(&tracks()).unwrap_err();
        assert_eq!(fs::read_to_string(path("late")).unwrap(), "mine");
    }

    #[test]
    fn a_device_stays_a_device() {
        assert_eq!(TraceFile::open(Path::new("/dev/null")).unwrap().write(&tracks()).unwrap(), 1);
        let full = TraceFile::open(Path::new("/dev/full")).unwrap().write(&tracks()).unwrap_err().to_string();
        assert!(full.contains("/dev/full: No space left"), "{full}");
        let nowhere = TraceFile::open(Path::new("/nowhere/x.json")).unwrap_err();
        assert!(nowhere.exit_code() == 1 && nowhere.to_string().contains("/nowhere/x.json"), "{nowhere}");
    }
}
