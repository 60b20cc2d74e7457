//! The end of a run, in words.

use super::peer_waits::PeerWaits;
use crate::describe::as_word;
use crate::engine::protocol::coordinator::Counts;
use crate::error::{EXIT_INTERRUPTED, Error};
use crate::host::perf::WorkerCounts;
use crate::units::counted;
use std::fmt;
use std::path::{Path, PathBuf};

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
    pub steps_done: u64,
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
    /// The file with one line a step, unless it was removed.
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

    /// The commands that are useful after this run, if it left a checkpoint: `next: superoffload resume DIR` where it was ended early.
    fn next_commands(&self) -> Option<String> {
        let dir = self.checkpoint.as_deref()?.parent()?;
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let dir = as_word(&dir.to_string_lossy());
        let after = format!("superoffload report {dir}, superoffload sample {dir} --prompt TEXT, superoffload export {dir} OUT");
        match (self.interrupted, &self.failure) {
            (true, _) => Some(format!("next: superoffload resume {dir}")),
            (false, None) => Some(format!("next: {after}")),
            (false, Some(_)) => None,
        }
    }

    fn why_early(&self) -> String {
        let evaluations = self.given_up.filter(|_| self.step < self.max_steps);
        evaluations
            .map_or(String::new(), |count| format!("; no lower loss in {} (--early-stopping-patience)", counted(count, "evaluation")))
    }

    /// How far the run came: `finished 300 of 300 steps`.
    fn extent(&self) -> String {
        let Self { step, max_steps, steps_done, .. } = self;
        let state = match (&self.failure, self.interrupted) {
            (Some(_), _) => format!("failed at step {step} of {max_steps}"),
            (None, true) => format!("interrupted at step {step} of {max_steps}"),
            (None, false) => format!("finished {step} of {max_steps} steps"),
        };
        let resumed =
            if steps_done == step || self.process > 0 { String::new() } else { format!(", {steps_done} of them since the resume") };
        format!("{state}{resumed}{}", self.why_early())
    }

    /// Losses of training and evaluations.
    fn losses(&self) -> Option<String> {
        let (first, last) = self.loss?;
        let evaluated = self
            .evaluation
            .map_or(String::new(), |(step, loss)| format!("; evaluation {loss:.4}, perplexity {:.3}, after step {step}", loss.exp()));
        let best = self.best.map_or(String::new(), |(step, loss)| format!("; best {loss:.4}, the checkpoint of step {step}"));
        Some(format!("{first:.4} -> {last:.4}{evaluated}{best}"))
    }

    /// Tokens a second, and the time in which compute waited.
    fn speed(&self) -> String {
        let (optimizer_ms, copies_ms) = self.exposed_ms;
        let peers = self.peers.as_ref().map_or(String::new(), |peers| format!(", {peers}"));
        let tokens = self.tokens_per_second;
        format!("{tokens:.0} tokens/s; waited {optimizer_ms:.0} ms for the optimizer, {copies_ms:.0} ms for copies{peers}")
    }

    /// The last checkpoint, and the timeline.
    fn files(&self) -> String {
        let checkpoint = match &self.checkpoint {
            Some(path) => path.display().to_string(),
            None if self.steps_done == 0 => "none (no step was done)".into(),
            None => "none".into(),
        };
        let dropped = match self.trace_dropped {
            0 => String::new(),
            spans => format!(", without {spans} earlier spans, for which it has no room"),
        };
        let timeline = self.trace.as_ref().map(|trace| format!("; timeline {} for ui.perfetto.dev{dropped}", trace.display()));
        checkpoint + &timeline.unwrap_or_default()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_dry {
            return f.write_str("dry run: no step was done, and nothing is in the output directory that was not there");
        }
        if self.process > 0 {
            return write!(f, "{}: process {} followed process 0", self.extent(), self.process);
        }
        if self.steps_done == 0 && !self.interrupted && self.failure.is_none() {
            let requested = if self.step == self.max_steps { String::new() } else { format!(", {} were asked for", self.max_steps) };
            return write!(f, "nothing to do: step {} was already done{requested}{}", self.step, self.why_early());
        }
        let Counts { speculated, rolled_back, committed, clipped, skipped } = self.counts;
        write!(f, "{}", self.extent())?;
        self.losses().iter().try_for_each(|losses| write!(f, "\n  loss          {losses}"))?;
        write!(f, "\n  speed         {}", self.speed())?;
        write!(f, "\n  optimizer     {committed} bucket steps committed, {clipped} clipped, {skipped} skipped; ")?;
        write!(f, "{speculated} speculated, {rolled_back} of them rolled back")?;
        self.perf.iter().try_for_each(|perf| write!(f, "\n  counters      {perf}"))?;
        write!(f, "\n  checkpoint    {}", self.files())?;
        if self.metrics.is_none() {
            f.write_str("\n  metrics       missing: the file was removed during the run")?;
        }
        self.lost.iter().try_for_each(|loss| write!(f, "\n  lost          {loss}"))?;
        self.next_commands().iter().try_for_each(|commands| write!(f, "\n{commands}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished() -> Summary {
        let counts = Counts { speculated: 5, rolled_back: 2, committed: 7, clipped: 3, skipped: 0 };
        Summary {
            step: 12,
            steps_done: 12,
            max_steps: 12,
            loss: Some((5.5, 2.25)),
            evaluation: Some((12, 2.5)),
            best: Some((8, 2.375)),
            tokens_per_second: 1234.4,
            counts,
            exposed_ms: (19.2, 29.4),
            checkpoint: Some("a run/checkpoint-12".into()),
            metrics: Some("a run/metrics.jsonl".into()),
            trace: Some("a run/trace.json".into()),
            ..Summary::default()
        }
    }

    #[test]
    fn a_run_ends_in_six_lines() {
        let lines = [
            "finished 12 of 12 steps",
            "  loss          5.5000 -> 2.2500; evaluation 2.5000, perplexity 12.182, after step 12; best 2.3750, the checkpoint of step 8",
            "  speed         1234 tokens/s; waited 19 ms for the optimizer, 29 ms for copies",
            "  optimizer     7 bucket steps committed, 3 clipped, 0 skipped; 5 speculated, 2 of them rolled back",
            "  checkpoint    a run/checkpoint-12; timeline a run/trace.json for ui.perfetto.dev",
            "next: superoffload report 'a run', superoffload sample 'a run' --prompt TEXT, superoffload export 'a run' OUT",
        ];
        assert_eq!(finished().to_string().lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn an_early_end_names_the_command_that_resumes_and_a_late_failure_none() {
        let early = Summary { step: 5, steps_done: 2, interrupted: true, checkpoint: Some("checkpoint-5".into()), ..finished() };
        let lines = early.to_string();
        assert!(lines.starts_with("interrupted at step 5 of 12, 2 of them since the resume\n"), "{lines}");
        assert!(lines.ends_with("\nnext: superoffload resume ."), "{lines}");
        let failed = Summary { failure: Some(Error::usage("late")), metrics: None, lost: vec!["the timeline".into()], ..finished() };
        let lines = failed.to_string();
        assert!(lines.starts_with("failed at step 12 of 12\n") && !lines.contains("next:"), "{lines}");
        assert!(lines.contains("\n  metrics       missing") && lines.ends_with("\n  lost          the timeline"), "{lines}");
        let follower = Summary { process: 1, ..finished() };
        assert_eq!(follower.to_string(), "finished 12 of 12 steps: process 1 followed process 0");
    }
}
