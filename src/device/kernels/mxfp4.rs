//! Expansion of matrices in MXFP4.

use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::dtype::mxfp4::{BLOCK_ELEMS, Mxfp4};
use crate::error::Result;

/// Expands numbers in MXFP4 to bfloat16; bit-identical to [`Mxfp4::widen`].
#[derive(Clone, Copy, Debug)]
pub struct ExpandMxfp4 {
    /// uint8: two codes in each byte.
    pub codes: DeviceSlice,
    /// uint8: a scale for each block of 32 numbers.
    pub scales: DeviceSlice,
    /// bf16; whole blocks.
    pub out: DeviceSlice,
}

impl Kernel for ExpandMxfp4 {
    const NAME: &'static str = "expand_mxfp4";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.out.elems();
        let [codes, scales] = Mxfp4::bytes(n);
        operands![self; Read codes[codes] Uint8, Read scales[scales] Uint8, Write out[n] Bfloat16]
    }

    fn check_shape(&self) -> Result<()> {
        let n = self.out.elems();
        if n.is_multiple_of(BLOCK_ELEMS) {
            Ok(())
        } else {
            Err(refused(Self::NAME, format!("{n} numbers are no whole blocks of {BLOCK_ELEMS}")))
        }
    }
}
