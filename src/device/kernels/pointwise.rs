//! Elementwise activations.

use crate::device::kernel::{Kernel, Operand, operands, rows};
use crate::device::slice::DeviceSlice;

/// `out[r,c] = silu(gate_up[r,c]) * gate_up[r, c + cols]`
#[derive(Clone, Copy, Debug)]
pub struct Swiglu {
    /// `[rows, 2 cols]`: gate, then up projection.
    pub gate_up: DeviceSlice,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    /// Columns of the output.
    pub cols: usize,
}

impl Kernel for Swiglu {
    const NAME: &'static str = "swiglu";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = rows(self.out, self.cols) * self.cols;
        operands![self; Read gate_up[2 * n], Write out[n]]
    }
}

/// Overwrites `dgate_up` with the gradient of [`Swiglu`]'s input.
#[derive(Clone, Copy, Debug)]
pub struct SwigluBackward {
    /// Gradient of the output, `[rows, cols]`.
    pub dout: DeviceSlice,
    /// `[rows, 2 cols]`
    pub gate_up: DeviceSlice,
    /// `[rows, 2 cols]`
    pub dgate_up: DeviceSlice,
    /// Columns of the output.
    pub cols: usize,
}

impl Kernel for SwigluBackward {
    const NAME: &'static str = "swiglu_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = rows(self.dout, self.cols) * self.cols;
        operands![self; Read dout[n], Read gate_up[2 * n], Write dgate_up[2 * n]]
    }
}

/// `out[r,c] = gelu(gate_up[r,c]) * gate_up[r, c + cols]`, with the tanh form of GELU.
#[derive(Clone, Copy, Debug)]
pub struct Geglu {
    /// `[rows, 2 cols]`: gate, then up projection.
    pub gate_up: DeviceSlice,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    /// Columns of the output.
    pub cols: usize,
}

impl Kernel for Geglu {
    const NAME: &'static str = "geglu";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = rows(self.out, self.cols) * self.cols;
        operands![self; Read gate_up[2 * n], Write out[n]]
    }
}

/// Overwrites `dgate_up` with the gradient of [`Geglu`]'s input.
#[derive(Clone, Copy, Debug)]
pub struct GegluBackward {
    /// Gradient of the output, `[rows, cols]`.
    pub dout: DeviceSlice,
    /// `[rows, 2 cols]`
    pub gate_up: DeviceSlice,
    /// `[rows, 2 cols]`
    pub dgate_up: DeviceSlice,
    /// Columns of the output.
    pub cols: usize,
}

impl Kernel for GegluBackward {
    const NAME: &'static str = "geglu_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = rows(self.dout, self.cols) * self.cols;
        operands![self; Read dout[n], Read gate_up[2 * n], Write dgate_up[2 * n]]
    }
}

/// GELU, tanh form (`gelu_new`, `gelu_pytorch_tanh`).
#[derive(Clone, Copy, Debug)]
pub struct Gelu {
    /// Any size.
    pub x: DeviceSlice,
    /// Same size as `x`.
    pub out: DeviceSlice,
}

impl Kernel for Gelu {
    const NAME: &'static str = "gelu";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read x[self.out.elems()], Write out[self.x.elems()]]
    }
}

/// Overwrites `dx` with the gradient of [`Gelu`]'s input.
#[derive(Clone, Copy, Debug)]
pub struct GeluBackward {
    pub dout: DeviceSlice,
    pub x: DeviceSlice,
    /// Same size as `x`; may be `dout`.
    pub dx: DeviceSlice,
}

impl Kernel for GeluBackward {
    const NAME: &'static str = "gelu_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read x[self.dx.elems()], Write dx[self.x.elems()], ReadInPlace dout[self.x.elems()]]
    }
}

/// `out = scale * x (+ base)`.
#[derive(Clone, Copy, Debug)]
pub struct ScaleAdd {
    /// Any size.
    pub x: DeviceSlice,
    pub scale: f32,
    /// Same size as `x`; `None`: no addend.
    pub base: Option<DeviceSlice>,
    /// Same size as `x`; may be `x`.
    pub out: DeviceSlice,
}

impl Kernel for ScaleAdd {
    const NAME: &'static str = "scale_add";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.out.elems();
        operands![self; ReadInPlace x[n], Read base[n], Write out[self.x.elems()]]
    }
}

/// `out = x * sigmoid(gate)`.
#[derive(Clone, Copy, Debug)]
pub struct SigmoidGate {
    /// Any size.
    pub x: DeviceSlice,
    /// Same size as `x`.
    pub gate: DeviceSlice,
    /// Same size as `x`.
    pub out: DeviceSlice,
}

impl Kernel for SigmoidGate {
    const NAME: &'static str = "sigmoid_gate";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.out.elems();
        operands![self; Read x[n], Read gate[n], Write out[self.x.elems()]]
    }
}

/// Overwrites `dx` and `dgate` with the gradients of [`SigmoidGate`]'s inputs.
#[derive(Clone, Copy, Debug)]
pub struct SigmoidGateBackward {
    /// Gradient of the output.
    pub dout: DeviceSlice,
    /// Same size as `dout`.
    pub x: DeviceSlice,
    /// Same size as `dout`.
    pub gate: DeviceSlice,
    /// Same size as `dout`.
    pub dx: DeviceSlice,
    /// Same size as `dout`.
    pub dgate: DeviceSlice,
}

impl Kernel for SigmoidGateBackward {
    const NAME: &'static str = "sigmoid_gate_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.dout.elems();
        operands![self; Read dout[self.dx.elems()], Read x[n], Read gate[n], Write dx[n], Write dgate[n]]
    }
}
