//! Short causal convolutions.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use crate::device::{DeviceSlice, Kernel, ShortConv, ShortConvBackward, Stream, TAPS};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/short_conv.ptx"),
    typed: &["short_conv", "short_conv_any", "short_conv_backward", "short_conv_backward_any"],
    plain: &[],
};

/// Constants of `short_conv.cu`: threads of a block, channels of a thread.
const THREADS: usize = 128;
const VECTOR: usize = 4;
/// Tokens of a thread of the forward pass, and the least of the backward pass.
const RUN: usize = 16;
const BACKWARD_RUN: usize = 64;
/// Maximum partial sums of a weight.
const PARTIALS: usize = 128;

impl GpuKernel for ShortConv {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, weight, documents, out, seq_length } = self;
        let [tokens, channels] = self.size();
        let (vectors, blocks) = blocks([tokens, channels], RUN, &[x, weight, out])?;
        let name = if vectors { "short_conv" } else { "short_conv_any" };
        let args = args![x, weight, documents, out, size(tokens)?, size(channels)?, size(seq_length)?, size(RUN)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for ShortConvBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, x, weight, documents, dx, dweight, accumulate, seq_length } = self;
        let [tokens, channels] = self.size();
        let run = tokens.div_ceil(PARTIALS).max(BACKWARD_RUN);
        let (vectors, blocks) = blocks([tokens, channels], run, &[dout, x, weight, dx])?;
        let name = if vectors { "short_conv_backward" } else { "short_conv_backward_any" };
        let runs = tokens.div_ceil(run);
        let partials = queue.scratch(runs * channels * TAPS)?;
        let args = args![dout, x, weight, documents, dx, partials, size(tokens)?, size(channels)?, size(seq_length)?, size(run)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)?;
        fold_columns(queue, partials, runs, (dweight, None), accumulate)
    }
}

/// Whether channels are processed as vectors, and a grid of threads that each have some channels of `run` tokens.
fn blocks([tokens, channels]: [usize; 2], run: usize, slices: &[DeviceSlice]) -> Result<(bool, LaunchConfig)> {
    let aligned = |x: &DeviceSlice| x.addr().is_multiple_of((VECTOR * x.dtype().bytes()) as u64);
    let vectors = channels.is_multiple_of(VECTOR) && slices.iter().all(aligned);
    let across = channels.div_ceil(if vectors { VECTOR } else { 1 });
    let grid = [size(tokens.div_ceil(run))?, size(across.div_ceil(THREADS))?, 1];
    Ok((vectors, LaunchConfig { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 }))
}
