//! Destinations of a run's steps and evaluations. A new logger is a file in this folder, an entry in [`SINKS`], and a value of `--report-to`.

mod event_file;
pub(crate) mod metrics_file;

use super::facts_line::FactsLine;
use super::observer::Observer;
use crate::config::options::ReportTo;
use crate::disk::{Dir, OwnedName};
use crate::error::Result;
use crate::metrics::{EvalLine, StepMetrics};
use std::path::PathBuf;

/// All kinds of sinks, in the order in which a step is written.
pub(super) static SINKS: [&SinkKind; 2] = [&event_file::SINK, &metrics_file::SINK];

/// A kind of sink.
pub(super) struct SinkKind {
    /// The name of its file or folder in the output directory.
    pub(super) name: &'static OwnedName,
    /// Its contents, for messages.
    contents: &'static str,
    /// The logger of `--report-to` that requests it; `None` if every run has it.
    logger: Option<ReportTo>,
    open: fn(&SinkStart, &mut dyn Observer) -> Result<Box<dyn StepSink>>,
}

/// The start of a run, for sinks.
pub(super) struct SinkStart<'a> {
    /// The output directory.
    pub(super) dir: &'a Dir,
    /// The number of steps before the run. Later lines of earlier runs are invalid.
    pub(super) step: u64,
    pub(super) facts: &'a FactsLine,
}

/// A destination of steps and evaluations.
trait StepSink {
    fn kind(&self) -> &'static SinkKind;

    /// Writes the metrics of a step.
    ///
    /// # Errors
    /// `Io` if they cannot be written.
    fn step(&mut self, metrics: &StepMetrics) -> Result<()>;

    /// Writes the results of an evaluation.
    ///
    /// # Errors
    /// `Io` if they cannot be written.
    fn evaluation(&mut self, line: &EvalLine) -> Result<()>;

    /// Waits until everything is on disk, as a checkpoint of the last step will be.
    ///
    /// # Errors
    /// `Io` if the disk fails.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// Writes the file again in `dir` if it was removed or replaced. Returns whether it was.
    ///
    /// # Errors
    /// `Io` if it cannot be read or written.
    fn restore(&mut self, _dir: &Dir) -> Result<bool> {
        Ok(false)
    }

    /// Whether its name in `dir` still leads to it.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    fn is_in(&self, dir: &Dir) -> Result<bool> {
        Ok(dir.kind(self.kind().name.pattern)?.is_some())
    }
}

impl SinkKind {
    /// The kind of sink with this name in the output directory.
    pub(super) fn named(name: &OwnedName) -> Option<&'static Self> {
        SINKS.into_iter().find(|kind| kind.name.pattern == name.pattern)
    }

    /// Whether a run ends if the sink cannot be written. Otherwise the run continues without it.
    pub(super) fn is_required(&self) -> bool {
        self.logger.is_none()
    }

    /// Whether a run with these loggers has the sink.
    pub(super) fn is_wanted(&self, loggers: &[ReportTo]) -> bool {
        self.logger.is_none_or(|logger| loggers.contains(&logger))
    }

    /// The value of `result`. The error of an optional sink becomes a warning.
    fn unless_lost<T>(&self, result: Result<T>, observer: &mut dyn Observer) -> Result<Option<T>> {
        match result {
            Err(error) if !self.is_required() => {
                observer.warn(&format!("no {} from here on: {error}", self.contents));
                Ok(None)
            }
            result => result.map(Some),
        }
    }
}

/// The sinks of a run.
pub(super) struct StepSinks(Vec<Box<dyn StepSink>>);

impl StepSinks {
    /// Opens the sinks of every run, and those that `loggers` request.
    ///
    /// # Errors
    /// `Io` or `Format` of a required sink.
    pub(super) fn open(loggers: &[ReportTo], start: &SinkStart, observer: &mut dyn Observer) -> Result<Self> {
        let mut sinks = Vec::new();
        for kind in SINKS.into_iter().filter(|kind| kind.is_wanted(loggers)) {
            let opened = (kind.open)(start, observer);
            sinks.extend(kind.unless_lost(opened, observer)?);
        }
        Ok(Self(sinks))
    }

    /// Writes the metrics of a step to all sinks.
    ///
    /// # Errors
    /// `Io` of a required sink.
    pub(super) fn step(&mut self, metrics: &StepMetrics, observer: &mut dyn Observer) -> Result<()> {
        self.write(observer, |sink| sink.step(metrics))
    }

    /// Writes the results of an evaluation to all sinks.
    ///
    /// # Errors
    /// `Io` of a required sink.
    pub(super) fn evaluation(&mut self, line: &EvalLine, observer: &mut dyn Observer) -> Result<()> {
        self.write(observer, |sink| sink.evaluation(line))
    }

    /// Writes to every sink, and drops optional ones that fail. Returns the first error of a required sink.
    fn write(&mut self, observer: &mut dyn Observer, write: impl Fn(&mut dyn StepSink) -> Result<()>) -> Result<()> {
        let mut outcome = Ok(());
        self.0.retain_mut(|sink| match sink.kind().unless_lost(write(sink.as_mut()), observer) {
            Ok(written) => written.is_some(),
            Err(error) => {
                if outcome.is_ok() {
                    outcome = Err(error);
                }
                true
            }
        });
        outcome
    }

    /// Waits until everything is on disk. Failures become warnings.
    pub(super) fn sync(&self, observer: &mut dyn Observer) {
        for sink in &self.0 {
            if let Err(error) = sink.sync() {
                observer.warn(&error.to_string());
            }
        }
    }

    /// Writes the files again that were removed from `dir` or replaced, with a warning.
    ///
    /// # Errors
    /// `Io` if one cannot be read or written.
    pub(super) fn restore(&mut self, dir: &Dir, observer: &mut dyn Observer) -> Result<()> {
        for sink in &mut self.0 {
            if sink.restore(dir)? {
                let path = dir.join(sink.kind().name.pattern);
                observer.warn(&format!("{} was removed or replaced during the run: written again, with this run's lines", path.display()));
            }
        }
        Ok(())
    }

    /// The path of the sink `name` in `dir`, if the run has it and the path still leads to it.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    pub(super) fn path(&self, name: &OwnedName, dir: &Dir) -> Result<Option<PathBuf>> {
        let sink = self.0.iter().find(|sink| sink.kind().name.pattern == name.pattern);
        let Some(sink) = sink else { return Ok(None) };
        Ok(sink.is_in(dir)?.then(|| dir.join(name.pattern)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::OwnMark;
    use crate::error::Error;
    use crate::metrics::EvalMetrics;
    use crate::train::tests::RecordingObserver;
    use std::cell::Cell;
    use std::rc::Rc;

    const NAME: OwnedName = OwnedName { pattern: "log", kind: "log", mark: OwnMark::Head("") };
    static REQUIRED: SinkKind = SinkKind { name: &NAME, contents: "records", logger: None, open: refuse };
    static OPTIONAL: SinkKind = SinkKind { name: &NAME, contents: "copies", logger: Some(ReportTo::Tensorboard), open: refuse };

    fn refuse(_: &SinkStart, _: &mut dyn Observer) -> Result<Box<dyn StepSink>> {
        Err(Error::resource("open a log", "the disk is full"))
    }

    /// A sink that fails at each evaluation, and counts what it is asked to write.
    struct Counting {
        kind: &'static SinkKind,
        writes: Rc<Cell<usize>>,
    }

    impl StepSink for Counting {
        fn kind(&self) -> &'static SinkKind {
            self.kind
        }

        fn step(&mut self, _: &StepMetrics) -> Result<()> {
            unreachable!("only evaluations are written")
        }

        fn evaluation(&mut self, _: &EvalLine) -> Result<()> {
            self.writes.set(self.writes.get() + 1);
            Err(Error::resource("write a log", "the disk is full"))
        }
    }

    #[test]
    fn a_required_sink_ends_the_run_and_an_optional_one_is_dropped_with_a_warning() {
        let (writes, mut observer) = (Rc::new(Cell::new(0)), RecordingObserver::default());
        let sink = |kind| Box::new(Counting { kind, writes: writes.clone() }) as Box<dyn StepSink>;
        let metrics = EvalMetrics { step: 1, eval_loss: 1.0, eval_perplexity: 1.0, objective: None, eval_tokens: 1, eval_seconds: 1.0 };
        let line = EvalLine { metrics, samples: vec![] };
        let mut sinks = StepSinks(vec![sink(&OPTIONAL), sink(&REQUIRED), sink(&OPTIONAL)]);
        for expected in [3, 4] {
            let error = sinks.evaluation(&line, &mut observer).unwrap_err();
            assert_eq!((error.to_string().as_str(), writes.get()), ("write a log: the disk is full", expected));
        }
        let mut sinks = StepSinks(vec![sink(&OPTIONAL)]);
        for _ in 0..2 {
            sinks.evaluation(&line, &mut observer).unwrap();
        }
        assert_eq!(writes.get(), 5);
        assert_eq!(observer.0, ["no copies from here on: write a log: the disk is full"; 3]);
    }

    #[test]
    fn each_kind_of_sink_has_a_name_of_its_own_and_the_log_is_in_every_run() {
        for kind in SINKS {
            assert!(std::ptr::eq(SinkKind::named(kind.name).unwrap(), kind), "{}", kind.name.pattern);
            assert!(kind.is_wanted(&[]) == kind.is_required());
        }
        assert!(SINKS.iter().any(|kind| kind.is_required()));
    }
}
