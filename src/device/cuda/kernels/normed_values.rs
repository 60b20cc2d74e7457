//! RMS normalisation of queries, keys and values, and a factor on the residual stream.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, WARP};
use crate::device::{DeviceSlice, Kernel, NORMED_CHANNELS_MAX, NormedHeads, QkvNorm, QkvNormBackward, ScaleBy, Stream};
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("generated/normed_values.ptx"), typed: &["qkv_norm", "qkv_norm_backward", "scale_by"], plain: &[] };

/// Constant of `normed_values.cu`.
const THREADS: usize = 256;
/// Maximum blocks of `qkv_norm_backward`: as many as run concurrently.
const BACKWARD_BLOCKS: usize = 4 * MULTIPROCESSORS;

/// # Errors
/// `Unsupported` for heads that do not fit a warp's registers.
fn check(heads: &NormedHeads) -> Result<()> {
    match heads.head_dim {
        0..=NORMED_CHANNELS_MAX => Ok(()),
        channels => Err(Error::Unsupported(format!(
            "a norm of values of heads of {channels} channels on a GPU: its kernel takes up to {NORMED_CHANNELS_MAX}"
        ))),
    }
}

impl GpuKernel for QkvNorm {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { qkv, q_weight, k_weight, eps, out, rstd, tokens, heads } = self;
        check(&heads)?;
        let items = size(tokens * heads.raw())?;
        let blocks = LaunchConfig::new(size((tokens * heads.raw()).div_ceil(THREADS / WARP))?, THREADS as u32);
        let [queries, keys, d] = [size(heads.heads)?, size(heads.kv_heads)?, size(heads.head_dim)?];
        let args = args![qkv, q_weight, k_weight, eps, out, rstd, items, queries, keys, d, heads.values_are_keys];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}

/// Heads of every token that share a weight, or have none.
struct HeadGroup {
    first: usize,
    count: usize,
    /// First head of the output that is made of the same heads, too.
    second: Option<usize>,
    /// Weight and its gradient.
    weight: Option<[DeviceSlice; 2]>,
}

impl HeadGroup {
    fn enqueue(self, queue: &mut impl Queue, kernel: &QkvNormBackward) -> Result<()> {
        let Self { first, count, second, weight } = self;
        let QkvNormBackward { dout, qkv, rstd, accumulate, tokens, heads, .. } = *kernel;
        let (d, warps) = (heads.head_dim, THREADS / WARP);
        let blocks = (tokens * count).div_ceil(warps).min(BACKWARD_BLOCKS);
        let partials = weight.map(|_| queue.scratch(blocks * warps * d)).transpose()?;
        size(tokens * count)?;
        let [all_tokens, first, count, d_size] = [size(tokens)?, size(first)?, size(count)?, size(d)?];
        let [second, raw, all] = [size(second.unwrap_or(0))?, size(heads.raw())?, size(heads.all())?];
        let of_weight = weight.map(|[value, _]| value);
        let args = args![dout, qkv, of_weight, rstd, partials, all_tokens, first, count, second, raw, all, d_size];
        let config = LaunchConfig::new(size(blocks)?, THREADS as u32);
        queue.launch(Stream::Compute, QkvNormBackward::NAME, Some(kernel.float_format()?), config, args)?;
        match weight.zip(partials) {
            Some(([_, gradient], partials)) => fold_columns(queue, partials, blocks * warps, (gradient, None), accumulate),
            None => Ok(()),
        }
    }
}

impl GpuKernel for QkvNormBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { q_weight, k_weight, dq_weight, dk_weight, heads, .. } = self;
        check(&heads)?;
        let NormedHeads { heads: queries, kv_heads: keys, values_are_keys, .. } = heads;
        let values = queries + keys;
        HeadGroup { first: 0, count: queries, second: None, weight: Some([q_weight, dq_weight]) }.enqueue(queue, &self)?;
        let second = values_are_keys.then_some(values);
        HeadGroup { first: queries, count: keys, second, weight: Some([k_weight, dk_weight]) }.enqueue(queue, &self)?;
        if values_are_keys {
            return Ok(());
        }
        HeadGroup { first: values, count: keys, second: None, weight: None }.enqueue(queue, &self)
    }
}

impl GpuKernel for ScaleBy {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, factor } = self;
        let blocks = LaunchConfig::new(size(x.elems().div_ceil(THREADS * PER_THREAD))?, THREADS as u32);
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args![x, factor, x.elems() as u64])
    }
}

/// Elements that a thread of `scale_by` multiplies.
const PER_THREAD: usize = 8;
