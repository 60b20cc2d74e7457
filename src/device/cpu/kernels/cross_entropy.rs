//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::Compute;
use super::isa::vectorised;
use super::math::exp;
use super::reduce::{fold, max};
use super::split::Chunks;
use crate::dtype::Element;

/// Rows of one block: logits have few, long rows.
const BLOCK: usize = 16;

/// One tile of logits `[rows, cols]` and where it lies.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// The token that each row should predict.
    pub(crate) targets: &'a [i32],
    /// Token of the first column.
    pub(crate) vocab_start: usize,
    /// Columns.
    pub(crate) cols: usize,
}

impl Tile<'_> {
    /// The column of the target of `row`, if it lies in this tile.
    fn target(&self, row: usize) -> Option<usize> {
        let token = usize::try_from(self.targets[row]).ok()?;
        token.checked_sub(self.vocab_start).filter(|&col| col < self.cols)
    }
}

/// See [`crate::device::Kernels::cross_entropy_stats`].
pub(crate) fn stats<T: Element>(cx: &mut Compute, tile: Tile<'_>, logits: &[T], stats: &mut [f32], first: bool) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(stats, 3 * BLOCK), |block, stats| {
        for (i, stats) in stats.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            let row = block * BLOCK + i;
            let logits = &logits[row * tile.cols..][..tile.cols];
            let [max, sum, target] = if first { [f32::NEG_INFINITY, 0.0, 0.0] } else { *stats };
            let (max, sum) = extend(isa, logits, max, sum);
            *stats = [max, sum, tile.target(row).map_or(target, |col| logits[col].to_f32())];
        }
    });
}

/// See [`crate::device::Kernels::cross_entropy_grad`].
pub(crate) fn grad<T: Element>(cx: &mut Compute, tile: Tile<'_>, logits: &mut [T], stats: &[f32], scale: f32) {
    let isa = cx.isa;
    let stats = stats.as_chunks::<3>().0;
    cx.team.for_each(Chunks::new(logits, BLOCK * tile.cols), |block, logits| {
        for (i, logits) in logits.chunks_exact_mut(tile.cols).enumerate() {
            let row = block * BLOCK + i;
            let [max, sum, _] = stats[row];
            let target = tile.target(row).map(|col| (col, exp(logits[col].to_f32() - max) / sum - 1.0));
            softmax(isa, logits, max, 1.0 / sum, scale);
            if let Some((col, gradient)) = target {
                logits[col] = T::from_f32(gradient * scale);
            }
        }
    });
}

/// See [`crate::device::Kernels::cross_entropy_loss`].
pub(crate) fn loss(stats: &[f32], loss: &mut f32, scale: f32, accumulate: bool) {
    let row = |[max, sum, target]: &[f32; 3]| f64::from(*max) + libm::log(f64::from(*sum)) - f64::from(*target);
    let total: f64 = stats.as_chunks::<3>().0.iter().map(row).sum();
    let old = if accumulate { f64::from(*loss) } else { 0.0 };
    *loss = (old + f64::from(scale) * total) as f32;
}

vectorised! {
    /// The maximum and the sum of exponentials below it, extended by one row of logits.
    fn extend<T>(logits: &[T], old_max: f32, old_sum: f32) -> (f32, f32) {
        let tile_max = max(logits);
        let max = if tile_max > old_max { tile_max } else { old_max };
        let sum = fold(logits, |sum, x| sum + exp(x - max));
        (max, old_sum.mul_add(exp(old_max - max), sum))
    }
}

vectorised! {
    fn softmax<T>(logits: &mut [T], max: f32, inv_sum: f32, scale: f32) {
        logits.iter_mut().for_each(|x| *x = T::from_f32(exp(x.to_f32() - max) * inv_sum * scale));
    }
}
