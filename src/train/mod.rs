//! A training run: settings in, checkpoints, metrics and a timeline out.
//!
//! [`setup`] builds the engine and the data, [`text`] finds the tokenizer, `identity` records the run's model, tokenizer and data,
//! `resume` compares them with a checkpoint's and continues from it, [`session`] runs steps and saves, this file ties them together.

pub(crate) mod ahead;
mod demo;
mod evaluation;
mod extent;
mod facts_line;
mod feed;
#[cfg(test)]
mod first_lines_tests;
mod frozen;
mod identity;
mod inputs;
mod model_files;
mod observer;
mod overview;
pub(crate) mod owned_names;
pub(crate) mod packing;
mod peer_waits;
mod previous_run;
mod processes;
mod prompts;
pub(crate) mod record;
mod reference;
mod replanner;
mod resume;
mod resume_numerics;
pub(crate) mod run_dir;
mod run_facts;
mod run_lock;
pub(crate) mod sample;
mod sampling;
mod save_times;
pub(crate) mod session;
pub(crate) mod setup;
pub(crate) mod sinks;
mod skips;
mod summary;
pub(crate) mod text;
pub(crate) mod trained_rows;

use crate::checkpoint::parts::SharedFolderMarker;
use crate::checkpoint::{Check, is_state_damage};
use crate::config::options::InitChoice;
use crate::config::settings::Settings;
use crate::device::Kernels;
use crate::disk::Dir;
use crate::engine::executor::Engine;
use crate::error::Result;
use crate::launch::agreement::ProcessGroup;
use crate::launch::engine::{Launcher, UseEngine};
use crate::launch::processes::ThisProcess;
use crate::signals::StopFlag;
use demo::Demo;
pub use observer::Observer;
use processes::Following;
use run_dir::RunDir;
pub use run_facts::RunFacts;
use session::Session;
use setup::PreparedRun;
pub use summary::Summary;

/// Trains under `settings`, until done, until `stop`, or until a failure, which the summary then holds.
///
/// # Errors
/// Errors before the first step.
pub fn train(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    if settings.processes == 1 || settings.dry_run {
        return lead(settings, None, stop, observer);
    }
    let process_group = processes::meet(settings, stop, observer)?;
    let outcome = match settings.process {
        0 => lead(settings, Some(&process_group), stop, observer),
        _ => processes::follow(settings, &process_group, stop, observer),
    };
    processes::part(process_group.links, outcome)
}

/// The run of process 0, which may be the only one.
fn lead(settings: &Settings, process_group: Option<&ProcessGroup>, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    let settings = &setup::find_sources(settings, settings.init == InitChoice::Checkpoint, stop, observer)?;
    inputs::check(settings)?;
    if let (true, Ok(dir)) = (settings.dry_run, Dir::open(&settings.output_dir)) {
        owned_names::check(&dir, settings)?;
    }
    let demo = process_group.is_none().then(|| Demo::of(settings)).flatten();
    if let Some(demo) = &demo {
        demo.log(None, stop, observer);
    }
    let summary = train_alone(settings, process_group, stop, observer)?;
    if let Some((demo, checkpoint)) = demo.zip(summary.checkpoint.as_deref().filter(|_| summary.steps_done > 0)) {
        demo.log(Some(checkpoint), stop, observer);
    }
    Ok(summary)
}

/// The run, without the messages around it. A run of one process checks the state that it goes on from while it loads it. If that is
/// damaged, it begins again with a check of all checkpoints, which names the damaged ones and finds the newest good one.
fn train_alone(settings: &Settings, process_group: Option<&ProcessGroup>, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    if process_group.is_some() || settings.dry_run {
        return train_checked(settings, (process_group, Check::Now), stop, observer);
    }
    match train_checked(settings, (None, Check::WhenRead), stop, observer) {
        Err(error) if settings.resume_from_checkpoint.is_some() && is_state_damage(&error) => {
            train_checked(settings, (None, Check::Now), stop, observer)
        }
        ended => ended,
    }
}

/// The run, which goes on from a checkpoint that passes `check`.
fn train_checked(
    settings: &Settings,
    (process_group, check): (Option<&ProcessGroup>, Check),
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let run_dir = (!settings.dry_run).then(|| RunDir::open(settings, observer)).transpose()?;
    let (launcher, settings) = process_group.map_or_else(|| Launcher::new(settings), |process_group| process_group.launcher(settings))?;
    let prepared = setup::prepare(&settings, &launcher, (run_dir.as_ref(), check), stop, observer)?;
    let Some(run_dir) = run_dir else {
        prepared.log(observer);
        return Ok(Summary { is_dry: true, ..Summary::default() });
    };
    let (plan, shape) = prepared.blueprint();
    let Some(process_group) = process_group else {
        return launcher.engine(&plan, &shape, Training { prepared, run_dir, meeting_place: None, stop, observer });
    };
    let meeting_place = Some(processes::propose(process_group, &plan, prepared.settings(), run_dir.dir())?);
    let settings = prepared.settings().clone();
    let this = ThisProcess { launch: &launcher, plan: &plan, shape: &shape, links: &process_group.links };
    this.lead(Training { prepared, run_dir, meeting_place, stop, observer }, &Following(&settings))
}

struct Training<'a> {
    prepared: PreparedRun<'a>,
    run_dir: RunDir,
    /// Of several processes, until all have their engines.
    meeting_place: Option<SharedFolderMarker>,
    stop: &'a StopFlag,
    observer: &'a mut dyn Observer,
}

impl UseEngine for Training<'_> {
    type Output = Summary;

    fn run<D: Kernels>(self, engine: Engine<D>) -> Result<Summary> {
        drop(self.meeting_place);
        drive(self.prepared.session(engine, self.run_dir, self.stop, self.observer)?, self.stop, self.observer)
    }
}

fn drive<D: Kernels>(mut session: Session<D>, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    let _watchdog = session.watch(observer)?;
    let mut failure = session.evaluate_on_start(stop, observer).err();
    while failure.is_none() && !session.is_done() && !stop.is_set() {
        failure = session
            .step(observer)
            .and_then(|()| session.evaluate_if_due(stop, observer))
            .and_then(|()| session.save_if_due(observer))
            .err();
    }
    Ok(session.end(failure, observer))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::checkpoint;
    use crate::config::options::DeviceChoice;
    use crate::disk::faults::{self, Mode};
    use crate::metrics::StepMetrics;
    use crate::optim::schedule::TrainLength;
    use crate::planner::plan::Plan;
    use std::path::{Path, PathBuf};

    /// A model with the layers of the built-in one, and a fifteenth of its parameters.
    pub(crate) const SMALL_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/small-model");
    /// A text for it.
    pub(crate) const SMALL_MODEL_TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/small-model/text.txt");

    /// Two steps of the built-in model on a few tokens, in `dir`.
    pub(super) fn tiny(dir: &Path) -> Settings {
        Settings {
            output_dir: dir.join("out"),
            train_length: TrainLength::Steps(2),
            device: DeviceChoice::Cpu,
            threads: Some(1),
            seq_length: 8,
            per_device_train_batch_size: 1,
            ..Settings::demo()
        }
    }

    #[derive(Default)]
    pub(crate) struct RecordingObserver(pub(crate) Vec<String>);

    impl Observer for RecordingObserver {
        fn begin(&mut self, _: &Plan, _: &RunFacts) {}
        fn step(&mut self, _: &StepMetrics) {}
        fn note(&mut self, _: &str) {}
        fn warn(&mut self, line: &str) {
            self.0.push(line.to_string());
        }
    }

    /// Trains four steps; returns the messages, the last step, and each access to a file, of which the one at `fault` fails.
    pub(super) fn four_steps(fault: Option<usize>) -> (Vec<String>, u64, Vec<(&'static str, PathBuf)>) {
        four_steps_with(|_| faults::arm(fault.map(|at| (at, Mode::Error))))
    }

    /// Like [`four_steps`], with `arm` applied to the output directory meanwhile.
    fn four_steps_with(arm: impl FnOnce(PathBuf)) -> (Vec<String>, u64, Vec<(&'static str, PathBuf)>) {
        let dir = tempfile::tempdir().unwrap();
        let (model, data) = (Some(SMALL_MODEL.into()), vec![SMALL_MODEL_TEXT.into()]);
        let settings = Settings { model, data, train_length: TrainLength::Steps(4), ..tiny(dir.path()) };
        let mut messages = RecordingObserver::default();
        arm(settings.output_dir.clone());
        let summary = train(&settings, &StopFlag::default(), &mut messages);
        let accesses = faults::disarm();
        let summary = summary.unwrap();
        assert!(summary.failure.is_none(), "{summary}: {:?}", summary.failure);
        checkpoint::verify(&settings.output_dir.join("checkpoint-4")).unwrap();
        (messages.0, summary.step, accesses)
    }

    #[test]
    fn a_directory_that_is_removed_at_any_moment_of_a_save_is_made_again_with_the_checkpoint() {
        let (_, _, accesses) = four_steps(None);
        let is_tmp = |path: &PathBuf| path.to_string_lossy().contains("/.checkpoint-4.tmp-");
        let first = accesses.iter().position(|(_, path)| is_tmp(path)).unwrap();
        let rename = accesses.iter().position(|(operation, path)| *operation == "rename" && is_tmp(path)).unwrap();
        assert!(rename - first > 8, "{accesses:?}");
        for (at, access) in accesses.iter().enumerate().take(rename + 1).skip(first).step_by(crate::sweep::sweep(3, 1)) {
            let (messages, ..) = four_steps_with(|dir| faults::arm_meanwhile(at, move || std::fs::remove_dir_all(dir).unwrap()));
            assert!(messages.iter().any(|line| line.contains("was removed during the run")), "{access:?}: {messages:?}");
        }
    }

    #[test]
    fn events_that_fail_in_mid_run_are_one_warning_and_training_goes_on() {
        let writes = |accesses: &[(&'static str, PathBuf)]| -> Vec<usize> {
            let is_event = |path: &PathBuf| path.to_string_lossy().contains("tfevents");
            accesses.iter().enumerate().filter(|(_, (operation, path))| *operation == "write" && is_event(path)).map(|(at, _)| at).collect()
        };
        let (quiet, _, accesses) = four_steps(None);
        // The version, and four steps.
        let [.., second, _, _] = writes(&accesses)[..] else { panic!("{accesses:?}") };
        let of_events =
            |messages: &[String]| messages.iter().filter(|line| line.starts_with("no events for TensorBoard from here on")).count();
        let (messages, step, accesses) = four_steps(Some(second));
        assert_eq!((of_events(&quiet), of_events(&messages), step, messages.len()), (0, 1, 4, quiet.len() + 1), "{messages:?}");
        assert_eq!(writes(&accesses).len(), 3, "the version, a step, and one that failed");
    }
}
