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
use std::thread::{self, JoinHandle};

/// The contents of a checkpoint besides its state, and the checkpoints that stay beside it.
pub(crate) struct Publication {
    /// The files of `model/`.
    pub(crate) model_files: Arc<[(String, Vec<u8>)]>,
    /// Number of checkpoints to keep.
    pub(crate) total_limit: Option<NonZeroUsize>,
    pub(crate) spared: RetainedCheckpoints,
}

/// The thread that reads the state, hands it to the threads that write it, and publishes the checkpoint.
pub(crate) struct BackgroundSave {
    step: u64,
    thread: Option<JoinHandle<Result<Saved>>>,
}

impl BackgroundSave {
    /// Starts to write `state` after `step` to `writer`, whose tensors, `specs`, were begun.
    ///
    /// # Errors
    /// `Resource` when the thread cannot start.
    pub(crate) fn start(writer: Writer, step: u64, state: FrozenState, specs: &[TensorSpec], publication: Publication) -> Result<Self> {
        let starts: Vec<usize> = specs.iter().map(|spec| spec.offset_elems).collect();
        let run = disk::continued(move || save(writer, &state, &starts, &publication));
        let thread = thread::Builder::new().name("save".into()).spawn(run);
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

fn save(mut writer: Writer, state: &FrozenState, starts: &[usize], publication: &Publication) -> Result<Saved> {
    if let Some((mut writers, tensors, arrays)) = writer.take_writers() {
        let places = StatePlaces { tensors: &tensors, starts, arrays };
        while let Some(bucket) = state.next()? {
            places.in_bucket(&state.range(bucket)).try_for_each(|extent| write(&mut writers, state, bucket, extent))?;
            state.saved(bucket);
        }
        writer.set_state(writers.finish()?);
    }
    writer.finish(&publication.model_files, publication.total_limit, publication.spared)
}

/// Consecutive bytes of an array of a bucket, which are consecutive in the file as well.
#[derive(Clone, Debug, PartialEq)]
struct StateExtent {
    part: StatePart,
    /// Bytes of the bucket's array.
    bytes: Range<usize>,
    /// Offset of the first byte in the file.
    offset: u64,
}

/// Copies an extent of `bucket` into pieces for the writers.
fn write(writers: &mut Writers, state: &FrozenState, bucket: usize, extent: StateExtent) -> Result<()> {
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
    fn in_bucket(&self, bucket: &Range<usize>) -> impl Iterator<Item = StateExtent> {
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
