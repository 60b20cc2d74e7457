//! Rows of skipped steps: a run that only skips learns nothing, and must not end as if it had.

use super::identity::Run;
use crate::error::{Error, Result};
use crate::units::counted;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Skipped steps in a row after which a warning is repeated.
const WARNED: u64 = 10;
/// Key of the row in a checkpoint's `run`.
const KEY: &str = "skips";

/// The present row of skipped steps.
#[derive(Debug, Default)]
pub(super) struct Skips {
    steps: u64,
    first: u64,
    /// The last checkpoint from before the row.
    before: Option<PathBuf>,
}

impl Skips {
    /// The row in which the checkpoint stood that `run` comes from.
    pub(super) fn of(run: &Run) -> Self {
        let number = |key: &str| run.get(KEY).and_then(|row| row.get(key)).and_then(Value::as_u64);
        match (number("steps"), number("first")) {
            (Some(steps), Some(first)) => Self { steps, first, before: None },
            _ => Self::default(),
        }
    }

    /// `run` with this row: a run that is started again and again must not forget it.
    pub(super) fn kept_in(&self, run: &Run) -> Run {
        let mut run = run.clone();
        match self.steps {
            0 => drop(run.remove(KEY)),
            steps => drop(run.insert(KEY.into(), json!({"steps": steps, "first": self.first}))),
        }
        run
    }

    /// Counts `step`, which was skipped or ends the row; `saved` is the last checkpoint.
    pub(super) fn record(&mut self, step: u64, skipped: bool, saved: Option<&Path>) {
        *self = match (skipped, self.steps) {
            (false, _) => Self::default(),
            (true, 0) => Self { steps: 1, first: step, before: saved.map(Path::to_path_buf) },
            (true, steps) => Self { steps: steps + 1, first: self.first, before: self.before.take() },
        };
    }

    /// The row's first step.
    pub(super) fn since(&self) -> Option<u64> {
        (self.steps > 0).then_some(self.first)
    }

    pub(super) fn warning(&self) -> Option<String> {
        let due = self.steps > 0 && self.steps.is_multiple_of(WARNED);
        due.then(|| format!("{} steps in a row had gradients that are not finite and were skipped", self.steps))
    }

    /// Whether the row is shorter than `limit`; 0 never ends a run.
    ///
    /// # Errors
    /// `Resource` with a remedy.
    pub(super) fn check(&self, limit: u64) -> Result<()> {
        if limit == 0 || self.steps < limit {
            return Ok(());
        }
        let Self { steps, first, before } = self;
        let from = before.as_ref().map_or(format!("a checkpoint from before step {first}"), |dir| dir.display().to_string());
        Err(Error::resource(
            format!("train: nothing was learned in {}", counted(*steps, "step")),
            format!(
                "from step {first} on, gradients are not finite, and the steps were skipped (--max-skipped-steps {limit}); lower \
                    --learning-rate or check the data, and resume with --resume-from-checkpoint {from}"
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_keeps_the_row_until_it_ends() {
        let mut skips = Skips::default();
        (5..8).for_each(|step| skips.record(step, true, None));
        let mut again = Skips::of(&skips.kept_in(&Run::new()));
        assert_eq!((again.since(), again.check(3).is_err(), again.check(4).is_ok()), (Some(5), true, true));
        again.record(8, false, None);
        assert_eq!(again.kept_in(&skips.kept_in(&Run::new())), Run::new());
        let senseless = json!({"skips": {"steps": -1}});
        assert_eq!(Skips::of(senseless.as_object().unwrap()).since(), None);
    }

    #[test]
    fn skips_in_a_row_end_with_a_counted_step_and_remember_the_last_save() {
        let mut skips = Skips::default();
        let saved = |step: u64| PathBuf::from(format!("out/checkpoint-{step}"));
        skips.record(1, true, None);
        assert!(skips.check(1).unwrap_err().to_string().ends_with("--resume-from-checkpoint a checkpoint from before step 1"));
        skips.record(2, false, None);
        assert_eq!((skips.since(), skips.check(1).is_ok()), (None, true));
        (5..25).for_each(|step| {
            skips.record(step, true, Some(&saved(step - 1)));
            assert_eq!(skips.warning().is_some(), step == 14 || step == 24, "{step}");
        });
        assert_eq!((skips.since(), skips.check(21).is_ok(), skips.check(0).is_ok()), (Some(5), true, true));
        let message = skips.check(20).unwrap_err().to_string();
        assert!(message.contains("in 20 steps: from step 5 on") && message.ends_with("out/checkpoint-4"), "{message}");
    }
}
