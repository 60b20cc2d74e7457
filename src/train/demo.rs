//! The run of the built-in model on the built-in text samples the model before and after training.

use super::observer::Observer;
use super::sample;
use crate::config::settings::Settings;
use crate::signals::StopFlag;
use std::path::Path;

/// How many texts of the built-in kind begin.
const PROMPT: &str = "You may ";

/// The settings of such a run.
pub(super) struct Demo<'a>(&'a Settings);

impl<'a> Demo<'a> {
    /// `None` where `settings` ask for another run, or for a part of this one.
    pub(super) fn of(settings: &'a Settings) -> Option<Self> {
        let Settings { model, data, dry_run, train_length, seq_length, resume_from_checkpoint, .. } = settings;
        let demo = Settings::demo();
        let is_whole = (*train_length, *seq_length) == (demo.train_length, demo.seq_length) && resume_from_checkpoint.is_none();
        (model.is_none() && data.is_empty() && !dry_run && is_whole).then_some(Self(settings))
    }

    /// Reports samples of the model: before the first step, or with the weights of `checkpoint`.
    pub(super) fn log(&self, checkpoint: Option<&Path>, stop: &StopFlag, observer: &mut dyn Observer) {
        let when = if checkpoint.is_some() { "after" } else { "before" };
        match sample::of_demo(self.0, PROMPT, checkpoint, stop) {
            Ok(text) => observer.note(&format!("sample  {when}: {PROMPT:?} is followed by {text:?}")),
            Err(error) => observer.warn(&format!("no sample {when} the run: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::DeviceChoice;
    use crate::metrics::StepMetrics;
    use crate::optim::schedule::TrainLength;
    use crate::planner::plan::Plan;
    use crate::train::RunFacts;

    struct Notes(Vec<String>);

    impl Observer for Notes {
        fn begin(&mut self, _: &Plan, _: &RunFacts) {}
        fn step(&mut self, _: &StepMetrics) {}
        fn note(&mut self, line: &str) {
            self.0.push(line.to_string());
        }
        fn warn(&mut self, line: &str) {
            self.0.push(format!("warning: {line}"));
        }
    }

    #[test]
    fn only_the_whole_run_of_the_built_in_model_lists_its_files() {
        let settings = Settings { device: DeviceChoice::Cpu, threads: Some(1), ..Settings::demo() };
        let mut notes = Notes(Vec::new());
        Demo::of(&settings).unwrap().log(None, &StopFlag::default(), &mut notes);
        assert!(notes.0.len() == 1 && notes.0[0].starts_with("sample  before: \"You may \" is followed by \""), "{:?}", notes.0);
        for other in [
            Settings { train_length: TrainLength::Steps(4), ..settings.clone() },
            Settings { data: vec!["a.txt".into()], ..settings.clone() },
            Settings { dry_run: true, ..settings },
        ] {
            assert!(Demo::of(&other).is_none());
        }
    }
}
