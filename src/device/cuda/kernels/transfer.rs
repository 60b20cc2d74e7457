//! Transfer kernels: casts, gradient norm, optimizer of resident buckets. They are hand-written in
//! `ptx/{cast,grad_norm,adam,adam_split,adam_int8,poke}.ptx`.
//!
//! Each kernel has a path for aligned vectors and a path for single elements. The second serves tails, and all elements if an address is
//! not aligned: see [`vectors`]. The kernels of 8-bit moments have vectors alone: see [`whole_groups`].

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;

use crate::device::cuda::launch::{Arg, GpuKernel, LaunchConfig, Queue, args, size};
use crate::device::cuda::modules::{PtxSource, ptx_file};
use crate::device::{Adam, Cast, DeviceSlice, GradNormPartials, Kernel, Poke, SplitAdam, Stream, SumSlices, Zero};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::optim::adam::AdamConsts;
use crate::optim::norm::BLOCK;

pub(super) const SOURCES: [PtxSource; 8] = [
    PtxSource { file: ptx_file!("cast.ptx"), typed: &[], plain: &["cast_bf16_f32", "cast_f16_f32", "cast_f32_bf16", "cast_f32_f16"] },
    PtxSource { file: ptx_file!("copy.ptx"), typed: &[], plain: &["copy_words"] },
    PtxSource { file: ptx_file!("grad_norm.ptx"), typed: &["grad_norm"], plain: &[] },
    PtxSource { file: ptx_file!("sum_slices.ptx"), typed: &["sum_slices"], plain: &[] },
    PtxSource { file: ptx_file!("adam.ptx"), typed: &["adam_step", "adam_step_packed"], plain: &[] },
    PtxSource { file: ptx_file!("adam_split.ptx"), typed: &[], plain: &["adam_step_split", "adam_step_split_packed"] },
    PtxSource { file: ptx_file!("adam_int8.ptx"), typed: &["adam_step_int8"], plain: &["adam_step_split_int8"] },
    PtxSource { file: ptx_file!("poke.ptx"), typed: &["poke"], plain: &[] },
];

/// Threads of a block, in every kernel except `poke`.
const THREADS: usize = 256;
/// Elements that a thread of `cast`, `sum_slices`, `grad_norm` and `adam_step` loads at once.
const VECTOR: usize = 4;
/// Vectors of one thread of `cast`.
const CAST_VECTORS: usize = 4;
/// Partial sums of one block of `grad_norm`: one for each warp.
const NORM_WARPS: usize = THREADS / 32;

/// Copies whole 32-bit words between the GPU and registered host memory.
pub(in crate::device::cuda) fn copy_words(queue: &mut impl Queue, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
    let words = bytes / 4;
    let blocks = LaunchConfig::new(size(words.div_ceil(THREADS))?, THREADS as u32);
    queue.launch(stream, "copy_words", None, blocks, args![from, to, words as u64])
}

impl GpuKernel for Zero {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        queue.zero(self.x)
    }
}

impl GpuKernel for Cast {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { stream, src, dst } = self;
        let name = match (src.dtype(), dst.dtype()) {
            (from, to) if from == to => return queue.copy(stream, src, dst),
            (Dtype::Bfloat16, Dtype::Float32) => "cast_bf16_f32",
            (Dtype::Float16, Dtype::Float32) => "cast_f16_f32",
            (Dtype::Float32, Dtype::Bfloat16) => "cast_f32_bf16",
            (Dtype::Float32, Dtype::Float16) => "cast_f32_f16",
            (from, to) => return Err(Error::Unsupported(format!("a cast from {from} to {to} on the GPU"))),
        };
        let blocks = grid(src.elems(), THREADS * CAST_VECTORS * VECTOR)?;
        let vectors = vectors(src.elems(), VECTOR, &[src, dst]);
        queue.launch(stream, name, None, blocks, args![src, dst, src.elems() as u64, vectors])
    }
}

impl GpuKernel for SumSlices {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let (dtype, Self { stream, parts: p, before, out }) = (self.dtype(), self);
        let (sums, rounded) = if out.dtype() == dtype { (None, Some(out)) } else { (Some(out), None) };
        let vectors = p.iter().chain([&before]).flatten().map(|&slice| vectors(out.elems(), VECTOR, &[slice, out])).min().unwrap_or(0);
        // One thread for each vector and for each element of the tail.
        let blocks = grid(out.elems() - (VECTOR - 1) * vectors as usize, THREADS)?;
        let elems = out.elems() as u64;
        let args = args![p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], before, sums, rounded, elems, vectors];
        queue.launch(stream, Self::NAME, Some(dtype), blocks, args)
    }
}

impl GpuKernel for GradNormPartials {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { stream, grads, partials, nonfinite } = self;
        let whole = vectors(grads.elems(), VECTOR, &[grads]) / (BLOCK / VECTOR) as u64;
        let args = args![grads, partials, nonfinite, grads.elems() as u64, whole];
        queue.launch(stream, "grad_norm", Some(self.float_format()?), grid(partials.elems(), NORM_WARPS)?, args)
    }
}

/// Working weights have the format of the gradients.
impl GpuKernel for Adam {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { first, params, m, v, grads, out, consts: c, scale } = self;
        let elems = params.elems();
        let vectors = vectors(elems, VECTOR, &[params, m, v, grads, out]);
        let blocks = step_grid(elems, vectors)?;
        let step = args![
            params,
            m,
            v,
            grads,
            out,
            elems as u64,
            vectors,
            c.beta1,
            c.one_minus_beta1,
            c.beta2,
            c.one_minus_beta2,
            c.decay,
            c.neg_step_size,
            c.inv_sqrt_bias2,
            c.eps,
            scale
        ];
        let format = Some(self.float_format()?);
        if m.dtype() == Dtype::Uint8 {
            let blocks = whole_groups(Self::NAME, elems, [params, grads, out], [m, v])?;
            let args = int8_args([params, m, v, grads, out], first, (c, scale));
            return queue.launch(Stream::Compute, "adam_step_int8", format, blocks, args);
        }
        if m.dtype() == Dtype::Float32 {
            return queue.launch(Stream::Compute, Self::NAME, format, blocks, step);
        }
        // Rounding bits depend on the index in the flat order modulo 2^32.
        let rounding = args![first as u32, c.rounding];
        let args: [Arg; 18] = std::array::from_fn(|i| if i < step.len() { step[i] } else { rounding[i - step.len()] });
        queue.launch(Stream::Compute, "adam_step_packed", format, blocks, args)
    }
}

impl GpuKernel for SplitAdam {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { first, weights, lower, m, v, grads, consts: c, scale } = self;
        let elems = weights.elems();
        if m.dtype() == Dtype::Uint8 {
            let blocks = whole_groups(Self::NAME, elems, [weights, lower, grads], [m, v])?;
            let args = int8_args([weights, lower, m, v, grads], first, (c, scale));
            return queue.launch(Stream::Compute, "adam_step_split_int8", None, blocks, args);
        }
        let vectors = vectors(elems, VECTOR, &[weights, lower, m, v, grads]);
        let name = if m.dtype() == Dtype::Float32 { Self::NAME } else { "adam_step_split_packed" };
        let args = args![
            weights,
            lower,
            m,
            v,
            grads,
            elems as u64,
            vectors,
            c.beta1,
            c.one_minus_beta1,
            c.beta2,
            c.one_minus_beta2,
            c.decay,
            c.neg_step_size,
            c.inv_sqrt_bias2,
            c.eps,
            scale,
            first as u32,
            c.rounding
        ];
        queue.launch(Stream::Compute, name, None, step_grid(elems, vectors)?, args)
    }
}

impl GpuKernel for Poke {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, index, value } = self;
        queue.launch(Stream::Compute, Self::NAME, Some(x.dtype()), LaunchConfig::new(1, 1), args![x.slice(index, 1), value])
    }
}

/// The grid of a step with 8-bit moments: one thread for each four elements.
///
/// # Errors
/// `Unsupported` if an address is not aligned: to four elements of the `arrays`, or to the codes of four elements in the `moments`.
fn whole_groups(kernel: &'static str, elems: usize, arrays: [DeviceSlice; 3], moments: [DeviceSlice; 2]) -> Result<LaunchConfig> {
    let aligned = moments.iter().all(|x| x.addr().is_multiple_of(VECTOR as u64));
    if vectors(elems, VECTOR, &arrays) == (elems / VECTOR) as u64 && aligned {
        return grid(elems / VECTOR, THREADS);
    }
    Err(Error::Unsupported(format!("{kernel} with 8-bit moments at addresses that are not aligned to {VECTOR} elements")))
}

/// The arguments of a step with 8-bit moments; the first array has a value for each element.
fn int8_args(arrays: [DeviceSlice; 5], first: usize, (c, scale): (AdamConsts, f32)) -> [Arg; 17] {
    let AdamConsts { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, neg_step_size, inv_sqrt_bias2, eps, rounding } = c;
    args![
        arrays[0],
        arrays[1],
        arrays[2],
        arrays[3],
        arrays[4],
        arrays[0].elems() as u64,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        decay,
        neg_step_size,
        inv_sqrt_bias2,
        eps,
        scale,
        first as u32,
        rounding
    ]
}

/// A grid with one thread for each vector of a step and for each element of the tail.
fn step_grid(elems: usize, vectors: u64) -> Result<LaunchConfig> {
    grid(elems - (VECTOR - 1) * vectors as usize, THREADS)
}

/// A grid of blocks of [`THREADS`] threads for `items`, with `per_block` items for each block.
fn grid(items: usize, per_block: usize) -> Result<LaunchConfig> {
    Ok(LaunchConfig::new(size(items.div_ceil(per_block))?, THREADS as u32))
}

/// Number of whole vectors of `vector` elements in `elems`; 0 if one of the slices is not aligned to its vectors.
fn vectors(elems: usize, vector: usize, slices: &[DeviceSlice]) -> u64 {
    let aligned = |x: &DeviceSlice| x.addr().is_multiple_of((vector * x.dtype().bytes()) as u64);
    if slices.iter().all(aligned) { (elems / vector) as u64 } else { 0 }
}
