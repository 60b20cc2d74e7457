//! Distillation: rows of logits beside the tokens of a teacher.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use crate::device::{Kernel, Stream, TeacherGrad, TeacherLosses, TeacherStats};
use crate::error::Result;
use crate::teacher_loss::TeacherLoss;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/teacher.ptx"),
    typed: &["teacher_stats", "teacher_stats_capped", "teacher_grad"],
    plain: &["teacher_losses"],
};

/// Threads of a block, as in `softmax.cuh`.
const THREADS: u32 = 512;

impl GpuKernel for TeacherStats {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, targets, teacher, stats, entries, top_k, vocab_start, cols, softcap, first } = self;
        let (top_k, vocab_start, cols, dtype) = (size(top_k)?, size(vocab_start)?, size(cols)?, Some(self.float_format()?));
        let blocks = LaunchConfig::new(size(targets.elems())?, THREADS);
        match softcap {
            None => {
                let args = args![logits, targets, teacher, stats, entries, top_k, vocab_start, cols, first];
                queue.launch(Stream::Compute, Self::NAME, dtype, blocks, args)
            }
            Some(cap) => {
                let args = args![logits, targets, teacher, stats, entries, top_k, vocab_start, cols, first, cap];
                queue.launch(Stream::Compute, "teacher_stats_capped", dtype, blocks, args)
            }
        }
    }
}

impl GpuKernel for TeacherLosses {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { teacher, targets, stats, entries, scales, totals, report, loss, softcap, weight, scale, accumulate } = self;
        let TeacherLoss { kd_ratio, top_k } = loss;
        let (rows, top_k, cap) = (size(targets.elems())?, size(top_k)?, softcap.unwrap_or(0.0));
        let args = args![teacher, targets, stats, entries, scales, totals, report, rows, top_k, kd_ratio, cap, weight, scale, accumulate];
        queue.launch(Stream::Compute, Self::NAME, None, LaunchConfig::new(1, THREADS), args)
    }
}

impl GpuKernel for TeacherGrad {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, pitch, targets, teacher, entries, top_k, vocab_start, cols } = self;
        let dtype = Some(self.float_format()?);
        let blocks = LaunchConfig::new(size(entries.elems().div_ceil(THREADS as usize))?, THREADS);
        let (rows, top_k, vocab_start, cols) = (size(targets.elems())?, size(top_k)?, size(vocab_start)?, size(cols)?);
        let args = args![logits, targets, teacher, entries, rows, top_k, vocab_start, cols, size(pitch)?];
        queue.launch(Stream::Compute, Self::NAME, dtype, blocks, args)
    }
}
