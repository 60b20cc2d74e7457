//! One number for the whole state of training: two runs with the same digest hold the same bits.

use super::reader;
use crate::data::checksum;
use crate::error::Result;
use crate::optim::state_array::{StateArrays, StatePart};
use sha2::{Digest, Sha256};
use std::path::Path;

/// SHA-256 over the step counter (u64) and then, for every tensor in the model's order, the arrays of the optimizer's state as they are
/// stored: for AdamW parameters in fp32, m and v in their format; all little endian.
pub struct StateDigest {
    sum: Sha256,
    arrays: StateArrays,
}

impl StateDigest {
    /// Starts with the number of optimizer steps done, of a state with these arrays.
    pub fn new(step: u64, arrays: StateArrays) -> Self {
        Self { sum: Sha256::new_with_prefix(step.to_le_bytes()), arrays }
    }

    /// Adds the next elements: of every tensor in the model's order first all parameters, then all of each further array.
    pub fn update(&mut self, part: StatePart, elems: &[f32]) {
        let add = |bytes: &[u8]| {
            self.sum.update(bytes);
            Ok(())
        };
        self.arrays[part].stored(elems, add).expect("nothing here fails");
    }

    /// The digest in hexadecimal.
    pub fn finish(self) -> String {
        checksum::hex(self.sum.finalize())
    }
}

/// The digest of the state in a checkpoint; every byte that enters it is verified.
///
/// # Errors
/// Errors of [`open`](super::open), or a checksum of the state that differs.
pub fn digest_checkpoint(dir: &Path) -> Result<String> {
    let loaded = reader::open(dir)?;
    let mut digest = StateDigest::new(loaded.manifest().trainer.optimizer_step, loaded.manifest().arrays());
    // `state.bin` holds the tensors exactly as `StateDigest::update` takes them.
    loaded.for_each_byte(|bytes| digest.sum.update(bytes))?;
    Ok(digest.finish())
}
