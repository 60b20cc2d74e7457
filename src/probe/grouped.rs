//! Expert products: many weights, each with its own rows, in one launch.

use super::product::{Product, SMALLEST, doublings};
use super::samples::{Samples, curve};
use super::timer::Timer;
use crate::device::{Device, DeviceSlice, GroupedMatmul, GroupedShape, Kernel, Kernels, MatmulLayout, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::hardware::sourced::Curve;
use crate::host::pinned::HostMemory;

/// Number of experts. Their square weights together fill a matrix of [`Product`].
const EXPERTS: usize = 16;

/// Measures expert products in the memory of `memory` for about `time_s`: FLOP/s of a layer's three products by the rows of an expert.
pub(crate) fn measure<D: Kernels>(timer: &mut Timer<'_, D>, memory: Product, time_s: f64) -> Result<Curve> {
    let width = memory.n / EXPERTS.isqrt();
    let rows: Vec<usize> = doublings(SMALLEST.min(width), width).collect();
    let each_s = time_s / rows.len() as f64;
    let mut rate = |rows: usize| -> Result<(f64, Samples)> { Ok((rows as f64, layer(timer, memory, (rows, width), each_s)?)) };
    Ok(curve(&rows.into_iter().map(&mut rate).collect::<Result<Vec<_>>>()?))
}

/// The rate of a layer's output and of the gradients of its input and its weights.
fn layer<D: Kernels>(timer: &mut Timer<'_, D>, memory: Product, (rows, width): (usize, usize), time_s: f64) -> Result<Samples> {
    let bounds = upload_bounds(timer.dev, &[rows; EXPERTS])?;
    let [tokens, weights] = [rows * EXPERTS * width, width * width * EXPERTS];
    let product = |layout| {
        let shape = GroupedShape { layout, experts: EXPERTS, rows: rows * EXPERTS, outs: width, ins: width };
        let (b, c) = if layout == MatmulLayout::Tn { (tokens, weights) } else { (weights, tokens) };
        let [a, b, c] = [(memory.a, tokens), (memory.b, b), (memory.c, c)].map(|(matrix, elems)| matrix.slice(0, elems));
        GroupedMatmul { shape, a, b, bounds, c, accumulate: false }
    };
    let products = [MatmulLayout::Nt, MatmulLayout::Nn, MatmulLayout::Tn].map(product);
    let flops = products.iter().map(Kernel::flops).sum();
    timer.rates(time_s, flops, |dev| products.into_iter().try_for_each(|product| dev.launch(product)))
}

/// Uploads the first row of each expert and the end of the last one, for experts with these `rows`.
///
/// # Errors
/// Errors of the device.
pub fn upload_bounds<D: Device>(dev: &mut D, rows: &[usize]) -> Result<DeviceSlice> {
    let mut host = HostMemory::default();
    let (source, bounds) =
        (host.alloc("rows of experts", 4 * (rows.len() + 1))?, dev.alloc("rows of experts", rows.len() + 1, Dtype::Int32)?);
    let ends = rows.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end as i32)
    });
    for (to, end) in host.lend_mut::<i32>(source).iter_mut().zip(std::iter::once(0).chain(ends)) {
        *to = end;
    }
    dev.copy_h2d(Stream::Compute, source, bounds)?;
    // The copy reads `host`, which is dropped here.
    Timer::new(dev)?.settle()?;
    Ok(bounds)
}
