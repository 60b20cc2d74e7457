//! The end of a run, good or bad: it saves the state if possible and names losses.

use super::Session;
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::host::perf::WorkerCounters;
use crate::train::observer::Observer;
use crate::train::peer_waits::PeerWaits;
use crate::train::sinks::metrics_file::METRICS;
use crate::train::summary::Summary;
use std::path::PathBuf;

/// The failures so far.
struct Failures(Option<Error>);

impl Failures {
    /// The value of `result`; an error is recorded.
    fn take<T>(&mut self, result: Result<T>) -> Option<T> {
        let Err(error) = result else { return result.ok() };
        self.0 = Some(match self.0.take() {
            // Every later query of the other ranks returns the error that ended the run.
            Some(first) if first.to_string() == error.to_string() => first,
            Some(first) => first.and(error),
            None => error,
        });
        None
    }

    /// A timeline that was asked for and is lost is a failure; of the usual one a warning is enough, as all steps are saved.
    fn take_timeline<T>(&mut self, is_requested: bool, result: Result<T>, observer: &mut dyn Observer) -> Option<T> {
        if is_requested { self.take(result) } else { result.map_err(|error| observer.warn(&error.to_string())).ok() }
    }
}

impl<D: Kernels> Session<D> {
    /// Saves what is not saved yet, ends the threads, and writes the timeline. After a `failure` the steps that were done are saved,
    /// unless it was the engine that failed: its state is then that of no step.
    pub(crate) fn end(mut self, failure: Option<Error>, observer: &mut dyn Observer) -> Summary {
        let mut failures = Failures(failure);
        self.check_ranks(&mut failures);
        if !self.is_sound && !self.engine.is_read_by_save() {
            // The state of an earlier step was read before the failure.
            failures.take(self.end_background(observer));
        }
        if self.is_sound && !self.save_failed {
            failures.take(self.save_if_new(observer));
            self.check_ranks(&mut failures);
        }
        if self.is_sound {
            failures.take(self.settle(observer));
        }
        let digest = (self.is_sound && self.settings.digest).then(|| self.digest());
        let digest = digest.and_then(|digest| failures.take(digest));
        let perf = self.perf.as_mut().map(WorkerCounters::read).and_then(|counts| failures.take(counts));
        let mut lost: Vec<String> = self.lost_steps().into_iter().chain(self.lost.take()).collect();
        let (step, max_steps, totals) = (self.engine.train_step(), self.schedule.max_steps, self.totals);
        let (ranks, given_up) = (self.engine.plan().site.ranks, self.progress.given_up());
        let tokens = self.step_work.tokens * totals.steps as f64;
        let checkpoint = failures.take(self.saved_path()).flatten().or_else(|| self.last_saved().map(|(_, path)| path));
        let metrics = failures.take(self.sinks.path(&METRICS, self.run_dir.dir())).flatten();
        let is_requested = self.settings.trace.is_some();
        let trace = failures.take_timeline(is_requested, self.run_dir.take_trace(), observer);
        let tracks = if self.is_sound { failures.take(self.engine.finish()) } else { None };
        // The timeline that a finished run left is worth more than one of no step.
        let written = match (&trace, tracks) {
            (Some(_), Some(_)) if totals.steps == 0 => Some(0),
            (Some(trace), Some(tracks)) => failures.take_timeline(is_requested, trace.write(&tracks), observer),
            _ => None,
        };
        lost.extend(written.is_none().then(|| "the timeline".to_string()));
        let trace: Option<PathBuf> = trace.and_then(|trace| trace.exists().is_ok_and(|exists| exists).then(|| trace.path()));
        let ms = |ns: u64| ns as f64 / 1e6;
        Summary {
            is_dry: false,
            process: 0,
            interrupted: step < max_steps && given_up.is_none(),
            step,
            steps_done: totals.steps,
            max_steps,
            loss: totals.first_loss.map(|first| (first, totals.last_loss)),
            evaluation: self.evaluated.map(|last| (last.step, last.eval_loss)),
            given_up,
            best: self.progress.best().map(|best| (best.step, best.eval_loss)),
            tokens_per_second: if totals.steps == 0 { 0.0 } else { tokens / totals.time.as_secs_f64() },
            counts: totals.counts,
            exposed_ms: (ms(totals.exposed.cpu_ns), ms(totals.exposed.transfer_ns)),
            peers: (ranks > 1).then(|| PeerWaits::new(&totals.exposed_to_peers_ns[..ranks], totals.time)),
            checkpoint,
            metrics,
            trace,
            trace_dropped: written.unwrap_or(0),
            perf,
            digest,
            lost,
            failure: failures.0,
        }
    }

    /// Waits for a save that still runs, because the last one failed before it began, and writes all updates into the state.
    fn settle(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.end_background(observer)?;
        self.engine.flush().inspect_err(|_| self.is_sound = false)
    }

    /// Without all ranks no state is complete. The rank's error is the failure, unless an earlier one is known.
    fn check_ranks(&mut self, failures: &mut Failures) {
        if let Err(error) = self.engine.check() {
            self.is_sound = false;
            failures.0.get_or_insert(error);
        }
    }

    fn lost_steps(&self) -> Option<String> {
        let (step, begin) = (self.engine.train_step(), self.engine.train_step() - self.totals.steps);
        let saved = self.last_saved();
        let kept = saved.as_ref().map_or(begin, |(saved, _)| *saved);
        let since = match &saved {
            Some((_, path)) => path.display().to_string(),
            None if begin > 0 => "the checkpoint of the start".into(),
            None => "the start".into(),
        };
        (step > kept).then(|| format!("steps {} to {step}, all since {since}", kept + 1))
    }
}
