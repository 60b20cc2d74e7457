//! Matrix products by cuBLASLt.

#[cfg(test)]
#[path = "product_tests.rs"]
mod tests;

use super::super::CudaDevice;
use super::super::gemm::{CallAddresses, Course, CublasProduct, LibraryProduct, Pointers, ProductCall, ProductCut, ProductPart};
use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use crate::device::{Checked, DeviceSlice, Kernel, Launch, Matmul, ScaledMatmul, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use std::ops::Range;

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("products.ptx"), typed: &["sum_products"], plain: &["widen_e4m3", "widen_e5m2"] };

/// Threads of a block, and elements that a thread processes at once.
const THREADS: usize = 256;
const VECTOR: usize = 4;

impl Launch<Matmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<Matmul>) -> Result<()> {
        multiply(self, &CublasProduct::of(*kernel)?, Matmul::NAME)
    }
}

impl Launch<ScaledMatmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<ScaledMatmul>) -> Result<()> {
        multiply(self, &CublasProduct::scaled(*kernel)?, ScaledMatmul::NAME)
    }
}

fn multiply(dev: &mut CudaDevice, product: &CublasProduct, name: &'static str) -> Result<()> {
    match dev.gemm.product(product)? {
        None => Ok(()),
        Some(ProductCall::Whole(call)) => dev.timed(Stream::Compute, name, call),
        Some(ProductCall::InParts(cut)) => multiply_parts(dev, product, &cut),
    }
}

/// A queue that also takes calls of cuBLASLt.
trait ProductQueue: Queue {
    /// Enqueues a call on the compute stream.
    fn call(&mut self, call: LibraryProduct, addresses: CallAddresses) -> Result<()>;
}

impl ProductQueue for CudaDevice {
    fn call(&mut self, call: LibraryProduct, addresses: CallAddresses) -> Result<()> {
        let call = self.gemm.call(call, addresses)?;
        self.timed(Stream::Compute, "matmul_part", call)
    }
}

/// Enqueues the parts of a product and the sums of its slices, block by block.
fn multiply_parts(queue: &mut impl ProductQueue, product: &CublasProduct, cut: &ProductCut) -> Result<()> {
    let scratch = queue.scratch(cut.scratch_elems())?;
    for rows in cut.blocks() {
        for (slice, part) in cut.parts(&rows).enumerate() {
            match cut.course {
                Course::AtOnce | Course::InTurn => {
                    multiply_slice(queue, product, (cut, &part), scratch.slice(slice * cut.sums_apart(), 0))?
                }
                Course::Widened => multiply_widened(queue, product, (cut, &part), scratch, slice > 0)?,
            }
        }
        SumProducts::of(product, cut, rows, scratch).enqueue(queue)?;
    }
    Ok(())
}

fn multiply_slice(
    queue: &mut impl ProductQueue,
    product: &CublasProduct,
    (cut, part): (&ProductCut, &ProductPart),
    sums: DeviceSlice,
) -> Result<()> {
    let [a, b] = cut.first_elems(part);
    let [a, b] = [product.a.slice(a, 0), product.b.slice(b, 0)].map(DeviceSlice::addr);
    let pointers = Pointers::of_scales(product.scales);
    queue.call(cut.call(part), CallAddresses { a, b, addend: sums.addr(), adds: false, c: sums.addr(), pointers })
}

/// The product of a slice of widened factors, which adds to the sum of earlier slices if there are any.
fn multiply_widened(
    queue: &mut impl ProductQueue,
    product: &CublasProduct,
    (cut, part): (&ProductCut, &ProductPart),
    scratch: DeviceSlice,
    adds: bool,
) -> Result<()> {
    let (n, pitch, terms) = (product.shape.n, product.shape.k, part.terms.len());
    let [a_first, b_first] = cut.first_elems(part);
    let [a_at, b_at, _] = cut.factors();
    let [a_scale, b_scale] = product.scales.map_or([None; 2], |scales| scales.map(Some));
    let narrow = |at: usize, rows: usize| scratch.view(4 * at, rows * terms, Dtype::Bfloat16);
    let a = Widen { x: product.a.slice(a_first, 0), pitch, scale: a_scale, out: narrow(a_at, part.rows.len()), cols: terms };
    let b = Widen { x: product.b.slice(b_first, 0), pitch, scale: b_scale, out: narrow(b_at, n), cols: terms };
    a.enqueue(queue)?;
    b.enqueue(queue)?;
    let [sums, a, b] = [scratch, a.out, b.out].map(DeviceSlice::addr);
    queue.call(cut.call(part), CallAddresses { a, b, addend: sums, adds, c: sums, pointers: Pointers::NONE })
}

/// The sum of fp32 parts of a block of rows, with the addends of the product, rounded once.
struct SumProducts {
    /// From the first element of the first part on.
    parts: DeviceSlice,
    /// Elements between the beginnings of two parts.
    apart: usize,
    count: usize,
    base: Option<DeviceSlice>,
    bias: Option<DeviceSlice>,
    out: DeviceSlice,
    cols: usize,
}

impl SumProducts {
    fn of(product: &CublasProduct, cut: &ProductCut, rows: Range<usize>, scratch: DeviceSlice) -> Self {
        let CublasProduct { bias, base, c, shape, .. } = *product;
        let block = |x: DeviceSlice| x.slice(rows.start * shape.n, rows.len() * shape.n);
        Self { parts: scratch, apart: cut.sums_apart(), count: cut.sums(), base: base.map(block), bias, out: block(c), cols: shape.n }
    }

    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { parts, apart, count, base, bias, out, cols } = self;
        let aligned = |x: &DeviceSlice| x.addr().is_multiple_of((VECTOR * x.dtype().bytes()) as u64);
        let is_aligned = [Some(parts), base, bias, Some(out)].iter().flatten().all(aligned);
        let has_vectors = is_aligned && apart.is_multiple_of(VECTOR) && (bias.is_none() || cols.is_multiple_of(VECTOR));
        let vectors = if has_vectors { out.elems() / VECTOR } else { 0 };
        // One thread for each vector and for each element of the tail.
        let blocks = (out.elems() - (VECTOR - 1) * vectors).div_ceil(THREADS);
        let blocks = LaunchConfig::new(size(blocks)?, THREADS as u32);
        let [apart, count, elems, cols, vectors] = [apart, count, out.elems(), cols, vectors].map(|n| n as u64);
        let args = args![parts, apart, count, base, bias, out, elems, cols, vectors];
        queue.launch(Stream::Compute, "sum_products", Some(out.dtype()), blocks, args)
    }
}

/// Some columns of a matrix of 8-bit numbers, times a scale, in bfloat16.
#[derive(Clone, Copy)]
struct Widen {
    /// From the first element on.
    x: DeviceSlice,
    /// Elements between two rows of `x`.
    pitch: usize,
    scale: Option<DeviceSlice>,
    out: DeviceSlice,
    /// A multiple of four.
    cols: usize,
}

impl Widen {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, pitch, scale, out, cols } = self;
        let name = if x.dtype() == Dtype::Float8E5m2 { "widen_e5m2" } else { "widen_e4m3" };
        let all = out.elems() / VECTOR;
        let blocks = LaunchConfig::new(size(all.div_ceil(THREADS))?, THREADS as u32);
        let args = args![x, pitch as u64, scale, out, (cols / VECTOR) as u64, all as u64];
        queue.launch(Stream::Compute, name, None, blocks, args)
    }
}
