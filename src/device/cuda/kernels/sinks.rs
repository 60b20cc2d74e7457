//! Attention sinks.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::WARP;
use crate::device::{AttentionShape, Kernel, Sinks, SinksBackward, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("transformer/sinks.ptx"), typed: &["sinks", "sinks_backward"], plain: &[] };

/// As in `sinks.cu`.
const THREADS: usize = 256;
const BACKWARD_THREADS: u32 = 1024;

impl GpuKernel for Sinks {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { sinks, out, lse, shape } = self;
        let AttentionShape { seq_length, heads, head_dim, .. } = shape;
        let rows = shape.tokens() * heads;
        let blocks = LaunchConfig::new(size(rows.div_ceil(THREADS / WARP))?, THREADS as u32);
        let args = args![sinks, out, lse, rows as u64, size(heads)?, size(head_dim)?, size(seq_length)?];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for SinksBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, out, lse, sinks, dsinks, accumulate, shape } = self;
        let AttentionShape { seq_length, heads, head_dim, .. } = shape;
        let blocks = LaunchConfig::new(size(heads)?, BACKWARD_THREADS);
        let (tokens, heads) = (size(shape.tokens())?, size(heads)?);
        let args = args![dout, out, lse, sinks, dsinks, tokens, heads, size(head_dim)?, size(seq_length)?, accumulate];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}
