//! Activations, biases and gradients between the two matrix products of experts.

use crate::device::kernel::{Kernel, Operand, operands, rows};
use crate::device::slice::DeviceSlice;

/// An expert's activation of gate and up projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// [`Swiglu`](super::pointwise::Swiglu): all gates, then all up projections.
    Swiglu,
    /// [`Geglu`](super::pointwise::Geglu): all gates, then all up projections.
    Geglu,
    /// [`ClampedSwiglu`]: gate and up projection interleaved.
    Clamped { alpha: f32, limit: f32 },
}

/// `out[r,c] = (u + 1) * g * sigmoid(alpha * g)`, where `g` is the gate, at most `limit`, and `u` is the up projection, between `-limit`
/// and `limit`.
#[derive(Clone, Copy, Debug)]
pub struct ClampedSwiglu {
    /// `[rows, 2 cols]`: gate and up projection interleaved.
    pub gate_up: DeviceSlice,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    pub alpha: f32,
    pub limit: f32,
}

impl Kernel for ClampedSwiglu {
    const NAME: &'static str = "clamped_swiglu";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.out.elems();
        operands![self; Read gate_up[2 * n], Write out[n]]
    }
}

/// Adds to every row the bias of its expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBias {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// `[experts, cols]`
    pub bias: DeviceSlice,
    /// int32 `[T, k]`, below `experts`.
    pub experts: DeviceSlice,
    /// Index of the routing choice of each row, int32 `[rows]`.
    pub entries: DeviceSlice,
    pub cols: usize,
}

impl Kernel for ExpertBias {
    const NAME: &'static str = "expert_bias";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, bias) = (self.entries.elems(), rows(self.bias, self.cols) * self.cols);
        operands![self; Update x[rows * self.cols]; Read bias[bias], Read experts[rows] Int32, Read entries[rows] Int32]
    }
}

/// Backward pass of an expert's activation `a`; `da` is its gradient for an expert weight of 1.
///
/// The routing weight `w` of a row is applied here, so that neither the experts' results nor their weighted gradients are ever stored. With
/// the gradient `dout` of a token, `y = a W + bias` and `da = dout W^T`, the gradient of the routing weight is
/// `<dout, y> = <da, a> + <dout, bias>`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBackward {
    /// `[rows, cols]`
    pub da: DeviceSlice,
    /// `[rows, 2 cols]`
    pub gate_up: DeviceSlice,
    /// Routing weights by choice, fp32 `[T, k]`.
    pub weights: DeviceSlice,
    /// Index of the routing choice of each row, int32 `[rows]`.
    pub entries: DeviceSlice,
    /// The gradient of `gate_up`, times the row's weight: `[rows, 2 cols]`.
    pub dgate_up: DeviceSlice,
    /// The activation times the row's weight, `[rows, cols]`. Its product with `dout` is the gradient of the second matrix.
    pub weighted: DeviceSlice,
    /// The gradient of each row's weight: fp32 `[rows]`. For experts with a bias, [`ExpertBiasDot`] adds to it.
    pub dweights: DeviceSlice,
    pub activation: ExpertActivation,
    pub cols: usize,
}

impl Kernel for ExpertBackward {
    const NAME: &'static str = "expert_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, n) = (self.entries.elems(), self.entries.elems() * self.cols);
        operands![
            self;
            Read da[n], Read gate_up[2 * n], Write dgate_up[2 * n], Write weighted[n];
            Read weights[rows] Float32, Read entries[rows] Int32, Write dweights[rows] Float32,
        ]
    }
}

/// `dweights[r] += <dout[r], bias of r's expert>`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiasDot {
    /// `[rows, cols]`
    pub dout: DeviceSlice,
    /// `[experts, cols]`
    pub bias: DeviceSlice,
    /// int32 `[T, k]`, below `experts`.
    pub experts: DeviceSlice,
    /// Index of the routing choice of each row, int32 `[rows]`.
    pub entries: DeviceSlice,
    /// fp32 `[rows]`
    pub dweights: DeviceSlice,
    pub cols: usize,
}

impl Kernel for ExpertBiasDot {
    const NAME: &'static str = "expert_bias_dot";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, bias) = (self.entries.elems(), rows(self.bias, self.cols) * self.cols);
        operands![
            self;
            Read dout[rows * self.cols];
            Read bias[bias], Read experts[rows] Int32, Read entries[rows] Int32, Update dweights[rows] Float32,
        ]
    }
}

/// `out[t,j] = weights[t,j] * scale[experts[t,j]]`: the weights of choices, each times the factor of its expert.
#[derive(Clone, Copy, Debug)]
pub struct ScaleChoices {
    /// fp32 `[T, k]`
    pub weights: DeviceSlice,
    /// int32 `[T, k]`, below the number of experts.
    pub experts: DeviceSlice,
    /// `[experts]`
    pub scale: DeviceSlice,
    /// fp32 `[T, k]`
    pub out: DeviceSlice,
}

impl Kernel for ScaleChoices {
    const NAME: &'static str = "scale_choices";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (choices, experts) = (self.weights.elems(), self.scale.elems());
        operands![
            self;
            Read weights[choices] Float32, Read experts[choices] Int32, Write out[choices] Float32;
            Read scale[experts],
        ]
    }
}

/// Backward pass of [`ScaleChoices`], from the gradients of the rows' scaled weights: `dscale[e] (+)=` the sum of `weights * dweights` over the
/// rows of expert `e`, and then each row's `dweights *= scale[e]`.
#[derive(Clone, Copy, Debug)]
pub struct ScaleChoicesBackward {
    /// Weights before the factor, by choice: fp32 `[T, k]`.
    pub weights: DeviceSlice,
    /// Index of the routing choice of each row, int32 `[rows]`.
    pub entries: DeviceSlice,
    /// Bounds of the experts' rows, int32 `[experts + 1]`.
    pub bounds: DeviceSlice,
    /// `[experts]`
    pub scale: DeviceSlice,
    /// fp32 `[rows]`
    pub dweights: DeviceSlice,
    /// `[experts]`
    pub dscale: DeviceSlice,
    /// Adds to `dscale`.
    pub accumulate: bool,
}

impl Kernel for ScaleChoicesBackward {
    const NAME: &'static str = "scale_choices_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, experts) = (self.entries.elems(), self.scale.elems());
        operands![
            self;
            Read weights[rows] Float32, Read entries[rows] Int32, Update dweights[rows] Float32;
            Read bounds[experts + 1] Int32, Read scale[experts], Write dscale[experts],
        ]
    }
}
