//! Numbers of the reference of an objective, and the metrics of an objective. A loss of pairs has two sums of log-probabilities for each pair,
//! and a loss of completions a log-probability for each token.

use super::executor::Engine;
use super::protocol::order::Order;
use crate::data::rows::batch::{Batches, CountedTargets};
use crate::device::{DeviceSlice, Kernels, Stream};
use crate::error::Result;
use crate::objective::{ObjectiveMetrics, REPORT_WORDS};
use crate::pair_loss::float_of;
use crate::policy_loss::reference_of;

/// Argument of an order to evaluate: keep the numbers of the reference.
pub(super) const KEEP_REFERENCE: u64 = 1;
/// Argument of an order to evaluate: pass the numbers of the reference that the last evaluation has kept to rank 0, and evaluate nothing.
pub(super) const POST_REFERENCE: u64 = 2;

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
        let words = self.reference_numbers(batches)?;
        Ok(words.as_chunks::<2>().0.iter().map(|words| float_of(*words)).collect::<Vec<_>>().as_chunks().0.to_vec())
    }

    /// The log-probability under the reference of each trained token in order, of as many micro-batches as a step has: the number that came
    /// with the token, or else the log-probability under the current weights. All ranks compute them. Training is not affected.
    ///
    /// # Errors
    /// Errors of [`Engine::evaluate`].
    pub(crate) fn token_references(&mut self, batches: &mut impl Batches) -> Result<Vec<f32>> {
        Ok(self.reference_numbers(batches)?.as_chunks().0.iter().filter_map(reference_of).collect())
    }

    /// The numbers of the reference of as many micro-batches as a step has, one micro-batch after another.
    fn reference_numbers(&mut self, batches: &mut impl Batches) -> Result<Vec<i32>> {
        let targets = self.read_micro_batches(batches)?;
        let micro_batches = self.plan.recipe.step.micro_batches;
        let mut words = vec![0.0; micro_batches * self.reference_words()];
        if targets.units > 0 {
            self.evaluate_reference(targets, &mut words)?;
        }
        Ok(words.into_iter().map(|word| word.to_bits() as i32).collect())
    }

    /// Evaluates the micro-batches that were read last, and copies the numbers of their reference to `words`.
    fn evaluate_reference(&mut self, targets: CountedTargets, words: &mut [f32]) -> Result<()> {
        let micro_steps = self.plan.micro_batches_of_rank();
        self.reserve_reference()?;
        self.lead(Order::Evaluate, [targets.units, micro_steps as u64, KEEP_REFERENCE, 0, 0, 0])?;
        let evaluated = self.run_evaluation(targets.units, micro_steps, &[]);
        self.named(evaluated)?;
        // The mail holds the micro-batches until every rank has read its own.
        self.lead(Order::Evaluate, [targets.units, micro_steps as u64, POST_REFERENCE, 0, 0, 0])?;
        self.await_done()?;
        self.exchange.mail(0, words);
        for place in 0..micro_steps {
            let start = self.exchange.part(place) * self.reference_words();
            words[start..start + self.reference_words()].copy_from_slice(self.host_reference(place));
        }
        Ok(())
    }

    /// Passes the numbers of the reference of this rank's last evaluation to rank 0.
    pub(super) fn post_reference(&self) {
        for place in 0..self.plan.micro_batches_of_rank() {
            self.exchange.post(self.exchange.part(place) * self.reference_words(), self.host_reference(place));
        }
    }

    /// Enqueues the copy of the numbers of the reference of micro-batch `place` of this rank, if there is memory for them.
    pub(super) fn send_reference(&mut self, place: usize) -> Result<()> {
        let (Some(memory), Some(numbers)) = (self.reference, self.device_reference()) else { return Ok(()) };
        self.dev.copy_d2h(Stream::Compute, numbers, memory.slice(place * numbers.bytes(), numbers.bytes()))
    }

    /// Words of the numbers of the reference of a micro-batch.
    fn reference_words(&self) -> usize {
        self.device_reference().map_or(0, |numbers| numbers.elems())
    }

    fn device_reference(&self) -> Option<DeviceSlice> {
        self.model.activations.objective.and_then(|work| work.reference())
    }

    fn host_reference(&self, place: usize) -> &[f32] {
        let bytes = 4 * self.reference_words();
        self.reference.map_or(&[], |memory| self.host.lend(memory.slice(place * bytes, bytes)))
    }

    /// Allocates host memory for the numbers of the reference.
    pub(super) fn reserve_reference(&mut self) -> Result<()> {
        if self.reference.is_none() {
            let memory = self.host.alloc("numbers of the reference", self.plan.micro_batches_of_rank() * self.reference_words() * 4)?;
            self.dev.pin(memory)?;
            self.reference = Some(memory);
        }
        Ok(())
    }
}
