//! What a checksum does not say: that training can go on from a state.

use super::reader::Loaded;
use crate::dtype::first_nonfinite;
use crate::error::{Error, Result};
use std::path::Path;

impl Loaded {
    /// [`Loaded::read_tensor`] of a state that training can go on from: everything finite, second moments not below zero.
    ///
    /// # Errors
    /// As there; `Format` with the tensor and the element that is not so.
    pub fn read_state(&mut self, name: &str, params: &mut [f32], m: &mut [f32], v: &mut [f32]) -> Result<()> {
        self.read_tensor(name, params, m, v)?;
        [("parameters", &*params), ("m", &*m), ("v", &*v)].into_iter().try_for_each(|(what, x)| {
            let idx = first_nonfinite(x);
            idx.map_or(Ok(()), |idx| Err(unsound(self.dir(), what, name, x[idx], idx)))
        })?;
        let below = v.iter().position(|&x| x < 0.0);
        below.map_or(Ok(()), |idx| Err(unsound(self.dir(), "v", name, v[idx], idx)))
    }
}

fn unsound(dir: &Path, what: &str, name: &str, value: f32, idx: usize) -> Error {
    let cause = format_args!("{what} of {name} is {value:?} at element {idx}: no training goes on from that; take an earlier checkpoint");
    Error::format(dir, cause)
}
