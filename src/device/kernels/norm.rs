//! RMS and layer normalisation by rows.

use crate::device::kernel::{Kernel, Operand, operands, rows};
use crate::device::slice::DeviceSlice;

/// `out = x * rstd * weight` by rows of the weight's length; with `plus_one` the factor is `1 + weight`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// Whether the factor is `1 + weight`.
    pub plus_one: bool,
    /// Added to the mean of squares.
    pub eps: f32,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    /// `1/sqrt(mean(x^2) + eps)`, fp32 `[rows]`, kept for the backward pass.
    pub rstd: DeviceSlice,
}

impl Kernel for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (cols, rows) = (self.weight.elems(), self.rstd.elems());
        operands![self; Read x[rows * cols], Write out[rows * cols]; Read weight[cols], Write rstd[rows] Float32]
    }
}

/// Adds the gradient of [`RmsNorm`]'s input to `dx`; `dweight (+)=` the gradient of the weight.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward {
    /// Gradient of the output, `[rows, cols]`.
    pub dout: DeviceSlice,
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// Whether the factor is `1 + weight`.
    pub plus_one: bool,
    /// Result of the forward pass, fp32 `[rows]`.
    pub rstd: DeviceSlice,
    /// `[rows, cols]`
    pub dx: DeviceSlice,
    /// `[cols]`
    pub dweight: DeviceSlice,
    /// Adds to `dweight`.
    pub accumulate: bool,
}

impl Kernel for RmsNormBackward {
    const NAME: &'static str = "rms_norm_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (cols, rows) = (self.weight.elems(), rows(self.x, self.weight.elems()));
        let n = rows * cols;
        operands![self; Read dout[n], Read x[n], Update dx[n]; Read weight[cols], Write dweight[cols], Read rstd[rows] Float32]
    }
}

/// `out = (x - mean) * rstd * weight + bias` by rows of the weight's length.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// `[cols]`
    pub bias: DeviceSlice,
    /// Added to the variance.
    pub eps: f32,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    /// Mean and rstd, fp32 `[rows, 2]`, kept for the backward pass.
    pub stats: DeviceSlice,
}

impl Kernel for LayerNorm {
    const NAME: &'static str = "layer_norm";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (cols, rows) = (self.weight.elems(), rows(self.x, self.weight.elems()));
        let n = rows * cols;
        operands![self; Read x[n], Write out[n]; Read weight[cols], Read bias[cols], Write stats[2 * rows] Float32]
    }
}

/// Adds the gradient of [`LayerNorm`]'s input to `dx`; `dweight (+)=` and `dbias (+)=` the gradients of the parameters.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormBackward {
    /// Gradient of the output, `[rows, cols]`.
    pub dout: DeviceSlice,
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[cols]`
    pub weight: DeviceSlice,
    /// Result of the forward pass, fp32 `[rows, 2]`.
    pub stats: DeviceSlice,
    /// `[rows, cols]`
    pub dx: DeviceSlice,
    /// `[cols]`
    pub dweight: DeviceSlice,
    /// `[cols]`
    pub dbias: DeviceSlice,
    /// Adds to `dweight` and `dbias`.
    pub accumulate: bool,
}

impl Kernel for LayerNormBackward {
    const NAME: &'static str = "layer_norm_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (cols, rows) = (self.weight.elems(), rows(self.x, self.weight.elems()));
        let n = rows * cols;
        operands![
            self;
            Read dout[n], Read x[n], Update dx[n];
            Read weight[cols], Write dweight[cols], Write dbias[cols], Read stats[2 * rows] Float32,
        ]
    }
}
