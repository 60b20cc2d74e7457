//! The directory that an export makes: beside first, marked, and locked as long as it is written, so that one that a killed export left
//! is distinguishable from one that is being written, and from foreign directories.

use super::owned::model_files;
use crate::disk::{Dir, FileKind, Lock, OwnMark, OwnedName, TmpDir};
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Marks a directory that is being written; it goes before that gets its name.
const MARK: OwnedName = OwnedName { pattern: ".superoffload-export", kind: "mark", mark: OwnMark::Head(MARK_TEXT) };
const MARK_TEXT: &str = "an export of superoffload\n";

pub(super) struct ExportDir {
    parent: Dir,
    name: OsString,
}

impl ExportDir {
    /// The place `out_dir`, after the remains of killed exports to it are removed.
    ///
    /// # Errors
    /// `Usage` when there is something that would be overwritten; `Io` when the directory that holds it cannot be read or written.
    pub(super) fn open(out_dir: &Path) -> Result<Self> {
        let refuse = |why: &str| Err(Error::usage(format_args!("{}: {why}", out_dir.display())));
        let Some((parent, name)) = Dir::of(out_dir)? else { return refuse("not a name for a new directory") };
        match parent.kind(&name)? {
            None => {}
            Some(FileKind::Dir) if parent.open_dir(&name)?.names()?.is_empty() => {}
            Some(FileKind::Dir) => return refuse("exists and is not empty"),
            Some(FileKind::Link) => return refuse("is a link; name the directory itself, or a new one"),
            Some(_) => return refuse("exists and is not a directory"),
        }
        let place = Self { parent, name };
        place.remove_leftovers()?;
        Ok(place)
    }

    /// The directory beside, locked.
    ///
    /// # Errors
    /// `Io` when it cannot be created.
    pub(super) fn begin(&self) -> Result<TmpDir> {
        loop {
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
            let tmp = TmpDir::create(&self.parent, format!("{}{}-{nanos}", self.prefix(), std::process::id()))?;
            // Before it was locked another export may have taken it for a leftover.
            if tmp.dir().try_lock()? != Lock::Taken && !tmp.dir().is_removed()? {
                tmp.dir().write_file(MARK.pattern, MARK_TEXT.as_bytes())?;
                return Ok(tmp);
            }
        }
    }

    /// Gives the directory `tmp`, which is written, its name.
    ///
    /// # Errors
    /// `Io` when it cannot be had.
    pub(super) fn publish(&self, tmp: &mut TmpDir) -> Result<Option<String>> {
        tmp.dir().remove(MARK.pattern)?;
        tmp.dir().sync()?;
        tmp.publish(&self.name)?;
        tmp.parent().unsynced()
    }

    fn prefix(&self) -> String {
        format!(".{}.tmp-", self.name.to_string_lossy())
    }

    /// A running export holds the lock of its directory. Without file locks running exports are not detectable, and nothing is removed.
    fn remove_leftovers(&self) -> Result<()> {
        for name in self.parent.names()? {
            let is_called_so = name.to_string_lossy().starts_with(&self.prefix()) && self.parent.kind(&name)? == Some(FileKind::Dir);
            if !is_called_so {
                continue;
            }
            let dir = self.parent.open_dir(&name)?;
            if dir.try_lock()? == Lock::Held {
                self.parent.remove_listed(&name, &marked_files(&dir)?)?;
            }
        }
        Ok(())
    }
}

/// The files in `dir`, the mark last; none where that is missing.
fn marked_files(dir: &Dir) -> Result<Vec<PathBuf>> {
    if dir.kind(MARK.pattern)?.is_none() || !MARK.is_own(dir, MARK.pattern)? {
        return Ok(vec![]);
    }
    let mut files = model_files(dir, |_| true)?;
    files.sort_by_key(|name| name == Path::new(MARK.pattern));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn leftovers_of_a_killed_export_go_and_a_running_export_stays() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        let out = path("out");
        let live = ExportDir::open(&out).unwrap().begin().unwrap();
        for (name, file) in [(".out.tmp-4711", MARK.pattern), (".out.tmp-4712", "thesis.tex"), (".other.tmp-4711", MARK.pattern)] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join(file), MARK_TEXT).unwrap();
            fs::write(path(name).join("model.safetensors"), "half").unwrap();
        }
        let second = ExportDir::open(&out).unwrap();
        assert!(!path(".out.tmp-4711").exists() && path(".other.tmp-4711").exists() && !live.dir().is_removed().unwrap());
        let mut tmp_dir = second.begin().unwrap();
        drop(live);
        second.publish(&mut tmp_dir).unwrap();
        drop(tmp_dir);
        let names: Vec<_> = fs::read_dir(tmp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.len() == 3 && fs::read_dir(out).unwrap().count() == 0, "{names:?}");
        assert_eq!(fs::read_dir(path(".out.tmp-4712")).unwrap().count(), 2, "nobody marked it");
    }

    #[test]
    fn an_export_over_existing_files_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        fs::create_dir_all(path("full/x")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        fs::write(path("file"), "").unwrap();
        symlink("empty", path("link")).unwrap();
        for (name, why) in
            [("full", "not empty"), ("file", "not a directory"), ("link", "is a link"), ("link/", "is a link"), ("..", "not a name")]
        {
            let refused = ExportDir::open(&path(name)).err().unwrap();
            assert!(refused.exit_code() == 2 && refused.to_string().contains(why), "{refused}");
        }
        for name in ["empty", "empty/", "new"] {
            ExportDir::open(&path(name)).unwrap();
        }
    }
}
