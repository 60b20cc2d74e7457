//! Evaluation during training: when, on what, and what comes of it.

use crate::config::options::EvalStrategy;
use crate::config::settings::Settings;
use crate::data::batch::{Batch, Batches};
use crate::data::loader::DataPosition;
use crate::data::packing::Dataset;
use crate::error::Result;

/// What a run is evaluated on, and when.
pub(super) struct Evaluation {
    dataset: Dataset,
    strategy: EvalStrategy,
    /// Steps between evaluations.
    steps: u64,
    on_start: bool,
    /// Passes over the training data that were complete when it was asked last.
    epochs: u64,
}

impl Evaluation {
    /// On `dataset`, as `settings` say, in a run that stands at `position` of its data.
    pub(super) fn new(settings: &Settings, dataset: Dataset, position: DataPosition, sequences: usize) -> Self {
        Self {
            dataset,
            strategy: settings.eval_strategy.unwrap_or(EvalStrategy::Steps),
            steps: settings.eval_steps.unwrap_or(settings.save_steps),
            on_start: settings.eval_on_start,
            epochs: complete_epochs(position, sequences),
        }
    }

    /// Whether to evaluate before the first step.
    pub(super) fn is_due_on_start(&self, step: u64) -> bool {
        self.on_start && step == 0
    }

    /// Whether to evaluate after `step`, where the data stands at `position` of so many `sequences`. Asked once a step.
    pub(super) fn is_due(&mut self, step: u64, is_last: bool, position: DataPosition, sequences: usize) -> bool {
        let before = std::mem::replace(&mut self.epochs, complete_epochs(position, sequences));
        match self.strategy {
            EvalStrategy::No => false,
            EvalStrategy::Steps => is_last || step.is_multiple_of(self.steps),
            EvalStrategy::Epoch => is_last || self.epochs > before,
        }
    }

    /// All of its sequences, once.
    pub(super) fn sequences(&self) -> Once<'_> {
        Once { dataset: &self.dataset, next: 0 }
    }
}

fn complete_epochs(position: DataPosition, sequences: usize) -> u64 {
    position.epoch + u64::from(position.next_sequence == sequences as u64)
}

/// The sequences of a dataset in its order; rows behind the last one count for nothing.
pub(super) struct Once<'a> {
    dataset: &'a Dataset,
    next: usize,
}

impl Once<'_> {
    /// Whether none is left.
    pub(super) fn is_over(&self) -> bool {
        self.next >= self.dataset.sequences()
    }
}

impl Batches for Once<'_> {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        batch.rows().try_for_each(|row| {
            let idx = self.next;
            self.next += 1;
            if idx < self.dataset.sequences() {
                return self.dataset.read_sequence(idx, row);
            }
            row.tokens.fill(0);
            row.targets.fill(-1);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::batch::arrays;
    use crate::data::packing::tests::counting;

    fn evaluation(strategy: EvalStrategy) -> Evaluation {
        let settings = Settings { eval_strategy: Some(strategy), eval_steps: Some(4), ..Settings::demo() };
        Evaluation::new(&settings, counting(3 * 5 + 1, 3).unwrap(), DataPosition::default(), 5)
    }

    /// After which of ten steps of two sequences each.
    fn due(strategy: EvalStrategy) -> Vec<u64> {
        let mut evaluation = evaluation(strategy);
        let position = |dealt: u64| DataPosition { epoch: (dealt - 1) / 5, next_sequence: (dealt - 1) % 5 + 1 };
        (1..=10).filter(|&step| evaluation.is_due(step, step == 10, position(2 * step), 5)).collect()
    }

    #[test]
    fn evaluations_are_due_by_steps_or_by_epochs_and_at_the_end() {
        assert_eq!(due(EvalStrategy::No), [0u64; 0]);
        assert_eq!(due(EvalStrategy::Steps), [4, 8, 10]);
        // Epochs end with the 5th, 10th, 15th and 20th sequence.
        assert_eq!(due(EvalStrategy::Epoch), [3, 5, 8, 10]);
    }

    #[test]
    fn every_sequence_comes_once_and_what_is_left_of_a_batch_counts_for_nothing() {
        let evaluation = evaluation(EvalStrategy::Steps);
        let (mut once, mut firsts, mut counted) = (evaluation.sequences(), Vec::new(), 0);
        while !once.is_over() {
            let mut memory = vec![7; arrays(false) * 2 * 3];
            let mut batch = Batch::new(&mut memory, 3, false);
            once.fill(&mut batch).unwrap();
            counted += batch.count_targets(100).unwrap();
            firsts.extend(batch.tokens.chunks(3).map(|row| row[0]));
        }
        assert_eq!((firsts, counted), (vec![0, 3, 6, 9, 12, 0], 15));
    }
}
