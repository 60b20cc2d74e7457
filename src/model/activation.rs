//! The activation between the two matrices of an MLP.

use super::layer_shape::{Act, Ffn};
use crate::device::{DeviceSlice, Geglu, GegluBackward, Gelu, GeluBackward, Kernels, ScaleCell, Swiglu, SwigluBackward, WithScale};
use crate::error::Result;

/// Computes the activation `out` from the first matrix's output `x`, and its scale in 8 bits into `cell`.
pub(super) fn activate<D: Kernels>(dev: &mut D, ffn: Ffn, x: DeviceSlice, out: DeviceSlice, cell: Option<ScaleCell>) -> Result<()> {
    let (cols, gate_up) = (ffn.width, x);
    match ffn.act {
        Act::Swiglu => dev.launch(WithScale { kernel: Swiglu { gate_up, out, cols }, cell }),
        Act::Geglu => dev.launch(WithScale { kernel: Geglu { gate_up, out, cols }, cell }),
        Act::GeluTanh => dev.launch(WithScale { kernel: Gelu { x, out }, cell }),
    }
}

/// Computes the gradient `dx` of the first matrix's output `x` from the gradient of the activation, and its scale in 8 bits into `cell`.
pub(super) fn activate_backward<D: Kernels>(
    dev: &mut D,
    ffn: Ffn,
    dout: DeviceSlice,
    x: DeviceSlice,
    dx: DeviceSlice,
    cell: Option<ScaleCell>,
) -> Result<()> {
    let (cols, gate_up, dgate_up) = (ffn.width, x, dx);
    match ffn.act {
        Act::Swiglu => dev.launch(WithScale { kernel: SwigluBackward { dout, gate_up, dgate_up, cols }, cell }),
        Act::Geglu => dev.launch(WithScale { kernel: GegluBackward { dout, gate_up, dgate_up, cols }, cell }),
        Act::GeluTanh => dev.launch(WithScale { kernel: GeluBackward { dout, x, dx }, cell }),
    }
}
