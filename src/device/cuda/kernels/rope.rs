//! RMS normalisation and rotation of query and key heads.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, WARP, threads, whole_vectors, wide};
use crate::device::kernels::rope::Spans;
use crate::device::{AttentionShape, DeviceSlice, Kernel, QkNorm, QkNormBackward, Rope, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/rope.ptx"),
    typed: &[
        "qk_norm",
        "qk_norm_any",
        "qk_norm_whole",
        "qk_norm_whole_any",
        "qk_norm_backward",
        "qk_norm_backward_any",
        "qk_norm_whole_backward",
        "qk_norm_whole_backward_any",
        "qk_norm_plus_one",
        "qk_norm_plus_one_any",
        "qk_norm_plus_one_whole",
        "qk_norm_plus_one_whole_any",
        "qk_norm_plus_one_backward",
        "qk_norm_plus_one_backward_any",
        "qk_norm_plus_one_whole_backward",
        "qk_norm_plus_one_whole_backward_any",
        "rope",
        "rope_any",
        "rope_neighbours",
    ],
    plain: &[],
};

/// Threads of a block of every kernel here, except the backward pass of whole tokens, whose maximum is `WHOLE_THREADS`.
const THREADS: usize = 256;
const WHOLE_THREADS: usize = 1024;
/// 16-byte vectors of a head that a lane keeps in registers.
const HEAD_VECS: usize = 2;
/// Maximum blocks of `qk_norm_backward`: as many as run concurrently.
const BACKWARD_BLOCKS: usize = 4 * MULTIPROCESSORS;
/// Heads that a thread of `rope` rotates.
const ROPE_HEADS: usize = 4;

/// Kernels of a norm of queries and keys: for heads of whole vectors, for any heads, and both kinds for all heads of a token together.
struct QkNormNames {
    vectors: &'static str,
    any: &'static str,
    whole: &'static str,
    whole_any: &'static str,
}

/// Kernels of each pass; the second entry is for weights plus one.
const FORWARD: [QkNormNames; 2] = [
    QkNormNames { vectors: "qk_norm", any: "qk_norm_any", whole: "qk_norm_whole", whole_any: "qk_norm_whole_any" },
    QkNormNames {
        vectors: "qk_norm_plus_one",
        any: "qk_norm_plus_one_any",
        whole: "qk_norm_plus_one_whole",
        whole_any: "qk_norm_plus_one_whole_any",
    },
];
const BACKWARD: [QkNormNames; 2] = [
    QkNormNames {
        vectors: "qk_norm_backward",
        any: "qk_norm_backward_any",
        whole: "qk_norm_whole_backward",
        whole_any: "qk_norm_whole_backward_any",
    },
    QkNormNames {
        vectors: "qk_norm_plus_one_backward",
        any: "qk_norm_plus_one_backward_any",
        whole: "qk_norm_plus_one_whole_backward",
        whole_any: "qk_norm_plus_one_whole_backward_any",
    },
];

/// Base-2 logarithm of the number of lanes that keep a head in registers. `None` unless a head in `slices` consists of whole vectors and
/// fits.
fn lanes_log2(head_dim: usize, slices: &[DeviceSlice]) -> Option<u32> {
    let lanes = head_dim.div_ceil(HEAD_VECS * wide(slices[0].dtype())).next_power_of_two();
    (whole_vectors(head_dim, slices) && lanes <= WARP).then_some(lanes.ilog2())
}

impl GpuKernel for QkNorm {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { qkv, q_weight, k_weight, plus_one, eps, out, rstd, shape } = self;
        let names = &FORWARD[usize::from(plus_one)];
        if let Some([q, k]) = whole(&shape, q_weight) {
            let slices = [qkv, q_weight, k_weight, out];
            let vectors = [q, k].into_iter().all(|cols| whole_vectors(cols, &slices));
            let (name, each) = if vectors { (names.whole, wide(qkv.dtype())) } else { (names.whole_any, 1) };
            let threads = size(threads(q, each).min(THREADS))?;
            let blocks = LaunchConfig { grid: [size(shape.tokens())?, 3, 1], block: [threads, 1, 1], shared_bytes: 0 };
            let args = args![qkv, q_weight, k_weight, eps, out, rstd, size(q)?, size(k)?];
            return queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args);
        }
        let (normed, d) = (shape.heads + shape.kv_heads, shape.head_dim);
        let per_token = normed + shape.kv_heads;
        let all_heads = shape.tokens() * per_token;
        let lanes = lanes_log2(d, &[qkv, q_weight, k_weight, out]);
        let (name, heads_per_block) = match lanes {
            Some(lanes) => (names.vectors, THREADS >> lanes),
            None => (names.any, THREADS / WARP),
        };
        let blocks = LaunchConfig::new(size(all_heads.div_ceil(heads_per_block))?, THREADS as u32);
        let (all_heads, heads, normed, per_token) = (size(all_heads)?, size(shape.heads)?, size(normed)?, size(per_token)?);
        // The kernel with suffix `any` ignores the last argument.
        let args = args![qkv, q_weight, k_weight, eps, out, rstd, all_heads, heads, normed, per_token, size(d)?, lanes.unwrap_or_default()];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for QkNormBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { q_weight, k_weight, dq_weight, dk_weight, shape, .. } = self;
        if let Some([q, k]) = whole(&shape, q_weight) {
            whole_backward(queue, &self, (0, q, 0), (q_weight, dq_weight))?;
            return whole_backward(queue, &self, (q, k, 1), (k_weight, dk_weight));
        }
        let queries = Heads { first: 0, count: shape.heads, weight: q_weight, dweight: dq_weight };
        let keys = Heads { first: shape.heads, count: shape.kv_heads, weight: k_weight, dweight: dk_weight };
        queries.enqueue(queue, &self)?;
        keys.enqueue(queue, &self)
    }
}

/// Columns of queries and of keys, if the norm spans all heads of a token.
fn whole(shape: &AttentionShape, q_weight: DeviceSlice) -> Option<[usize; 2]> {
    let Spans { q, k, .. } = Spans::of(shape, q_weight);
    (q != shape.head_dim).then_some([q, k])
}

/// Enqueues the gradients of span `part` of every token: `cols` columns from `first` on.
fn whole_backward(
    queue: &mut impl Queue,
    kernel: &QkNormBackward,
    (first, cols, part): (usize, usize, usize),
    (weight, dweight): (DeviceSlice, DeviceSlice),
) -> Result<()> {
    let QkNormBackward { dqkv, qkv, plus_one, rstd, accumulate, shape, .. } = *kernel;
    let (tokens, per_token) = (shape.tokens(), shape.qkv_cols());
    let (names, by_vectors) = (&BACKWARD[usize::from(plus_one)], threads(cols, wide(qkv.dtype())));
    // A thread processes one vector, so all spans must begin at a vector.
    let vectors = [first, cols, per_token].into_iter().all(|cols| whole_vectors(cols, &[dqkv, qkv, weight]));
    let (name, threads) = if vectors && by_vectors <= WHOLE_THREADS { (names.whole, by_vectors) } else { (names.whole_any, THREADS) };
    let blocks = tokens.min(BACKWARD_BLOCKS);
    let partials = queue.scratch(blocks * cols)?;
    let args = args![dqkv, qkv, weight, rstd, partials, size(tokens)?, size(first)?, size(cols)?, size(per_token)?, size(part)?];
    let config = LaunchConfig::new(size(blocks)?, size(threads)?);
    queue.launch(Stream::Compute, name, Some(kernel.float_format()?), config, args)?;
    fold_columns(queue, partials, blocks, (dweight, None), accumulate)
}

/// Heads of every token that share a weight.
struct Heads {
    first: usize,
    count: usize,
    weight: DeviceSlice,
    dweight: DeviceSlice,
}

impl Heads {
    fn enqueue(self, queue: &mut impl Queue, kernel: &QkNormBackward) -> Result<()> {
        let Self { first, count, weight, dweight } = self;
        let QkNormBackward { dqkv, qkv, plus_one, rstd, accumulate, shape, .. } = *kernel;
        let (tokens, d, normed) = (shape.tokens(), shape.head_dim, shape.heads + shape.kv_heads);
        let lanes = lanes_log2(d, &[dqkv, qkv, weight]);
        let names = &BACKWARD[usize::from(plus_one)];
        // The kernel with suffix `any` writes one partial sum for each warp, the other kernel one for each block.
        let (name, heads_per_block, sums_per_block) = match lanes {
            Some(lanes) => (names.vectors, THREADS >> lanes, 1),
            None => (names.any, THREADS / WARP, THREADS / WARP),
        };
        let blocks = (tokens * count).div_ceil(heads_per_block).min(BACKWARD_BLOCKS);
        let partials = queue.scratch(blocks * sums_per_block * d)?;
        size(tokens * count)?;
        let (first, count, normed, per_token) = (size(first)?, size(count)?, size(normed)?, size(normed + shape.kv_heads)?);
        let args =
            args![dqkv, qkv, weight, rstd, partials, size(tokens)?, first, count, normed, per_token, size(d)?, lanes.unwrap_or_default()];
        queue.launch(Stream::Compute, name, Some(kernel.float_format()?), LaunchConfig::new(size(blocks)?, THREADS as u32), args)?;
        fold_columns(queue, partials, blocks * sums_per_block, (dweight, None), accumulate)
    }
}

impl GpuKernel for Rope {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { qkv, positions, table, rotary_dim, interleaved, inverse, shape } = self;
        let dtype = self.float_format()?;
        let (half, heads) = (rotary_dim / 2, shape.heads + shape.kv_heads);
        let vectors = whole_vectors(half, &[qkv, table]) && whole_vectors(shape.head_dim, &[qkv]);
        let (name, lanes) = match interleaved {
            true => ("rope_neighbours", 1),
            false if vectors => ("rope", wide(dtype)),
            false => ("rope_any", 1),
        };
        let groups = heads.div_ceil(ROPE_HEADS);
        let threads = shape.tokens() * groups * (half / lanes);
        size(threads + THREADS)?;
        let (tokens, heads, per_token) = (size(shape.tokens())?, size(heads)?, size(heads + shape.kv_heads)?);
        let args = args![qkv, positions, table, tokens, heads, per_token, size(shape.head_dim)?, size(half)?, size(groups)?, inverse];
        queue.launch(Stream::Compute, name, Some(dtype), LaunchConfig::new(size(threads.div_ceil(THREADS))?, THREADS as u32), args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn a_head_takes_as_many_lanes_as_its_vectors_need() {
        let lanes = |dtype, d| lanes_log2(d, &[DeviceSlice::at(0, d, dtype)]);
        assert_eq!([8, 16, 64, 96, 128, 256, 512].map(|d| lanes(Dtype::Bfloat16, d)), [0, 0, 2, 3, 3, 4, 5].map(Some));
        assert_eq!([128, 256].map(|d| lanes(Dtype::Float32, d)), [4, 5].map(Some));
        assert_eq!([lanes(Dtype::Bfloat16, 6), lanes(Dtype::Bfloat16, 520), lanes(Dtype::Float32, 260)], [None; 3]);
    }
}
