//! Losses of pairs of answers, from the softmax statistics of their rows.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use crate::data::loss_weight::LossWeight;
use crate::device::PairLosses;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;
use crate::pair_loss::{AnswerSum, PAIR_WORDS, REPORT_WORDS, SUM_WORDS, float_of, words_of};
use std::ops::Range;

/// Targets and statistics of the rows of answers.
#[derive(Clone, Copy)]
struct AnswerRows<'a> {
    targets: &'a [i32],
    stats: &'a [[f32; 3]],
}

/// The log-probability of a target, from the softmax statistics of its row.
pub(super) fn log_probability(&[max, sum, target]: &[f32; 3]) -> f64 {
    f64::from(target) - f64::from(max) - libm::log(f64::from(sum))
}

/// Whether a target that counts is a token of a prompt, which has less than the whole weight.
fn is_of_prompt(target: i32) -> bool {
    target >= 0 && LossWeight::of(target as u32) != LossWeight::WHOLE
}

/// Adds `report` to the totals so far, if there are any, and writes their means over `count`.
pub(super) fn add_totals(totals: &mut [i32], means: &mut [f32], report: [f64; REPORT_WORDS], (count, accumulate): (f64, bool)) {
    for ((words, total), mean) in totals.as_chunks_mut::<2>().0.iter_mut().zip(report).zip(means) {
        let total = total + if accumulate { float_of(*words) } else { 0.0 };
        (*words, *mean) = (words_of(total), (total / count) as f32);
    }
}

impl AnswerRows<'_> {
    /// The sum of the log-probabilities of an answer's trained rows, in their order, and their number.
    fn sum(self, rows: Range<usize>, reference: f64) -> AnswerSum {
        let trained = rows.filter(|row| self.targets[*row] >= 0);
        let mut answer = AnswerSum { sum: 0.0, tokens: 0.0, reference, prompt: [0.0; 2] };
        for row in trained {
            let logp = log_probability(&self.stats[row]);
            if is_of_prompt(self.targets[row]) {
                answer.prompt[0] += logp;
                answer.prompt[1] += 1.0;
            } else {
                answer.sum += logp;
                answer.tokens += 1.0;
            }
        }
        answer
    }
}

impl CpuArithmetic for PairLosses {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        let rows = AnswerRows { targets: memory.read(self.targets), stats: memory.read::<f32>(self.stats).as_chunks().0 };
        let scales: &mut [f32] = memory.write(self.scales);
        let pairs = memory.read::<i32>(self.pairs).as_chunks::<PAIR_WORDS>().0;
        let mut report = [0.0; REPORT_WORDS];
        for (pair, sums) in pairs.iter().zip(memory.write::<i32>(self.sums).as_chunks_mut::<SUM_WORDS>().0) {
            let numbers = self.pair(rows, pair, scales, sums);
            report.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
        }
        add_totals(memory.write(self.totals), memory.write(self.report), report, (self.step_pairs, self.accumulate));
    }
}

impl PairLosses {
    /// Writes the sums of a pair and the scales of its rows. Returns the numbers that are reported of the pair.
    fn pair(
        &self,
        rows: AnswerRows<'_>,
        &[chosen, rejected, end, _, c_low, c_high, r_low, r_high]: &[i32; PAIR_WORDS],
        scales: &mut [f32],
        sums: &mut [i32; SUM_WORDS],
    ) -> [f64; REPORT_WORDS] {
        *sums = [0; SUM_WORDS];
        if end <= chosen {
            return [0.0; REPORT_WORDS];
        }
        let [chosen, rejected, end] = [chosen, rejected, end].map(|row| row as usize);
        let answers = [rows.sum(chosen..rejected, float_of([c_low, c_high])), rows.sum(rejected..end, float_of([r_low, r_high]))];
        let terms = self.loss.terms(answers[0], answers[1]);
        let scale = |slope: f64| (-slope / self.step_pairs * f64::from(self.scale)) as f32;
        for (answer, slope) in [chosen..rejected, rejected..end].into_iter().zip(terms.slopes) {
            for (target, place) in rows.targets[answer.clone()].iter().zip(&mut scales[answer]) {
                *place = scale(if is_of_prompt(*target) { terms.prompt_slope } else { slope });
            }
        }
        let [c_sum, r_sum] = answers.map(|answer| words_of(answer.sum));
        *sums = [c_sum[0], c_sum[1], r_sum[0], r_sum[1]];
        terms.report(answers.map(|answer| answer.sum))
    }
}
