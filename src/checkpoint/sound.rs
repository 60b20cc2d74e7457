//! Checks beyond the checksum: whether training can continue from a state.

use super::reader::Loaded;
use crate::dtype::first_nonfinite;
use crate::error::{Error, Result};
use crate::optim::StatePart;
use std::path::Path;

impl Loaded {
    /// [`Loaded::read_elems`] of a state that training can go on from: everything finite, second moments not below zero.
    ///
    /// # Errors
    /// Errors of [`Loaded::read_elems`]; `Format` with the tensor and its invalid element.
    pub fn read_state(&mut self, name: &str, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.read_elems(name, part, start, out)?;
        let below = || (part == StatePart::V).then(|| out.iter().position(|&x| x < 0.0)).flatten();
        match first_nonfinite(out).or_else(below) {
            Some(idx) => Err(unsound(self.dir(), part, name, out[idx], start + idx)),
            None => Ok(()),
        }
    }
}

fn unsound(dir: &Path, part: StatePart, name: &str, value: f32, idx: usize) -> Error {
    let state = ["parameters", "m", "v"][part as usize];
    let cause = format_args!(
        "{state} of {name} is {value:?} at element {idx}: training cannot continue from this value; use an earlier checkpoint"
    );
    Error::format(dir, cause)
}
