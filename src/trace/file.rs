//! The file of a timeline.

use super::{HEAD, Recorder, write_chrome};
use crate::disk::{Dir, OwnMark, OwnedName, ResultFile, ResultKind};
use crate::error::Result;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const TIMELINE: ResultKind = ResultKind { name: "timeline", head: HEAD, flag: "--trace", operation: "write trace" };

/// The timeline of a run in its output directory.
pub(crate) const TRACE: OwnedName = OwnedName { pattern: "trace.json", kind: TIMELINE.name, mark: OwnMark::Head(HEAD) };

/// A path at which a timeline can be written.
#[derive(Debug)]
pub(crate) struct TraceFile(ResultFile);

impl TraceFile {
    /// Checks `path`; nothing is written yet.
    ///
    /// # Errors
    /// `Usage` when a file is there that is not a timeline of this program; `Io` when it cannot be written.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        ResultFile::open(path, &TIMELINE).map(Self)
    }

    /// Checks the path `name` in `dir`.
    pub(crate) fn in_dir(dir: Dir, name: OsString) -> Result<Self> {
        ResultFile::in_dir(dir, name, &TIMELINE).map(Self)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path()
    }

    /// Whether a timeline exists, of this run or an earlier one.
    ///
    /// # Errors
    /// `Io` when the directory cannot be read.
    pub(crate) fn exists(&self) -> Result<bool> {
        self.0.exists()
    }

    /// Writes the tracks. Returns the number of dropped spans.
    ///
    /// # Errors
    /// As [`TraceFile::open`], for a file that was created there since.
    pub(crate) fn write(&self, tracks: &[Recorder]) -> Result<u64> {
        self.0.write(|out| write_chrome(out, tracks))?;
        Ok(tracks.iter().map(Recorder::dropped).sum())
    }
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
            assert!(fs::read_to_string(&path).unwrap().contains("late") && trace.exists().unwrap());
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
        // A file that was created after the check is kept as well.
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
