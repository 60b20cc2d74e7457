//! Saves of a run: beside its steps where that is possible, or while it stops.

use super::{SavedPosition, Session};
use crate::checkpoint::background::{BackgroundSave, Publication};
use crate::checkpoint::engine_state::{SAVE_ELEMS, for_each_piece};
use crate::checkpoint::parts;
use crate::checkpoint::{RetainedCheckpoints, SaveRate, Saved, SavedLossScale, Scheduler, TrainerState, Writer, disk_rate};
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::request::choices::SaveMemory;
use crate::train::identity::Run;
use crate::train::observer::Observer;
use crate::units::{Bytes, counted};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A wait for the save before that is worth a line.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// From this size on, a run measures the disk before its first step.
const MEASURED_BYTES: u64 = 1 << 30;

/// How long a save of `bytes` takes on a disk that writes `rate` bytes a second, and how long training waits for it: all the time if it
/// `stops`, or until the disk has taken all but `copies` bytes.
fn describe_saves(bytes: u64, rate: f64, copies: u64, stops: bool) -> String {
    let seconds = |bytes: u64| format!("{:.1} s", bytes as f64 / rate);
    let save = format!("a save of {} takes about {}, as the disk writes {} a second", Bytes(bytes), seconds(bytes), Bytes(rate as u64));
    match bytes.saturating_sub(copies) {
        _ if stops => format!("{save}; training stops meanwhile"),
        0 => format!("{save}; training goes on meanwhile"),
        rest => format!("{save}; {} are for copies: training waits {}, less the time of a step", Bytes(copies), seconds(rest)),
    }
}

impl<D: Kernels> Session<D> {
    /// Measures the disk if saves are large, and says how long they take.
    ///
    /// # Errors
    /// `Io` when the disk fails.
    pub(super) fn report_duration_of_saves(&self, observer: &mut dyn Observer) -> Result<()> {
        let bytes = self.engine.plan().optimizer().arrays().bytes(self.engine.plan().params()) as u64;
        let has_saves = self.settings.save_steps < self.schedule.max_steps - self.engine.train_step().min(self.schedule.max_steps);
        if bytes >= MEASURED_BYTES && has_saves && self.plan.site.processes == 1 {
            let limit = self.settings.save_rate.map_or(f64::INFINITY, |limit| limit.0 as f64);
            let rate = disk_rate(self.run_dir.dir())?.min(limit);
            let stops = self.stops_for_saves() || self.engine.save_obstacle().is_some();
            observer.note(&describe_saves(bytes, rate, self.engine.save_copy_bytes(), stops));
        }
        Ok(())
    }

    /// A checkpoint after a step, when one is due.
    ///
    /// # Errors
    /// As [`Session::save_if_new`], and the errors of a save that ran beside the steps.
    pub(crate) fn save_if_due(&mut self, observer: &mut dyn Observer) -> Result<()> {
        if self.background.as_ref().is_some_and(BackgroundSave::is_over) {
            self.end_background(observer)?;
        }
        if self.engine.train_step().is_multiple_of(self.settings.save_steps) {
            let start = Instant::now();
            self.save_unless_saved(!self.is_done(), observer)?;
            self.save_wait += start.elapsed();
            self.last_step_end = Some(Instant::now());
        }
        Ok(())
    }

    /// Saves a checkpoint unless this step has one; nothing before the first step. Makes sure first that the output directory is
    /// still this run's, and afterwards that the metrics are still in it.
    ///
    /// # Errors
    /// `Io` naming the file; checkpoints that were there are as they were.
    pub(crate) fn save_if_new(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.save_unless_saved(false, observer)
    }

    /// As [`Session::save_if_new`]; if the run `goes_on`, the save runs beside its next steps where that is possible.
    fn save_unless_saved(&mut self, goes_on: bool, observer: &mut dyn Observer) -> Result<()> {
        let has_changed = self.run_dir.hold()?;
        has_changed.iter().for_each(|line| observer.warn(line));
        self.await_save_before(goes_on, has_changed.is_some(), observer)?;
        if self.totals.steps > 0 && self.saved_path()?.is_none() {
            let in_background = goes_on && self.may_save_in_background(observer);
            self.save_or_save_again(in_background, observer).inspect_err(|_| self.save_failed = true)?;
        }
        self.sinks.restore(self.run_dir.dir(), observer)
    }

    /// Ends a save that still runs when the next one is due. If the directory `has_changed` meanwhile, a failure of that save is no failure
    /// of the run.
    fn await_save_before(&mut self, goes_on: bool, has_changed: bool, observer: &mut dyn Observer) -> Result<()> {
        let Some(before) = self.background.as_ref().map(BackgroundSave::step) else { return Ok(()) };
        let start = Instant::now();
        self.end_background_in(has_changed, observer)?;
        let waited = start.elapsed();
        if goes_on && waited >= LONG_WAIT && !self.reported_saves.waits {
            self.reported_saves.waits = true;
            let (steps, waited) = (self.engine.train_step() - before, waited.as_secs_f64());
            observer.warn(&format!(
                "the save after step {before} took longer than the {} until the next one, which waited {waited:.1} s: a larger \
                 --save-steps avoids that",
                counted(steps, "step")
            ));
        }
        Ok(())
    }

    /// Whether saves stop training because nothing else was requested.
    fn stops_for_saves(&self) -> bool {
        self.plan.site.save_memory == SaveMemory::Off
    }

    /// Whether saves can run beside steps, as was requested. A run says once why they cannot.
    fn may_save_in_background(&mut self, observer: &mut dyn Observer) -> bool {
        if self.stops_for_saves() {
            return false;
        }
        let Some(why) = self.engine.save_obstacle() else { return true };
        if !self.reported_saves.stops {
            self.reported_saves.stops = true;
            observer.note(&format!("training stops while a checkpoint is saved: {why}"));
        }
        false
    }

    /// Waits for the save that runs beside the steps, if one does.
    ///
    /// # Errors
    /// The engine's; the errors of the save.
    pub(super) fn end_background(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.end_background_in(false, observer)
    }

    /// As [`Session::end_background`]. A failure in a directory that `has_changed` is no failure of the run.
    fn end_background_in(&mut self, has_changed: bool, observer: &mut dyn Observer) -> Result<()> {
        if self.background.is_some() && self.is_sound {
            self.engine.end_save().inspect_err(|_| self.is_sound = false)?;
        }
        let Some(save) = self.background.take() else { return Ok(()) };
        let step = save.step();
        match save.join() {
            Ok(saved) => {
                self.record_saved(step, saved, observer);
                Ok(())
            }
            Err(_) if has_changed && self.is_sound => self.save(observer).inspect_err(|_| self.save_failed = true),
            Err(error) => self.save_failed_beside(error, observer),
        }
    }

    /// A save beside the steps has failed. If somebody removed the directory meanwhile, it is made again, and the state of the present step
    /// is saved.
    fn save_failed_beside(&mut self, error: Error, observer: &mut dyn Observer) -> Result<()> {
        let removed = if self.is_sound { self.run_dir.hold()? } else { None };
        let Some(line) = removed else {
            self.save_failed = true;
            return Err(error);
        };
        observer.warn(&line);
        self.save(observer).inspect_err(|_| self.save_failed = true)
    }

    /// The checkpoint of this step, if it was written and is still there.
    pub(super) fn saved_path(&self) -> Result<Option<PathBuf>> {
        let Some((_, name)) = self.saved.as_ref().filter(|(step, _)| *step == self.engine.train_step()) else { return Ok(None) };
        let dir = self.run_dir.dir();
        Ok(dir.kind(name)?.map(|_| dir.join(name)))
    }

    /// The last checkpoint of this process, for messages.
    pub(super) fn last_saved(&self) -> Option<(u64, PathBuf)> {
        self.saved.as_ref().map(|(step, name)| (*step, self.run_dir.dir().join(name)))
    }

    /// The last checkpoint of this process that is published, or will be when its save has ended.
    pub(super) fn last_begun(&self) -> Option<(u64, PathBuf)> {
        let begun = self.background.as_ref().map(|save| (save.step(), self.run_dir.dir().join(save.name())));
        begun.or_else(|| self.last_saved())
    }

    /// Somebody may remove the directory while a checkpoint is written into it: then it is made again, and the checkpoint with it.
    fn save_or_save_again(&mut self, in_background: bool, observer: &mut dyn Observer) -> Result<()> {
        let saved = if in_background { self.save_in_background(observer) } else { self.save(observer) };
        if saved.is_err()
            && self.is_sound
            && self.plan.site.processes == 1
            && let Some(line) = self.run_dir.hold()?
        {
            observer.warn(&line);
            return self.save(observer);
        }
        saved
    }

    /// Begins a save of the state after this step, which runs beside the next steps.
    fn save_in_background(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let step = self.engine.train_step();
        let (run, publication) = self.publication(step)?;
        let writer = self.begin_whole(run)?;
        self.sinks.sync(observer);
        let state = self.engine.begin_save().inspect_err(|_| self.is_sound = false)?;
        self.background = Some(BackgroundSave::start(writer, step, state, self.engine.table().specs(), publication)?);
        self.progress.saved(step);
        Ok(())
    }

    /// Saves the state after this step, while the run stops.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let step = self.engine.train_step();
        self.engine.flush().inspect_err(|_| self.is_sound = false)?;
        let (run, Publication { model_files, total_limit, spared }) = self.publication(step)?;
        let writer = self.write_state(run)?;
        self.sinks.sync(observer);
        let saved = writer.finish(&model_files, total_limit, spared)?;
        self.progress.saved(step);
        self.record_saved(step, saved, observer);
        Ok(())
    }

    fn record_saved(&mut self, step: u64, saved: Saved, observer: &mut dyn Observer) {
        saved.warnings.iter().for_each(|line| observer.warn(line));
        observer.note(&format!("checkpoint {}", saved.path.display()));
        self.saved = saved.path.file_name().map(|name| (step, name.to_os_string()));
    }

    /// The record of the run and all other contents of a checkpoint of `step`, besides its state.
    fn publication(&mut self, step: u64) -> Result<(Run, Publication)> {
        let evaluations = self.progress.with_checkpoint(step);
        let run = evaluations.kept_in(self.skips.kept_in(&self.run));
        let run = match &mut self.carrier {
            Some(carrier) => carrier.kept_in(self.run_dir.dir(), run)?,
            None => run,
        };
        let total_limit = self.settings.save_total_limit.and_then(NonZeroUsize::new);
        let spared = RetainedCheckpoints { newest_before: self.skips.since(), best: evaluations.best.map(|best| best.step) };
        Ok((run, Publication { model_files: self.model_files.clone(), total_limit, spared }))
    }

    /// A checkpoint with the engine's state, by this process or by all.
    fn write_state(&mut self, run: Run) -> Result<Writer> {
        if self.plan.site.processes > 1 {
            let trainer = self.trainer_state()?;
            return parts::save(&mut self.engine, self.run_dir.dir(), trainer, run);
        }
        let mut writer = self.begin_whole(run)?;
        for_each_piece(&mut self.engine, SAVE_ELEMS, |part, elems| writer.elems(part, elems))?;
        Ok(writer)
    }

    /// A checkpoint by this process alone, with disk space for its state.
    fn begin_whole(&self, run: Run) -> Result<Writer> {
        let rate = SaveRate::new(self.settings.save_rate.map_or(0, |rate| rate.0));
        let mut writer = Writer::create(self.run_dir.dir(), self.trainer_state()?, run, rate)?;
        self.engine.table().specs().iter().for_each(|spec| writer.begin(&spec.name, &spec.shape));
        writer.reserve()?;
        Ok(writer)
    }

    fn trainer_state(&self) -> Result<TrainerState> {
        let json = |e: serde_json::Error| Error::format(self.run_dir.path(), e);
        let loss_scale = self.engine.loss_scale();
        Ok(TrainerState {
            step: self.engine.train_step(),
            optimizer_step: self.engine.optimizer_step(),
            loss_scale: SavedLossScale { scale: loss_scale.scale(), good_steps: u64::from(loss_scale.good_steps()) },
            scheduler: Scheduler {
                name: name_of(&self.settings.lr_scheduler_type).map_err(json)?,
                base_lr: self.schedule.peak_lr,
                warmup_steps: self.schedule.warmup_steps,
                max_steps: self.schedule.max_steps,
            },
            seed: self.settings.seed,
            data_position: serde_json::to_value(SavedPosition { position: self.feed.position(), sequences: self.feed.sequences() })
                .map_err(json)?,
            speculation: serde_json::to_value(self.engine.history()).map_err(json)?,
            clip: self.engine.clip_memory().clone(),
            settings: serde_json::to_value(&self.settings).map_err(json)?,
        })
    }
}

/// The name under which serde writes a unit variant.
fn name_of(value: &impl serde::Serialize) -> serde_json::Result<String> {
    serde_json::to_value(value).and_then(serde_json::from_value)
}

#[cfg(test)]
#[path = "saving_tests.rs"]
mod tests;
