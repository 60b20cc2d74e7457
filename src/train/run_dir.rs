//! The output directory of a run: opened once, owned by one run at a time, and used by descriptor from then on.

use super::metrics_file::METRICS;
use super::observer::Observer;
use super::run_lock::{LOCK, RunLock};
use crate::checkpoint;
use crate::config::settings::Settings;
use crate::disk::Dir;
use crate::error::{Error, Result};
use crate::trace::file::TraceFile;
use crate::units::Bytes;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// The timeline, unless another file is named.
pub(crate) const TRACE: &str = "trace.json";
/// Written and removed, to know that files can be.
const PROBE: &str = ".write-probe";

/// An output directory that this process owns.
pub(super) struct RunDir {
    dir: Dir,
    lock: RunLock,
    /// The directory that it lies in and its name there, if that can be opened: to make it again.
    place: Option<(Dir, OsString)>,
    /// This process made it.
    is_new: bool,
    /// The timeline's place, if it is not in here.
    trace: Option<TraceFile>,
}

impl RunDir {
    /// Makes the output directory if there is none, takes it for this run, tidies up after dead ones, and finds out now whether
    /// all that will be written can be. `observer` is told what could not be tidied up.
    ///
    /// # Errors
    /// `Resource` that says which run has it; `Usage` when `--trace` names what is no timeline; `Io` that names the directory or
    /// the file.
    pub(super) fn open(settings: &Settings, observer: &mut dyn Observer) -> Result<Self> {
        let path = &settings.output_dir;
        let is_new = fs::symlink_metadata(path).is_err();
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        let dir = Dir::open(path)?;
        let lock = RunLock::take(&dir)?;
        if !lock.is_supported() {
            observer.warn(&format!("{}: this file system has no locks; two runs in it would destroy each other", path.display()));
        }
        // Where the parent cannot be opened, a directory that is removed stays so.
        let place = Dir::of(path).ok().flatten();
        let mut this = Self { dir, lock, place, is_new, trace: None };
        this.dir.recreate_file(PROBE)?.write(b"x")?;
        this.dir.remove(PROBE)?;
        this.tidy()?.iter().for_each(|line| observer.warn(line));
        this.trace = settings.trace.as_deref().map(TraceFile::open).transpose()?;
        match &this.trace {
            Some(trace) => this.refuse_our_own(trace)?,
            None => drop(this.trace_here()?),
        }
        Ok(this)
    }

    pub(super) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Its path, for messages.
    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the timeline goes, for the end of the run.
    pub(super) fn take_trace(&mut self) -> Result<TraceFile> {
        self.trace.take().map_or_else(|| self.trace_here(), Ok)
    }

    /// Makes sure, before something is written, that the directory is still this run's. One that was removed is made again,
    /// one that was moved is followed. Returns a line for people if there was anything.
    ///
    /// # Errors
    /// `Resource` when another run has taken it, or something else its place; `Io` when it cannot be made again.
    pub(super) fn hold(&mut self) -> Result<Option<String>> {
        if self.dir.is_removed()? {
            self.dir = self.make_again()?;
            self.lock = RunLock::take(&self.dir)?;
            return Ok(Some(format!("{} was removed during the run: made again, without what was in it", self.path().display())));
        }
        if !self.lock.is_of(&self.dir)? {
            self.lock = RunLock::take(&self.dir)?;
        }
        let moved = self.dir.follow()?;
        Ok(moved.map(|from| format!("{} was moved during the run, which goes on in {}", from.display(), self.path().display())))
    }

    /// Refuses a run whose next checkpoint, of so many bytes, finds no room.
    ///
    /// # Errors
    /// `Resource` with both sizes.
    pub(super) fn expect_room(&self, checkpoint_bytes: u64) -> Result<()> {
        let free = self.dir.free_bytes()?.unwrap_or(u64::MAX);
        if free >= checkpoint_bytes {
            return Ok(());
        }
        let said = |bytes| format!("{} ({bytes} bytes)", Bytes(bytes));
        let cause = format!("it takes {}, {} are free; make room, or name another --output-dir", said(checkpoint_bytes), said(free));
        Err(Error::resource(format_args!("find room for a checkpoint in {}", self.path().display()), cause))
    }

    /// What dead runs left goes; returns a line for each thing that could not be done.
    fn tidy(&self) -> Result<Vec<String>> {
        let trace_beside = format!(".{TRACE}.tmp-");
        for name in self.dir.names()?.iter().filter(|name| name.to_string_lossy().starts_with(&trace_beside)) {
            self.dir.remove(name)?;
        }
        checkpoint::clean(&self.dir)
    }

    fn trace_here(&self) -> Result<TraceFile> {
        TraceFile::in_dir(self.dir.try_clone()?, TRACE.into())
    }

    /// These may not be there yet, so that nothing else would refuse them.
    fn refuse_our_own(&self, trace: &TraceFile) -> Result<()> {
        let is_ours = |name: &str| [METRICS, LOCK].contains(&name) || name.starts_with("checkpoint-");
        if trace.is_in(&self.dir, is_ours)? {
            return Err(Error::usage(format_args!("--trace {}: the run itself writes this; name another file", trace.path().display())));
        }
        Ok(())
    }

    fn make_again(&self) -> Result<Dir> {
        let path = self.path().display();
        let made = self.place.as_ref().map(|(parent, name)| parent.create_dir(name));
        made.unwrap_or_else(|| Err(Error::resource(format_args!("write into {path}"), "it was removed during the run")))
    }
}

impl Drop for RunDir {
    /// A command that was refused leaves no directory behind.
    fn drop(&mut self) {
        if let Some((parent, name)) = self.place.as_ref().filter(|_| self.is_new)
            && self.dir.names().is_ok_and(|names| names == [LOCK])
        {
            let _ = self.dir.remove(LOCK).and_then(|()| parent.remove_empty(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::tests::Heard;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    fn open(path: PathBuf, trace: Option<PathBuf>) -> Result<RunDir> {
        let mut heard = Heard::default();
        let opened = RunDir::open(&Settings { output_dir: path, trace, ..Settings::default() }, &mut heard);
        assert_eq!(heard.0, [""; 0]);
        opened
    }

    #[test]
    fn one_run_has_it_at_a_time_and_a_refused_one_changes_nothing() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join("r").join(name);
        let first = open(path(""), None).unwrap();
        fs::create_dir(path(".checkpoint-4.tmp-1")).unwrap();
        assert_eq!(open(path(""), None).err().unwrap().exit_code(), 1);
        assert!(path(".checkpoint-4.tmp-1").exists());
        drop(first);
        open(path(""), None).unwrap();
        assert!(!path(".checkpoint-4.tmp-1").exists());
    }

    #[test]
    fn a_directory_that_was_not_used_goes_again() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("r");
        drop(open(path.clone(), None).unwrap());
        assert!(!path.exists());
        let used = open(path.clone(), None).unwrap();
        fs::write(path.join("metrics.jsonl"), "").unwrap();
        drop(used);
        assert!(path.join(LOCK).exists());
        fs::remove_file(path.join("metrics.jsonl")).unwrap();
        drop(open(path.clone(), None).unwrap());
        assert!(path.exists(), "it was there before");
    }

    #[test]
    fn a_removed_one_is_made_again_and_a_link_in_its_place_leads_nowhere() {
        let tmp = tempfile::tempdir().unwrap();
        let (path, elsewhere) = (tmp.path().join("r"), tmp.path().join("elsewhere"));
        let mut run = open(path.clone(), None).unwrap();
        assert_eq!(run.hold().unwrap(), None);
        fs::remove_dir_all(&path).unwrap();
        assert!(run.hold().unwrap().unwrap().contains("was removed during the run"));
        assert!(open(path.clone(), None).is_err(), "the new one is ours, too");
        fs::remove_dir_all(&path).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        let refused = run.hold().unwrap_err().to_string();
        assert!(refused.contains("create") && refused.contains("/r: File exists"), "{refused}");
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_that_was_removed_is_taken_again_unless_another_run_was_faster() {
        let tmp = tempfile::tempdir().unwrap();
        let mut first = open(tmp.path().into(), None).unwrap();
        fs::remove_file(tmp.path().join(LOCK)).unwrap();
        assert_eq!(first.hold().unwrap(), None);
        open(tmp.path().into(), None).err().expect("it is locked");
        fs::remove_file(tmp.path().join(LOCK)).unwrap();
        let _second = open(tmp.path().into(), None).unwrap();
        assert!(first.hold().unwrap_err().to_string().contains("another run"));
    }

    #[test]
    fn room_for_a_checkpoint_is_asked_for() {
        let tmp = tempfile::tempdir().unwrap();
        let run = open(tmp.path().into(), None).unwrap();
        run.expect_room(1).unwrap();
        let refused = run.expect_room(1 << 60).unwrap_err().to_string();
        for word in [tmp.path().to_str().unwrap(), "1152921504606846976 bytes", "are free", "--output-dir"] {
            assert!(refused.contains(word), "{refused}");
        }
    }

    #[test]
    fn a_timeline_replaces_nothing_that_the_run_writes_and_follows_no_link() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join("r").join(name);
        for name in [METRICS, LOCK, "checkpoint-4"] {
            let refused = open(path(""), Some(path(name))).err().unwrap();
            assert!(refused.exit_code() == 2 && refused.to_string().contains(name), "{refused}");
        }
        fs::create_dir_all(path("")).unwrap();
        fs::write(tmp.path().join("victim"), "mine").unwrap();
        symlink(tmp.path().join("victim"), path(PROBE)).unwrap();
        open(path(""), None).unwrap();
        symlink(tmp.path().join("victim"), path(TRACE)).unwrap();
        assert!(open(path(""), None).err().unwrap().to_string().contains("trace.json: not a timeline"));
        assert_eq!(fs::read_to_string(tmp.path().join("victim")).unwrap(), "mine");
        fs::remove_file(path(TRACE)).unwrap();
        fs::write(path(".trace.json.tmp-1"), "half").unwrap();
        open(path(""), None).unwrap();
        assert!(!path(".trace.json.tmp-1").exists());
    }
}
