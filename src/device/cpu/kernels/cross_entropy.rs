//! Cross-entropy over the vocabulary, one tile of logits at a time.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::{exp, soft_capped};
use super::reduce::{fold, max};
use super::split::Chunks;
use crate::data::loss_weight::{LossWeight, id_of};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, CrossEntropyStats};
use crate::dtype::{Dtype, Element};
use half::{bf16, f16};

/// Rows of one block, few because a row of logits is long.
pub(super) const BLOCK: usize = 16;

/// One tile `[rows, cols]` of the logits and its position in the vocabulary.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// The word of each row's target; a negative one means that the row has no loss.
    pub(crate) targets: &'a [i32],
    /// Token of the first column.
    pub(crate) vocab_start: usize,
    /// Columns.
    pub(crate) cols: usize,
    /// Soft cap of logits.
    pub(crate) softcap: Option<f32>,
}

/// Statistics of a row without a loss: `0 + ln 1 - 0`.
pub(super) const NO_LOSS: [f32; 3] = [0.0, 1.0, 0.0];

/// The capped logit and the slope of the cap.
#[inline(always)]
pub(super) fn capped(x: f32, softcap: Option<f32>) -> (f32, f32) {
    softcap.map_or((x, 1.0), |cap| soft_capped(x, cap))
}

impl Tile<'_> {
    pub(super) fn has_loss(&self, row: usize) -> bool {
        self.targets[row] >= 0
    }

    fn weight(&self, row: usize) -> f32 {
        LossWeight::of(self.targets[row] as u32).value()
    }

    /// Column of the target of `row`, if the target lies in this tile.
    pub(super) fn target(&self, row: usize) -> Option<usize> {
        self.column(id_of(u32::try_from(self.targets[row]).ok()?))
    }

    /// Column of the token `id`, if it lies in this tile.
    pub(super) fn column(&self, id: u32) -> Option<usize> {
        (id as usize).checked_sub(self.vocab_start).filter(|&col| col < self.cols)
    }
}

impl CpuArithmetic for CrossEntropyStats {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let tile = Tile { targets: memory.read(self.targets), vocab_start: self.vocab_start, cols: self.cols, softcap: self.softcap };
        stats::<T>(cx, tile, memory.read(self.logits), memory.write(self.stats), self.first);
    }
}

/// See [`CrossEntropyStats`].
pub(crate) fn stats<T: Element>(cx: &mut Compute, tile: Tile<'_>, logits: &[T], stats: &mut [f32], first: bool) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(stats, 3 * BLOCK), |block, stats| {
        for (i, stats) in stats.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            let row = block * BLOCK + i;
            if !tile.has_loss(row) {
                *stats = NO_LOSS;
                continue;
            }
            let logits = &logits[row * tile.cols..][..tile.cols];
            let [max, sum, target] = if first { [f32::NEG_INFINITY, 0.0, 0.0] } else { *stats };
            let (max, sum) = extend(isa, logits, tile.softcap, max, sum);
            *stats = [max, sum, tile.target(row).map_or(target, |col| capped(logits[col].to_f32(), tile.softcap).0)];
        }
    });
}

impl CpuArithmetic for CrossEntropyGrad {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let tile = Tile { targets: memory.read(self.targets), vocab_start: self.vocab_start, cols: self.cols, softcap: self.softcap };
        let logits = memory.write::<T>(self.logits);
        grad::<T>(cx, tile, logits, memory.read(self.stats), |row| tile.weight(row) * self.scale);
        narrow_rows(cx, logits, self.cols, self.gradients);
    }
}

impl CpuArithmetic for CrossEntropyRowGrad {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let tile = Tile { targets: memory.read(self.targets), vocab_start: self.vocab_start, cols: self.cols, softcap: self.softcap };
        let (scales, logits) = (memory.read::<f32>(self.scales), memory.write::<T>(self.logits));
        grad::<T>(cx, tile, logits, memory.read(self.stats), |row| scales[row]);
        narrow_rows(cx, logits, self.cols, self.gradients);
    }
}

/// See [`CrossEntropyGrad`]. `scale` returns the factor on the gradient of a row.
pub(crate) fn grad<T: Element>(cx: &mut Compute, tile: Tile<'_>, logits: &mut [T], stats: &[f32], scale: impl Fn(usize) -> f32 + Sync) {
    let isa = cx.isa;
    let stats = stats.as_chunks::<3>().0;
    cx.team.for_each(Chunks::new(logits, BLOCK * tile.cols), |block, logits| {
        for (i, logits) in logits.chunks_exact_mut(tile.cols).enumerate() {
            let row = block * BLOCK + i;
            if !tile.has_loss(row) {
                logits.fill(T::from_f32(0.0));
                continue;
            }
            let ([max, sum, _], scale) = (stats[row], scale(row));
            let target = tile.target(row).map(|col| {
                let (logit, slope) = capped(logits[col].to_f32(), tile.softcap);
                (col, (exp(logit - max) / sum - 1.0) * slope)
            });
            softmax(isa, logits, tile.softcap, max, 1.0 / sum, scale);
            if let Some((col, gradient)) = target {
                logits[col] = T::from_f32(gradient * scale);
            }
        }
    });
}

/// Rounds rows of `cols` gradients to `format`, each into the first half of its own memory, if they have another format.
fn narrow_rows<T: Element>(cx: &mut Compute, rows: &mut [T], cols: usize, format: Dtype) {
    match format {
        Dtype::Bfloat16 if T::DTYPE == Dtype::Float32 => narrow_words::<bf16>(cx, bytemuck::cast_slice_mut(rows), cols),
        Dtype::Float16 if T::DTYPE == Dtype::Float32 => narrow_words::<f16>(cx, bytemuck::cast_slice_mut(rows), cols),
        _ => (),
    }
}

/// See [`narrow_rows`]; `rows` holds the words of fp32 numbers. Two numbers of a row become one word, behind which no word is read again.
fn narrow_words<N: Element>(cx: &mut Compute, rows: &mut [u32], cols: usize) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(rows, BLOCK * cols), |_, rows| {
        rows.chunks_exact_mut(cols).for_each(|row| narrow_row(isa, row, N::from_f32(0.0)));
    });
}

vectorised! {
    fn narrow_row<N>(row: &mut [u32], behind: N) {
        let number = |row: &[u32], i: usize| row.get(i).map_or(behind, |word| N::from_f32(f32::from_bits(*word)));
        for word in 0..row.len().div_ceil(2) {
            row[word] = bytemuck::cast([number(row, 2 * word), number(row, 2 * word + 1)]);
        }
    }
}

impl CpuArithmetic for CrossEntropyLoss {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        loss(memory.read(self.targets), memory.read(self.stats), &mut memory.write(self.loss)[0], self.scale, self.accumulate);
    }
}

/// See [`CrossEntropyLoss`].
pub(crate) fn loss(targets: &[i32], stats: &[f32], loss: &mut f32, scale: f32, accumulate: bool) {
    let row = |[max, sum, target]: &[f32; 3]| f64::from(*max) + libm::log(f64::from(*sum)) - f64::from(*target);
    let weights = targets.iter().map(|word| f64::from(LossWeight::of(*word as u32).value()));
    let total: f64 = weights.zip(stats.as_chunks::<3>().0).map(|(weight, stats)| weight * row(stats)).sum();
    let old = if accumulate { f64::from(*loss) } else { 0.0 };
    *loss = (old + f64::from(scale) * total) as f32;
}

vectorised! {
    /// Extends a running maximum and sum of exponentials by one row of logits.
    fn extend<T>(logits: &[T], softcap: Option<f32>, old_max: f32, old_sum: f32) -> (f32, f32) {
        let tile_max = capped(max(logits), softcap).0;
        let max = if tile_max > old_max { tile_max } else { old_max };
        let sum = match softcap {
            None => fold(logits, |sum, x| sum + exp(x - max)),
            Some(cap) => fold(logits, |sum, x| sum + exp(soft_capped(x, cap).0 - max)),
        };
        (max, old_sum.mul_add(exp(old_max - max), sum))
    }
}

vectorised! {
    fn softmax<T>(logits: &mut [T], softcap: Option<f32>, max: f32, inv_sum: f32, scale: f32) {
        match softcap {
            None => logits.iter_mut().for_each(|x| *x = T::from_f32(exp(x.to_f32() - max) * inv_sum * scale)),
            Some(cap) => logits.iter_mut().for_each(|x| {
                let (logit, slope) = soft_capped(x.to_f32(), cap);
                *x = T::from_f32(exp(logit - max) * inv_sum * slope * scale);
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::KernelIsa;
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, values, wide, widened};
    use super::*;

    const ROWS: usize = 37;
    const VOCAB: usize = 50;
    const SCALE: f32 = 0.25;

    fn inputs<T: Element>() -> (Vec<T>, Vec<i32>) {
        let logits = values(1, ROWS * VOCAB).iter().map(|x: &f32| T::from_f32(8.0 * x)).collect();
        (logits, (0..ROWS).map(|row| (row * 7 % VOCAB) as i32).collect())
    }

    /// Statistics, loss and gradient, computed in vocabulary tiles of `tile_cols`.
    fn run<T: Element>(cx: &mut Compute, logits: &[T], targets: &[i32], tile_cols: usize) -> (Vec<f32>, f32, Vec<T>) {
        run_capped(cx, logits, targets, tile_cols, None)
    }

    fn run_capped<T: Element>(
        cx: &mut Compute,
        logits: &[T],
        targets: &[i32],
        tile_cols: usize,
        softcap: Option<f32>,
    ) -> (Vec<f32>, f32, Vec<T>) {
        let mut row_stats = vec![f32::NAN; 3 * ROWS];
        let columns = |start: usize, cols: usize| -> Vec<T> {
            logits.chunks_exact(VOCAB).flat_map(|row| row[start..start + cols].to_vec()).collect()
        };
        let mut tiles = Vec::new();
        for start in (0..VOCAB).step_by(tile_cols) {
            let tile = Tile { targets, vocab_start: start, cols: tile_cols.min(VOCAB - start), softcap };
            let logits = columns(start, tile.cols);
            stats(cx, tile, &logits, &mut row_stats, start == 0);
            tiles.push((tile, logits));
        }
        let mut gradient = logits.to_vec();
        for (tile, mut logits) in tiles {
            grad(cx, tile, &mut logits, &row_stats, |row| tile.weight(row) * SCALE);
            for (row, part) in logits.chunks_exact(tile.cols).enumerate() {
                gradient[row * VOCAB + tile.vocab_start..][..tile.cols].copy_from_slice(part);
            }
        }
        let mut total = 0.0;
        loss(targets, &row_stats, &mut total, SCALE, false);
        (row_stats, total, gradient)
    }

    fn reference(logits: &[f64], targets: &[i32]) -> (f64, Vec<f64>) {
        let (mut total, mut gradient) = (0.0, Vec::new());
        for (row, &target) in logits.chunks_exact(VOCAB).zip(targets) {
            if target < 0 {
                gradient.extend([0.0; VOCAB]);
                continue;
            }
            let (target, scale) = (id_of(target as u32) as usize, f64::from(SCALE * LossWeight::of(target as u32).value()));
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            total += scale * (sum.ln() - row[target]);
            let hit = |col: usize| if col == target { 1.0 } else { 0.0 };
            gradient.extend(row.iter().enumerate().map(|(col, x)| scale * (x.exp() / sum - hit(col))));
        }
        (total, gradient)
    }

    #[test]
    fn loss_and_gradient_agree_with_f64_for_any_tile() {
        let (logits, targets) = inputs::<f32>();
        let (want_loss, want_gradient) = reference(&wide(&logits), &targets);
        for tile_cols in [1, 7, 16, 49, 50] {
            let (_, loss, gradient) = run(&mut fastest(), &logits, &targets, tile_cols);
            assert_close("loss", &[loss], &[want_loss], 1e-6);
            assert_close("gradient", &gradient, &want_gradient, 3e-7);
        }
    }

    /// Rows of `cols` fp32 numbers in `N`, each from the beginning of its row.
    fn narrowed<N: Element>(rows: &[f32], cols: usize, threads: usize) -> Vec<N> {
        let mut memory = rows.to_vec();
        let mut cx = Compute::new(threads, KernelIsa::detect()).unwrap();
        narrow_rows(&mut cx, &mut memory, cols, N::DTYPE);
        let halves = |row: &[f32]| bytemuck::cast_slice::<f32, N>(row)[..cols].to_vec();
        memory.chunks_exact(cols).flat_map(halves).collect()
    }

    #[test]
    fn narrower_gradients_lie_in_the_first_half_of_their_row_and_are_rounded_once() {
        let (logits, targets) = inputs::<f32>();
        for (cols, threads) in [(50, 1), (25, 3), (1, 2)] {
            let rows: Vec<f32> = run(&mut fastest(), &logits, &targets, VOCAB).2.into_iter().chain([f32::INFINITY, 1e-42, -0.0]).collect();
            let rows = &rows[rows.len() % cols..];
            assert_rounded("gradient in bfloat16", &narrowed::<bf16>(rows, cols, threads), rows);
            assert_rounded("gradient in float16", &narrowed::<f16>(rows, cols, threads), rows);
            let mut same = rows.to_vec();
            narrow_rows(&mut fastest(), &mut same, cols, Dtype::Float32);
            assert_eq!(bits(&same), bits(rows), "the format of the logits");
        }
    }

    #[test]
    fn capped_logits_agree_with_f64() {
        let ((logits, targets), cap) = (inputs::<f32>(), 5.0);
        let bent: Vec<f64> = wide(&logits).iter().map(|x| cap * (x / cap).tanh()).collect();
        let (want_loss, mut want_gradient) = reference(&bent, &targets);
        want_gradient.iter_mut().zip(&bent).for_each(|(gradient, bent)| *gradient *= 1.0 - (bent / cap).powi(2));
        for tile_cols in [7, 50] {
            let (_, loss, gradient) = run_capped(&mut fastest(), &logits, &targets, tile_cols, Some(cap as f32));
            assert_close("loss", &[loss], &[want_loss], 1e-6);
            assert_close("gradient", &gradient, &want_gradient, 3e-7);
        }
    }

    #[test]
    fn rows_without_a_target_have_no_loss_and_no_gradient_whatever_their_logits() {
        let (mut logits, mut targets) = inputs::<f32>();
        for (row, target) in [(0, -1), (17, -100), (36, i32::MIN)] {
            targets[row] = target;
            logits[row * VOCAB..][..3].copy_from_slice(&[f32::NAN, f32::INFINITY, 1e4]);
        }
        let (want_loss, want_gradient) = reference(&wide(&logits), &targets);
        for tile_cols in [7, 50] {
            let (stats, loss, gradient) = run(&mut fastest(), &logits, &targets, tile_cols);
            assert_close("loss", &[loss], &[want_loss], 1e-6);
            assert_close("gradient", &gradient, &want_gradient, 3e-7);
            for row in [0, 17, 36] {
                assert_eq!(stats[3 * row..][..3], [0.0, 1.0, 0.0]);
                assert!(gradient[row * VOCAB..][..VOCAB].iter().all(|x| x.to_bits() == 0));
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow_and_nan_shows() {
        let (mut logits, targets) = inputs::<f32>();
        logits.iter_mut().for_each(|x| *x = *x * 10.0 + 1e4);
        let (want, _) = reference(&wide(&logits).iter().map(|x| x - 1e4).collect::<Vec<_>>(), &targets);
        assert_close("loss", &[run(&mut fastest(), &logits, &targets, 16).1], &[want], 1e-5);
        logits[777] = f32::NAN;
        assert!(run(&mut fastest(), &logits, &targets, 16).1.is_nan());
    }

    #[test]
    fn losses_accumulate_in_f64() {
        let stats = [0.0, 1.0, -3.0].repeat(5);
        let mut total = 1.0;
        loss(&[7; 5], &stats, &mut total, 0.5, true);
        assert_eq!(total, 8.5);
        loss(&[7; 5], &stats, &mut total, 0.5, false);
        assert_eq!(total, 7.5);
    }

    /// The targets with the weights 1/4096, 2/4096 and so on.
    fn weighted(targets: &[i32]) -> Vec<i32> {
        let weight = |row: usize| LossWeight::of_units(row + 1).unwrap();
        targets.iter().enumerate().map(|(row, id)| weight(row).word(*id as u32) as i32).collect()
    }

    #[test]
    fn rows_count_by_the_weights_of_their_targets() {
        let (logits, targets) = inputs::<f32>();
        let targets = weighted(&targets);
        let (want_loss, want_gradient) = reference(&wide(&logits), &targets);
        for tile_cols in [7, 50] {
            let (_, loss, gradient) = run(&mut fastest(), &logits, &targets, tile_cols);
            assert_close("loss", &[loss], &[want_loss], 1e-6);
            let largest = want_gradient.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            assert_close("gradient", &gradient, &want_gradient, 3e-7 * largest);
        }
    }

    #[test]
    fn rows_of_equal_weights_have_the_bits_of_rows_without_weights_and_a_smaller_scale() {
        let (logits, targets) = inputs::<bf16>();
        let quarter: Vec<i32> = targets.iter().map(|id| LossWeight::nearest(0.25).unwrap().word(*id as u32) as i32).collect();
        let [whole, quarter] = [targets, quarter].map(|targets| run_capped(&mut fastest(), &logits, &targets, 20, Some(5.0)));
        assert_eq!((bits(&whole.0), whole.1 * 0.25), (bits(&quarter.0), quarter.1));
        assert!(whole.2.iter().zip(&quarter.2).all(|(whole, quarter)| whole.to_f32() * 0.25 == quarter.to_f32()));
    }

    #[test]
    fn a_scale_of_each_row_replaces_its_weight() {
        let (logits, targets) = inputs::<f32>();
        let (whole, quarter) = (Tile { targets: &targets, vocab_start: 0, cols: VOCAB, softcap: None }, weighted(&targets));
        let mut row_stats = vec![0.0; 3 * ROWS];
        stats(&mut fastest(), whole, &logits, &mut row_stats, true);
        let gradient = |tile: Tile<'_>, scale: &(dyn Fn(usize) -> f32 + Sync)| {
            let mut gradient = logits.clone();
            grad(&mut fastest(), tile, &mut gradient, &row_stats, scale);
            bits(&gradient)
        };
        let tile = Tile { targets: &quarter, ..whole };
        assert_eq!(gradient(whole, &|row| (row + 1) as f32 / 4096.0), gradient(tile, &|row| tile.weight(row)));
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        let (logits, targets) = inputs::<bf16>();
        assert_same_everywhere(|cx| {
            let runs = [None, Some(5.0)].map(|softcap| run_capped(cx, &logits, &targets, 20, softcap));
            runs.iter().flat_map(|(stats, loss, gradient)| [bits(stats), bits(&[*loss]), bits(gradient)].concat()).collect()
        });
    }

    fn rounds_once<T: Element>() {
        let (logits, targets) = inputs::<T>();
        let narrow = run(&mut fastest(), &logits, &targets, 20);
        let wide = run(&mut fastest(), &widened(&logits), &targets, 20);
        assert_eq!(narrow.0, wide.0);
        assert_rounded("gradient", &narrow.2, &wide.2);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
}
