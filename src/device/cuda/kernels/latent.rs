//! Queries, keys and values of multi-head latent attention, and the width of heads.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{WARP, whole_vectors, wide};
use crate::device::{AssembleHeads, AssembleHeadsBackward, DeviceSlice, Kernel, LatentHeads, ResizeRows, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/latent.ptx"),
    typed: &[
        "assemble_heads",
        "assemble_heads_any",
        "assemble_heads_backward",
        "assemble_heads_backward_any",
        "resize_rows",
        "resize_rows_any",
    ],
    plain: &[],
};

/// Constants of `latent.cu`.
const THREADS: usize = 256;
const HEAD_WARPS: usize = THREADS / WARP;

/// Whether the plain channels of heads and their values consist of whole vectors in all of `slices`.
fn has_vectors(heads: &LatentHeads, slices: &[DeviceSlice]) -> bool {
    [heads.plain, heads.rotary, heads.value].into_iter().all(|cols| whole_vectors(cols, slices))
}

/// Blocks of warps that take one of `parts` each.
fn blocks(parts: usize) -> Result<LaunchConfig> {
    Ok(LaunchConfig::new(size(parts.div_ceil(HEAD_WARPS))?, THREADS as u32))
}

impl GpuKernel for AssembleHeads {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { queries, projected, key, positions, table, qkv, heads } = self;
        let name = if has_vectors(&heads, &[queries, projected, qkv]) { Self::NAME } else { "assemble_heads_any" };
        let parts = positions.elems() * heads.heads;
        let [count, plain, rotary, value] = [size(heads.heads)?, size(heads.plain)?, size(heads.rotary)?, size(heads.value)?];
        let args = args![queries, projected, key, positions, table, qkv, size(parts)?, count, plain, rotary, value, heads.interleaved];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks(parts)?, args)
    }
}

impl GpuKernel for AssembleHeadsBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dqkv, positions, table, dqueries, dprojected, dkey, heads } = self;
        let name = if has_vectors(&heads, &[dqkv, dqueries, dprojected]) { Self::NAME } else { "assemble_heads_backward_any" };
        let parts = positions.elems() * (heads.heads + 1);
        let [count, plain, rotary, value] = [size(heads.heads)?, size(heads.plain)?, size(heads.rotary)?, size(heads.value)?];
        let args = args![dqkv, positions, table, dqueries, dprojected, dkey, size(parts)?, count, plain, rotary, value, heads.interleaved];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks(parts)?, args)
    }
}

impl GpuKernel for ResizeRows {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, out, from, to } = self;
        let vectors = [from, to].into_iter().all(|cols| whole_vectors(cols, &[x, out]));
        let (name, lanes) = if vectors { (Self::NAME, wide(x.dtype())) } else { ("resize_rows_any", 1) };
        let items = out.elems() / lanes;
        let blocks = LaunchConfig::new(size(items.div_ceil(THREADS))?, THREADS as u32);
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args![x, out, items as u64, size(from)?, size(to)?])
    }
}
