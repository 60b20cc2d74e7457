//! The directory that an export makes: beside first, locked as long as it is written, so that one that a killed export left can
//! be told from one that is being written.

use crate::disk::{Dir, FileKind, Lock, TmpDir};
use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) struct ExportDir {
    parent: Dir,
    name: OsString,
}

impl ExportDir {
    /// The place `out_dir`, after what killed exports to it left is removed.
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
            Some(FileKind::Link) => return refuse("is a link, which would be replaced; name the directory itself, or a new one"),
            Some(_) => return refuse("exists and is not a directory"),
        }
        let place = Self { parent, name };
        place.remove_leftovers()?;
        Ok(place)
    }

    pub(super) fn name(&self) -> &OsStr {
        &self.name
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
                return Ok(tmp);
            }
        }
    }

    fn prefix(&self) -> String {
        format!(".{}.tmp-", self.name.to_string_lossy())
    }

    /// Whoever still writes into one holds its lock. Without locks nobody can tell, and nothing is removed.
    fn remove_leftovers(&self) -> Result<()> {
        for name in self.parent.names()? {
            let is_ours = name.to_string_lossy().starts_with(&self.prefix()) && self.parent.kind(&name)? == Some(FileKind::Dir);
            if is_ours && self.parent.open_dir(&name)?.try_lock()? == Lock::Held {
                self.parent.remove(&name)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_a_killed_export_left_goes_and_what_is_being_written_stays() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        let out = path("out");
        let live = ExportDir::open(&out).unwrap().begin().unwrap();
        fs::create_dir_all(path(".out.tmp-4711/deeper")).unwrap();
        fs::create_dir(path(".other.tmp-4711")).unwrap();
        let second = ExportDir::open(&out).unwrap();
        assert!(!path(".out.tmp-4711").exists() && path(".other.tmp-4711").exists() && !live.dir().is_removed().unwrap());
        let mut tmp_dir = second.begin().unwrap();
        drop(live);
        tmp_dir.publish(second.name()).unwrap();
        drop(tmp_dir);
        let names: Vec<_> = fs::read_dir(tmp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.len() == 2 && out.is_dir(), "{names:?}");
    }

    #[test]
    fn what_would_be_overwritten_is_refused() {
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
