//! RMS normalisation with a gate, the last operation of a layer with the delta rule.

use crate::device::kernel::{Kernel, Operand, operands, rows};
use crate::device::slice::DeviceSlice;

/// `out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)` by rows of the weight's length.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[rows, cols]`
    pub gate: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// Added to the mean of squares.
    pub eps: f32,
    /// `[rows, cols]`
    pub out: DeviceSlice,
}

impl Kernel for GatedNorm {
    const NAME: &'static str = "gated_norm";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let cols = self.weight.elems();
        let n = rows(self.x, cols) * cols;
        operands![self; Read x[n], Read gate[n], Write out[n]; Read weight[cols]]
    }
}

/// Overwrites `dx` and `dgate` with the gradients of [`GatedNorm`]'s inputs; `dweight (+)=` the gradient of the weight.
#[derive(Clone, Copy, Debug)]
pub struct GatedNormBackward {
    /// Gradient of the output, `[rows, cols]`.
    pub dout: DeviceSlice,
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[rows, cols]`
    pub gate: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// See [`GatedNorm::eps`].
    pub eps: f32,
    /// `[rows, cols]`
    pub dx: DeviceSlice,
    /// `[rows, cols]`
    pub dgate: DeviceSlice,
    /// `[cols]`
    pub dweight: DeviceSlice,
    /// Adds to `dweight`.
    pub accumulate: bool,
}

impl Kernel for GatedNormBackward {
    const NAME: &'static str = "gated_norm_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let cols = self.weight.elems();
        let n = rows(self.x, cols) * cols;
        operands![
            self;
            Read dout[n], Read x[n], Read gate[n], Write dx[n], Write dgate[n];
            Read weight[cols], Write dweight[cols],
        ]
    }
}
