//! Sums of attention's gradients over blocks.

use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Adds the key and value gradients of one block of queries to the fp32 sums of earlier blocks. For keys that no later block sees, the sum
/// is rounded and replaces the block's own gradients. The same kernel sums query gradients over blocks of keys, with one half of their
/// columns in place of keys and the other half in place of values.
#[derive(Clone, Copy, Debug)]
pub struct AddKeyGradients {
    /// Gradients of the block, `[keys, pitch]`, in `width` columns from each of `columns` on; other columns are not accessed.
    pub dqkv: DeviceSlice,
    /// fp32 `[keys, 2, width]`.
    pub sums: DeviceSlice,
    /// Columns of a row of `dqkv`.
    pub pitch: usize,
    /// First columns of key gradients and of value gradients.
    pub columns: [usize; 2],
    /// Columns of key gradients, and of value gradients.
    pub width: usize,
    /// Number of leading keys that already have a sum; the sums of the remaining keys begin with 0.
    pub begun: usize,
    /// Number of leading keys that no later block sees.
    pub done: usize,
}

impl AddKeyGradients {
    /// Number of keys.
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

    /// Reads the gradients and the present sums; writes either the gradient or the sum of each key.
    fn bytes(&self) -> f64 {
        let (sums, gradient) = (self.sums.bytes() as f64, self.dqkv.dtype().bytes() as f64 / 4.0);
        sums * (2.0 + gradient)
    }
}
