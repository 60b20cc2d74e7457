//! Attention without a library: `--attention plain`.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use super::grid::{WARP, whole_vectors};
use crate::device::arguments::{arguments, check, check_documents, check_shape};
use crate::device::{AttentionShape, DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/attention.ptx",
    ptx: include_str!("../../../../ptx/transformer/attention.ptx"),
    typed: &["attention", "attention_delta", "attention_backward_q", "attention_backward_kv"],
    plain: &[],
};

/// As in `attention.cu`: threads of a block, queries or keys of a block, channels of a block's result.
const THREADS: usize = 256;
const TILE: usize = 64;
const SLICE: usize = 128;

/// See [`crate::device::Kernels::attention`].
pub(super) fn attention(
    dev: &mut impl Queue,
    qkv: DeviceSlice,
    documents: Option<DeviceSlice>,
    out: DeviceSlice,
    lse: DeviceSlice,
    shape: AttentionShape,
) -> Result<()> {
    check_shape("attention", &shape)?;
    check_documents("attention", documents, &shape)?;
    let (n, out_elems) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols());
    check("attention", arguments![qkv.dtype => in qkv[n], out out[out_elems]; Dtype::Float32 => out lse[shape.tokens() * shape.heads]])?;
    let KernelShape { seq_length, heads, kv_heads, head_dim, window } = KernelShape::new(&shape)?;
    let wide = whole_vectors(shape.head_dim, &[qkv]);
    let args = args![qkv, documents, out, lse, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide];
    dev.launch(Stream::Compute, "attention", Some(qkv.dtype), tiles(&shape, shape.heads)?, args)
}

/// See [`crate::device::Kernels::attention_backward`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn attention_backward(
    dev: &mut impl Queue,
    dout: DeviceSlice,
    qkv: DeviceSlice,
    documents: Option<DeviceSlice>,
    out: DeviceSlice,
    lse: DeviceSlice,
    dqkv: DeviceSlice,
    shape: AttentionShape,
) -> Result<()> {
    check_shape("attention_backward", &shape)?;
    check_documents("attention_backward", documents, &shape)?;
    let (n, out_elems) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols());
    let rows = shape.tokens() * shape.heads;
    check(
        "attention_backward",
        arguments![
            qkv.dtype => in dout[out_elems], in qkv[n], in out[out_elems], out dqkv[n];
            Dtype::Float32 => in lse[rows]
        ],
    )?;
    let delta = dev.scratch(rows)?;
    let KernelShape { seq_length, heads, kv_heads, head_dim, window } = KernelShape::new(&shape)?;
    let dtype = Some(qkv.dtype);
    let launch = LaunchConfig::new(size(rows.div_ceil(THREADS / WARP))?, THREADS as u32);
    dev.launch(Stream::Compute, "attention_delta", dtype, launch, args![dout, out, delta, size(rows)?, seq_length, heads, head_dim])?;
    let wide = whole_vectors(shape.head_dim, &[dout, qkv]);
    let args = args![dout, qkv, documents, lse, delta, dqkv, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide];
    dev.launch(Stream::Compute, "attention_backward_q", dtype, tiles(&shape, shape.heads)?, args)?;
    dev.launch(Stream::Compute, "attention_backward_kv", dtype, tiles(&shape, shape.kv_heads)?, args)
}

/// A shape as the kernels take it.
struct KernelShape {
    seq_length: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Every token sees itself and at most all of its sequence.
    window: u32,
}

impl KernelShape {
    fn new(shape: &AttentionShape) -> Result<Self> {
        let window = shape.window.map_or(shape.seq_length, |window| window.min(shape.seq_length));
        Ok(Self {
            seq_length: size(shape.seq_length)?,
            heads: size(shape.heads)?,
            kv_heads: size(shape.kv_heads)?,
            head_dim: size(shape.head_dim)?,
            window: size(window)?,
        })
    }
}

/// Blocks for the tiles of `heads` heads of every sequence, each as often as its channels have slices.
fn tiles(shape: &AttentionShape, heads: usize) -> Result<LaunchConfig> {
    let (tiles, slices) = (shape.seq_length.div_ceil(TILE), shape.head_dim.div_ceil(SLICE));
    Ok(LaunchConfig { grid: [size(tiles)?, size(heads * slices)?, size(shape.batch)?], block: [THREADS as u32, 1, 1], shared_bytes: 0 })
}
