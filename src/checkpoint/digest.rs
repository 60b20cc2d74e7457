//! One number for the whole state of training: two runs with the same digest hold the same bits.

use super::reader;
use crate::data::checksum;
use crate::error::Result;
use crate::optim::StatePart;
use crate::optim::moments::Moments;
use sha2::{Digest, Sha256};
use std::path::Path;

/// SHA-256 over the step counter (u64) and then, for every tensor in the model's order, parameters, m and v as they are stored: parameters
/// in fp32, moments in their format; all little endian.
pub struct StateDigest {
    sum: Sha256,
    moments: Moments,
}

impl StateDigest {
    /// Starts with the number of optimizer steps done, of a state whose moments are in this format.
    pub fn new(step: u64, moments: Moments) -> Self {
        Self { sum: Sha256::new_with_prefix(step.to_le_bytes()), moments }
    }

    /// Adds the next elements: of every tensor in the model's order first all parameters, then all of m, then all of v.
    pub fn update(&mut self, part: StatePart, elems: &[f32]) {
        let add = |bytes: &[u8]| {
            self.sum.update(bytes);
            Ok(())
        };
        self.moments.stored(part, elems, add).expect("nothing here fails");
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
    let mut loaded = reader::open(dir)?;
    let mut digest = StateDigest::new(loaded.manifest().trainer.optimizer_step, loaded.manifest().moments());
    // `state.bin` holds the tensors exactly as `StateDigest::update` takes them.
    loaded.for_each_byte(|bytes| digest.sum.update(bytes))?;
    Ok(digest.finish())
}
