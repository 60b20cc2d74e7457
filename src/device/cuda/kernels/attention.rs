//! Attention by cuDNN, by products, or by this program's kernels (`--attention plain`).

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::super::{CudaDevice, sdpa};
use super::grid::{WARP, whole_vectors};
use crate::device::{
    AttentionBackward, AttentionForward, AttentionShape, AttentionWay, Checked, Device, DeviceSlice, Kernel, Launch, ScoreTile, Stream,
    score_passes,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/attention.ptx"),
    typed: &[
        "attention",
        "attention_delta",
        "attention_backward_q",
        "attention_backward_kv",
        "attention_capped",
        "attention_backward_q_capped",
        "attention_backward_kv_capped",
    ],
    plain: &[],
};

/// Constants of `attention.cu`: threads of a block, queries or keys of a block, channels of a block's result.
const THREADS: usize = 256;
const TILE: usize = 64;
const SLICE: usize = 128;

impl Launch<AttentionForward> for CudaDevice {
    fn accept(&mut self, kernel: Checked<AttentionForward>) -> Result<()> {
        match (self.attention.way(&kernel.shape), kernel.documents) {
            (AttentionWay::Plain, _) => plain(*kernel, self),
            (_, None) => self.attend(&kernel),
            (_, Some(_)) => self.attend_packed(&kernel),
        }
    }
}

impl Launch<AttentionBackward> for CudaDevice {
    fn accept(&mut self, kernel: Checked<AttentionBackward>) -> Result<()> {
        match (self.attention.way(&kernel.shape), kernel.documents) {
            (AttentionWay::Plain, _) => plain_backward(*kernel, self),
            (_, None) => self.attend_backward(&kernel),
            (_, Some(_)) => self.attend_packed_backward(&kernel),
        }
    }
}

impl CudaDevice {
    /// Attention over rows of one document, by cuDNN or by products.
    pub(super) fn attend(&mut self, kernel: &AttentionForward) -> Result<()> {
        if self.attention.way(&kernel.shape) != AttentionWay::Products {
            return fused(self, &sdpa::AttentionCall::forward(kernel)?);
        }
        let workspace = self.reserve_scores(&[(kernel.shape, None)], kernel.float_format()?)?;
        score_passes::forward(self, kernel, workspace)
    }

    /// The backward pass of [`CudaDevice::attend`].
    pub(super) fn attend_backward(&mut self, kernel: &AttentionBackward) -> Result<()> {
        let AttentionBackward { shape, block, .. } = *kernel;
        if self.attention.way(&shape) != AttentionWay::Products {
            let block = block.or_else(|| self.sdpa.as_ref().map(|sdpa| sdpa.block(&shape))).unwrap_or(shape.seq_length);
            return fused(self, &sdpa::AttentionCall::backward(kernel, block)?);
        }
        let workspace = self.reserve_scores(&[(shape, block)], kernel.float_format()?)?;
        score_passes::backward(self, kernel, workspace)
    }

    /// The workspace of attention by products for all of these shapes and blocks.
    ///
    /// # Errors
    /// `Unsupported` for formats and shapes that products do not have; `Resource` without memory.
    pub(in super::super) fn reserve_scores(&mut self, shapes: &[(AttentionShape, Option<usize>)], dtype: Dtype) -> Result<DeviceSlice> {
        if let Some((shape, _)) =
            shapes.iter().find(|(shape, _)| dtype == Dtype::Float32 || !shape.head_dim.is_multiple_of(ScoreTile::GRAIN))
        {
            return Err(Error::Unsupported(format!(
                "attention by products of heads of {} channels in {dtype}: it has 16-bit formats and multiples of {} channels; \
                 `--attention plain` computes it",
                shape.head_dim,
                ScoreTile::GRAIN
            )));
        }
        let bytes = shapes.iter().map(|(shape, block)| score_passes::workspace_bytes(shape, dtype, *block)).max().unwrap_or(0);
        if self.scores.bytes() < bytes {
            self.free(self.scores)?;
            self.scores = self.alloc("scores of attention", bytes / Dtype::Float32.bytes(), Dtype::Float32)?;
        }
        Ok(self.scores)
    }
}

/// Enqueues `call` with cuDNN.
fn fused(dev: &mut CudaDevice, call: &sdpa::AttentionCall) -> Result<()> {
    // Taken out for the call, because the span around it borrows the device.
    let mut sdpa = dev.sdpa.take().ok_or_else(|| Error::Unsupported("fused attention on a device opened without cuDNN".into()))?;
    let result = enqueue_steps(dev, &mut sdpa, call);
    dev.sdpa = Some(sdpa);
    result
}

fn enqueue_steps(dev: &mut CudaDevice, sdpa: &mut sdpa::Sdpa, call: &sdpa::AttentionCall) -> Result<()> {
    for steps in sdpa.steps(call)? {
        dev.timed(Stream::Compute, call.name, |_| steps.iter().try_for_each(|step| sdpa.enqueue(call, *step)))?;
        sdpa.sums_behind(call, &steps)?.into_iter().try_for_each(|sums| sums.enqueue(dev))?;
    }
    Ok(())
}

pub(super) fn plain(kernel: AttentionForward, queue: &mut impl Queue) -> Result<()> {
    let AttentionForward { qkv, documents, out, lse, shape } = kernel;
    let KernelShape { seq_length, heads, kv_heads, head_dim, window } = KernelShape::new(&shape)?;
    let wide = whole_vectors(shape.head_dim, &[qkv]);
    let (dtype, blocks) = (Some(kernel.float_format()?), tiles(&shape, shape.heads)?);
    match shape.softcap {
        None => {
            let args = args![qkv, documents, out, lse, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide];
            queue.launch(Stream::Compute, "attention", dtype, blocks, args)
        }
        Some(cap) => {
            let args = args![qkv, documents, out, lse, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide, cap];
            queue.launch(Stream::Compute, "attention_capped", dtype, blocks, args)
        }
    }
}

/// Enqueues this program's backward kernels: gradients of queries, then of keys and values.
pub(super) fn plain_backward(kernel: AttentionBackward, queue: &mut impl Queue) -> Result<()> {
    let AttentionBackward { dout, qkv, documents, out, lse, dqkv, shape, block } = kernel;
    if block.is_some_and(|block| block < shape.seq_length) {
        return Err(Error::Unsupported("attention's backward pass in blocks of queries without cuDNN, which computes all at once".into()));
    }
    let dtype = Some(kernel.float_format()?);
    let rows = shape.tokens() * shape.heads;
    let delta = queue.scratch(rows)?;
    let KernelShape { seq_length, heads, kv_heads, head_dim, window } = KernelShape::new(&shape)?;
    let blocks = LaunchConfig::new(size(rows.div_ceil(THREADS / WARP))?, THREADS as u32);
    queue.launch(Stream::Compute, "attention_delta", dtype, blocks, args![dout, out, delta, size(rows)?, seq_length, heads, head_dim])?;
    let wide = whole_vectors(shape.head_dim, &[dout, qkv]);
    let (queries, keys) = (tiles(&shape, shape.heads)?, tiles(&shape, shape.kv_heads)?);
    match shape.softcap {
        None => {
            let args = args![dout, qkv, documents, lse, delta, dqkv, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide];
            queue.launch(Stream::Compute, "attention_backward_q", dtype, queries, args)?;
            queue.launch(Stream::Compute, "attention_backward_kv", dtype, keys, args)
        }
        Some(cap) => {
            let args = args![dout, qkv, documents, lse, delta, dqkv, seq_length, heads, kv_heads, head_dim, window, shape.scale, wide, cap];
            queue.launch(Stream::Compute, "attention_backward_q_capped", dtype, queries, args)?;
            queue.launch(Stream::Compute, "attention_backward_kv_capped", dtype, keys, args)
        }
    }
}

struct KernelShape {
    seq_length: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Number of visible keys, at most the sequence length.
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

/// Grid over the tiles of `heads` heads of every sequence, with one block for each slice of channels.
fn tiles(shape: &AttentionShape, heads: usize) -> Result<LaunchConfig> {
    let (tiles, slices) = (shape.seq_length.div_ceil(TILE), shape.head_dim.div_ceil(SLICE));
    Ok(LaunchConfig { grid: [size(tiles)?, size(heads * slices)?, size(shape.batch)?], block: [THREADS as u32, 1, 1], shared_bytes: 0 })
}
