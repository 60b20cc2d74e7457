//! Gradients of attention that come block by block.

use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Adds what one block of queries gave to gradients of keys and values to the sums of the blocks before it, in fp32. Of keys that no later
/// block sees, the sum is rounded to where the block's own gradients were. The same adds up gradients of queries over blocks of keys: one half of
/// their columns stands where keys are, the other where values are.
#[derive(Clone, Copy, Debug)]
pub struct AddKeyGradients {
    /// What the block gave, `[keys, pitch]`, in `width` columns from each of `columns` on; others are not touched.
    pub dqkv: DeviceSlice,
    /// fp32 `[keys, 2, width]`.
    pub sums: DeviceSlice,
    /// Columns of a row of `dqkv`.
    pub pitch: usize,
    /// The first column of keys' gradients, and that of values'.
    pub columns: [usize; 2],
    /// Columns of each.
    pub width: usize,
    /// So many keys, the first ones, have a sum; that of others begins with 0.
    pub begun: usize,
    /// So many keys, the first ones, are seen by no later block.
    pub done: usize,
}

impl AddKeyGradients {
    /// Keys.
    pub(crate) fn keys(&self) -> usize {
        rows(self.dqkv, self.pitch)
    }
}

impl Kernel for AddKeyGradients {
    const NAME: &'static str = "add_key_gradients";

    fn check_shape(&self) -> Result<()> {
        let Self { pitch, columns: [keys, values], width, .. } = *self;
        let fits = keys.abs_diff(values) >= width && [keys, values].iter().all(|first| first.saturating_add(width) <= pitch);
        if fits && width > 0 {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("{width} columns from {keys} and {values} on, in rows of {pitch}")))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let keys = self.keys();
        operands![self; Update dqkv[keys * self.pitch], Update sums[keys * 2 * self.width] Float32]
    }

    /// Reads gradients, and of each sum what there was; writes one of both.
    fn bytes(&self) -> f64 {
        let (sums, gradient) = (self.sums.bytes() as f64, self.dqkv.dtype().bytes() as f64 / 4.0);
        sums * (2.0 + gradient)
    }
}
