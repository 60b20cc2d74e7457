//! How much a run has before it: steps, passes over its data, and the time that its plan predicts.

use crate::data::dataset::Dataset;
use crate::planner::plan::Plan;
use crate::units::counted;
use std::fmt;
use std::time::Duration;

/// Passes over records above which a model mostly learns them by heart.
const PASSES_MAX: f64 = 20.0;

/// The steps of a run that are still to be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunExtent {
    first: u64,
    last: u64,
    /// CountedRows of the data, and those of a step.
    rows: usize,
    rows_per_step: usize,
    /// By the plan, if it predicts steps.
    step: Option<Duration>,
}

impl RunExtent {
    /// The extent of a run of `max_steps` steps over `dataset` that goes on after step `done`.
    pub(super) fn new(plan: &Plan, dataset: &Dataset, rows_per_step: usize, (done, max_steps): (u64, u64)) -> Self {
        let step_s = plan.forecast.simulated_step_ms.map(|ms| ms / 1e3).or(plan.forecast.predicted.map(|predicted| predicted.step_s));
        let step = step_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Self { first: done + 1, last: max_steps, rows: dataset.sequences(), rows_per_step, step }
    }

    /// A line for people, if the whole run goes over its records too often.
    pub(super) fn warning(&self) -> Option<String> {
        let passes = self.passes(self.last);
        let epochs = "--num-train-epochs 3 trains each record three times";
        (passes > PASSES_MAX).then(|| format!("the run makes {} over {} of records; {epochs}", Passes(passes), CountedRows(self.rows)))
    }

    /// The predicted time of a step and of all steps to come.
    pub(super) fn predicted(&self) -> Option<String> {
        let step_s = self.step?.as_secs_f64();
        let all =
            if self.is_over() { String::new() } else { format!(", about {} in all", ApproximateDuration(step_s * self.steps() as f64)) };
        Some(format!("{:.0} ms a step{all}", step_s * 1e3))
    }

    /// Checkpoints that a run writes `every` so many steps and after its last step.
    pub(super) fn saves(&self, every: u64) -> u64 {
        let (done, last) = (self.first - 1, self.last);
        if self.is_over() { 0 } else { last.div_ceil(every) - done / every }
    }

    /// The sentence of a dry run about the steps.
    pub(super) fn planned(&self) -> String {
        match self.is_over() {
            true => format!("nothing would be done: step {} is the last one", self.last),
            false => format!("steps {} to {} would be trained: {}", self.first, self.last, self.amount()),
        }
    }

    /// Passes and time of the steps.
    fn amount(&self) -> String {
        let time = self.step.map(|step| format!(", about {}", ApproximateDuration(step.as_secs_f64() * self.steps() as f64)));
        format!("{} over {}{}", Passes(self.passes(self.steps())), CountedRows(self.rows), time.unwrap_or_default())
    }

    /// The number of steps to come.
    fn steps(&self) -> u64 {
        (self.last + 1).saturating_sub(self.first)
    }

    /// Whether no step is left.
    pub(super) fn is_over(&self) -> bool {
        self.first > self.last
    }

    fn passes(&self, steps: u64) -> f64 {
        steps as f64 * self.rows_per_step as f64 / self.rows.max(1) as f64
    }
}

impl fmt::Display for RunExtent {
    /// `3 passes in steps 1 to 15`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in steps {} to {}", Passes(self.passes(self.steps())), self.first, self.last)
    }
}

struct Passes(f64);

impl fmt::Display for Passes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(passes) = *self;
        let digits = if passes >= 9.95 || (passes - passes.round()).abs() < 0.005 {
            0
        } else if passes >= 0.095 {
            1
        } else {
            3
        };
        write!(f, "{passes:.digits$} pass{}", if passes.round() == 1.0 && digits == 0 { "" } else { "es" })
    }
}

struct CountedRows(usize);

impl fmt::Display for CountedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&counted(self.0, "row"))
    }
}

/// Seconds in the largest unit of which there are two or more.
pub(super) struct ApproximateDuration(pub(super) f64);

impl fmt::Display for ApproximateDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(seconds) = *self;
        match seconds {
            ..120.0 => write!(f, "{:.0} s", seconds.ceil()),
            ..7200.0 => write!(f, "{:.0} minutes", seconds / 60.0),
            ..172_800.0 => write!(f, "{:.1} hours", seconds / 3600.0),
            _ => write!(f, "{:.1} days", seconds / 86_400.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RunExtent {
        /// Steps without a prediction.
        pub(in crate::train) fn of_steps(first: u64, last: u64) -> Self {
            extent(first, last, 100, None)
        }
    }

    fn extent(first: u64, last: u64, rows: usize, step_ms: Option<u64>) -> RunExtent {
        RunExtent { first, last, rows, rows_per_step: 8, step: step_ms.map(Duration::from_millis) }
    }

    #[test]
    fn steps_are_shown_as_passes_and_minutes() {
        for (extent, words) in [
            (extent(1, 14, 37, Some(1500)), "steps 1 to 14 would be trained: 3.0 passes over 37 rows, about 21 s"),
            (extent(1, 37, 37, None), "steps 1 to 37 would be trained: 8 passes over 37 rows"),
            (extent(37, 37, 8, Some(240_000)), "steps 37 to 37 would be trained: 1 pass over 8 rows, about 4 minutes"),
            (extent(1, 1000, 1_000_000, Some(9000)), "steps 1 to 1000 would be trained: 0.008 passes over 1000000 rows, about 2.5 hours"),
            (extent(1, 1000, 1, Some(900_000)), "steps 1 to 1000 would be trained: 8000 passes over 1 row, about 10.4 days"),
        ] {
            assert_eq!(extent.planned(), words);
        }
        let extent_of = extent(1, 14, 37, Some(1500));
        assert_eq!(extent_of.to_string(), "3.0 passes in steps 1 to 14");
        assert_eq!(extent_of.predicted().unwrap(), "1500 ms a step, about 21 s in all");
        assert_eq!(extent(15, 14, 37, Some(1500)).predicted().unwrap(), "1500 ms a step");
        assert!(extent(5, 4, 9, None).is_over() && !extent(4, 4, 9, None).is_over());
    }

    #[test]
    fn more_than_twenty_passes_of_the_whole_run_are_a_warning() {
        assert_eq!(extent(1, 92, 37, None).warning(), None);
        let warning = extent(93, 93, 37, None).warning().unwrap();
        assert!(warning.starts_with("the run makes 20 passes over 37 rows of records; --num-train-epochs 3"), "{warning}");
    }
}
