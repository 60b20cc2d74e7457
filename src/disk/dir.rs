//! An open directory. Names in it are resolved through its descriptor, so replacing its path by a link or another directory has no effect.
//! Names that are links are never followed.

use super::lock::{Lock, try_lock};
use super::out_file::{FileId, OutFile, attempt};
use crate::error::{Error, Result};
use crate::units::Bytes;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat, mkdirat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum bytes of a log. A log of a hundred million steps is smaller.
const LOG_BYTES_MAX: u64 = 64 << 30;

/// Type of a directory entry. Links are not followed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FileKind {
    /// A regular file with its size in bytes.
    File(u64),
    Dir,
    Link,
    CharDevice,
    /// A pipe, a socket or a block device.
    Other,
}

/// An open directory. `path` appears in messages.
#[derive(Debug)]
pub(crate) struct Dir {
    file: File,
    path: PathBuf,
}

impl Dir {
    /// Opens the directory at `path`, following links.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path);
        Ok(Self { file: open.map_err(|e| Error::io("open", path, e))?, path: path.to_path_buf() })
    }

    /// Opens the parent directory of `path`. Returns the file name, too. `None` for a path without a file name: `.`, `..`, `/`.
    pub(crate) fn of(path: &Path) -> Result<Option<(Self, OsString)>> {
        let Some(name) = path.file_name() else { return Ok(None) };
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Some((Self::open(parent)?, name.to_os_string())))
    }

    /// Duplicates the descriptor of the directory.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|e| Error::io("open", &self.path, e))?;
        Ok(Self { file, path: self.path.clone() })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Path of the directory, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of `name` in the directory, for messages.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        if self.path == Path::new(".") { name.as_ref().to_path_buf() } else { self.path.join(name) }
    }

    /// Type of the entry `name`; `None` if it does not exist.
    pub(crate) fn kind(&self, name: impl AsRef<Path>) -> Result<Option<FileKind>> {
        let stat = self.stat(name.as_ref()).map_err(|e| Error::io("read", self.join(&name), e))?;
        Ok(stat.map(|stat| match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
            SFlag::S_IFREG => FileKind::File(stat.st_size as u64),
            SFlag::S_IFDIR => FileKind::Dir,
            SFlag::S_IFLNK => FileKind::Link,
            SFlag::S_IFCHR => FileKind::CharDevice,
            _ => FileKind::Other,
        }))
    }

    /// Whether `name` is still the open `file`, and was not replaced.
    pub(crate) fn holds(&self, name: impl AsRef<Path>, file: &File) -> Result<bool> {
        let read = |e| Error::io("read", self.join(&name), e);
        let (stat, open) = (self.stat(name.as_ref()).map_err(read)?, file.metadata().map_err(read)?);
        Ok(stat.is_some_and(|stat| (stat.st_dev, stat.st_ino) == (open.dev(), open.ino())))
    }

    /// Names of all entries, in no particular order.
    pub(crate) fn names(&self) -> Result<Vec<OsString>> {
        self.list().map_err(|e| Error::io("read", &self.path, e))
    }

    /// Bytes that this user may still write to the file system; `None` if it reports none.
    pub(crate) fn free_bytes(&self) -> Result<Option<u64>> {
        let space = fstatvfs(&self.file).map_err(|e| Error::io("read the free space of", &self.path, e.into()))?;
        Ok((space.blocks() > 0).then(|| space.blocks_available() * space.fragment_size()))
    }

    /// Opens the regular file `name` for reading; `None` if it does not exist.
    pub(crate) fn open_file(&self, name: impl AsRef<Path>) -> Result<Option<File>> {
        let path = self.join(&name);
        match self.kind(&name)? {
            None => Ok(None),
            Some(FileKind::File(_)) => self.open_at(name, OFlag::O_RDONLY).map(Some).map_err(|e| Error::io("read", path, e)),
            Some(_) => Err(Error::format(path, "not a regular file")),
        }
    }

    /// Opens a log or a timeline, which is read whole, like [`Dir::open_file`]. Rejects files above the size of any log, such as sparse
    /// files.
    pub(crate) fn open_log(&self, name: impl AsRef<Path>) -> Result<Option<File>> {
        match self.kind(&name)? {
            Some(FileKind::File(bytes)) if bytes > LOG_BYTES_MAX => {
                let cause = format!("{} are more than any log has; move the file away", Bytes(bytes));
                Err(Error::format(self.join(&name), cause))
            }
            _ => self.open_file(name),
        }
    }

    /// Opens the directory `name`.
    pub(crate) fn open_dir(&self, name: impl AsRef<Path>) -> Result<Self> {
        let path = self.join(&name);
        match self.open_at(name, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
            Ok(file) => Ok(Self { file, path }),
            Err(e) => Err(Error::io("open", path, e)),
        }
    }

    /// Opens `name` with `flags`. Never blocks, even on a pipe.
    pub(crate) fn open_at(&self, name: impl AsRef<Path>, flags: OFlag) -> io::Result<File> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        Ok(openat(&self.file, name.as_ref(), flags, Mode::from_bits_truncate(0o666))?.into())
    }

    /// Creates a directory, which must not exist.
    pub(crate) fn create_dir(&self, name: impl AsRef<Path>) -> Result<Self> {
        let path = self.join(&name);
        attempt("create", &path, || Ok(mkdirat(&self.file, name.as_ref(), Mode::from_bits_truncate(0o777))?))?;
        self.open_dir(name)
    }

    /// Creates a file, which must not exist, for writing and reading.
    pub(crate) fn create_file(&self, name: impl AsRef<Path>) -> Result<OutFile> {
        let path = self.join(&name);
        let file = attempt("create", &path, || self.open_at(name, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL))?;
        Ok(OutFile::new(file, path))
    }

    /// Creates a file. Removes an existing file or link of that name first.
    #[cfg(any(feature = "hub", test))]
    pub(crate) fn recreate_file(&self, name: impl AsRef<Path>) -> Result<OutFile> {
        match unlinkat(&self.file, name.as_ref(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => self.create_file(name),
            Err(e) => Err(Error::io("remove", self.join(name), e.into())),
        }
    }

    /// Opens the file `name` for appending, and creates it if it does not exist.
    #[cfg(feature = "hub")]
    pub(crate) fn append_file(&self, name: impl AsRef<Path>) -> Result<OutFile> {
        let path = self.join(&name);
        let file = attempt("create", &path, || self.open_at(name, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_APPEND))?;
        Ok(OutFile::new(file, path))
    }

    /// Creates the link `name` to `target`, unless it already points there.
    #[cfg(feature = "hub")]
    pub(crate) fn link(&self, name: impl AsRef<Path>, target: &Path) -> Result<()> {
        let exists = nix::fcntl::readlinkat(&self.file, name.as_ref()).is_ok_and(|there| Path::new(&there) == target);
        let link = || Ok(nix::unistd::symlinkat(target, &self.file, name.as_ref())?);
        if exists { Ok(()) } else { attempt("link", &self.join(&name), link) }
    }

    /// Creates a file, writes `bytes` and syncs it.
    pub(crate) fn write_file(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<FileId> {
        let mut file = self.create_file(name)?;
        file.write(bytes)?;
        file.sync()?;
        file.id()
    }

    /// Identity of the regular file `name`; `None` if it does not exist or is not a regular file.
    pub(crate) fn file_id(&self, name: impl AsRef<Path>) -> Result<Option<FileId>> {
        let stat = self.stat(name.as_ref()).map_err(|e| Error::io("read", self.join(&name), e))?;
        let file = stat.filter(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG);
        Ok(file.map(|stat| FileId { device: stat.st_dev, inode: stat.st_ino, bytes: stat.st_size as u64 }))
    }

    /// Whether the mode of the directory lets its owner write.
    pub(crate) fn is_writable(&self) -> Result<bool> {
        Ok(self.metadata()?.mode() & Mode::S_IWUSR.bits() != 0)
    }

    /// Moves `from` to `to` in another directory of the same file system, by a rename only.
    pub(super) fn rename_only(&self, from: &Path, dir: &Self, to: &Path) -> Result<()> {
        attempt("rename", &self.join(from), || Ok(renameat(&self.file, from, &dir.file, to)?))
    }

    /// Removes `name` and, if it is a directory, everything in it. Links are removed, not followed.
    pub(crate) fn remove(&self, name: impl AsRef<Path>) -> Result<()> {
        attempt("remove", &self.join(&name), || self.remove_tree(name.as_ref()))
    }

    /// Removes the directory `name` if it is empty.
    pub(crate) fn remove_empty(&self, name: impl AsRef<Path>) -> Result<()> {
        let path = self.join(&name);
        attempt("remove", &path, || Ok(unlinkat(&self.file, name.as_ref(), UnlinkatFlags::RemoveDir)?))
    }

    /// Syncs the directory, so that its names are durable, if the file system supports that: see [`Dir::unsynced`].
    pub(crate) fn sync(&self) -> Result<()> {
        self.unsynced().map(drop)
    }

    /// Syncs the directory. Returns a warning if the file system does not support it, as may be with CIFS, AFS and shared folders of
    /// virtual machines.
    pub(crate) fn unsynced(&self) -> Result<Option<String>> {
        let refusal = attempt("fsync", &self.path, || refusal(self.file.sync_all()))?;
        let line = |cause| {
            let path = self.path.display();
            format!("{path}: this file system has no fsync of directories ({cause}): after a power failure its newest files may be missing")
        };
        Ok(refusal.map(line))
    }

    /// Tries to lock the directory. The lock is released when the last clone is dropped.
    pub(crate) fn try_lock(&self) -> Result<Lock> {
        try_lock(&self.file).map_err(|e| Error::io("lock", &self.path, e))
    }

    /// Whether the directory has been deleted.
    pub(crate) fn is_removed(&self) -> Result<bool> {
        Ok(self.metadata()?.nlink() == 0)
    }

    /// Updates the path if the directory was moved. Returns the old path if it changed.
    pub(crate) fn follow(&mut self) -> Result<Option<PathBuf>> {
        let own = self.metadata()?;
        let is_ours = |path: &Path| fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()));
        if is_ours(&self.path) {
            return Ok(None);
        }
        let now = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok().filter(|path| is_ours(path));
        Ok(now.map(|now| std::mem::replace(&mut self.path, now)))
    }

    /// Total bytes of the files in `name` and in the directories below.
    pub(crate) fn tree_bytes(&self, name: impl AsRef<Path>) -> Result<u64> {
        match self.kind(&name)? {
            Some(FileKind::File(bytes)) => Ok(bytes),
            Some(FileKind::Dir) => {
                let dir = self.open_dir(&name)?;
                dir.names()?.iter().try_fold(0, |sum, child| Ok(sum + dir.tree_bytes(child)?))
            }
            _ => Ok(0),
        }
    }

    fn metadata(&self) -> Result<fs::Metadata> {
        self.file.metadata().map_err(|e| Error::io("read", &self.path, e))
    }

    fn stat(&self, name: &Path) -> io::Result<Option<FileStat>> {
        match fstatat(&self.file, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => Ok(None),
            stat => Ok(Some(stat?)),
        }
    }

    fn list(&self) -> io::Result<Vec<OsString>> {
        // Opened anew, because listing moves the offset, which clones of a descriptor share.
        let mut listing = nix::dir::Dir::openat(&self.file, ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        let mut names = vec![];
        for entry in listing.iter() {
            let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_os_string();
            names.extend((name != "." && name != "..").then_some(name));
        }
        Ok(names)
    }

    fn remove_tree(&self, name: &Path) -> io::Result<()> {
        match unlinkat(&self.file, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => {}
            done => return Ok(done?),
        }
        let file = self.open_at(name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let dir = Self { file, path: PathBuf::new() };
        dir.list()?.iter().try_for_each(|child| dir.remove_tree(Path::new(child)))?;
        Ok(unlinkat(&self.file, name, UnlinkatFlags::RemoveDir)?)
    }
}

/// The error of a directory sync that the file system does not support; `None` after a successful sync. Real disk errors are returned as
/// errors.
fn refusal(synced: io::Result<()>) -> io::Result<Option<io::Error>> {
    match synced {
        Ok(()) => Ok(None),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EBADF | libc::ENOSYS)) => Ok(Some(e)),
        Err(e) => Err(e),
    }
}

/// A directory with a temporary name. It is removed when dropped, unless it was published.
pub(crate) struct TmpDir {
    parent: Dir,
    name: PathBuf,
    dir: Dir,
    published: bool,
}

impl TmpDir {
    /// Creates `name` in `parent`, where it must not exist.
    pub(crate) fn create(parent: &Dir, name: impl AsRef<Path>) -> Result<Self> {
        let name = name.as_ref().to_path_buf();
        Ok(Self { parent: parent.try_clone()?, dir: parent.create_dir(&name)?, name, published: false })
    }

    pub(crate) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// The parent directory.
    pub(crate) fn parent(&self) -> &Dir {
        &self.parent
    }

    /// Renames the directory to `name`, which must be absent or an empty directory.
    pub(crate) fn publish(&mut self, name: impl AsRef<Path>) -> Result<()> {
        self.parent.rename(&self.name, name)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TmpDir {
    fn drop(&mut self) {
        if !self.published {
            // The earlier error is the one to report.
            let _ = self.parent.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn dir() -> (tempfile::TempDir, Dir) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        (tmp, dir)
    }

    #[test]
    fn a_file_system_without_fsync_of_directories_is_distinguished_from_a_failing_disk() {
        let synced = |errno| refusal(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::EINVAL, libc::ENOTSUP, libc::EBADF, libc::ENOSYS] {
            assert_eq!(synced(errno).unwrap().unwrap().raw_os_error(), Some(errno));
        }
        for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::ESTALE, libc::EROFS] {
            assert_eq!(synced(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        assert!(refusal(Ok(())).unwrap().is_none() && dir().1.unsynced().unwrap().is_none());
    }

    #[test]
    fn a_log_of_holes_is_refused_before_it_is_read() {
        let (tmp, dir) = dir();
        let file = File::create(tmp.path().join("metrics.jsonl")).unwrap();
        file.set_len(LOG_BYTES_MAX).unwrap();
        assert!(dir.open_log("metrics.jsonl").unwrap().is_some() && dir.open_log("none").unwrap().is_none());
        file.set_len(LOG_BYTES_MAX + 1).unwrap();
        let refusal = dir.open_log("metrics.jsonl").unwrap_err().to_string();
        assert!(refusal.ends_with("metrics.jsonl: 64.0 GiB are more than any log has; move the file away"), "{refusal}");
    }

    #[test]
    fn a_link_is_removed_replaced_and_moved_and_never_followed() {
        let (tmp, dir) = dir();
        fs::create_dir(tmp.path().join("safe")).unwrap();
        let victim = tmp.path().join("safe/victim");
        fs::write(&victim, "mine").unwrap();
        for name in ["a", "b", "tree"] {
            symlink(if name == "tree" { tmp.path().join("safe") } else { victim.clone() }, tmp.path().join(name)).unwrap();
        }
        assert_eq!(dir.kind("a").unwrap(), Some(FileKind::Link));
        assert!(dir.create_file("a").is_err() && dir.open_file("a").is_err() && dir.open_dir("tree").is_err());
        dir.recreate_file("a").unwrap().write(b"theirs").unwrap();
        dir.rename("b", "c").unwrap();
        dir.remove("tree").unwrap();
        assert_eq!((fs::read_to_string(&victim).unwrap(), dir.kind("c").unwrap()), ("mine".into(), Some(FileKind::Link)));
        assert_eq!(dir.kind("a").unwrap(), Some(FileKind::File(6)));
    }

    #[test]
    fn a_tree_is_measured_and_removed_whole() {
        let (tmp, dir) = dir();
        let (outer, inner) = (dir.create_dir("outer").unwrap(), "inner");
        let inner = outer.create_dir(inner).unwrap();
        inner.write_file("five", b"12345").unwrap();
        outer.write_file("two", b"12").unwrap();
        symlink("/", tmp.path().join("outer/root")).unwrap();
        assert_eq!(dir.tree_bytes("outer").unwrap(), 7);
        dir.remove("outer").unwrap();
        assert!(dir.names().unwrap().is_empty() && outer.is_removed().unwrap() && !dir.is_removed().unwrap());
        assert!(dir.remove("outer").is_err());
    }

    #[test]
    fn an_entry_that_replaces_the_path_has_no_effect() {
        let (tmp, outer) = dir();
        let mut dir = outer.create_dir("run").unwrap();
        fs::rename(tmp.path().join("run"), tmp.path().join("moved")).unwrap();
        fs::create_dir(tmp.path().join("elsewhere")).unwrap();
        symlink("elsewhere", tmp.path().join("run")).unwrap();
        dir.write_file("file", b"1").unwrap();
        assert!(tmp.path().join("moved/file").exists() && !tmp.path().join("elsewhere/file").exists());
        assert_eq!(dir.follow().unwrap(), Some(tmp.path().join("run")));
        assert_eq!((dir.follow().unwrap(), dir.path()), (None, fs::canonicalize(tmp.path()).unwrap().join("moved").as_path()));
    }

    #[test]
    fn a_temporary_directory_goes_unless_it_is_published() {
        let (_tmp, dir) = dir();
        drop(TmpDir::create(&dir, "beside").unwrap());
        assert!(dir.names().unwrap().is_empty());
        let mut published = TmpDir::create(&dir, "beside").unwrap();
        published.publish("name").unwrap();
        drop(published);
        assert_eq!(dir.names().unwrap(), ["name"]);
    }
}
