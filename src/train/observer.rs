//! The observer of a run, and the messages that it receives.

use super::peer_waits::PeerWaits;
use crate::config::describe::as_word;
use crate::engine::coordinator::Counts;
use crate::engine::watchdog::Alarm;
use crate::error::{EXIT_INTERRUPTED, Error};
use crate::host::perf::WorkerCounts;
use crate::metrics::StepMetrics;
use crate::planner::plan::Plan;
use crate::simulate::outcome::of_a_large_product;
use std::fmt;
use std::path::{Path, PathBuf};

/// Receives the events of a run.
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
    /// The handler, called on another thread, of stalled threads. By default there is none, and threads are not watched.
    fn on_alarm(&mut self) -> Option<Box<dyn Fn(Alarm) + Send>> {
        None
    }
}

/// The facts of a run about to start, apart from the plan.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// The device, in words.
    pub device: String,
    /// The source of the plan's GPU rates, in words.
    pub rates: Option<String>,
    /// FLOPs a second of large matrix products on all devices, by the profile of a GPU.
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
    /// The steps to come, the passes over the data that they are and the time that the plan predicts, in words.
    pub extent: String,
    /// Steps between log lines.
    pub logging_steps: u64,
}

impl RunFacts {
    /// How the step's `model_tflops` compare with a large product on each GPU, in words; empty where that is not known.
    pub fn share(&self, step: &StepMetrics) -> String {
        of_a_large_product(self.matmul_flops.map(|peak| step.model_tflops * 1e12 / peak))
    }
}

/// How a run ended.
#[derive(Debug, Default)]
pub struct Summary {
    /// Whether this was a dry run.
    pub is_dry: bool,
    /// The process that reports the summary; processes other than 0 fill few fields.
    pub process: usize,
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
    /// The step after which the last evaluation was, and its mean loss.
    pub evaluation: Option<(u64, f64)>,
    /// Evaluations in a row without a lower loss, if they ended the run.
    pub given_up: Option<u64>,
    /// The step whose checkpoint has the lowest loss of an evaluation, and that loss.
    pub best: Option<(u64, f64)>,
    /// Real tokens per second over all steps of this process.
    pub tokens_per_second: f64,
    /// Bucket steps of this process.
    pub counts: Counts,
    /// Compute was idle because the optimizer or a copy was not done, in milliseconds.
    pub exposed_ms: (f64, f64),
    /// How long several ranks waited for each other.
    pub peers: Option<PeerWaits>,
    /// The last checkpoint, if one was written.
    pub checkpoint: Option<PathBuf>,
    /// One line a step, if nobody removed it.
    pub metrics: Option<PathBuf>,
    /// Chrome/Perfetto timeline, if there is one.
    pub trace: Option<PathBuf>,
    /// Spans that made room in it for later ones.
    pub trace_dropped: u64,
    /// Performance counters of the optimizer's threads, if requested.
    pub perf: Option<WorkerCounts>,
    /// Digest of the final state, if it was asked for.
    pub digest: Option<String>,
    /// Results of this process that no file holds.
    pub lost: Vec<String>,
    /// The error that ended the run early, or occurred at its end.
    pub failure: Option<Error>,
}

impl Summary {
    /// The process exit code of a run that did not fail: 75 if it was interrupted and can be resumed, else 0.
    pub fn exit_code(&self) -> i32 {
        if self.interrupted { EXIT_INTERRUPTED } else { 0 }
    }

    /// The command that goes on with a run that was ended early, if there is a checkpoint to go on from.
    fn next_command(&self) -> Option<String> {
        let dir = self.checkpoint.as_deref().filter(|_| self.interrupted)?.parent()?;
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        Some(format!("go on with: superoffload resume {}", as_word(&dir.to_string_lossy())))
    }

    fn why_early(&self) -> String {
        let evaluations = self.given_up.filter(|_| self.step < self.max_steps);
        evaluations.map_or(String::new(), |count| format!("; no lower loss in {count} evaluations (--early-stopping-patience)"))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_dry {
            return f.write_str("dry run: no step was done, and nothing is in the output directory that was not there");
        }
        if self.process > 0 {
            let state = if self.interrupted { "interrupted" } else { "done" };
            return write!(f, "{state} at step {} of {}: process {} followed process 0", self.step, self.max_steps, self.process);
        }
        if self.steps_here == 0 && !self.interrupted && self.failure.is_none() {
            let requested = if self.step == self.max_steps { String::new() } else { format!(", {} were asked for", self.max_steps) };
            return write!(f, "nothing to do: step {} was already done{requested}{}", self.step, self.why_early());
        }
        let state = match (&self.failure, self.interrupted) {
            (Some(_), _) => "failed",
            (None, true) => "interrupted",
            (None, false) => "done",
        };
        write!(f, "{state} at step {} of {} ({} here){}", self.step, self.max_steps, self.steps_here, self.why_early())?;
        if let Some((first, last)) = self.loss {
            write!(f, "\n  loss          {first:.4} -> {last:.4}")?;
            write!(f, "\n  speed         {:.0} tokens/s", self.tokens_per_second)?;
        }
        if let Some((step, loss)) = self.evaluation {
            write!(f, "\n  evaluation    loss {loss:.4}, perplexity {:.3}, after step {step}", loss.exp())?;
        }
        if let Some((step, loss)) = self.best {
            write!(f, "\n  best          loss {loss:.4}, the checkpoint of step {step}")?;
        }
        let c = self.counts;
        write!(f, "\n  bucket steps  {} committed, {} clipped, {} skipped; ", c.committed, c.clipped, c.skipped)?;
        write!(f, "{} speculated, {} of them rolled back", c.speculated, c.rolled_back)?;
        let (optimizer_ms, copies_ms) = self.exposed_ms;
        write!(f, "\n  exposed       {optimizer_ms:.0} ms waiting for the optimizer, {copies_ms:.0} ms for copies")?;
        self.peers.iter().try_for_each(|peers| write!(f, ", {peers}"))?;
        self.perf.iter().try_for_each(|perf| write!(f, "\n  counters      {perf}"))?;
        match &self.checkpoint {
            Some(path) => write!(f, "\n  checkpoint    {}", path.display())?,
            None if self.steps_here == 0 => write!(f, "\n  checkpoint    none (no step was done)")?,
            None => write!(f, "\n  checkpoint    none")?,
        }
        match &self.metrics {
            Some(path) => write!(f, "\n  metrics       {}", path.display())?,
            None => write!(f, "\n  metrics       gone: somebody removed the file")?,
        }
        self.lost.iter().try_for_each(|what| write!(f, "\n  lost          {what}"))?;
        if let Some(trace) = &self.trace {
            let dropped =
                if self.trace_dropped > 0 { format!(" (full: {} earlier spans left out)", self.trace_dropped) } else { String::new() };
            write!(f, "\n  timeline      {}{dropped} (open in ui.perfetto.dev)", trace.display())?;
        }
        self.next_command().iter().try_for_each(|command| write!(f, "\n{command}"))
    }
}
