//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use crate::device::arguments::{arguments, check, rows};
use crate::device::{DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/cross_entropy.ptx",
    ptx: include_str!("../../../../ptx/transformer/cross_entropy.ptx"),
    typed: &["cross_entropy_stats", "cross_entropy_grad"],
    plain: &["cross_entropy_loss"],
};

/// Threads of a block, as in `cross_entropy.cu`.
const THREADS: u32 = 512;
const LOSS_THREADS: u32 = 1024;
/// Columns of a block of the gradient: four vectors of a narrow format for each thread.
const GRAD_COLS: usize = 16384;

/// See [`crate::device::Kernels::cross_entropy_stats`].
pub(super) fn cross_entropy_stats(
    dev: &mut impl Queue,
    logits: DeviceSlice,
    targets: DeviceSlice,
    stats: DeviceSlice,
    vocab_start: usize,
    cols: usize,
    first: bool,
) -> Result<()> {
    let t = targets.elems;
    check(
        "cross_entropy_stats",
        arguments![logits.dtype => in logits[t * cols]; Dtype::Int32 => in targets[t]; Dtype::Float32 => out stats[3 * t]],
    )?;
    let args = args![logits, targets, stats, size(vocab_start)?, size(cols)?, first];
    dev.launch(Stream::Compute, "cross_entropy_stats", Some(logits.dtype), LaunchConfig::new(size(t)?, THREADS), args)
}

/// See [`crate::device::Kernels::cross_entropy_grad`].
pub(super) fn cross_entropy_grad(
    dev: &mut impl Queue,
    logits: DeviceSlice,
    targets: DeviceSlice,
    stats: DeviceSlice,
    vocab_start: usize,
    cols: usize,
    scale: f32,
) -> Result<()> {
    let t = targets.elems;
    check(
        "cross_entropy_grad",
        arguments![logits.dtype => out logits[t * cols]; Dtype::Int32 => in targets[t]; Dtype::Float32 => in stats[3 * t]],
    )?;
    let launch = LaunchConfig { grid: [size(t)?, size(cols.div_ceil(GRAD_COLS))?, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
    let args = args![logits, targets, stats, size(vocab_start)?, size(cols)?, scale];
    dev.launch(Stream::Compute, "cross_entropy_grad", Some(logits.dtype), launch, args)
}

/// See [`crate::device::Kernels::cross_entropy_loss`].
pub(super) fn cross_entropy_loss(dev: &mut impl Queue, stats: DeviceSlice, loss: DeviceSlice, scale: f32, accumulate: bool) -> Result<()> {
    let rows = rows(stats, 3);
    check("cross_entropy_loss", arguments![Dtype::Float32 => in stats[rows * 3], out loss[1]])?;
    let args = args![stats, loss, size(rows)?, scale, accumulate];
    dev.launch(Stream::Compute, "cross_entropy_loss", None, LaunchConfig::new(1, LOSS_THREADS), args)
}
