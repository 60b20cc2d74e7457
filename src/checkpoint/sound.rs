//! Checks beyond the checksum: whether training can continue from a state.

use super::reader::Loaded;
use crate::dtype::first_nonfinite;
use crate::error::{Error, Result};
use crate::optim::state_array::{StateArray, StatePart};
use std::path::Path;

impl Loaded {
    /// [`Loaded::read_elems`] of a state that training can go on from: everything finite, and no value below zero in an array without
    /// such values.
    ///
    /// # Errors
    /// Errors of [`Loaded::read_elems`]; `Format` with the tensor and its invalid element.
    pub fn read_state(&mut self, name: &str, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.read_elems(name, part, start, out)?;
        let array = self.manifest().arrays()[part];
        let below = || array.is_nonnegative.then(|| out.iter().position(|&x| x < 0.0)).flatten();
        match first_nonfinite(out).or_else(below) {
            Some(idx) => Err(unsound(self.dir(), &array, name, out[idx], start + idx)),
            None => Ok(()),
        }
    }
}

fn unsound(dir: &Path, array: &StateArray, name: &str, value: f32, idx: usize) -> Error {
    let state = array.name;
    let cause = format_args!(
        "{state} of {name} is {value:?} at element {idx}: training cannot continue from this value; use an earlier checkpoint"
    );
    Error::format(dir, cause)
}
