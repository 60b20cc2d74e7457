//! Sums of log-probabilities of pairs of answers, and the metrics of an objective.

use super::executor::Engine;
use super::protocol::order::Order;
use crate::data::rows::batch::{Batches, CountedTargets};
use crate::device::{DeviceSlice, Kernels, Stream};
use crate::error::Result;
use crate::objective::{ObjectiveMetrics, REPORT_WORDS};
use crate::pair_loss::float_of;

/// Argument of an order to evaluate: keep the sums of pairs.
pub(super) const KEEP_PAIR_SUMS: u64 = 1;
/// Argument of an order to evaluate: pass the sums of pairs that the last evaluation has kept to rank 0, and evaluate nothing.
pub(super) const POST_PAIR_SUMS: u64 = 2;

impl<D: Kernels> Engine<D> {
    /// Means over the last step or evaluation; `None` for the cross-entropy of tokens.
    pub(crate) fn objective_metrics(&self) -> Option<ObjectiveMetrics> {
        self.plan.recipe.objective.map(|objective| objective.metrics(self.reported()))
    }

    /// The numbers that the last step or evaluation reported of its objective.
    pub(crate) fn reported(&self) -> [f64; REPORT_WORDS] {
        self.exchange.reported()
    }

    /// The sums of log-probabilities of the chosen and the rejected answer at each place of pairs, of as many micro-batches as a step has,
    /// under the current weights. All ranks compute them. Training is not affected.
    ///
    /// # Errors
    /// Errors of [`Engine::evaluate`].
    pub(crate) fn pair_sums(&mut self, batches: &mut impl Batches) -> Result<Vec<[f64; 2]>> {
        let targets = self.read_micro_batches(batches)?;
        let micro_batches = self.plan.recipe.step.micro_batches;
        let mut words = vec![0.0; micro_batches * self.pair_sum_words()];
        if targets.units > 0 {
            self.evaluate_pairs(targets, &mut words)?;
        }
        let float = |words: &[f32; 2]| float_of(words.map(|word| word.to_bits() as i32));
        Ok(words.as_chunks::<2>().0.iter().map(float).collect::<Vec<_>>().as_chunks().0.to_vec())
    }

    /// Evaluates the micro-batches that were read last, and copies the sums of their pairs to `words`.
    fn evaluate_pairs(&mut self, targets: CountedTargets, words: &mut [f32]) -> Result<()> {
        let micro_steps = self.plan.micro_batches_of_rank();
        self.reserve_pair_sums()?;
        self.lead(Order::Evaluate, [targets.units, micro_steps as u64, KEEP_PAIR_SUMS, 0, 0, 0])?;
        let evaluated = self.run_evaluation(targets.units, micro_steps, &[]);
        self.named(evaluated)?;
        // The mail holds the micro-batches until every rank has read its own.
        self.lead(Order::Evaluate, [targets.units, micro_steps as u64, POST_PAIR_SUMS, 0, 0, 0])?;
        self.await_done()?;
        self.exchange.mail(0, words);
        for place in 0..micro_steps {
            let start = self.exchange.part(place) * self.pair_sum_words();
            words[start..start + self.pair_sum_words()].copy_from_slice(self.host_pair_sums(place));
        }
        Ok(())
    }

    /// Passes the sums of the pairs of this rank's last evaluation to rank 0.
    pub(super) fn post_pair_sums(&self) {
        for place in 0..self.plan.micro_batches_of_rank() {
            self.exchange.post(self.exchange.part(place) * self.pair_sum_words(), self.host_pair_sums(place));
        }
    }

    /// Enqueues the copy of the sums of the pairs of micro-batch `place` of this rank, if there is memory for them.
    pub(super) fn send_pair_sums(&mut self, place: usize) -> Result<()> {
        let (Some(memory), Some(sums)) = (self.pair_sums, self.device_pair_sums()) else { return Ok(()) };
        self.dev.copy_d2h(Stream::Compute, sums, memory.slice(place * sums.bytes(), sums.bytes()))
    }

    /// Words of the sums of the pairs of a micro-batch.
    fn pair_sum_words(&self) -> usize {
        self.device_pair_sums().map_or(0, |sums| sums.elems())
    }

    fn device_pair_sums(&self) -> Option<DeviceSlice> {
        self.model.activations.objective.and_then(|work| work.sums())
    }

    fn host_pair_sums(&self, place: usize) -> &[f32] {
        let bytes = 4 * self.pair_sum_words();
        self.pair_sums.map_or(&[], |memory| self.host.lend(memory.slice(place * bytes, bytes)))
    }

    /// Allocates host memory for the sums of the pairs of evaluations.
    pub(super) fn reserve_pair_sums(&mut self) -> Result<()> {
        if self.pair_sums.is_none() {
            let memory = self.host.alloc("sums of pairs", self.plan.micro_batches_of_rank() * self.pair_sum_words() * 4)?;
            self.dev.pin(memory)?;
            self.pair_sums = Some(memory);
        }
        Ok(())
    }
}
