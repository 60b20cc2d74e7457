//! A run of several processes: the work of processes other than 0, and the end of all.

use super::observer::Observer;
use super::setup::forward_progress;
use super::summary::Summary;
use super::text;
use crate::checkpoint::parts::{self, PartSaver, SharedFolderMarker};
use crate::config::settings::Settings;
use crate::device::{Kernels, Peers};
use crate::disk::Dir;
use crate::engine::executor::Engine;
use crate::engine::watch::watchdog::{Alarm, Watchdog};
use crate::error::{Error, Result};
use crate::hardware::limits::check_file_size;
use crate::launch::agreement::ProcessGroup;
use crate::launch::processes::{FollowEngine, ThisProcess};
use crate::model::shape::ModelShape;
use crate::model_dir::{CONFIG, ModelDir};
use crate::planner::plan::Plan;
use crate::ranks::links::{EndOfRun, LastResort, Links};
use crate::signals::StopFlag;
use std::io::ErrorKind;
use std::time::Duration;

/// Meets the other processes of the run of `settings`.
///
/// # Errors
/// Errors of [`ProcessGroup::meet`].
pub(super) fn meet(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<ProcessGroup> {
    let last_resort = observer.on_alarm().map(|alarm| -> LastResort { Box::new(move |why| alarm(Alarm::Stall(why))) });
    ProcessGroup::meet(settings, stop, last_resort, &mut |event| forward_progress(observer, event))
}

/// Process 0 sends its plan to the others. They find the returned place in their output directories, which are this `output_dir`; it is not
/// needed once all have their engines.
///
/// # Errors
/// Errors of the disk.
pub(super) fn propose(process_group: &ProcessGroup, plan: &Plan, settings: &Settings, output_dir: &Dir) -> Result<SharedFolderMarker> {
    let (place, sign) = SharedFolderMarker::create(output_dir)?;
    process_group.propose(plan, settings, sign)?;
    Ok(place)
}

/// Runs a process other than process 0: it takes the plan of process 0 and follows.
///
/// # Errors
/// Inputs that are missing or differ here; the error that ended another process.
pub(super) fn follow(settings: &Settings, process_group: &ProcessGroup, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    // Data comes from process 0.
    let without_data = Settings { data: Vec::new(), eval_data: Vec::new(), ..settings.clone() };
    let found = text::find_sources(&without_data, false, stop, &mut |event| forward_progress(observer, event))?;
    let settings = Settings { model: found.model, ..settings.clone() };
    let shape = match settings.model.as_deref().map(ModelDir::open).transpose()? {
        Some(dir) => ModelShape::read(&dir.file(CONFIG)?)?,
        None => ModelShape::demo(),
    };
    let links = &process_group.links;
    let (launch, plan, proposal) = match process_group.plan(&settings, &shape)? {
        Ok(planned) => planned,
        Err(end) => return ended(links, end),
    };
    SharedFolderMarker::find(&settings.output_dir, &proposal.meeting_place, &links.names()[0])?;
    let own_name = &links.names()[links.process()];
    let notes = try_writing(&settings, &proposal.meeting_place, parts::part_bytes(&plan, links.process()), links.process());
    if let Some(line) = &notes.map_err(|error| cannot_write(&settings, own_name, &error))? {
        observer.note(line);
    }
    for line in &launch.warnings(&settings) {
        observer.warn(line);
    }
    observer.detail(&plan.to_string());
    observer.note(&format!("process {} follows process 0, which prints the steps", links.process()));
    let this = ThisProcess { launch: &launch, plan: &plan, shape: &plan.recipe.model, links };
    let on_alarm = observer.on_alarm();
    let watch = |watched| on_alarm.map(|on_alarm| Watchdog::start(watched, stall_limit(&settings), on_alarm)).transpose();
    match this.follow(&Following(&settings), watch) {
        Error::Rank { .. } => links.end_of_run().and_then(|end| ended(links, end)),
        own => Err(own),
    }
}

/// Checks that `process` can write its parts of checkpoints, of `bytes` each; returns a warning about limits of the file system.
fn try_writing(settings: &Settings, meeting_place: &str, bytes: u64, process: usize) -> Result<Option<String>> {
    check_file_size("write a part of a checkpoint", bytes)?;
    SharedFolderMarker::try_writing(&settings.output_dir, meeting_place, process)
}

/// An error of this process, called `own_name`, before the first step, which would else end the first save.
fn cannot_write(settings: &Settings, own_name: &str, error: &Error) -> Error {
    let kind = if let Error::Io { source, .. } = error { source.kind() } else { ErrorKind::Other };
    let remedy = match kind {
        ErrorKind::ReadOnlyFilesystem => "mount it writable on this machine",
        ErrorKind::PermissionDenied => "run all processes as one user, or let this one write there",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there",
        _ => "name an --output-dir in which all processes can write",
    };
    let (operation, all) =
        (format!("write into --output-dir {} as {own_name}", settings.output_dir.display()), "each process writes its part");
    Error::resource(operation, format!("{error}; {all} of every checkpoint there: {remedy}"))
}

/// A quarter more than that of process 0, which knows more of a stall that both see.
fn stall_limit(settings: &Settings) -> Duration {
    Duration::from_millis(settings.stall_limit.saturating_mul(1250))
}

/// Trains, and saves its part at the place that rank 0 sends.
pub(super) struct Following<'a>(pub(super) &'a Settings);

impl FollowEngine for Following<'_> {
    fn run<D: Kernels + Peers>(&self, engine: &mut Engine<D>, settle_down: impl FnOnce() -> Result<()>) -> Result<()> {
        engine.follow_and_save(settle_down, PartSaver::new(&self.0.output_dir, self.0.save_limit()))
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

/// Sends the outcome of the run here to the other processes, and returns it.
///
/// # Errors
/// Errors of `outcome`.
pub(super) fn part(links: Links, outcome: Result<Summary>) -> Result<Summary> {
    let failed = |error: &Error| match error {
        // The failing process reports the error itself.
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
