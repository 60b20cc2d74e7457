//! The file of state of one of several processes, which threads write while training goes on.

use super::background::{StateExtent, write_state};
use super::save_rate::SaveRate;
use super::state_parts::file_name;
use super::state_writer::StateWriter;
use crate::bucket::slices::Slices;
use crate::device::Kernels;
use crate::disk::{self, Dir};
use crate::engine::executor::Engine;
use crate::engine::save::frozen_state::FrozenState;
use crate::error::{Error, Result};
use crate::optim::state_array::StateArrays;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};

/// A rank's file of state.
pub(super) enum PartSave {
    /// The thread that reads the slices and hands them to the threads that write them. It ends by itself when the engine ends.
    Running(JoinHandle<Result<Vec<u32>>>),
    /// The file is on the disk; the checksums of its chunks.
    Written(Vec<u32>),
    /// The error was returned.
    Failed,
}

impl PartSave {
    /// Creates the file of the slices of `engine` in `dir`, with its disk space. `begin` begins the save of `engine`, whose state is then
    /// written into the file.
    ///
    /// # Errors
    /// Errors of the disk and of `begin`; `Resource` when a thread cannot start.
    pub(super) fn start<D: Kernels>(
        engine: &mut Engine<D>,
        (dir, rate): (Dir, SaveRate),
        begin: impl FnOnce(&mut Engine<D>) -> Result<FrozenState>,
    ) -> Result<Self> {
        let (slices, arrays) = (engine.slices().clone(), engine.plan().optimizer().arrays());
        let file = StateWriter::create(&dir, &file_name(slices.rank()), rate)?;
        file.reserve(arrays.bytes(slices.elems()) as u64)?;
        let (writers, state) = (file.into_writers(), begin(engine)?);
        let run = disk::continued(move || {
            write_state(&writers, &state, |bucket| extents(&slices, arrays, bucket), &AtomicBool::new(false))?;
            let written = writers.finish()?;
            dir.sync()?;
            Ok(written.crc32c)
        });
        let thread = thread::Builder::new().name("save".into()).spawn(run);
        thread.map(Self::Running).map_err(|e| Error::resource("start a thread that saves", e))
    }

    /// Whether the file is on the disk.
    ///
    /// # Errors
    /// The first error of the save.
    pub(super) fn is_written(&mut self) -> Result<bool> {
        if matches!(self, Self::Running(thread) if thread.is_finished()) {
            *self = Self::Written(std::mem::replace(self, Self::Failed).join()?);
        }
        Ok(matches!(self, Self::Written(_)))
    }

    /// Waits until the file is on the disk; the checksums of its chunks.
    ///
    /// # Errors
    /// The first error of the save.
    pub(super) fn join(self) -> Result<Vec<u32>> {
        let failed = |cause: &str| Err(Error::resource("save a part of a checkpoint", cause));
        match self {
            Self::Running(thread) => thread.join().unwrap_or_else(|_| failed("its thread panicked")),
            Self::Written(crc32c) => Ok(crc32c),
            Self::Failed => failed("it has failed before"),
        }
    }
}

/// Places of the arrays of `bucket` in the file of `slices`.
fn extents(slices: &Slices, arrays: StateArrays, bucket: usize) -> impl Iterator<Item = StateExtent> + use<> {
    let (local, elems) = (slices.local(bucket), slices.elems());
    arrays.parts().map(move |part| StateExtent {
        part,
        bytes: 0..arrays[part].bytes(local.len()),
        offset: (arrays.offset(part, elems) + arrays[part].bytes(local.start)) as u64,
    })
}
