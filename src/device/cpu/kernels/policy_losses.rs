//! Losses of sampled completions, from the softmax statistics of their rows.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use super::pair_losses::{add_totals, log_probability};
use crate::device::PolicyLosses;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;
use crate::pair_loss::REPORT_WORDS;
use crate::policy_loss::{PolicyToken, REFERENCE_WORD, TOKEN_WORDS};

impl CpuArithmetic for PolicyLosses {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        let tokens = memory.write::<i32>(self.tokens).as_chunks_mut::<TOKEN_WORDS>().0;
        let stats = memory.read::<f32>(self.stats).as_chunks::<3>().0;
        let rows = memory.read::<i32>(self.targets).iter().zip(tokens).zip(stats);
        let mut report = [0.0; REPORT_WORDS];
        for (((target, token), stats), scale) in rows.zip(memory.write::<f32>(self.scales)) {
            *scale = 0.0;
            if *target < 0 {
                continue;
            }
            let logp = self.loss.rounded(log_probability(stats));
            let numbers = self.loss.with_reference(PolicyToken::of_words(token), logp);
            if self.loss.has_reference() {
                token[REFERENCE_WORD] = (numbers.reference as f32).to_bits() as i32;
            }
            let terms = self.loss.terms(logp, numbers);
            *scale = (-terms.slope / self.count * f64::from(self.scale)) as f32;
            report.iter_mut().zip(terms.report()).for_each(|(total, number)| *total += number);
        }
        add_totals(memory.write(self.totals), memory.write(self.report), report, (self.count, self.accumulate));
    }
}
