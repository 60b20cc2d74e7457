//! Reads past the page cache, where the file system allows that: a checkpoint that is read once would displace pages that are needed again.

use super::{DIRECT_ALIGN, InFile};
use crate::error::{Error, Result};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes at an address that direct access needs.
#[derive(Default)]
pub(crate) struct AlignedBytes {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    /// The bytes that were read last.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    /// Has `len` bytes from now on. Returns these and those up to the next multiple of [`DIRECT_ALIGN`], with any content.
    fn reset(&mut self, len: usize) -> &mut [u8] {
        let whole = len.next_multiple_of(DIRECT_ALIGN);
        self.memory.resize(self.memory.len().max(whole + DIRECT_ALIGN), 0);
        (self.start, self.len) = (self.memory.as_ptr().align_offset(DIRECT_ALIGN), len);
        &mut self.memory[self.start..self.start + whole]
    }
}

impl InFile {
    /// This file for reads past the page cache, if its file system has them. From now on only [`InFile::read_direct`] may be called.
    pub(crate) fn direct(self) -> Self {
        // A file system that refuses the flag serves the same reads from the page cache.
        let _ = self.set_direct(true);
        self
    }

    /// Reads `len` bytes from byte `offset`, a multiple of [`DIRECT_ALIGN`], into `out`.
    ///
    /// # Errors
    /// `Io` when the disk fails, or the file has fewer bytes.
    pub(crate) fn read_direct(&self, offset: u64, len: usize, out: &mut AlignedBytes) -> Result<()> {
        let (space, mut done) = (out.reset(len), 0);
        while done < len {
            match self.file.read_at(&mut space[done..], offset + done as u64) {
                Ok(0) => return Err(Error::io("read", &self.path, io::ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => done += bytes,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) && self.is_direct() => {
                    self.set_direct(false).map_err(|e| Error::io("read", &self.path, e.into()))?;
                }
                Err(e) => return Err(Error::io("read", &self.path, e)),
            }
        }
        Ok(())
    }

    fn flags(&self) -> nix::Result<OFlag> {
        fcntl(&self.file, FcntlArg::F_GETFL).map(OFlag::from_bits_retain)
    }

    fn is_direct(&self) -> bool {
        self.flags().is_ok_and(|flags| flags.contains(OFlag::O_DIRECT))
    }

    fn set_direct(&self, is_direct: bool) -> nix::Result<()> {
        let mut flags = self.flags()?;
        flags.set(OFlag::O_DIRECT, is_direct);
        fcntl(&self.file, FcntlArg::F_SETFL(flags)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    #[test]
    fn direct_reads_have_the_bytes_of_the_file_on_every_file_system() {
        for root in [std::env::temp_dir(), PathBuf::from("/dev/shm"), PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target")] {
            let Ok(tmp) = tempfile::tempdir_in(&root) else { continue };
            let (path, bytes) = (tmp.path().join("x"), (0..3 * DIRECT_ALIGN + 5).map(|i| (i % 251) as u8).collect::<Vec<_>>());
            fs::write(&path, &bytes).unwrap();
            let (file, mut out) = (InFile::open(&path).unwrap().direct(), AlignedBytes::default());
            for (start, len) in [(0, DIRECT_ALIGN), (DIRECT_ALIGN, 2 * DIRECT_ALIGN + 5), (2 * DIRECT_ALIGN, 7), (0, 0)] {
                file.read_direct(start as u64, len, &mut out).unwrap();
                assert_eq!(out.as_slice(), &bytes[start..start + len], "{root:?}");
            }
            let beyond = file.read_direct(3 * DIRECT_ALIGN as u64, 6, &mut out).unwrap_err();
            assert!(matches!(beyond, Error::Io { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof));
        }
    }
}
