//! Linear layers: the product of the forward pass and its gradients.

use super::params::{LinearParams, MatrixParam};
use crate::device::{BiasBackward, DeviceSlice, Kernels, Matmul, MatmulLayout, MatmulShape};
use crate::error::Result;

/// `out = x * weight^T + bias (+ base)`.
pub(super) fn linear<D: Kernels>(
    dev: &mut D,
    params: &LinearParams,
    x: DeviceSlice,
    base: Option<DeviceSlice>,
    out: DeviceSlice,
) -> Result<()> {
    if let Some(fp8) = &params.fp8 {
        return fp8.forward(dev, params, x, base, out);
    }
    let shape = MatmulShape { layout: MatmulLayout::Nt, m: x.elems() / params.in_cols, n: params.out_cols, k: params.in_cols };
    let bias = params.bias.map(|p| p.value);
    dev.launch(Matmul { bias, base, ..Matmul::plain(shape, [x, params.weight.value, out]) })
}

/// Destination of the gradient of a linear layer's input.
#[derive(Clone, Copy)]
pub(super) enum Input {
    /// Overwrite this slice.
    New(DeviceSlice),
    /// Add to this slice.
    Added(DeviceSlice),
}

impl Input {
    /// The slice, and whether to add to it.
    pub(super) fn parts(self) -> (DeviceSlice, bool) {
        match self {
            Self::New(dx) => (dx, false),
            Self::Added(dx) => (dx, true),
        }
    }
}

/// Gradients of [`linear`]; with `first` the gradients of the parameters are overwritten.
pub(super) fn linear_backward<D: Kernels>(
    dev: &mut D,
    params: &LinearParams,
    x: DeviceSlice,
    dout: DeviceSlice,
    input: Input,
    first: bool,
) -> Result<()> {
    let (dx, add) = input.parts();
    match &params.fp8 {
        Some(fp8) => fp8.backward(dev, params, (x, dout), (dx, add), !first)?,
        None => products_backward(dev, params, (x, dout), (dx, add), !first)?,
    }
    if let Some(bias) = params.bias { dev.launch(BiasBackward { dout, dbias: bias.grad, accumulate: !first }) } else { Ok(()) }
}

/// Gradients of a product's factors in the compute format.
fn products_backward<D: Kernels>(
    dev: &mut D,
    params: &LinearParams,
    (x, dout): (DeviceSlice, DeviceSlice),
    (dx, add): (DeviceSlice, bool),
    accumulate: bool,
) -> Result<()> {
    let (rows, out_cols, in_cols) = (x.elems() / params.in_cols, params.out_cols, params.in_cols);
    let to_input = MatmulShape { layout: MatmulLayout::Nn, m: rows, n: in_cols, k: out_cols };
    let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: out_cols, n: in_cols, k: rows };
    dev.launch(Matmul::plain(to_input, [dout, params.weight.value, dx]).onto_itself(add))?;
    weight_product(dev, to_weight, [dout, x], params.weight, accumulate)
}

/// The gradient `dout^T * x` of a matrix, unless it is frozen.
pub(super) fn weight_product<D: Kernels>(
    dev: &mut D,
    shape: MatmulShape,
    [dout, x]: [DeviceSlice; 2],
    weight: MatrixParam,
    accumulate: bool,
) -> Result<()> {
    let Some(grad) = weight.grad else { return Ok(()) };
    dev.launch(Matmul::plain(shape, [dout, x, grad]).onto_itself(accumulate))
}
