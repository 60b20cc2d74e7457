//! One number for the whole state of training: two runs with the same digest hold the same bits.

use super::reader;
use crate::data::checksum;
use crate::error::Result;
use sha2::{Digest, Sha256};
use std::path::Path;

/// SHA-256 over the step counter (u64) and then, for every tensor in the model's order, parameters, m and v (fp32);
/// all little endian.
pub struct StateDigest(Sha256);

impl StateDigest {
    /// Starts with the number of optimizer steps done.
    pub fn new(step: u64) -> Self {
        Self(Sha256::new_with_prefix(step.to_le_bytes()))
    }

    /// Adds the next elements: of every tensor in the model's order first all parameters, then all of m, then all of v.
    pub fn update(&mut self, elems: &[f32]) {
        self.0.update(bytemuck::cast_slice::<f32, u8>(elems));
    }

    /// The digest in hexadecimal.
    pub fn finish(self) -> String {
        checksum::hex(self.0.finalize())
    }
}

/// The digest of the state in a checkpoint; every byte that enters it is verified.
///
/// # Errors
/// Whatever [`open`](super::open) finds wrong, or a checksum of the state that differs.
pub fn digest_checkpoint(dir: &Path) -> Result<String> {
    let mut loaded = reader::open(dir)?;
    let mut digest = StateDigest::new(loaded.manifest().trainer.optimizer_step);
    // `state.bin` holds the tensors exactly as `StateDigest::update` takes them.
    loaded.for_each_chunk(|chunk| digest.0.update(chunk))?;
    Ok(digest.finish())
}
