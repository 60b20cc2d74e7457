//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use crate::device::{CrossEntropyGrad, CrossEntropyLoss, CrossEntropyStats, Kernel, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/cross_entropy.ptx"),
    typed: &["cross_entropy_stats", "cross_entropy_grad", "cross_entropy_stats_capped", "cross_entropy_grad_capped"],
    plain: &["cross_entropy_loss"],
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
        let grid = [size(targets.elems())?, size(cols.div_ceil(GRAD_COLS))?, 1];
        let blocks = LaunchConfig { grid, block: [THREADS, 1, 1], shared_bytes: 0 };
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

impl GpuKernel for CrossEntropyLoss {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { targets, stats, loss, scale, accumulate } = self;
        let args = args![targets, stats, loss, size(targets.elems())?, scale, accumulate];
        queue.launch(Stream::Compute, Self::NAME, None, LaunchConfig::new(1, LOSS_THREADS), args)
    }
}
