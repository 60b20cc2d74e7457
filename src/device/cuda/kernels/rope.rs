//! Query and key heads: their RMS normalisation and their rotation.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, WARP, whole_vectors, wide};
use crate::device::arguments::{arguments, check, check_shape};
use crate::device::{AttentionShape, DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/rope.ptx",
    ptx: include_str!("../../../../ptx/transformer/rope.ptx"),
    typed: &["qk_norm", "qk_norm_any", "qk_norm_backward", "qk_norm_backward_any", "rope", "rope_any"],
    plain: &[],
};

/// Threads of every block here.
const THREADS: usize = 256;
/// 16-byte vectors of a head that a lane keeps.
const HEAD_VECS: usize = 2;
/// Blocks of `qk_norm_backward` that run at a time.
const BACKWARD_BLOCKS: usize = 4 * MULTIPROCESSORS;
/// Heads that a thread of `rope` rotates.
const ROPE_HEADS: usize = 4;

/// The base-2 logarithm of the lanes that keep a head in registers, if its rows in `slices` are whole vectors and few enough.
fn lanes_log2(head_dim: usize, slices: &[DeviceSlice]) -> Option<u32> {
    let lanes = head_dim.div_ceil(HEAD_VECS * wide(slices[0].dtype)).next_power_of_two();
    (whole_vectors(head_dim, slices) && lanes <= WARP).then_some(lanes.ilog2())
}

/// See [`crate::device::Kernels::qk_norm`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn qk_norm(
    dev: &mut impl Queue,
    qkv: DeviceSlice,
    q_weight: DeviceSlice,
    k_weight: DeviceSlice,
    eps: f32,
    out: DeviceSlice,
    rstd: DeviceSlice,
    shape: AttentionShape,
) -> Result<()> {
    let (n, normed, d) = (shape.tokens() * shape.qkv_cols(), shape.heads + shape.kv_heads, shape.head_dim);
    check_shape("qk_norm", &shape)?;
    check(
        "qk_norm",
        arguments![
            qkv.dtype => in qkv[n], in q_weight[d], in k_weight[d], out out[n];
            Dtype::Float32 => out rstd[shape.tokens() * normed]
        ],
    )?;
    let per_token = normed + shape.kv_heads;
    let all_heads = shape.tokens() * per_token;
    let lanes = lanes_log2(d, &[qkv, q_weight, k_weight, out]);
    let (name, heads_per_block) = match lanes {
        Some(lanes) => ("qk_norm", THREADS >> lanes),
        None => ("qk_norm_any", THREADS / WARP),
    };
    let launch = LaunchConfig::new(size(all_heads.div_ceil(heads_per_block))?, THREADS as u32);
    let (all_heads, heads, normed, per_token) = (size(all_heads)?, size(shape.heads)?, size(normed)?, size(per_token)?);
    // The kernel named `any` has no use for the last.
    let args = args![qkv, q_weight, k_weight, eps, out, rstd, all_heads, heads, normed, per_token, size(d)?, lanes.unwrap_or_default()];
    dev.launch(Stream::Compute, name, Some(qkv.dtype), launch, args)
}

/// See [`crate::device::Kernels::qk_norm_backward`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn qk_norm_backward(
    dev: &mut impl Queue,
    dqkv: DeviceSlice,
    qkv: DeviceSlice,
    q_weight: DeviceSlice,
    k_weight: DeviceSlice,
    rstd: DeviceSlice,
    dq_weight: DeviceSlice,
    dk_weight: DeviceSlice,
    accumulate: bool,
    shape: AttentionShape,
) -> Result<()> {
    let (n, normed, d) = (shape.tokens() * shape.qkv_cols(), shape.heads + shape.kv_heads, shape.head_dim);
    check_shape("qk_norm_backward", &shape)?;
    check(
        "qk_norm_backward",
        arguments![
            qkv.dtype => out dqkv[n], in qkv[n], in q_weight[d], in k_weight[d], out dq_weight[d], out dk_weight[d];
            Dtype::Float32 => in rstd[shape.tokens() * normed]
        ],
    )?;
    let queries = Heads { first: 0, count: shape.heads, weight: q_weight, dweight: dq_weight };
    let keys = Heads { first: shape.heads, count: shape.kv_heads, weight: k_weight, dweight: dk_weight };
    heads_backward(dev, dqkv, qkv, rstd, queries, accumulate, shape)?;
    heads_backward(dev, dqkv, qkv, rstd, keys, accumulate, shape)
}

/// Heads of every token that share a weight.
struct Heads {
    first: usize,
    count: usize,
    weight: DeviceSlice,
    dweight: DeviceSlice,
}

fn heads_backward(
    dev: &mut impl Queue,
    dqkv: DeviceSlice,
    qkv: DeviceSlice,
    rstd: DeviceSlice,
    heads: Heads,
    accumulate: bool,
    shape: AttentionShape,
) -> Result<()> {
    let Heads { first, count, weight, dweight } = heads;
    let (tokens, d, normed) = (shape.tokens(), shape.head_dim, shape.heads + shape.kv_heads);
    let lanes = lanes_log2(d, &[dqkv, qkv, weight]);
    // The kernel named `any` sums by warps, the other by blocks.
    let (name, heads_per_block, sums_per_block) = match lanes {
        Some(lanes) => ("qk_norm_backward", THREADS >> lanes, 1),
        None => ("qk_norm_backward_any", THREADS / WARP, THREADS / WARP),
    };
    let blocks = (tokens * count).div_ceil(heads_per_block).min(BACKWARD_BLOCKS);
    let partials = dev.scratch(blocks * sums_per_block * d)?;
    size(tokens * count)?;
    let (first, count, normed, per_token) = (size(first)?, size(count)?, size(normed)?, size(normed + shape.kv_heads)?);
    let args =
        args![dqkv, qkv, weight, rstd, partials, size(tokens)?, first, count, normed, per_token, size(d)?, lanes.unwrap_or_default()];
    dev.launch(Stream::Compute, name, Some(qkv.dtype), LaunchConfig::new(size(blocks)?, THREADS as u32), args)?;
    fold_columns(dev, partials, blocks * sums_per_block, (dweight, None), accumulate)
}

/// See [`crate::device::Kernels::rope`].
pub(super) fn rope(
    dev: &mut impl Queue,
    qkv: DeviceSlice,
    positions: DeviceSlice,
    table: DeviceSlice,
    rotary_dim: usize,
    inverse: bool,
    shape: AttentionShape,
) -> Result<()> {
    check_shape("rope", &shape)?;
    let (n, angles) = (shape.tokens() * shape.qkv_cols(), shape.seq_length * rotary_dim);
    check("rope", arguments![qkv.dtype => out qkv[n]; Dtype::Float32 => in table[angles]; Dtype::Int32 => in positions[shape.tokens()]])?;
    if rotary_dim > shape.head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(Error::resource("launch rope", format!("cannot rotate {rotary_dim} of {} channels", shape.head_dim)));
    }
    let (half, heads) = (rotary_dim / 2, shape.heads + shape.kv_heads);
    let vectors = whole_vectors(half, &[qkv, table]) && whole_vectors(shape.head_dim, &[qkv]);
    let (name, lanes) = if vectors { ("rope", wide(qkv.dtype)) } else { ("rope_any", 1) };
    let groups = heads.div_ceil(ROPE_HEADS);
    let threads = shape.tokens() * groups * (half / lanes);
    size(threads + THREADS)?;
    let (tokens, heads, per_token) = (size(shape.tokens())?, size(heads)?, size(heads + shape.kv_heads)?);
    let args = args![qkv, positions, table, tokens, heads, per_token, size(shape.head_dim)?, size(half)?, size(groups)?, inverse];
    dev.launch(Stream::Compute, name, Some(qkv.dtype), LaunchConfig::new(size(threads.div_ceil(THREADS))?, THREADS as u32), args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_takes_as_many_lanes_as_its_vectors_need() {
        let lanes = |dtype, d| lanes_log2(d, &[DeviceSlice { addr: 0, elems: d, dtype }]);
        assert_eq!([8, 16, 64, 96, 128, 256, 512].map(|d| lanes(Dtype::Bfloat16, d)), [0, 0, 2, 3, 3, 4, 5].map(Some));
        assert_eq!([128, 256].map(|d| lanes(Dtype::Float32, d)), [4, 5].map(Some));
        assert_eq!([lanes(Dtype::Bfloat16, 6), lanes(Dtype::Bfloat16, 520), lanes(Dtype::Float32, 260)], [None; 3]);
    }
}
