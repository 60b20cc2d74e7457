//! Attention by products: products by cuBLASLt, and the softmax of their scores.

use super::super::CudaDevice;
use super::super::gemm::LibraryProduct;
use super::super::launch::{Arg, GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::whole_vectors;
use crate::device::{
    AttentionShape, BatchedMatmul, Checked, Kernel, Launch, MaskedSoftmax, RoundSums, ScoreTile, SoftmaxBackward, Stream, StridedMatrices,
};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/scores.ptx"),
    typed: &["masked_softmax", "masked_softmax_capped", "softmax_backward", "softmax_backward_capped", "round_sums", "round_sums_any"],
    plain: &[],
};

/// Constants of `scores.cu`: threads of a block, and sums that a thread rounds at once.
const THREADS: usize = 256;
const GROUP: usize = 4;

impl Launch<BatchedMatmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<BatchedMatmul>) -> Result<()> {
        let (call, addresses) = LibraryProduct::batched(&kernel)?;
        let call = self.gemm.batch(call, addresses)?;
        self.timed(Stream::Compute, BatchedMatmul::NAME, call)
    }
}

/// The arguments `own`, and then those of the tile, the shape and the cap.
fn with_tile<const N: usize, const ALL: usize>(own: [Arg; N], tile: &ScoreTile, shape: &AttentionShape) -> Result<[Arg; ALL]> {
    let &ScoreTile { sequence, kv_head, member, lanes, across_sequences, query, rows, key, keys, pitch, .. } = tile;
    let &AttentionShape { seq_length, heads, kv_heads, scale, softcap, .. } = shape;
    let window = shape.window.map_or(seq_length, |window| window.min(seq_length));
    let [sequence, kv_head, member, lanes] = [size(sequence)?, size(kv_head)?, size(member)?, size(lanes)?];
    let [query, rows, key, keys, pitch] = [size(query)?, size(rows)?, size(key)?, size(keys)?, size(pitch)?];
    let [seq_length, heads, group, window] = [size(seq_length)?, size(heads)?, size(heads / kv_heads)?, size(window)?];
    let cap = softcap.unwrap_or(0.0);
    let of_tile = args![
        sequence,
        kv_head,
        member,
        lanes,
        across_sequences,
        query,
        rows,
        key,
        keys,
        pitch,
        seq_length,
        heads,
        group,
        window,
        scale,
        cap
    ];
    const { assert!(ALL == N + 16) };
    let mut all = own.into_iter().chain(of_tile);
    Ok(std::array::from_fn(|_| all.next().unwrap_or(Arg(0))))
}

/// A block for each row of scores.
fn rows(tile: &ScoreTile) -> Result<LaunchConfig> {
    Ok(LaunchConfig::new(size(tile.matrices() * tile.rows)?, THREADS as u32))
}

impl GpuKernel for MaskedSoftmax {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { scores, probabilities, lse, tile, shape } = self;
        let name = if shape.softcap.is_some() { "masked_softmax_capped" } else { Self::NAME };
        let args: [Arg; 19] = with_tile(args![scores, probabilities, lse], &tile, &shape)?;
        queue.launch(Stream::Compute, name, Some(self.float_format()?), rows(&tile)?, args)
    }
}

impl GpuKernel for SoftmaxBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { scores, dprobabilities, dout, out, lse, probabilities, dscores, tile, shape } = self;
        let name = if shape.softcap.is_some() { "softmax_backward_capped" } else { Self::NAME };
        let own = args![scores, dprobabilities, dout, out, lse, probabilities, dscores, size(shape.head_dim)?];
        let args: [Arg; 24] = with_tile(own, &tile, &shape)?;
        queue.launch(Stream::Compute, name, Some(self.float_format()?), rows(&tile)?, args)
    }
}

impl GpuKernel for RoundSums {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { sums, out: StridedMatrices { memory, pitch, stride }, size: [rows, cols, count] } = self;
        let aligned = |bytes: usize| bytes.is_multiple_of(GROUP * memory.dtype().bytes());
        let apart = [memory.addr() as usize, pitch * memory.dtype().bytes(), stride * memory.dtype().bytes()];
        let is_wide = apart.into_iter().all(aligned) && cols.is_multiple_of(GROUP) && whole_vectors(cols, &[sums]);
        let items = rows * cols * count / if is_wide { GROUP } else { 1 };
        let blocks = LaunchConfig::new(size(items.div_ceil(THREADS))?, THREADS as u32);
        let name = if is_wide { Self::NAME } else { "round_sums_any" };
        let args = args![sums, memory, items as u64, size(rows)?, size(cols)?, pitch as u64, stride as u64];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}
