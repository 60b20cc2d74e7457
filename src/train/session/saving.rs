//! Saves of a run: beside its steps where that is possible, or while it stops.

use super::save_beside::SaveBeside;
use super::{SavedPosition, Session};
use crate::checkpoint::background::{BackgroundSave, Publication};
use crate::checkpoint::engine_state::{SAVE_ELEMS, for_each_piece};
use crate::checkpoint::parts;
use crate::checkpoint::sliced_save::SlicedSave;
use crate::checkpoint::{RetainedCheckpoints, SaveRate, Saved, SavedLossScale, Scheduler, TrainerState, Writer};
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::request::choices::SaveMemory;
use crate::train::identity::Run;
use crate::train::observer::Observer;
use crate::units::counted;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A wait for the save before that is worth a line.
const LONG_WAIT: Duration = Duration::from_secs(1);

impl<D: Kernels> Session<D> {
    /// A checkpoint after a step, when one is due. If a later one runs beside steps, its memory is prepared.
    ///
    /// # Errors
    /// As [`Session::save_if_new`], and the errors of a save that ran beside the steps.
    pub(crate) fn save_if_due(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.go_on_saving(observer)?;
        let (step, every) = (self.engine.train_step(), self.settings.save_steps);
        if self.plan.site.save_memory != SaveMemory::Off && (step / every + 1) * every < self.schedule.max_steps {
            self.engine.prepare_saves().inspect_err(|_| self.is_sound = false)?;
        }
        if self.engine.train_step().is_multiple_of(self.settings.save_steps) {
            let start = Instant::now();
            self.save_unless_saved(!self.is_done(), observer)?;
            self.save_wait += start.elapsed();
            self.last_step_end = Some(Instant::now());
        }
        Ok(())
    }

    /// Looks between two steps for the end of the save that runs beside them.
    fn go_on_saving(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(save) = &mut self.background else { return Ok(()) };
        if !save.is_over(&mut self.engine).inspect_err(|_| self.save_failed = true)? {
            return Ok(());
        }
        match self.background.take() {
            Some(save @ SaveBeside::Slices(_)) => {
                let publishing = save.written(&mut self.engine).inspect_err(|_| self.save_failed = true)?;
                self.background = Some(SaveBeside::Whole(publishing));
                Ok(())
            }
            whole => {
                self.background = whole;
                self.end_background(observer)
            }
        }
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
        let has_changed = self.hold_directory(observer)?;
        self.await_save_before(goes_on, has_changed, observer)?;
        if self.totals.steps > 0 && self.saved_path()?.is_none() {
            let in_background = goes_on && self.may_save_in_background(observer);
            self.save_or_save_again(in_background, observer).inspect_err(|_| self.save_failed = true)?;
        }
        self.sinks.restore(self.run_dir.dir(), observer)
    }

    /// [`RunDir::hold`](crate::train::run_dir::RunDir::hold), with its line as a warning. Returns whether the directory was removed or moved.
    fn hold_directory(&mut self, observer: &mut dyn Observer) -> Result<bool> {
        let line = self.run_dir.hold()?;
        line.iter().for_each(|line| observer.warn(line));
        Ok(line.is_some())
    }

    /// Ends a save that still runs when the next one is due. If the directory `has_changed` meanwhile, a failure of that save is no failure
    /// of the run.
    fn await_save_before(&mut self, goes_on: bool, has_changed: bool, observer: &mut dyn Observer) -> Result<()> {
        let Some(before) = self.background.as_ref().map(SaveBeside::step) else { return Ok(()) };
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

    /// Whether saves can run beside steps, as was requested. A run says once why they cannot.
    fn may_save_in_background(&mut self, observer: &mut dyn Observer) -> bool {
        if self.plan.site.save_memory == SaveMemory::Off {
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

    /// As [`Session::end_background`]. If the directory `has_changed` before, or is removed or moved by now, a failure of the save is no
    /// failure of the run: the state of the present step is saved instead.
    fn end_background_in(&mut self, has_changed: bool, observer: &mut dyn Observer) -> Result<()> {
        if self.background.is_some() && self.is_sound {
            self.engine.end_save().inspect_err(|_| self.is_sound = false)?;
        }
        let Some(save) = self.background.take() else { return Ok(()) };
        if !self.is_sound && matches!(save, SaveBeside::Slices(_)) {
            // Another rank has ended, and its slices are lost.
            return Ok(());
        }
        let (step, saved) = (save.step(), save.written(&mut self.engine).and_then(BackgroundSave::join));
        let has_changed = self.hold_directory(observer)? || has_changed;
        match saved {
            Ok(saved) => {
                self.record_saved(step, saved, observer);
                Ok(())
            }
            Err(_) if has_changed && self.is_sound => self.save(observer).inspect_err(|_| self.save_failed = true),
            Err(error) => {
                self.save_failed = true;
                Err(error)
            }
        }
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
        self.background = Some(if self.plan.site.processes > 1 {
            self.sinks.sync(observer);
            let (contents, limit) = ((self.trainer_state()?, run), self.settings.save_limit());
            let save = SlicedSave::begin(&mut self.engine, self.run_dir.dir(), contents, publication, limit)?;
            SaveBeside::Slices(Box::new(save))
        } else {
            let writer = self.begin_whole(run)?;
            self.sinks.sync(observer);
            let states = self.engine.begin_save().inspect_err(|_| self.is_sound = false)?;
            SaveBeside::Whole(BackgroundSave::start(writer, step, states, self.engine.table().specs(), publication)?)
        });
        self.progress.saved(step);
        Ok(())
    }

    /// Saves the state after this step, while the run stops.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let step = self.engine.train_step();
        self.engine.flush().inspect_err(|_| self.is_sound = false)?;
        let (run, publication) = self.publication(step)?;
        let writer = self.write_state(run)?;
        self.sinks.sync(observer);
        let saved = publication.finish(writer)?;
        self.progress.saved(step);
        self.record_saved(step, saved, observer);
        Ok(())
    }

    fn record_saved(&mut self, step: u64, saved: Saved, observer: &mut dyn Observer) {
        saved.warnings.iter().for_each(|line| observer.warn(line));
        let Some(name) = saved.path.file_name() else { return };
        observer.note(&format!("checkpoint {}", self.run_dir.dir().join(name).display()));
        self.saved = Some((step, name.to_os_string()));
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
            let (contents, limit) = ((self.trainer_state()?, run), self.settings.save_limit());
            return parts::save(&mut self.engine, self.run_dir.dir(), contents, limit);
        }
        let mut writer = self.begin_whole(run)?;
        for_each_piece(&mut self.engine, SAVE_ELEMS, |part, elems| writer.elems(part, elems))?;
        Ok(writer)
    }

    /// A checkpoint by this process alone, with disk space for its state.
    fn begin_whole(&self, run: Run) -> Result<Writer> {
        let rate = SaveRate::new(self.settings.save_limit());
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
