//! Distillation: statistics, losses and gradients of rows of logits beside the tokens of a teacher.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use super::cross_entropy::{BLOCK, NO_LOSS, Tile, capped};
use super::isa::{KernelIsa, vectorised};
use super::math::{exp, soft_capped};
use super::pair_losses::add_totals;
use super::reduce::{fold, max};
use super::split::Chunks;
use crate::data::loss_weight::{LossWeight, id_of};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{TeacherGrad, TeacherLosses, TeacherStats};
use crate::dtype::Element;
use crate::pair_loss::REPORT_WORDS;
use crate::teacher_loss::{ENTRY_WORDS, TOP_K_MAX, TeacherEntry, TeacherRow, entries};

/// The tokens of a teacher of all rows, and the gradients or logits beside them.
#[derive(Clone, Copy)]
struct Teacher<'a> {
    words: &'a [i32],
    top_k: usize,
}

impl Teacher<'_> {
    /// Ids and probabilities of the tokens of `row`.
    fn tokens(&self, row: usize) -> impl Iterator<Item = (u32, f32)> {
        entries(&self.words[row * self.top_k * ENTRY_WORDS..][..self.top_k * ENTRY_WORDS])
    }
}

impl CpuArithmetic for TeacherStats {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let tile = Tile { targets: memory.read(self.targets), vocab_start: self.vocab_start, cols: self.cols, softcap: self.softcap };
        let (teacher, isa) = (Teacher { words: memory.read(self.teacher), top_k: self.top_k }, cx.isa);
        let places = self.top_k + 1;
        let logits = Chunks::new(memory.write::<T>(self.logits), BLOCK * self.cols);
        let stats = Chunks::new(memory.write::<f32>(self.stats), 3 * BLOCK);
        let entries = Chunks::new(memory.write::<f32>(self.entries), BLOCK * places);
        cx.team.for_each(((logits, stats), entries), |block, ((logits, stats), entries)| {
            let rows = logits.chunks_exact_mut(self.cols).zip(entries.chunks_exact_mut(places));
            for ((i, stats), (logits, entries)) in stats.as_chunks_mut::<3>().0.iter_mut().enumerate().zip(rows) {
                let row = block * BLOCK + i;
                *stats = match (tile.has_loss(row), self.first) {
                    (false, _) => NO_LOSS,
                    (true, true) => row_stats(isa, (tile, row), teacher, logits, entries, [f32::NEG_INFINITY, 0.0, 0.0]),
                    (true, false) => row_stats(isa, (tile, row), teacher, logits, entries, *stats),
                };
            }
        });
    }
}

/// Takes the logits of the teacher's tokens out of a row, and extends the statistics of its other tokens.
fn row_stats<T: Element>(
    isa: KernelIsa,
    (tile, row): (Tile<'_>, usize),
    teacher: Teacher<'_>,
    logits: &mut [T],
    entries: &mut [f32],
    [max, sum, target]: [f32; 3],
) -> [f32; 3] {
    let target = tile.target(row).map_or(target, |col| capped(logits[col].to_f32(), tile.softcap).0);
    for ((id, _), entry) in teacher.tokens(row).zip(entries) {
        if let Some(col) = tile.column(id) {
            *entry = capped(logits[col].to_f32(), tile.softcap).0;
            logits[col] = T::from_f32(f32::NEG_INFINITY);
        }
    }
    let (max, sum) = extend_outside(isa, logits, tile.softcap, max, sum);
    [max, sum, target]
}

impl CpuArithmetic for TeacherLosses {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        let teacher = Teacher { words: memory.read(self.teacher), top_k: self.loss.top_k };
        let stats = memory.read::<f32>(self.stats).as_chunks::<3>().0;
        let targets: &[i32] = memory.read(self.targets);
        let entries = memory.write::<f32>(self.entries).chunks_exact_mut(self.loss.top_k + 1);
        let rows = stats.iter().zip(entries).zip(memory.write::<f32>(self.scales));
        let mut report = [0.0; REPORT_WORDS];
        for (row, ((stats, entries), scale)) in rows.enumerate() {
            *scale = 0.0;
            if targets[row] >= 0 {
                let numbers = self.row(teacher.tokens(row), targets[row] as u32, stats, (entries, scale));
                report.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
            }
        }
        add_totals(memory.write(self.totals), memory.write(self.report), report, (self.weight, self.accumulate));
    }
}

impl TeacherLosses {
    /// Writes the gradients of a row. Returns the numbers that are reported of the row.
    fn row(
        &self,
        tokens: impl Iterator<Item = (u32, f32)>,
        word: u32,
        &[max, sum, target]: &[f32; 3],
        (places, scale): (&mut [f32], &mut f32),
    ) -> [f64; REPORT_WORDS] {
        let (mut found, mut gradients, mut count) = ([TeacherEntry::default(); TOP_K_MAX], [0.0; TOP_K_MAX], 0);
        for ((id, probability), logit) in tokens.zip(&*places) {
            let is_target = id == id_of(word);
            found[count] = TeacherEntry { probability: probability.into(), logit: f64::from(*logit), is_target };
            count += 1;
        }
        let row = TeacherRow { entries: &found[..count], outside: [max, sum].map(f64::from), target: target.into() };
        let terms = self.loss.terms(row, &mut gradients[..count]);
        let weight = f64::from(LossWeight::of(word).value());
        let factor = weight / self.weight * f64::from(self.scale);
        *scale = (terms.outside * factor) as f32;
        let gradient = |gradient: f64, logit: f64| (gradient * self.slope(logit) * factor) as f32;
        let mut of_target = gradient(terms.target, target.into());
        for ((place, entry), found) in places.iter_mut().zip(gradients).zip(&found[..count]) {
            *place = gradient(entry, found.logit);
            of_target = if found.is_target { *place } else { of_target };
        }
        places[self.loss.top_k] = of_target;
        terms.report(weight)
    }

    /// The slope of the soft cap at a logit behind it.
    fn slope(&self, logit: f64) -> f64 {
        self.softcap.map_or(1.0, |cap| 1.0 - (logit / f64::from(cap)) * (logit / f64::from(cap)))
    }
}

impl CpuArithmetic for TeacherGrad {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let tile = Tile { targets: memory.read(self.targets), vocab_start: self.vocab_start, cols: self.cols, softcap: None };
        let (teacher, entries) = (Teacher { words: memory.read(self.teacher), top_k: self.top_k }, memory.read::<f32>(self.entries));
        cx.team.for_each(Chunks::new(memory.write::<T>(self.logits), BLOCK * self.pitch), |block, logits| {
            for (i, logits) in logits.chunks_exact_mut(self.pitch).enumerate() {
                let row = block * BLOCK + i;
                let gradients = &entries[row * (self.top_k + 1)..][..self.top_k + 1];
                if !tile.has_loss(row) {
                    continue;
                }
                if let Some(col) = tile.target(row) {
                    logits[col] = T::from_f32(gradients[self.top_k]);
                }
                for ((id, _), gradient) in teacher.tokens(row).zip(gradients) {
                    if let Some(col) = tile.column(id) {
                        logits[col] = T::from_f32(*gradient);
                    }
                }
            }
        });
    }
}

vectorised! {
    /// Extends a running maximum and sum of exponentials by one row of logits, without those that are minus infinity.
    fn extend_outside<T>(logits: &[T], softcap: Option<f32>, old_max: f32, old_sum: f32) -> (f32, f32) {
        let largest = max(logits);
        if largest == f32::NEG_INFINITY {
            return (old_max, old_sum);
        }
        let tile_max = capped(largest, softcap).0;
        let max = if tile_max > old_max { tile_max } else { old_max };
        let sum = match softcap {
            None => fold(logits, |sum, x| sum + exp(x - max)),
            Some(cap) => fold(logits, |sum, x| sum + if x == f32::NEG_INFINITY { 0.0 } else { exp(soft_capped(x, cap).0 - max) }),
        };
        (max, old_sum.mul_add(exp(old_max - max), sum))
    }
}
