//! A save that runs beside steps, of one process or of several.

use crate::checkpoint::background::BackgroundSave;
use crate::checkpoint::sliced_save::SlicedSave;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::error::Result;

/// The save, or the rest of it.
pub(super) enum SaveBeside {
    /// Each rank of several processes writes its slices.
    Slices(Box<SlicedSave>),
    /// A thread of this process writes what is missing, and publishes the checkpoint.
    Whole(BackgroundSave),
}

impl SaveBeside {
    /// The step after which the state is saved.
    pub(super) fn step(&self) -> u64 {
        match self {
            Self::Slices(save) => save.step(),
            Self::Whole(save) => save.step(),
        }
    }

    /// Name of the checkpoint when it is published.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Slices(save) => save.name(),
            Self::Whole(save) => save.name(),
        }
    }

    /// Whether [`SaveBeside::finish`] would wait for no disk, but for that of the manifest.
    ///
    /// # Errors
    /// Errors of the disk of this process; the failure that ended another rank.
    pub(super) fn is_over<D: Kernels>(&mut self, engine: &mut Engine<D>) -> Result<bool> {
        match self {
            Self::Slices(save) => save.is_written(engine),
            Self::Whole(save) => Ok(save.is_over()),
        }
    }

    /// Waits until the state is written. A thread may still publish the checkpoint.
    ///
    /// # Errors
    /// Errors of the disk, here or at another process; the failure that ended another rank.
    pub(super) fn written<D: Kernels>(self, engine: &mut Engine<D>) -> Result<BackgroundSave> {
        match self {
            Self::Slices(save) => save.publish(engine),
            Self::Whole(save) => Ok(save),
        }
    }
}
