//! Activations, biases and gradients between the two matrix products of experts.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{WARP, rows_blocks, threads, whole_vectors, wide};
use crate::device::{
    ClampedSwiglu, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot, Kernel, ScaleChoices, ScaleChoicesBackward, Stream,
};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/experts.ptx"),
    typed: &[
        "clamped_swiglu",
        "clamped_swiglu_any",
        "expert_bias",
        "expert_bias_any",
        "expert_backward",
        "expert_backward_any",
        "expert_bias_dot",
        "expert_bias_dot_any",
        "scale_choices",
        "scale_choices_backward",
    ],
    plain: &[],
};

/// Constants of `experts.cu`: maximum threads of a block, rows of a block of `expert_bias`.
const THREADS: usize = 256;
const BIAS_ROWS: usize = 4;

impl GpuKernel for ClampedSwiglu {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { gate_up, out, alpha, limit } = self;
        let elems = out.elems();
        // A vector holds both gates and up projections.
        let vectors = whole_vectors(elems, &[gate_up, out]);
        let (name, each) = if vectors { (Self::NAME, wide(out.dtype()) / 2) } else { ("clamped_swiglu_any", 1) };
        let blocks = LaunchConfig::new(size(elems.div_ceil(THREADS * each))?, THREADS as u32);
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args![gate_up, out, elems as u64, alpha, limit])
    }
}

impl GpuKernel for ExpertBias {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, bias, experts, entries, cols } = self;
        let rows = entries.elems();
        let (vectors, blocks) = rows_blocks(rows.div_ceil(BIAS_ROWS), cols, THREADS, &[x, bias])?;
        let name = if vectors { Self::NAME } else { "expert_bias_any" };
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args![bias, experts, entries, x, size(rows)?, size(cols)?])
    }
}

impl GpuKernel for ExpertBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { da, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols } = self;
        let vectors = whole_vectors(cols, &[da, gate_up, dgate_up, weighted]);
        let (name, each) = if vectors { (Self::NAME, wide(da.dtype())) } else { ("expert_backward_any", 1) };
        // A limit of 0 means no limit, and a negative one GELU. With a limit, a thread processes half as many elements.
        let (alpha, limit, each) = match activation {
            ExpertActivation::Swiglu => (0.0, 0.0, each),
            ExpertActivation::Geglu => (0.0, -1.0, each),
            ExpertActivation::Clamped { alpha, limit } => (alpha, limit, each.div_ceil(2)),
        };
        let args = args![da, gate_up, weights, entries, dgate_up, weighted, dweights, size(cols)?, alpha, limit];
        let blocks = LaunchConfig::new(size(entries.elems())?, size(threads(cols, each).min(THREADS))?);
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for ExpertBiasDot {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, bias, experts, entries, dweights, cols } = self;
        let (rows, vectors) = (entries.elems(), whole_vectors(cols, &[dout, bias]));
        let name = if vectors { Self::NAME } else { "expert_bias_dot_any" };
        let blocks = LaunchConfig::new(size(rows.div_ceil(THREADS / WARP))?, THREADS as u32);
        let args = args![dout, bias, experts, entries, dweights, size(rows)?, size(cols)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for ScaleChoices {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { weights, experts, scale, out } = self;
        let blocks = LaunchConfig::new(size(out.elems().div_ceil(THREADS))?, THREADS as u32);
        let args = args![weights, experts, scale, out, size(out.elems())?];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for ScaleChoicesBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { weights, entries, bounds, scale, dweights, dscale, accumulate } = self;
        let blocks = LaunchConfig::new(size(scale.elems())?, THREADS as u32);
        let args = args![weights, entries, bounds, scale, dweights, dscale, u32::from(accumulate)];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}
