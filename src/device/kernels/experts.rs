//! What experts do to their rows between the two products.

use crate::device::kernel::{Kernel, Operand, operands, rows};
use crate::device::slice::DeviceSlice;

/// How an expert's gate and up make its activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// [`Swiglu`](super::pointwise::Swiglu): all gates, then all ups.
    Swiglu,
    /// [`ClampedSwiglu`]: gate and up in turns.
    Clamped { alpha: f32, limit: f32 },
}

/// `out[r,c] = (u + 1) * g * sigmoid(alpha * g)`, where `g` is the gate, at most `limit`, and `u` is up, between `-limit` and `limit`.
#[derive(Clone, Copy, Debug)]
pub struct ClampedSwiglu {
    /// `[rows, 2 cols]`: gate and up in turns.
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
    /// Which choice each row is, int32 `[rows]`.
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

/// Backward of an expert's activation `a`, of which `da` is the gradient as if the expert's weight were 1.
///
/// The weight `w` of a row comes in here, so that neither the experts' results nor their weighted gradients are ever stored: with `dout`, the
/// gradient of a token, `y = a W + bias` and `da = dout W^T`, the gradient of the weight is `<dout, y> = <da, a> + <dout, bias>`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBackward {
    /// `[rows, cols]`
    pub da: DeviceSlice,
    /// `[rows, 2 cols]`
    pub gate_up: DeviceSlice,
    /// By choice, fp32 `[T, k]`.
    pub weights: DeviceSlice,
    /// Which choice each row is, int32 `[rows]`.
    pub entries: DeviceSlice,
    /// The gradient of `gate_up`, times the row's weight: `[rows, 2 cols]`.
    pub dgate_up: DeviceSlice,
    /// The activation times the row's weight, `[rows, cols]`: with `dout` it makes the gradient of the second product's weight.
    pub weighted: DeviceSlice,
    /// The gradient of each row's weight: fp32 `[rows]`. With a bias it is what [`ExpertBiasDot`] adds to.
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
    /// Which choice each row is, int32 `[rows]`.
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
