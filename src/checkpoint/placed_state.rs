//! A file of state while it is written, by any thread at any place: bytes in chunks with a checksum each. A chunk may be written in several
//! parts; their checksums are combined.

use super::format::CHUNK_BYTES;
use crate::disk::{Dir, FileId, PlacedFile};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The file and the checksums so far.
pub(super) struct PlacedState {
    file: PlacedFile,
    /// By offset: bytes and checksum of a chunk, or of a part of a chunk.
    sums: Mutex<BTreeMap<u64, (usize, u32)>>,
}

/// A file that is on the disk, and the checksums of its chunks.
pub(super) struct WrittenState {
    pub(super) id: FileId,
    pub(super) crc32c: Vec<u32>,
}

impl PlacedState {
    pub(super) fn create(dir: &Dir, name: &str) -> Result<Self> {
        Ok(Self { file: PlacedFile::create(dir, name)?, sums: Mutex::default() })
    }

    /// See [`PlacedFile::reserve`].
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        self.file.reserve(bytes)
    }

    /// Writes `bytes` at `offset`. No byte may be written twice.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to_boundary = (CHUNK_BYTES - offset as usize % CHUNK_BYTES) % CHUNK_BYTES;
        let (head, rest) = bytes.split_at(bytes.len().min(to_boundary));
        let (chunks, tail) = rest.split_at(rest.len() / CHUNK_BYTES * CHUNK_BYTES);
        let mut at = offset;
        for part in [head, chunks, tail].into_iter().filter(|part| !part.is_empty()) {
            self.file.write_at(at, part)?;
            let sums = (at..).step_by(CHUNK_BYTES).zip(part.chunks(CHUNK_BYTES).map(|piece| (piece.len(), crc32c::crc32c(piece))));
            self.sums.lock().unwrap_or_else(PoisonError::into_inner).extend(sums);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Has the whole file on the disk.
    ///
    /// # Errors
    /// `Io` when the disk fails; `Resource` when a byte of the file was not written.
    pub(super) fn finish(self) -> Result<WrittenState> {
        self.file.sync()?;
        let id = self.file.id()?;
        let (mut crc32c, mut end) = (Vec::with_capacity(id.bytes.div_ceil(CHUNK_BYTES as u64) as usize), 0);
        for (at, (bytes, sum)) in self.sums.into_inner().unwrap_or_else(PoisonError::into_inner) {
            if at != end {
                return Err(Error::resource(format!("write {}", self.file.path().display()), format!("bytes {end}..{at} are missing")));
            }
            match crc32c.last_mut().filter(|_| at % CHUNK_BYTES as u64 != 0) {
                Some(chunk) => *chunk = crc32c::crc32c_combine(*chunk, sum, bytes),
                None => crc32c.push(sum),
            }
            end = at + bytes as u64;
        }
        if end == id.bytes {
            return Ok(WrittenState { id, crc32c });
        }
        Err(Error::resource(format!("write {}", self.file.path().display()), format!("{end} of {} bytes were written", id.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two chunks and a half, cut at `cuts` and written last part first, but for the part at `missing`.
    fn written(missing: Option<usize>) -> (Vec<u8>, Result<WrittenState>) {
        let tmp = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..5 * CHUNK_BYTES / 2).map(|i| (i % 251) as u8).collect();
        let file = PlacedState::create(&Dir::open(tmp.path()).unwrap(), "x").unwrap();
        file.reserve(bytes.len() as u64).unwrap();
        let cuts = [0, 5, 4097, CHUNK_BYTES - 3, 2 * CHUNK_BYTES + 9, bytes.len()];
        for part in (0..cuts.len() - 1).rev().filter(|part| Some(*part) != missing) {
            file.write(cuts[part] as u64, &bytes[cuts[part]..cuts[part + 1]]).unwrap();
        }
        (bytes, file.finish())
    }

    #[test]
    fn parts_in_any_order_have_the_checksums_of_whole_chunks() {
        let (bytes, state) = written(None);
        let state = state.unwrap();
        let expected: Vec<u32> = bytes.chunks(CHUNK_BYTES).map(crc32c::crc32c).collect();
        assert_eq!((state.crc32c, state.id.bytes), (expected, bytes.len() as u64));
    }

    #[test]
    fn a_part_that_was_not_written_is_an_error() {
        for (missing, bytes) in
            [(0, "bytes 0..5 are missing"), (1, "bytes 5..4097 are missing"), (4, "2097161 of 2621440 bytes were written")]
        {
            let message = written(Some(missing)).1.err().unwrap().to_string();
            assert!(message.starts_with("write ") && message.ends_with(bytes), "{message}");
        }
    }
}
