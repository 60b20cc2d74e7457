//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use crate::device::{
    CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, CrossEntropyStats, DeviceSlice, Kernel, PairLosses, PolicyLosses, Stream,
};
use crate::error::Result;
use crate::pair_loss::PairLoss;
use crate::policy_loss::PolicyLoss;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/cross_entropy.ptx"),
    typed: &[
        "cross_entropy_stats",
        "cross_entropy_grad",
        "cross_entropy_row_grad",
        "cross_entropy_stats_capped",
        "cross_entropy_grad_capped",
        "cross_entropy_row_grad_capped",
    ],
    plain: &["cross_entropy_loss", "pair_losses", "policy_losses"],
};

/// Threads of a block, as in `cross_entropy.cu`.
const THREADS: u32 = 512;
const LOSS_THREADS: u32 = 1024;
/// Columns of a block of the gradient: four vectors of a 16-bit format for each thread.
const GRAD_COLS: usize = 16384;

impl GpuKernel for CrossEntropyStats {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, targets, stats, vocab_start, cols, softcap, first } = self;
        let (vocab_start, cols, dtype) = (size(vocab_start)?, size(cols)?, Some(self.float_format()?));
        let blocks = LaunchConfig::new(size(targets.elems())?, THREADS);
        match softcap {
            None => {
                let args = args![logits, targets, stats, vocab_start, cols, first];
                queue.launch(Stream::Compute, Self::NAME, dtype, blocks, args)
            }
            Some(cap) => {
                let args = args![logits, targets, stats, vocab_start, cols, first, cap];
                queue.launch(Stream::Compute, "cross_entropy_stats_capped", dtype, blocks, args)
            }
        }
    }
}

impl GpuKernel for CrossEntropyGrad {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, targets, stats, vocab_start, cols, softcap, scale } = self;
        let blocks = gradient_blocks(targets, cols)?;
        let (vocab_start, cols, dtype) = (size(vocab_start)?, size(cols)?, Some(self.float_format()?));
        match softcap {
            None => {
                let args = args![logits, targets, stats, vocab_start, cols, scale];
                queue.launch(Stream::Compute, Self::NAME, dtype, blocks, args)
            }
            Some(cap) => {
                let args = args![logits, targets, stats, vocab_start, cols, scale, cap];
                queue.launch(Stream::Compute, "cross_entropy_grad_capped", dtype, blocks, args)
            }
        }
    }
}

impl GpuKernel for CrossEntropyRowGrad {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, targets, stats, scales, vocab_start, cols, softcap } = self;
        let blocks = gradient_blocks(targets, cols)?;
        let (vocab_start, cols, dtype) = (size(vocab_start)?, size(cols)?, Some(self.float_format()?));
        match softcap {
            None => {
                let args = args![logits, targets, stats, vocab_start, cols, scales];
                queue.launch(Stream::Compute, Self::NAME, dtype, blocks, args)
            }
            Some(cap) => {
                let args = args![logits, targets, stats, vocab_start, cols, scales, cap];
                queue.launch(Stream::Compute, "cross_entropy_row_grad_capped", dtype, blocks, args)
            }
        }
    }
}

/// Blocks of a gradient with these targets and columns.
fn gradient_blocks(targets: DeviceSlice, cols: usize) -> Result<LaunchConfig> {
    let grid = [size(targets.elems())?, size(cols.div_ceil(GRAD_COLS))?, 1];
    Ok(LaunchConfig { grid, block: [THREADS, 1, 1], shared_bytes: 0 })
}

impl GpuKernel for PairLosses {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let places = size(self.places())?;
        let Self { pairs, targets, stats, scales, sums, totals, report, loss, step_pairs, scale, accumulate } = self;
        let PairLoss { kind, beta, margin, .. } = loss;
        let args = args![
            pairs,
            targets,
            stats,
            scales,
            sums,
            totals,
            report,
            places,
            kind.number(),
            beta,
            loss.own_coefficient(),
            margin,
            step_pairs,
            scale,
            accumulate
        ];
        queue.launch(Stream::Compute, Self::NAME, None, LaunchConfig::new(1, THREADS), args)
    }
}

impl GpuKernel for PolicyLosses {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { tokens, targets, stats, scales, totals, report, loss, count, scale, accumulate } = self;
        let PolicyLoss { kind, epsilon, epsilon_high, beta, max_completion_length } = loss;
        let (rows, most) = (size(targets.elems())?, max_completion_length as f64);
        let (least_ratio, most_ratio) = (1.0 - epsilon, 1.0 + epsilon_high);
        let args = args![
            tokens,
            targets,
            stats,
            scales,
            totals,
            report,
            rows,
            kind.number(),
            least_ratio,
            most_ratio,
            beta,
            most,
            count,
            scale,
            accumulate
        ];
        queue.launch(Stream::Compute, Self::NAME, None, LaunchConfig::new(1, THREADS), args)
    }
}

impl GpuKernel for CrossEntropyLoss {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { targets, stats, loss, scale, accumulate } = self;
        let args = args![targets, stats, loss, size(targets.elems())?, scale, accumulate];
        queue.launch(Stream::Compute, Self::NAME, None, LaunchConfig::new(1, LOSS_THREADS), args)
    }
}
