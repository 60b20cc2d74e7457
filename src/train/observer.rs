//! Who watches a run, and what it is told.

use crate::engine::coordinator::Counts;
use crate::engine::watchdog::OnAlarm;
use crate::error::Error;
use crate::host::perf::WorkerCounts;
use crate::metrics::StepMetrics;
use crate::planner::plan::Plan;
use std::path::PathBuf;

/// Who watches a run.
pub trait Observer {
    /// Everything is resolved and checked; training begins at `step` of `max_steps`.
    fn begin(&mut self, plan: &Plan, facts: &RunFacts);
    /// A step is done.
    fn step(&mut self, metrics: &StepMetrics);
    /// A line for people: a checkpoint was written, something was tidied up.
    fn note(&mut self, line: &str);
    /// A line for people: something is not as it should be, and training goes on.
    fn warn(&mut self, line: &str);
    /// Of `all` bytes of data `done` are read; `what` is done with them, in words. Comes often, before [`Observer::begin`].
    fn progress(&mut self, _what: &str, _done: u64, _all: u64) {}
    /// Who hears, on another thread, of threads that stand still; nobody by default, and then nothing watches them.
    fn on_alarm(&mut self) -> Option<OnAlarm> {
        None
    }
}

/// What a run is about to do, apart from the plan.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// The device, in words.
    pub device: String,
    /// What the plan of a GPU rests on, in words.
    pub rates: Option<String>,
    /// FLOPs a second of a large matrix product, by the profile of a GPU.
    pub matmul_flops: Option<f64>,
    /// The model, in words.
    pub model: String,
    /// The data, in words.
    pub data: String,
    /// Host memory as it was got, in words.
    pub host: String,
    /// Partition of cache and bandwidth that the optimizer has, in words.
    pub partition: String,
    /// Steps already done.
    pub step: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Steps between log lines.
    pub logging_steps: u64,
}

/// How a run ended.
#[derive(Debug)]
pub struct Summary {
    /// Whether a signal ended it early.
    pub interrupted: bool,
    /// Steps done in all, and in this process.
    pub step: u64,
    /// Steps done by this process.
    pub steps_here: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Loss of the first and of the last step of this process.
    pub loss: Option<(f32, f32)>,
    /// Real tokens per second over all steps of this process.
    pub tokens_per_second: f64,
    /// Bucket steps of this process.
    pub counts: Counts,
    /// Compute was idle because the optimizer or a copy was not done, in milliseconds.
    pub exposed_ms: (f64, f64),
    /// The last checkpoint, if one was written.
    pub checkpoint: Option<PathBuf>,
    /// One line a step, if nobody removed it.
    pub metrics: Option<PathBuf>,
    /// Chrome/Perfetto timeline, if there is one.
    pub trace: Option<PathBuf>,
    /// Spans that no longer fitted.
    pub trace_dropped: u64,
    /// What was counted of the optimizer's threads, if it was asked for.
    pub perf: Option<WorkerCounts>,
    /// Digest of the final state, if it was asked for.
    pub digest: Option<String>,
    /// What this process did and no file holds.
    pub lost: Vec<String>,
    /// What ended the run early, or went wrong at its end.
    pub failure: Option<Error>,
}
