//! A run of several processes: what those behind process 0 do, and how all end.

use super::observer::{Observer, Summary};
use super::text;
use crate::checkpoint::parts::{self, MeetingPlace};
use crate::config::settings::Settings;
use crate::device::{Kernels, Peers};
use crate::disk::Dir;
use crate::engine::executor::Engine;
use crate::engine::watchdog::Alarm;
use crate::error::{Error, Result};
use crate::launch::agreement::Party;
use crate::launch::processes::{FollowEngine, ThisProcess};
use crate::model::shape::ModelShape;
use crate::model_dir::{CONFIG, ModelDir};
use crate::planner::plan::Plan;
use crate::ranks::links::{EndOfRun, LastResort, Links};
use crate::signals::StopFlag;
use std::path::Path;

/// Meets the other processes of the run of `settings`.
///
/// # Errors
/// Those of [`Party::meet`].
pub(super) fn meet(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Party> {
    let last_resort = observer.on_alarm().map(|alarm| -> LastResort { Box::new(move |why| alarm(Alarm::Stall(why))) });
    let mut tell = |line: &str| match line.strip_prefix("warning: ") {
        Some(warning) => observer.warn(warning),
        None => observer.note(line),
    };
    Party::meet(settings, stop, last_resort, &mut tell)
}

/// Process 0 tells the others what it has decided. They find what is returned in their output directories, which are this `output_dir`; nobody
/// needs it once all have their engines.
///
/// # Errors
/// The disk's.
pub(super) fn propose(party: &Party, blueprint: (&Plan, &ModelShape), settings: &Settings, output_dir: &Dir) -> Result<MeetingPlace> {
    let (place, sign) = MeetingPlace::create(output_dir)?;
    party.propose(blueprint, settings, sign)?;
    Ok(place)
}

/// What a process behind process 0 does: it plans as process 0 says, and follows.
///
/// # Errors
/// What is missing or differs here; what ended another process.
pub(super) fn follow(settings: &Settings, party: &Party, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    // Data comes from process 0.
    let without_data = Settings { data: Vec::new(), eval_data: Vec::new(), ..settings.clone() };
    let found = text::find_sources(&without_data, false, stop, &mut |news| super::setup::hear(observer, news))?;
    let settings = Settings { model: found.model, ..settings.clone() };
    let shape = match settings.model.as_deref().map(ModelDir::open).transpose()? {
        Some(dir) => ModelShape::read(&dir.file(CONFIG)?)?,
        None => ModelShape::demo(),
    };
    let links = &party.links;
    let (launch, plan, proposal) = match party.plan(&settings, &shape)? {
        Ok(planned) => planned,
        Err(end) => return ended(links, end),
    };
    MeetingPlace::find(&settings.output_dir, &proposal.meeting_place, &links.names()[0])?;
    observer.note(&plan.to_string());
    observer.note(&format!("process {} follows process 0, which tells of steps", links.process()));
    let this = ThisProcess { launch: &launch, plan: &plan, shape: &shape, links };
    match this.follow(&Following { output_dir: &settings.output_dir }) {
        Error::Rank { .. } => links.end_of_run().and_then(|end| ended(links, end)),
        own => Err(own),
    }
}

/// Trains, and saves its part where rank 0 says.
pub(super) struct Following<'a> {
    pub(super) output_dir: &'a Path,
}

impl FollowEngine for Following<'_> {
    fn run<D: Kernels + Peers>(&self, engine: &mut Engine<D>, settle_down: impl FnOnce() -> Result<()>) -> Result<()> {
        engine.follow_and_save(settle_down, |engine, words| parts::save_own(engine, self.output_dir, words))
    }
}

/// How a run that process 0 ended ends here.
fn ended(links: &Links, end: EndOfRun) -> Result<Summary> {
    let EndOfRun { step, max_steps, interrupted, .. } = end;
    match links.failure_of(end) {
        Some(error) => Err(error),
        None => Ok(Summary { process: links.process(), step, max_steps, interrupted, ..Summary::default() }),
    }
}

/// Tells the other processes how the run ended here, and gives that back.
///
/// # Errors
/// Those of `outcome`.
pub(super) fn part(links: Links, outcome: Result<Summary>) -> Result<Summary> {
    let failed = |error: &Error| match error {
        // Who fails tells it itself.
        Error::Rank { .. } if links.process() > 0 => EndOfRun::default(),
        Error::Interrupted(_) => EndOfRun { interrupted: true, ..EndOfRun::default() },
        error => links.end_by(error),
    };
    let end = match &outcome {
        Ok(Summary { failure: Some(error), .. }) | Err(error) => failed(error),
        Ok(Summary { step, max_steps, interrupted, .. }) => {
            EndOfRun { step: *step, max_steps: *max_steps, interrupted: *interrupted, ..EndOfRun::default() }
        }
    };
    links.close(end);
    outcome
}
