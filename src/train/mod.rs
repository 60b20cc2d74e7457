//! A training run: settings in, checkpoints, metrics and a timeline out.
//!
//! [`setup`] builds the engine and the data, [`text`] finds what turns text into tokens, `identity` says what a run learns with and
//! from, `resume` compares that with a checkpoint's and goes on from it, [`session`] runs steps and saves, this file ties them together.

mod feed;
mod identity;
mod metrics_file;
mod previous_run;
mod resume;
mod run_dir;
mod run_lock;
pub mod session;
pub mod setup;
mod skips;
mod state;
pub mod text;

use crate::config::settings::Settings;
use crate::device::Kernels;
use crate::engine::coordinator::Counts;
use crate::engine::watchdog::OnAlarm;
use crate::error::{Error, Result};
use crate::hardware::topology::Topology;
use crate::host::perf::WorkerCounts;
use crate::launch::devices;
use crate::metrics::StepMetrics;
use crate::planner::plan::Plan;
use crate::signals::StopFlag;
use run_dir::RunDir;
use session::Session;
use std::path::PathBuf;

/// Who watches a run.
pub trait Observer {
    /// Everything is resolved and checked; training begins at `step` of `max_steps`.
    fn begin(&mut self, plan: &Plan, facts: &Facts);
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
pub struct Facts {
    /// The device, in words.
    pub device: String,
    /// What the plan of a GPU rests on, in words.
    pub rates: Option<String>,
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

/// Trains as `settings` say, until done, until `stop`, or until something fails, which the summary then holds.
///
/// # Errors
/// What went wrong before the first step.
pub fn run(settings: &Settings, stop: &StopFlag, observer: &mut impl Observer) -> Result<Summary> {
    let run_dir = RunDir::open(settings, observer)?;
    let chosen = devices::choose(settings, &Topology::this_machine())?;
    #[cfg(feature = "cuda")]
    if chosen.is_gpu() {
        return drive(setup::prepare(settings, &chosen, run_dir, stop, observer, setup::cuda_engine)?, stop, observer);
    }
    drive(setup::prepare(settings, &chosen, run_dir, stop, observer, setup::cpu_engine)?, stop, observer)
}

fn drive<D: Kernels>(mut session: Session<D>, stop: &StopFlag, observer: &mut impl Observer) -> Result<Summary> {
    let _watchdog = session.watch(observer)?;
    let mut failure = None;
    while failure.is_none() && !session.is_done() && !stop.is_set() {
        failure = session.step(observer).err();
    }
    Ok(session.end(failure, observer))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The warnings that a person was told.
    #[derive(Default)]
    pub(crate) struct Heard(pub(crate) Vec<String>);

    impl Observer for Heard {
        fn begin(&mut self, _: &Plan, _: &Facts) {}
        fn step(&mut self, _: &StepMetrics) {}
        fn note(&mut self, _: &str) {}
        fn warn(&mut self, line: &str) {
            self.0.push(line.to_string());
        }
    }
}
