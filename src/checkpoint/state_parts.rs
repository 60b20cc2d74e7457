//! How the manifest describes the state of several processes in their files, and which descriptions are valid.

use crate::bucket::layout::{BucketLayout, Tier};
use crate::bucket::slices::Slices;
use crate::disk::canonical;
use crate::optim::CHUNK_BYTES;
use crate::optim::norm::BLOCK;
use crate::optim::state_array::StateArrays;
use crate::ranks::RANKS_MAX;
use serde::{Deserialize, Serialize};

/// More elements than any model has: bytes of them are counted without overflow.
pub(super) const ELEMS_MAX: u64 = 1 << 53;

/// How the state of several processes lies in their files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StateParts {
    /// Elements of the flat order.
    pub(super) flat_elems: u64,
    /// Elements of a bucket, of which each file has its part.
    pub(super) bucket_elems: u64,
    /// First element of each tensor in the flat order.
    pub(super) starts: Vec<u64>,
    /// Of each file, the checksums of its chunks.
    pub(super) state_crc32c: Vec<Vec<u32>>,
}

/// Name of the file of `rank`.
pub(super) fn file_name(rank: usize) -> String {
    format!("state-{rank}.bin")
}

/// Whether `name` is that of some rank's file.
pub(super) fn is_file_name(name: &str) -> bool {
    let rank = name.strip_prefix("state-").and_then(|rest| rest.strip_suffix(".bin"));
    rank.and_then(canonical::<usize>).is_some()
}

impl StateParts {
    /// Which elements the file of `rank` holds.
    pub(super) fn slices(&self, rank: usize) -> Slices {
        let layout = BucketLayout::new(self.flat_elems as usize, self.bucket_elems as usize, Tier::Host);
        Slices::new(layout, rank, self.state_crc32c.len())
    }

    pub(super) fn file_bytes(&self, rank: usize, arrays: StateArrays) -> u64 {
        arrays.bytes(self.slices(rank).elems()) as u64
    }

    /// Checks that the parts fit `tensors` with these numbers of elements.
    pub(super) fn validate(&self, tensors: &[u64], arrays: StateArrays) -> std::result::Result<(), String> {
        let Self { flat_elems, bucket_elems, starts, state_crc32c } = self;
        let blocks = |elems: u64| elems > 0 && elems.is_multiple_of(BLOCK as u64);
        if !blocks(*flat_elems) || !blocks(*bucket_elems) || bucket_elems > flat_elems || *flat_elems > ELEMS_MAX {
            return Err(format!("parts of {flat_elems} elements in buckets of {bucket_elems}"));
        }
        if !(2..=RANKS_MAX).contains(&state_crc32c.len()) {
            return Err(format!("{} files of state: 2 to {RANKS_MAX}", state_crc32c.len()));
        }
        let fits = |(start, elems): (&u64, &u64)| start.checked_add(*elems).is_some_and(|end| end <= *flat_elems);
        if starts.len() != tensors.len() || !starts.iter().zip(tensors).all(fits) {
            return Err(format!("tensors reach beyond {flat_elems} elements"));
        }
        let chunks = |rank: usize| self.file_bytes(rank, arrays).div_ceil(CHUNK_BYTES as u64);
        let wrong = (0..state_crc32c.len()).find(|rank| state_crc32c[*rank].len() as u64 != chunks(*rank));
        if let Some(rank) = wrong {
            Err(format!("{} has {} checksums, not {}", file_name(rank), state_crc32c[rank].len(), chunks(rank)))
        } else {
            Ok(())
        }
    }
}
