//! Renaming and removing entries, also on an overlay file system, where a directory of a lower layer cannot be renamed.

use super::out_file::attempt;
use super::{Dir, FileKind};
use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::readlinkat;
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};
use std::cmp::Reverse;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

impl Dir {
    /// Moves `from` to `to` in this directory.
    pub(crate) fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        self.rename_into(from, self, to)
    }

    /// Moves `from` to `to` in another directory of the same file system. A directory that cannot be renamed is copied and removed.
    pub(crate) fn rename_into(&self, from: impl AsRef<Path>, dir: &Self, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        match self.rename_only(from, dir, to) {
            Err(error) if is_cross_device(&error) && self.kind(from)? == Some(FileKind::Dir) => {
                self.copy_tree(from, dir, to)?;
                dir.sync()?;
                self.remove(from)
            }
            renamed => renamed,
        }
    }

    /// Renames the directory `from` to `to`. Returns false if the file system would need a copy.
    pub(crate) fn rename_in_place(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<bool> {
        match self.rename_only(from.as_ref(), self, to.as_ref()) {
            Err(error) if is_cross_device(&error) => Ok(false),
            renamed => renamed.map(|()| true),
        }
    }

    /// Removes `files`, given as paths in the directory `name`, in order, and then the directory and its folders if they are empty. Returns
    /// true if the directory was removed.
    pub(crate) fn remove_listed(&self, name: impl AsRef<Path>, files: &[PathBuf]) -> Result<bool> {
        attempt("remove", &self.join(&name), || {
            let dir = self.open_dir(&name).map_err(into_io)?;
            for file in files {
                let folder = match file.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                    Some(parent) => &dir.open_dir(parent).map_err(into_io)?,
                    None => &dir,
                };
                unlinkat(folder.file(), Path::new(file.file_name().unwrap_or_default()), UnlinkatFlags::NoRemoveDir)?;
            }
            for folder in nested_folders(files) {
                remove_if_empty(&dir, folder)?;
            }
            for child in dir.names().map_err(into_io)? {
                if dir.kind(&child).map_err(into_io)? == Some(FileKind::Dir) {
                    remove_if_empty(&dir, Path::new(&child))?;
                }
            }
            remove_if_empty(self, name.as_ref())
        })
    }

    /// Copies the directory `from` with its content to `to` in `dir`, durably. Links are copied as links.
    fn copy_tree(&self, from: &Path, dir: &Self, to: &Path) -> Result<()> {
        let (source, target) = (self.open_dir(from)?, dir.create_dir(to)?);
        for name in source.names()? {
            let name = Path::new(&name);
            match source.kind(name)? {
                Some(FileKind::Dir) => source.copy_tree(name, &target, name)?,
                Some(FileKind::File(_)) => source.copy_file(name, &target)?,
                Some(FileKind::Link) => {
                    let leads = |e: Errno| Error::io("copy", source.join(name), e.into());
                    let to = readlinkat(source.file(), name).map_err(leads)?;
                    symlinkat(to.as_os_str(), target.file(), name).map_err(leads)?;
                }
                Some(_) => return Err(Error::format(source.join(name), "neither a file nor a directory nor a link; move it away")),
                None => {}
            }
        }
        target.sync()
    }

    fn copy_file(&self, name: &Path, target: &Self) -> Result<()> {
        let Some(mut from) = self.open_file(name)? else { return Ok(()) };
        let mut to = target.create_file(name)?.into_file();
        let copied = || -> io::Result<()> {
            io::copy(&mut from, &mut to)?;
            fchmod(&to, Mode::from_bits_truncate(from.metadata()?.mode()))?;
            to.sync_all()
        };
        attempt("copy", &self.join(name), copied)
    }
}

/// Folders in folders that hold `files`, the deepest first.
fn nested_folders(files: &[PathBuf]) -> Vec<&Path> {
    let depth = |folder: &Path| folder.components().count();
    let mut folders: Vec<_> = files.iter().flat_map(|file| file.ancestors().skip(1)).filter(|folder| depth(folder) > 1).collect();
    folders.sort_by_key(|folder| (Reverse(depth(folder)), *folder));
    folders.dedup();
    folders
}

fn is_cross_device(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::EXDEV))
}

fn into_io(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        other => io::Error::other(other),
    }
}

fn remove_if_empty(dir: &Dir, name: &Path) -> io::Result<bool> {
    match unlinkat(dir.file(), name, UnlinkatFlags::RemoveDir) {
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        removed => Ok(removed.map(|()| true)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::faults;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_directory_that_cannot_be_renamed_is_copied_with_all_in_it() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), |name: &str| tmp.path().join(name));
        fs::create_dir_all(path("lower/inner")).unwrap();
        fs::write(path("lower/inner/file"), "content").unwrap();
        fs::set_permissions(path("lower/inner/file"), fs::Permissions::from_mode(0o751)).unwrap();
        symlink("/nowhere", path("lower/link")).unwrap();
        faults::arm_overlay(vec![path("lower")]);
        let moved = dir.rename("lower", "moved").and_then(|()| dir.rename_in_place("moved", "again"));
        faults::disarm();
        assert!(moved.unwrap() && !path("lower").exists());
        assert_eq!(fs::read_to_string(path("again/inner/file")).unwrap(), "content");
        assert_eq!(fs::metadata(path("again/inner/file")).unwrap().mode() & 0o777, 0o751);
        assert_eq!(fs::read_link(path("again/link")).unwrap(), Path::new("/nowhere"));
    }

    #[test]
    fn unlisted_files_and_targets_of_links_stay() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), |name: &str| tmp.path().join(name));
        fs::create_dir_all(path("d/model")).unwrap();
        fs::create_dir(path("safe")).unwrap();
        for file in ["d/state", "d/model/a", "d/model/mine", "safe/a"] {
            fs::write(path(file), "").unwrap();
        }
        let listed = ["state", "model/a"].map(PathBuf::from);
        assert!(!dir.remove_listed("d", &listed).unwrap() && path("d/model/mine").exists() && !path("d/state").exists());
        fs::remove_file(path("d/model/mine")).unwrap();
        assert!(dir.remove_listed("d", &[]).unwrap() && !path("d").exists());
        fs::create_dir(path("d")).unwrap();
        symlink(path("safe"), path("d/model")).unwrap();
        assert!(dir.remove_listed("d", &listed[1..]).is_err() && path("safe/a").exists());
    }
}
