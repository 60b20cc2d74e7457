//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use crate::device::{
    CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, CrossEntropyStats, DeviceSlice, Kernel, PairLosses, PolicyLosses, Stream,
};
use crate::dtype::Dtype;
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
    plain: &[
        "cross_entropy_loss",
        "pair_losses",
        "policy_losses",
        "cross_entropy_grad_f32_bf16",
        "cross_entropy_grad_f32_f16",
        "cross_entropy_row_grad_f32_bf16",
        "cross_entropy_row_grad_f32_f16",
        "cross_entropy_grad_capped_f32_bf16",
        "cross_entropy_grad_capped_f32_f16",
        "cross_entropy_row_grad_capped_f32_bf16",
        "cross_entropy_row_grad_capped_f32_f16",
    ],
};

/// Names of the kernels of a gradient: in the format of the logits, and from fp32 logits in bfloat16 and in float16.
type GradientNames = [&'static str; 3];

const GRAD: GradientNames = ["cross_entropy_grad", "cross_entropy_grad_f32_bf16", "cross_entropy_grad_f32_f16"];
const GRAD_CAPPED: GradientNames = ["cross_entropy_grad_capped", "cross_entropy_grad_capped_f32_bf16", "cross_entropy_grad_capped_f32_f16"];
const ROW_GRAD: GradientNames = ["cross_entropy_row_grad", "cross_entropy_row_grad_f32_bf16", "cross_entropy_row_grad_f32_f16"];
const ROW_GRAD_CAPPED: GradientNames =
    ["cross_entropy_row_grad_capped", "cross_entropy_row_grad_capped_f32_bf16", "cross_entropy_row_grad_capped_f32_f16"];

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
        let Self { logits, gradients, targets, stats, vocab_start, cols, softcap, scale } = self;
        let names = if softcap.is_some() { GRAD_CAPPED } else { GRAD };
        let (name, dtype, blocks) = gradient_kernel(names, (logits, gradients), targets, cols)?;
        let (vocab_start, cols) = (size(vocab_start)?, size(cols)?);
        match softcap {
            None => queue.launch(Stream::Compute, name, dtype, blocks, args![logits, targets, stats, vocab_start, cols, scale]),
            Some(cap) => queue.launch(Stream::Compute, name, dtype, blocks, args![logits, targets, stats, vocab_start, cols, scale, cap]),
        }
    }
}

impl GpuKernel for CrossEntropyRowGrad {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, gradients, targets, stats, scales, vocab_start, cols, softcap } = self;
        let names = if softcap.is_some() { ROW_GRAD_CAPPED } else { ROW_GRAD };
        let (name, dtype, blocks) = gradient_kernel(names, (logits, gradients), targets, cols)?;
        let (vocab_start, cols) = (size(vocab_start)?, size(cols)?);
        match softcap {
            None => queue.launch(Stream::Compute, name, dtype, blocks, args![logits, targets, stats, vocab_start, cols, scales]),
            Some(cap) => queue.launch(Stream::Compute, name, dtype, blocks, args![logits, targets, stats, vocab_start, cols, scales, cap]),
        }
    }
}

/// The kernel of a gradient, its format if it has several, and its blocks. Narrower gradients overwrite logits of other columns of their row,
/// so that one block takes all of it.
fn gradient_kernel(
    [same, to_bf16, to_f16]: GradientNames,
    (logits, gradients): (DeviceSlice, Dtype),
    targets: DeviceSlice,
    cols: usize,
) -> Result<(&'static str, Option<Dtype>, LaunchConfig)> {
    let rows = size(targets.elems())?;
    let split = LaunchConfig { grid: [rows, size(cols.div_ceil(GRAD_COLS))?, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
    Ok(match gradients {
        _ if gradients == logits.dtype() => (same, Some(gradients), split),
        Dtype::Float16 => (to_f16, None, LaunchConfig::new(rows, THREADS)),
        _ => (to_bf16, None, LaunchConfig::new(rows, THREADS)),
    })
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
