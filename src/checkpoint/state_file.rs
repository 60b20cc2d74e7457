//! A file of state that is read: bytes in chunks with a checksum each, in any order. Every returned byte was verified.

use super::format::CHUNK_BYTES;
use super::read_ahead::{self, READERS};
use crate::disk::{AlignedBytes, InFile};
use crate::error::{Error, Result};
use std::mem;
use std::path::Path;
use std::sync::Arc;

/// The open file.
pub(super) struct StateFile {
    file: InFile,
    bytes: u64,
    crc32c: Arc<[u32]>,
    /// Content of `current`, the chunk read last.
    chunk: AlignedBytes,
    current: Option<usize>,
}

impl StateFile {
    /// The file at `path`, of `bytes` bytes, in chunks with these checksums.
    pub(super) fn open(path: &Path, bytes: u64, crc32c: Vec<u32>) -> Result<Self> {
        Ok(Self { file: open_sized(path, bytes)?.direct(), bytes, crc32c: crc32c.into(), chunk: AlignedBytes::default(), current: None })
    }

    /// This file, opened again for another thread.
    pub(super) fn reopened(&self) -> Result<Self> {
        let file = open_sized(self.path(), self.bytes)?.direct();
        Ok(Self { file, bytes: self.bytes, crc32c: self.crc32c.clone(), chunk: AlignedBytes::default(), current: None })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Gives every chunk to `visit`, in order, checked. Several threads read.
    pub(super) fn for_each_chunk(&self, mut visit: impl FnMut(&[u8])) -> Result<()> {
        let readers = (0..READERS).map(|_| self.reopened()).collect::<Result<Vec<_>>>()?;
        let read = |file: &mut Self, idx, chunk: &mut AlignedBytes| file.read_chunk(idx, chunk);
        read_ahead::in_order(readers, self.crc32c.len(), read, |_, chunk| {
            visit(chunk.as_slice());
            Ok(())
        })
    }

    pub(super) fn read_at(&mut self, mut offset: u64, mut out: &mut [u8]) -> Result<()> {
        while !out.is_empty() {
            let start = (offset % CHUNK_BYTES as u64) as usize;
            let chunk = self.load_chunk((offset / CHUNK_BYTES as u64) as usize)?;
            let n = out.len().min(chunk.len() - start);
            let (head, rest) = out.split_at_mut(n);
            head.copy_from_slice(&chunk[start..start + n]);
            out = rest;
            offset += n as u64;
        }
        Ok(())
    }

    fn load_chunk(&mut self, idx: usize) -> Result<&[u8]> {
        if self.current != Some(idx) {
            self.current = None;
            let mut chunk = mem::take(&mut self.chunk);
            let read = self.read_chunk(idx, &mut chunk);
            self.chunk = chunk;
            read?;
            self.current = Some(idx);
        }
        Ok(self.chunk.as_slice())
    }

    /// Reads a chunk and compares its checksum.
    fn read_chunk(&self, idx: usize, chunk: &mut AlignedBytes) -> Result<()> {
        let start = idx as u64 * CHUNK_BYTES as u64;
        let bytes = (self.bytes - start).min(CHUNK_BYTES as u64) as usize;
        self.file.read_direct(start, bytes, chunk)?;
        if crc32c::crc32c(chunk.as_slice()) == self.crc32c[idx] {
            return Ok(());
        }
        let cause = format_args!("damaged: the checksum of bytes {start}..{} differs", start + bytes as u64);
        Err(Error::format(self.file.path(), cause))
    }
}

/// The file at `path`, which must have `bytes` bytes.
pub(super) fn open_sized(path: &Path, bytes: u64) -> Result<InFile> {
    let file = InFile::open(path)?;
    if file.bytes() != bytes {
        return Err(Error::format(path, format_args!("has {} bytes, should have {bytes}", file.bytes())));
    }
    Ok(file)
}
