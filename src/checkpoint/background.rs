//! A checkpoint that threads write while training goes on.

use super::format::TensorEntry;
use super::owned::published;
use super::store::RetainedCheckpoints;
use super::writer::{Saved, Writer};
use super::writers::Writers;
use crate::disk;
use crate::engine::save::frozen_state::FrozenState;
use crate::error::{Error, Result};
use crate::model::tensors::TensorSpec;
use crate::optim::state_array::{StateArrays, StatePart};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// The contents of a checkpoint besides its state, and the checkpoints that stay beside it.
pub(crate) struct Publication {
    /// The files of `model/`.
    pub(crate) model_files: Arc<[(String, Vec<u8>)]>,
    /// Number of checkpoints to keep.
    pub(crate) total_limit: Option<NonZeroUsize>,
    pub(crate) spared: RetainedCheckpoints,
}

impl Publication {
    /// See [`Writer::finish`].
    pub(crate) fn finish(&self, writer: Writer) -> Result<Saved> {
        writer.finish(&self.model_files, self.total_limit, self.spared)
    }
}

/// The thread that reads the state, with another one for each further rank, hands it to the threads that write it, and publishes the
/// checkpoint.
pub(crate) struct BackgroundSave {
    step: u64,
    thread: Option<JoinHandle<Result<Saved>>>,
}

impl BackgroundSave {
    /// Starts to write the state after `step`, of which each of `states` is a part, to `writer`, whose tensors, `specs`, were begun.
    ///
    /// # Errors
    /// `Resource` when the thread cannot start.
    pub(crate) fn start(
        writer: Writer,
        step: u64,
        states: Vec<FrozenState>,
        specs: &[TensorSpec],
        publication: Publication,
    ) -> Result<Self> {
        let starts: Vec<usize> = specs.iter().map(|spec| spec.offset_elems).collect();
        Self::spawn(step, move || save(writer, &states, &starts, &publication))
    }

    /// Starts to publish `writer`, a checkpoint of `step` whose state is on the disk.
    ///
    /// # Errors
    /// `Resource` when the thread cannot start.
    pub(super) fn publish(writer: Writer, step: u64, publication: Publication) -> Result<Self> {
        Self::spawn(step, move || publication.finish(writer))
    }

    fn spawn(step: u64, run: impl FnOnce() -> Result<Saved> + Send + 'static) -> Result<Self> {
        let thread = thread::Builder::new().name("save".into()).spawn(disk::continued(run));
        let thread = thread.map_err(|e| Error::resource("start a thread that saves", e))?;
        Ok(Self { step, thread: Some(thread) })
    }

    /// The step after which the state is saved.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Name of the checkpoint when it is published.
    pub(crate) fn name(&self) -> String {
        published(self.step)
    }

    /// Whether the save has ended, well or not.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end of the save.
    ///
    /// # Errors
    /// The first error of the save; checkpoints that were there before are as they were.
    pub(crate) fn join(mut self) -> Result<Saved> {
        let thread = self.thread.take().expect("joined once");
        thread.join().unwrap_or_else(|_| Err(Error::resource("save a checkpoint", "its thread panicked")))
    }
}

impl Drop for BackgroundSave {
    /// Waits for the end of the save, which an engine that has ended cuts short. The failure that ended the run is reported, not this one.
    fn drop(&mut self) {
        self.thread.take().into_iter().for_each(|thread| _ = thread.join());
    }
}

fn save(mut writer: Writer, states: &[FrozenState], starts: &[usize], publication: &Publication) -> Result<Saved> {
    if let Some((writers, tensors, arrays)) = writer.take_writers() {
        write_all(&writers, states, &StatePlaces { tensors: &tensors, starts, arrays })?;
        writer.set_state(writers.finish()?);
    }
    publication.finish(writer)
}

/// Reads every part of the state by a thread of its own, the first by this thread, and hands it to the writers.
fn write_all(writers: &Writers, states: &[FrozenState], places: &StatePlaces<'_>) -> Result<()> {
    let has_failed = &AtomicBool::new(false);
    let write_one = |state: &FrozenState| {
        let extents = |bucket| places.in_bucket(&state.range(bucket));
        write_state(writers, state, extents, has_failed).inspect_err(|_| has_failed.store(true, Ordering::Relaxed))
    };
    let Some((first, others)) = states.split_first() else { return Ok(()) };
    thread::scope(|scope| {
        let start = |state| {
            let run = disk::continued(move || write_one(state));
            let thread = thread::Builder::new().name("save".into()).spawn_scoped(scope, run);
            thread.map_err(|e| Error::resource("start a thread that reads the state", e))
        };
        let threads = others.iter().map(start).collect::<Result<Vec<_>>>().inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?;
        let mut results = vec![write_one(first)];
        results.extend(threads.into_iter().map(|thread| thread.join().expect("a reader reports its failures")));
        results.into_iter().collect()
    })
}

/// Hands a part of the state to the writers, until all of it was read, or another part has failed. `extents` are the places of a bucket.
pub(super) fn write_state<E: Iterator<Item = StateExtent>>(
    writers: &Writers,
    state: &FrozenState,
    extents: impl Fn(usize) -> E,
    has_failed: &AtomicBool,
) -> Result<()> {
    while !has_failed.load(Ordering::Relaxed)
        && let Some(bucket) = state.next()?
    {
        extents(bucket).try_for_each(|extent| write(writers, state, bucket, extent))?;
        state.saved(bucket);
    }
    Ok(())
}

/// Consecutive bytes of an array of a bucket, which are consecutive in the file as well.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StateExtent {
    pub(super) part: StatePart,
    /// Bytes of the bucket's array.
    pub(super) bytes: Range<usize>,
    /// Offset of the first byte in the file.
    pub(super) offset: u64,
}

/// Copies an extent of `bucket` into pieces for the writers.
fn write(writers: &Writers, state: &FrozenState, bucket: usize, extent: StateExtent) -> Result<()> {
    let StateExtent { part, mut bytes, mut offset } = extent;
    while !bytes.is_empty() {
        let mut piece = writers.piece(offset)?;
        let out = piece.extend(bytes.len());
        state.read(bucket, part, bytes.start, out)?;
        (bytes.start, offset) = (bytes.start + out.len(), offset + out.len() as u64);
        writers.write(piece);
    }
    Ok(())
}

/// Places of the flat order in the file.
struct StatePlaces<'a> {
    tensors: &'a [TensorEntry],
    /// First element of each tensor in the flat order.
    starts: &'a [usize],
    arrays: StateArrays,
}

impl StatePlaces<'_> {
    /// The extents of a bucket with these elements of the flat order. Padding between tensors has no place in the file.
    fn in_bucket(&self, bucket: &Range<usize>) -> impl Iterator<Item = StateExtent> + use<> {
        let common = |(tensor, start): (&'_ TensorEntry, &usize)| {
            let elems = bucket.start.max(*start)..bucket.end.min(start + tensor.elems as usize);
            (!elems.is_empty()).then(|| (tensor.offset, tensor.elems as usize, elems.start - start, elems))
        };
        let parts: Vec<_> = self.tensors.iter().zip(self.starts).filter_map(common).collect();
        let (first, arrays) = (bucket.start, self.arrays);
        parts.into_iter().flat_map(move |(offset, tensor_elems, skipped, elems)| {
            let extent = move |part: StatePart| StateExtent {
                part,
                bytes: arrays[part].bytes(elems.start - first)..arrays[part].bytes(elems.end - first),
                offset: offset + (arrays.offset(part, tensor_elems) + arrays[part].bytes(skipped)) as u64,
            };
            arrays.parts().map(extent)
        })
    }
}
