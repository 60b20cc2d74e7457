//! Evaluation during training: schedule, dataset and results.

use super::identity::Run;
use crate::checkpoint::best::{Best, Evaluations};
use crate::config::options::EvalStrategy;
use crate::config::settings::Settings;
use crate::data::dataset::Dataset;
use crate::data::loader::DataPosition;
use crate::data::rows::batch::{Batch, Batches};
use crate::error::Result;
use crate::objective::{Objective, ObjectiveMetrics, REPORT_WORDS};

/// The evaluation dataset of a run and its schedule.
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
    /// An evaluation on `dataset` under `settings`, for a run at `position` of its data.
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
    pub(super) fn sequences(&self) -> EvalSequences<'_> {
        EvalSequences::of(&self.dataset)
    }
}

fn complete_epochs(position: DataPosition, sequences: usize) -> u64 {
    position.epoch + u64::from(position.next_sequence == sequences as u64)
}

/// Sums of the reported numbers of an objective over the parts of an evaluation.
#[derive(Default)]
pub(super) struct ReportSums([f64; REPORT_WORDS]);

impl ReportSums {
    /// Adds the means over `weight` pairs, completions or tokens.
    pub(super) fn add(&mut self, means: [f64; REPORT_WORDS], weight: f64) {
        self.0.iter_mut().zip(means).for_each(|(sum, mean)| *sum += mean * weight);
    }

    /// The metrics of the means over all `weight` pairs, completions or tokens; `None` for the cross-entropy of tokens.
    pub(super) fn metrics(self, objective: Option<Objective>, weight: f64) -> Option<ObjectiveMetrics> {
        objective.map(|objective| objective.metrics(self.0.map(|sum| sum / weight.max(1.0))))
    }
}

/// The results of evaluations, and whether they end the run.
#[derive(Debug)]
pub(super) struct Progress {
    all: Evaluations,
    /// Step and loss of the last one here.
    last: Option<(u64, f64)>,
    patience: Option<u64>,
    threshold: f64,
}

impl Progress {
    /// Of a run that goes on from a checkpoint which keeps `run`.
    pub(super) fn new(settings: &Settings, run: &Run) -> Self {
        let (patience, threshold) = (settings.early_stopping_patience, settings.early_stopping_threshold);
        Self { all: Evaluations::of(run), last: None, patience, threshold }
    }

    /// Marks an evaluation as due: a checkpoint written before the evaluation finishes records it.
    pub(super) fn begin(&mut self) {
        self.all.is_due = true;
    }

    /// Whether an evaluation was due where the run goes on.
    pub(super) fn is_unfinished(&self) -> bool {
        self.all.is_due
    }

    /// The evaluation after `step` found `loss`. `is_saved`: this step has a checkpoint already.
    pub(super) fn record(&mut self, step: u64, loss: f64, is_saved: bool) {
        let lowest = self.all.lowest.unwrap_or(f64::INFINITY);
        let improved = loss < lowest - self.threshold;
        self.all.without_improvement = if improved { 0 } else { self.all.without_improvement + 1 };
        self.all.lowest = if loss < lowest { Some(loss) } else { self.all.lowest };
        self.all.is_due = false;
        self.last = Some((step, loss));
        if is_saved {
            self.all = self.with_checkpoint(step);
        }
    }

    /// How it stands once `step` has a checkpoint.
    pub(super) fn with_checkpoint(&self, step: u64) -> Evaluations {
        let evaluated = self.last.filter(|(of, _)| *of == step).map(|(step, eval_loss)| Best { step, eval_loss });
        let better = evaluated.filter(|new| new.eval_loss < self.all.best.map_or(f64::INFINITY, |best| best.eval_loss));
        Evaluations { best: better.or(self.all.best), ..self.all }
    }

    /// `step` has a checkpoint.
    pub(super) fn saved(&mut self, step: u64) {
        self.all = self.with_checkpoint(step);
    }

    /// After how many evaluations without a lower loss the run ends here, if it does.
    pub(super) fn given_up(&self) -> Option<u64> {
        self.patience.filter(|patience| self.all.without_improvement >= *patience)
    }

    pub(super) fn best(&self) -> Option<Best> {
        self.all.best
    }
}

/// The sequences of a dataset in its order; rows behind the last one count for nothing.
pub(super) struct EvalSequences<'a> {
    dataset: &'a Dataset,
    next: usize,
}

impl<'a> EvalSequences<'a> {
    /// All sequences of `dataset`.
    pub(super) fn of(dataset: &'a Dataset) -> Self {
        Self { dataset, next: 0 }
    }

    /// Number of the next sequence.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// Whether none is left.
    pub(super) fn is_over(&self) -> bool {
        self.next >= self.dataset.sequences()
    }
}

impl Batches for EvalSequences<'_> {
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
    use crate::data::dataset::tests::counting;
    use crate::data::rows::batch::arrays;

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

    fn progress(patience: u64, threshold: f64, run: &Run) -> Progress {
        let settings = Settings { early_stopping_patience: Some(patience), early_stopping_threshold: threshold, ..Settings::demo() };
        Progress::new(&settings, run)
    }

    #[test]
    fn patience_ends_after_so_many_losses_that_are_not_lower_by_enough_wherever_the_run_was_stopped() {
        let losses = [3.0, 2.5, 2.4, f64::NAN, 2.2, 2.1, 2.05];
        for stopped in 0..losses.len() {
            let mut given_up = Vec::new();
            let mut now = progress(2, 0.3, &Run::new());
            for (step, loss) in (0..).zip(losses) {
                if step == stopped as u64 {
                    now = progress(2, 0.3, &now.all.kept_in(Run::new()));
                }
                now.record(step, loss, false);
                given_up.push(now.given_up().is_some());
            }
            // 2.5 is lower by 0.5; 2.4 is not by 0.3; NaN is never lower; 2.2 is not lower than 2.4 by 0.3.
            assert_eq!(given_up, [false, false, false, true, true, true, true]);
            assert_eq!(now.all.lowest, Some(2.05));
        }
    }

    #[test]
    fn the_best_is_the_lowest_of_those_that_have_a_checkpoint() {
        let mut now = progress(9, 0.0, &Run::new());
        now.record(0, 1.0, false);
        assert_eq!(now.with_checkpoint(3).best, None, "step 3 was not evaluated");
        for (step, loss, is_saved) in [(1, 3.0, true), (2, 2.0, false), (3, 2.5, true), (4, 2.5, true), (5, f64::NAN, true)] {
            now.record(step, loss, false);
            is_saved.then(|| now.saved(step));
        }
        assert_eq!(now.best(), Some(Best { step: 3, eval_loss: 2.5 }));
        now.begin();
        let mut resumed = progress(9, 0.0, &now.all.kept_in(Run::new()));
        assert!(resumed.is_unfinished());
        resumed.record(5, 2.25, true);
        assert_eq!((resumed.best().unwrap().step, resumed.is_unfinished()), (5, false));
    }

    #[test]
    fn every_sequence_comes_once_and_the_rest_of_a_batch_does_not_count() {
        let evaluation = evaluation(EvalStrategy::Steps);
        let (mut once, mut firsts, mut counted) = (evaluation.sequences(), Vec::new(), 0);
        while !once.is_over() {
            let mut memory = vec![7; arrays(false) * 2 * 3];
            let mut batch = Batch::new(&mut memory, 3, false);
            once.fill(&mut batch).unwrap();
            counted += batch.count_targets(100).unwrap().targets;
            firsts.extend(batch.tokens.chunks(3).map(|row| row[0]));
        }
        assert_eq!((firsts, counted), (vec![0, 3, 6, 9, 12, 0], 15));
    }
}
