//! Reading state that lies in files of several processes.

use super::format::Manifest;
use super::state_file::StateFile;
use super::state_parts::{StateParts, file_name};
use crate::bucket::slices::Slices;
use crate::error::Result;
use crate::optim::state_array::{StateArrays, StatePart};
use std::path::Path;

/// The open files, each with its slices.
pub(super) struct PartFiles(Vec<(StateFile, Slices)>);

impl PartFiles {
    /// The files in `dir`.
    ///
    /// # Errors
    /// One that is missing or of another size.
    pub(super) fn open(dir: &Path, parts: &StateParts, arrays: StateArrays) -> Result<Self> {
        let open = |(rank, crc32c): (usize, &Vec<u32>)| {
            let file = StateFile::open(&dir.join(file_name(rank)), parts.file_bytes(rank, arrays), crc32c.clone())?;
            Ok((file, parts.slices(rank)))
        };
        parts.state_crc32c.iter().enumerate().map(open).collect::<Result<_>>().map(Self)
    }

    /// Compares every checksum.
    ///
    /// # Errors
    /// The first that differs.
    pub(super) fn verify(&self) -> Result<()> {
        self.0.iter().try_for_each(|(file, _)| file.for_each_chunk(|_| ()))
    }

    /// These files, opened again for another thread.
    pub(super) fn reopened(&self) -> Result<Self> {
        self.0.iter().map(|(file, own)| Ok((file.reopened()?, own.clone()))).collect::<Result<_>>().map(Self)
    }

    /// Reads elements of the flat order from `start` on.
    ///
    /// # Errors
    /// A checksum that differs.
    pub(super) fn read(&mut self, (part, arrays): (StatePart, StateArrays), start: usize, out: &mut [f32]) -> Result<()> {
        for (file, own) in &mut self.0 {
            let (first, array) = (arrays.offset(part, own.elems()), arrays[part]);
            for (flat, local) in own.owned(start..start + out.len()) {
                let at = (first + array.bytes(local)) as u64;
                array.load(&mut out[flat.start - start..flat.end - start], |bytes| file.read_at(at, bytes))?;
            }
        }
        Ok(())
    }
}

/// The place of the tensor at `nth` in the flat order.
pub(super) fn start_of(manifest: &Manifest, nth: usize) -> Option<usize> {
    manifest.parts.as_ref().map(|parts| parts.starts[nth] as usize)
}

#[cfg(test)]
#[path = "part_files_tests.rs"]
mod tests;
