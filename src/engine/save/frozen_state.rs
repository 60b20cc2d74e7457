//! The writer's end of a save: the state of all buckets after one step, while later steps run.
#![allow(unsafe_code)]

use super::board::{SaveBoard, Source};
use crate::engine::state_copies::StateCopies;
use crate::engine::step_job::HostState;
use crate::error::{Error, Result};
use crate::host::pinned::PinnedSlice;
use crate::optim::state_array::StatePart;
use std::ops::Range;
use std::sync::Arc;

/// The state of one rank after a step. One thread reads it, bucket after bucket. Dropping it ends the save of this rank: no bucket waits for
/// it any more.
pub struct FrozenState {
    board: Arc<SaveBoard>,
    /// By bucket: this rank's elements, in the flat order.
    ranges: Vec<Range<usize>>,
    /// By bucket: its memory, if that is on the host. All other buckets have copies from the start.
    buckets: Vec<HostState>,
    copies: StateCopies,
}

impl FrozenState {
    pub(in crate::engine) fn new(board: Arc<SaveBoard>, ranges: Vec<Range<usize>>, buckets: Vec<HostState>, copies: StateCopies) -> Self {
        Self { board, ranges, buckets, copies }
    }

    /// The elements of `bucket` that this rank has, in the flat order.
    pub fn range(&self, bucket: usize) -> Range<usize> {
        self.ranges[bucket].clone()
    }

    pub(in crate::engine) fn board(&self) -> Arc<SaveBoard> {
        self.board.clone()
    }

    /// The next bucket to read; `None` when all have been saved. It waits until the state of one is ready. Buckets in their own memory come
    /// first, because a step may wait for them, and of these the first in the order of the backward pass.
    ///
    /// # Errors
    /// `Resource` when the engine ended.
    pub fn next(&self) -> Result<Option<usize>> {
        loop {
            let (rung, next) = (self.rings(), self.ready());
            if next.is_none() && self.board.is_complete() {
                return Ok(None);
            }
            if self.board.is_cancelled() {
                return Err(cancelled());
            }
            if next.is_some() {
                return Ok(next);
            }
            self.board.writer.wait(rung);
        }
    }

    /// The bucket that [`FrozenState::next`] would return without waiting.
    pub(super) fn ready(&self) -> Option<usize> {
        let in_memory = self.board.sources().position(|source| source == Source::Memory);
        in_memory.or_else(|| self.board.sources().position(|source| matches!(source, Source::Copy(_))))
    }

    /// Number of changes that a reader should look at.
    pub(super) fn rings(&self) -> u64 {
        self.board.writer.rings()
    }

    /// Bytes of this rank's state of `bucket`.
    pub(super) fn bytes(&self, bucket: usize) -> usize {
        self.copies.arrays().bytes(self.ranges[bucket].len())
    }

    /// Reads the stored form of array `part` of `bucket`, from byte `start` of the array on. The bucket comes from [`FrozenState::next`].
    ///
    /// # Errors
    /// `Resource` when the engine ended.
    ///
    /// # Panics
    /// If the bytes exceed the array, or the bucket was not ready.
    pub fn read(&self, bucket: usize, part: StatePart, start: usize, out: &mut [u8]) -> Result<()> {
        let source = self.board.begin_read(bucket);
        if let Some(source) = source {
            let memory = self.memory(bucket, part, source).slice(start, out.len());
            // SAFETY: the memory is mapped: the engine's end of the save is dropped before the memory, and waits for the end of this read
            // (`SaveBoard::cancel`). Nothing writes these bytes: the coordinator starts no job that writes a held state, the bucket is held
            // until this read has ended (`RunningSave::poll`), and a copy is given to another bucket only after it was saved. No reference
            // to the bytes is made. `out` is not part of the engine's memory.
            unsafe { std::ptr::copy_nonoverlapping(memory.addr() as *const u8, out.as_mut_ptr(), out.len()) };
        }
        self.board.end_read(bucket, source.unwrap_or(Source::Nowhere));
        source.map(drop).ok_or_else(cancelled)
    }

    /// All of `bucket` was read.
    pub fn saved(&self, bucket: usize) {
        self.board.saved(bucket);
    }

    fn memory(&self, bucket: usize, part: StatePart, source: Source) -> PinnedSlice {
        match source {
            Source::Memory => self.buckets[bucket].arrays[part],
            Source::Copy(slot) => self.copies.array(slot, part, self.ranges[bucket].len()),
            Source::Nowhere | Source::Saved => unreachable!("bucket {bucket} is read from {source:?}"),
        }
    }
}

impl Drop for FrozenState {
    fn drop(&mut self) {
        (0..self.ranges.len()).for_each(|bucket| self.board.saved(bucket));
    }
}

fn cancelled() -> Error {
    Error::resource("save the state of a running run", "the run ended before its state was read")
}
