//! A checkpoint that several processes write while training goes on.

use super::background::{BackgroundSave, Publication};
use super::format::TrainerState;
use super::owned::published;
use super::part_save::PartSave;
use super::parts;
use super::writer::Writer;
use crate::device::Kernels;
use crate::disk::Dir;
use crate::engine::executor::Engine;
use crate::error::Result;
use serde_json::{Map, Value};

/// The checkpoint at process 0, and its own file of state.
pub(crate) struct SlicedSave {
    step: u64,
    writer: Writer,
    own: PartSave,
    publication: Publication,
}

impl SlicedSave {
    /// Begins a checkpoint in `output_dir`: all ranks begin to write their slices of the state after the last step. This process writes at
    /// most `limit` bytes in a second; 0: no limit.
    ///
    /// # Errors
    /// Errors of the disk, here or at another process; the failure that ended another rank.
    pub(crate) fn begin<D: Kernels>(
        engine: &mut Engine<D>,
        output_dir: &Dir,
        (trainer, run): (TrainerState, Map<String, Value>),
        publication: Publication,
        limit: u64,
    ) -> Result<Self> {
        let step = trainer.step;
        let writer = parts::begin(engine, output_dir, trainer, run)?;
        let place = (writer.dir().try_clone()?, parts::rate(engine, limit));
        let own = PartSave::start(engine, place, |engine| engine.begin_save_of_slices(parts::place(step)))?;
        Ok(Self { step, writer, own, publication })
    }

    /// The step after which the state is saved.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Name of the checkpoint when it is published.
    pub(crate) fn name(&self) -> String {
        published(self.step)
    }

    /// Whether all ranks have written their files. The other ranks are asked once this one has written its file.
    ///
    /// # Errors
    /// The error of this rank's file; the failure that ended another rank.
    pub(crate) fn is_written<D: Kernels>(&mut self, engine: &mut Engine<D>) -> Result<bool> {
        Ok(self.own.is_written()? && engine.have_others_saved()?)
    }

    /// Waits until all ranks have written their files, and starts to publish the checkpoint.
    ///
    /// # Errors
    /// Errors of the disk, here or at another process; the failure that ended another rank.
    pub(crate) fn publish<D: Kernels>(self, engine: &mut Engine<D>) -> Result<BackgroundSave> {
        let Self { step, mut writer, own, publication } = self;
        let state_crc32c = engine.await_saved(|| own.join())?;
        parts::set(engine, &mut writer, state_crc32c);
        BackgroundSave::publish(writer, step, publication)
    }
}
