//! FP8 products, if the device supports them.

use super::product::Product;
use super::samples::Samples;
use super::timer::Timer;
use crate::device::{AbsMaxScale, DeviceSlice, FP8_GRAIN, Kernel, Kernels, Quantize, ScaledMatmul};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Measures FLOP/s of large FP8 products in matrices of the size of `memory`, for about `time_s`. `None` if the device has no FP8 or the
/// matrices are too small. The device must have reached its power limit before.
pub(crate) fn measure<D: Kernels>(timer: &mut Timer<'_, D>, memory: Product, time_s: f64) -> Result<Option<Samples>> {
    match timer.dev.prepare_fp8() {
        Err(Error::Unsupported(_)) => return Ok(None),
        ready => ready?,
    }
    let n = memory.n;
    if !n.is_multiple_of(FP8_GRAIN) {
        return Ok(None);
    }
    let ((a, a_scale), (b, b_scale)) = (narrowed(timer.dev, memory.a, n)?, narrowed(timer.dev, memory.b, n)?);
    let product = ScaledMatmul { a, a_scale, b, b_scale, bias: None, base: None, c: memory.c.slice(0, n * n), m: n, n, k: n };
    // The first launch may compile.
    timer.seconds(|dev| dev.launch(product))?;
    timer.rates(time_s, product.flops(), |dev| dev.launch(product)).map(Some)
}

/// The first `n` x `n` elements of `x` in E4M3, and their scale.
fn narrowed<D: Kernels>(dev: &mut D, x: DeviceSlice, n: usize) -> Result<(DeviceSlice, DeviceSlice)> {
    let (x, format) = (x.slice(0, n * n), Dtype::Float8E4m3);
    let (out, scale) = (dev.alloc("matrix of 8 bits", n * n, format)?, dev.alloc("its scale", 1, Dtype::Float32)?);
    dev.launch(AbsMaxScale { x, scale, format })?;
    dev.launch(Quantize { x, scale, out: Some(out), transposed: None, cols: n })?;
    Ok((out, scale))
}
