//! What experts do to their rows between the two products.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{whole_vectors, wide};
use crate::device::{ClampedSwiglu, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot, Kernel, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("transformer/experts.ptx"),
    typed: &["clamped_swiglu", "expert_bias", "expert_bias_any", "expert_backward", "expert_bias_dot"],
    plain: &[],
};

/// Threads of every block, as in `experts.cu`.
const THREADS: usize = 256;

impl GpuKernel for ClampedSwiglu {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { gate_up, out, alpha, limit } = self;
        let blocks = LaunchConfig::new(size(out.elems().div_ceil(THREADS))?, THREADS as u32);
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args![gate_up, out, out.elems() as u64, alpha, limit])
    }
}

impl GpuKernel for ExpertBias {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, bias, experts, entries, cols } = self;
        let vectors = whole_vectors(cols, &[x, bias]);
        let (name, each) = if vectors { (Self::NAME, wide(x.dtype())) } else { ("expert_bias_any", 1) };
        let grid = [size(entries.elems())?, size(cols.div_ceil(THREADS * each))?, 1];
        let blocks = LaunchConfig { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 };
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args![bias, experts, entries, x, size(cols)?])
    }
}

impl GpuKernel for ExpertBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { da, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols } = self;
        // No limit is 0: a positive one clamps.
        let (alpha, limit) = match activation {
            ExpertActivation::Swiglu => (0.0, 0.0),
            ExpertActivation::Clamped { alpha, limit } => (alpha, limit),
        };
        let args = args![da, gate_up, weights, entries, dgate_up, weighted, dweights, size(cols)?, alpha, limit];
        let blocks = LaunchConfig::new(size(entries.elems())?, THREADS as u32);
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for ExpertBiasDot {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, bias, experts, entries, dweights, cols } = self;
        let blocks = LaunchConfig::new(size(entries.elems())?, THREADS as u32);
        let args = args![dout, bias, experts, entries, dweights, size(cols)?];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}
