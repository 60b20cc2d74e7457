//! Norms of the residual stream, and factors on it.

use super::layer_shape::NormSpec;
use super::params::NormParams;
use crate::device::{DeviceSlice, Kernels, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, ScaleAdd, ScaleCell, WithScale};
use crate::error::Result;

/// Normalises `x`, and stores what the backward pass needs in `stats`.
pub(super) fn norm<D: Kernels>(
    dev: &mut D,
    norm: NormSpec,
    params: &NormParams,
    (x, out): (DeviceSlice, DeviceSlice),
    stats: DeviceSlice,
    cell: Option<ScaleCell>,
) -> Result<()> {
    let (weight, NormSpec { eps, plus_one, .. }) = (params.weight.value, norm);
    match params.bias {
        None => dev.launch(WithScale { kernel: RmsNorm { x, weight, plus_one, eps, out, rstd: stats }, cell }),
        Some(bias) => dev.launch(WithScale { kernel: LayerNorm { x, weight, bias: bias.value, eps, out, stats }, cell }),
    }
}

/// Computes the gradient of a norm's input, which is added, and the gradients of its parameters, from the gradient of its output.
pub(super) fn norm_backward<D: Kernels>(
    dev: &mut D,
    norm: NormSpec,
    params: &NormParams,
    (x, stats): (DeviceSlice, DeviceSlice),
    (dout, dx): (DeviceSlice, DeviceSlice),
    first: bool,
    cell: Option<ScaleCell>,
) -> Result<()> {
    let (weight, dweight, accumulate, plus_one) = (params.weight.value, params.weight.grad, !first, norm.plus_one);
    match params.bias {
        None => dev.launch(WithScale { kernel: RmsNormBackward { dout, x, weight, plus_one, rstd: stats, dx, dweight, accumulate }, cell }),
        Some(bias) => {
            let kernel = LayerNormBackward { dout, x, weight, stats, dx, dweight, dbias: bias.grad, accumulate };
            dev.launch(WithScale { kernel, cell })
        }
    }
}

/// Multiplies `x` by `factor`.
pub(super) fn scale<D: Kernels>(dev: &mut D, x: DeviceSlice, factor: f32) -> Result<()> {
    if factor == 1.0 { Ok(()) } else { dev.launch(ScaleAdd { x, scale: factor, base: None, out: x }) }
}
