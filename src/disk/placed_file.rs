//! A file that several threads write at offsets, past the page cache where its file system allows that.

use super::dir::Dir;
use super::out_file::{FileId, attempt};
use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Addresses, offsets and sizes of direct writes are multiples of this many bytes, the largest block of a disk.
pub(crate) const DIRECT_ALIGN: usize = 4096;

/// The file, opened twice.
pub(crate) struct PlacedFile {
    file: File,
    /// For writes past the page cache; `None` where the file system refuses to open the file for them.
    direct: Option<File>,
    /// Whether a direct write was refused.
    is_refused: AtomicBool,
    path: PathBuf,
}

impl PlacedFile {
    /// Creates the file `name` in `dir`, which must not exist.
    ///
    /// # Errors
    /// `Io` when it cannot be created.
    pub(crate) fn create(dir: &Dir, name: &str) -> Result<Self> {
        let file = dir.create_file(name)?.into_file();
        let direct = dir.open_at(name, OFlag::O_WRONLY | OFlag::O_DIRECT).ok();
        Ok(Self { file, direct, is_refused: AtomicBool::new(false), path: dir.join(name) })
    }

    /// Reserves the disk space of `bytes` bytes, so that a full disk is an error now and not in the middle of the writes. Some file systems
    /// cannot reserve space; there, nothing is reserved.
    ///
    /// # Errors
    /// `Io` when the disk is full, or the file would be too large.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let reserve = || loop {
            match fallocate(&self.file, FallocateFlags::empty(), 0, bytes as libc::off_t) {
                Err(Errno::EINTR) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(()),
                done => return Ok(done?),
            }
        };
        attempt("reserve", &self.path, reserve)
    }

    /// Writes `bytes` at `offset`: directly, if address, offset and size are multiples of [`DIRECT_ALIGN`].
    ///
    /// # Errors
    /// `Io` when the disk is full or fails.
    pub(crate) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        attempt("write", &self.path, || {
            if self.write_directly(offset, bytes)? {
                return Ok(());
            }
            self.file.write_all_at(bytes, offset)
        })
    }

    /// Returns false if the bytes cannot be written past the page cache.
    fn write_directly(&self, offset: u64, bytes: &[u8]) -> io::Result<bool> {
        let is_aligned = [offset as usize, bytes.len(), bytes.as_ptr().addr()].iter().all(|place| place.is_multiple_of(DIRECT_ALIGN));
        let Some(direct) = self.direct.as_ref().filter(|_| is_aligned && !self.is_refused.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        match direct.write_all_at(bytes, offset) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            done => done.map(|()| true),
        }
    }

    /// Identity and present size of the file.
    pub(crate) fn id(&self) -> Result<FileId> {
        let metadata = self.file.metadata().map_err(|e| Error::io("read", &self.path, e))?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino(), bytes: metadata.len() })
    }

    /// Syncs the file's content to the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        attempt("fsync", &self.path, || self.file.sync_all())
    }

    /// The path, for messages.
    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn aligned_and_other_writes_make_one_file_on_every_file_system() {
        for root in [std::env::temp_dir(), PathBuf::from("/dev/shm"), PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target")] {
            let Ok(tmp) = tempfile::tempdir_in(&root) else { continue };
            let file = PlacedFile::create(&Dir::open(tmp.path()).unwrap(), "x").unwrap();
            file.reserve(3 * DIRECT_ALIGN as u64 + 5).unwrap();
            let memory: Vec<u8> = (0..4 * DIRECT_ALIGN).map(|i| (i % 251) as u8).collect();
            let aligned = &memory[memory.as_ptr().align_offset(DIRECT_ALIGN)..][..2 * DIRECT_ALIGN];
            file.write_at(DIRECT_ALIGN as u64, aligned).unwrap();
            file.write_at(0, &memory[1..][..DIRECT_ALIGN]).unwrap();
            file.write_at(3 * DIRECT_ALIGN as u64, &memory[7..12]).unwrap();
            file.sync().unwrap();
            let expected = [&memory[1..][..DIRECT_ALIGN], aligned, &memory[7..12]].concat();
            assert!(fs::read(tmp.path().join("x")).unwrap() == expected, "{root:?}");
            assert_eq!(file.id().unwrap().bytes, expected.len() as u64);
        }
    }

    #[test]
    fn more_space_than_the_disk_has_is_refused_before_a_byte_is_written() {
        let tmp = tempfile::tempdir().unwrap();
        let file = PlacedFile::create(&Dir::open(tmp.path()).unwrap(), "x").unwrap();
        let message = file.reserve(1 << 60).unwrap_err().to_string();
        assert!(message.starts_with("reserve ") && message.contains("/x: "), "{message}");
    }
}
