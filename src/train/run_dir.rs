//! The output directory of a run: opened once, owned by one run at a time, and used by descriptor from then on.

use super::observer::Observer;
use super::owned_names::{self, PROBE};
use super::run_lock::{LOCK, RunLock};
use crate::checkpoint;
use crate::config::settings::Settings;
use crate::disk::{Dir, OwnedName, RECORDS, RECORDS_MANIFEST};
use crate::error::{Error, Result};
use crate::trace::file::{TRACE, TraceFile};
use crate::units::Bytes;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

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
    /// all that will be written can be. `observer` receives failed cleanups and the new names of foreign content.
    ///
    /// # Errors
    /// `Resource` that names the run that has it; `Usage` when foreign content has a name that the run needs, or `--trace` names a file
    /// that is no timeline: then nothing was written; `Io` that names the directory or the file.
    pub(super) fn open(settings: &Settings, observer: &mut dyn Observer) -> Result<Self> {
        let path = &settings.output_dir;
        let is_new = fs::symlink_metadata(path).is_err();
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        let dir = Dir::open(path)?;
        // A run that is at work creates and renames entries while they are checked: its lock is the reason to give, not their state.
        owned_names::claim_lock(&dir, settings, observer).map_err(|e| RunLock::refusal_of_holder(&dir).unwrap_or(e))?;
        let lock = RunLock::take(&dir)?;
        owned_names::claim(&dir, settings, observer)?;
        if !lock.is_supported() {
            observer.warn(&format!("{}: this file system has no locks; two runs in it would overwrite each other", path.display()));
        }
        // Where the parent cannot be opened, a directory that is removed stays so.
        let place = Dir::of(path).ok().flatten();
        let mut this = Self { dir, lock, place, is_new, trace: None };
        let (mut probe, beside) = this.dir.create_beside(PROBE.pattern)?;
        probe.write(b"x").and_then(|()| this.dir.remove(beside))?;
        if let Some(line) = &this.dir.unsynced()? {
            observer.note(line);
        }
        owned_names::remove_remains(&this.dir)?;
        for line in &checkpoint::clean(&this.dir)? {
            observer.warn(line);
        }
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
            return Ok(Some(format!("{} was removed during the run: created again, without its former files", self.path().display())));
        }
        if !self.lock.is_of(&self.dir)? {
            self.lock = RunLock::take(&self.dir)?;
        }
        let moved = self.dir.follow()?;
        Ok(moved.map(|from| format!("{} was moved during the run, which continues in {}", from.display(), self.path().display())))
    }

    /// Rejects a run if the disk has no room for its next checkpoint of `checkpoint_bytes`.
    ///
    /// # Errors
    /// `Resource` with both sizes.
    pub(super) fn expect_free_bytes(&self, checkpoint_bytes: u64) -> Result<()> {
        let free = self.dir.free_bytes()?.unwrap_or(u64::MAX);
        if free >= checkpoint_bytes {
            return Ok(());
        }
        let text = |bytes| format!("{} ({bytes} bytes)", Bytes(bytes));
        let cause = format!("it needs {}, {} are free; make room, or name another --output-dir", text(checkpoint_bytes), text(free));
        Err(Error::resource(format_args!("find room for a checkpoint in {}", self.path().display()), cause))
    }

    fn trace_here(&self) -> Result<TraceFile> {
        TraceFile::in_dir(self.dir.try_clone()?, TRACE.pattern.into())
    }

    /// These may not be there yet, so that nothing else would refuse them.
    fn refuse_our_own(&self, trace: &TraceFile) -> Result<()> {
        match self.own_name_of(&trace.path()) {
            Some(owned) if owned.pattern != TRACE.pattern => {
                let path = trace.path();
                Err(Error::usage(format_args!("--trace {}: the run itself writes this; name another file", path.display())))
            }
            _ => Ok(()),
        }
    }

    /// The run's own name at which `path` lies, or below which.
    fn own_name_of(&self, path: &Path) -> Option<&'static OwnedName> {
        let (own_path, parent) = (self.path().canonicalize().ok()?, path.parent().filter(|parent| !parent.as_os_str().is_empty()));
        let place = parent.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?);
        owned_names::named(place.strip_prefix(own_path).ok()?.components().next()?.as_os_str())
    }

    /// Whether there is nothing but the lock and the mark of the folder of records.
    fn is_unused(&self) -> Result<bool> {
        let (names, records) = (self.dir.names()?, self.dir.open_dir(RECORDS.pattern)?.names()?);
        let is_first = |name: &OsString| LOCK.matches(name) || RECORDS.matches(name);
        Ok(names.iter().all(is_first) && records == [RECORDS_MANIFEST.pattern])
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
            && self.is_unused().unwrap_or(false)
            && self.dir.remove_listed(RECORDS.pattern, &[RECORDS_MANIFEST.pattern.into()]).is_ok_and(|gone| gone)
        {
            let _ = self.dir.remove(LOCK.pattern).and_then(|()| parent.remove_empty(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Resume;
    use crate::train::tests::RecordingObserver;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    fn open(path: PathBuf, trace: Option<PathBuf>) -> Result<RunDir> {
        let mut messages = RecordingObserver::default();
        let opened = RunDir::open(&Settings { output_dir: path, trace, ..Settings::default() }, &mut messages);
        assert_eq!(messages.0, [""; 0]);
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
    fn a_refused_resume_renames_nothing_under_the_run_that_has_it() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join("r").join(name);
        let first = open(path(""), None).unwrap();
        fs::write(path("trace.json"), "of another program").unwrap();
        let resumed = Settings { output_dir: path(""), resume_from_checkpoint: Some(Resume::Auto), ..Settings::default() };
        assert_eq!(RunDir::open(&resumed, &mut RecordingObserver::default()).err().unwrap().exit_code(), 1);
        assert!(path("trace.json").exists() && !path("trace.json.foreign-1").exists());
        drop(first);
        RunDir::open(&resumed, &mut RecordingObserver::default()).unwrap();
        assert_eq!(fs::read(path("trace.json.foreign-1")).unwrap(), b"of another program");
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
        assert!(path.join(LOCK.pattern).exists());
        let record = tmp.path().join("second/.superoffload/data-checked.json");
        let prepared = open(tmp.path().join("second"), None).unwrap();
        fs::write(&record, "").unwrap();
        drop(prepared);
        assert!(record.with_file_name("manifest.json").exists(), "a folder with records keeps its mark");
        fs::remove_file(path.join("metrics.jsonl")).unwrap();
        drop(open(path.clone(), None).unwrap());
        assert!(path.exists(), "it was there before");
    }

    #[test]
    fn a_removed_one_is_made_again_and_a_link_in_its_place_leads_nowhere() {
        let tmp = tempfile::tempdir().unwrap();
        let (path, target) = (tmp.path().join("r"), tmp.path().join("elsewhere"));
        let mut run = open(path.clone(), None).unwrap();
        assert_eq!(run.hold().unwrap(), None);
        fs::remove_dir_all(&path).unwrap();
        assert!(run.hold().unwrap().unwrap().contains("was removed during the run"));
        assert!(open(path.clone(), None).is_err(), "the new one is ours, too");
        fs::remove_dir_all(&path).unwrap();
        fs::create_dir(&target).unwrap();
        symlink(&target, &path).unwrap();
        let refused = run.hold().unwrap_err().to_string();
        assert!(refused.contains("create") && refused.contains("/r: File exists"), "{refused}");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_that_was_removed_is_taken_again_unless_another_run_was_faster() {
        let tmp = tempfile::tempdir().unwrap();
        let mut first = open(tmp.path().into(), None).unwrap();
        fs::remove_file(tmp.path().join(LOCK.pattern)).unwrap();
        assert_eq!(first.hold().unwrap(), None);
        open(tmp.path().into(), None).err().expect("it is locked");
        fs::remove_file(tmp.path().join(LOCK.pattern)).unwrap();
        let _second = open(tmp.path().into(), None).unwrap();
        assert!(first.hold().unwrap_err().to_string().contains("another run"));
    }

    #[test]
    fn room_for_a_checkpoint_is_required() {
        let tmp = tempfile::tempdir().unwrap();
        let run = open(tmp.path().into(), None).unwrap();
        run.expect_free_bytes(1).unwrap();
        let refused = run.expect_free_bytes(1 << 60).unwrap_err().to_string();
        for word in [tmp.path().to_str().unwrap(), "1152921504606846976 bytes", "are free", "--output-dir"] {
            assert!(refused.contains(word), "{refused}");
        }
    }

    #[test]
    fn a_timeline_replaces_nothing_that_the_run_writes_and_follows_no_link() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join("r").join(name);
        for name in ["metrics.jsonl", ".lock", "checkpoint-4", "tb", ".superoffload/x.json", "../r/.checkpoint-4.del-1"] {
            let refused = open(path(""), Some(path(name))).err().unwrap();
            assert!(refused.exit_code() == 2 && refused.to_string().contains(name), "{refused}");
        }
        open(path(""), Some(path("own.json"))).unwrap();
        fs::create_dir_all(path("")).unwrap();
        fs::write(tmp.path().join("victim"), "mine").unwrap();
        symlink(tmp.path().join("victim"), path(".write-probe")).unwrap();
        open(path(""), None).unwrap();
        symlink(tmp.path().join("victim"), path("trace.json")).unwrap();
        assert!(open(path(""), None).err().unwrap().to_string().contains("trace.json: not a timeline"));
        assert_eq!(fs::read_to_string(tmp.path().join("victim")).unwrap(), "mine");
        fs::remove_file(path("trace.json")).unwrap();
        for (name, content) in [(".trace.json.tmp-1", "{\"display"), (".write-probe.tmp-9", "x"), (".trace.json.tmp-2", "mine")] {
            fs::write(path(name), content).unwrap();
        }
        open(path(""), None).unwrap();
        assert!(!path(".trace.json.tmp-1").exists() && !path(".write-probe.tmp-9").exists() && path(".trace.json.tmp-2").exists());
    }
}
