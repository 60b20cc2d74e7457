//! One bucket's work for the optimizer pool: which memory, which pass, split by worker and by decay group.
#![allow(unsafe_code)]

use crate::bucket::slot::Slot;
use crate::dtype::Dtype;
use crate::engine::coordinator::{GradUpdate, Update, Work};
use crate::engine::late_rows::{PackedRows, RowPart};
use crate::host::pinned::PinnedSlice;
use crate::host::pool::Job;
use crate::optim::StatePart;
use crate::optim::adam::{AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::moments::{Moment, Moments};
use crate::optim::simd::{AdamKernels, Grads, Weights};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// Elements that a worker takes at once, at most: some tenths of a millisecond, so that all end together, and streams that
/// are long enough. Small buckets are cut, too, into whole pages of state: no two workers write one page.
const PIECE_ELEMS_MAX: usize = 32 << 10;
const PIECES_MIN: usize = 16;
const PAGE_BYTES: usize = 4096;

/// A flat range with one weight-decay rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Flat elements.
    pub range: Range<usize>,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Equal slots side by side in one allocation.
#[derive(Clone, Copy, Debug)]
pub struct SlotMemory {
    pub memory: PinnedSlice,
    /// Elements that a slot has room for.
    pub slot_elems: usize,
    pub dtype: Dtype,
}

impl SlotMemory {
    /// The first `elems` elements of `slot`.
    pub fn slot(&self, slot: Slot, elems: usize) -> PinnedSlice {
        let width = self.dtype.bytes();
        self.memory.slice(slot.0 * self.slot_elems * width, elems * width)
    }

    /// The flat range `part` of the bucket `whole`, which lies in `slot`.
    pub fn part(&self, slot: Slot, whole: &Range<usize>, part: &Range<usize>) -> PinnedSlice {
        let width = self.dtype.bytes();
        self.slot(slot, whole.len()).slice((part.start - whole.start) * width, part.len() * width)
    }
}

/// State in host memory, from element `first` of the rank's order on.
#[derive(Clone, Copy, Debug)]
pub struct HostState {
    pub first: usize,
    /// Format of `m` and `v`.
    pub moments: Moments,
    pub params: PinnedSlice,
    /// First moments.
    pub m: PinnedSlice,
    /// Second moments.
    pub v: PinnedSlice,
}

impl HostState {
    /// Behind its last element.
    pub(super) fn end(&self) -> usize {
        self.first + self.params.bytes() / 4
    }

    pub(super) fn arrays(&self) -> [PinnedSlice; 3] {
        [self.params, self.m, self.v]
    }

    /// The part that it has of a flat range, if any.
    pub(super) fn part(&self, range: &Range<usize>) -> Option<Self> {
        let common = range.start.max(self.first)..range.end.min(self.end());
        (!common.is_empty()).then(|| self.slice(&common))
    }

    /// The part of this flat range.
    ///
    /// # Panics
    /// If it reaches outside.
    pub(super) fn slice(&self, range: &Range<usize>) -> Self {
        let [params, m, v] = StatePart::ALL.map(|part| {
            let width = self.moments.dtype(part).bytes();
            self.arrays()[part as usize].slice((range.start - self.first) * width, range.len() * width)
        });
        Self { first: range.start, params, m, v, ..*self }
    }
}

/// What all jobs of a run share.
#[derive(Clone, Debug)]
pub struct StepMemory {
    pub grads: SlotMemory,
    /// Working-weight slots.
    pub params: SlotMemory,
    /// Decay groups of the flat order.
    pub segments: Arc<[Segment]>,
    /// All of Adam but learning rate and step.
    pub hyper: AdamHyper,
    pub kernels: AdamKernels,
}

#[derive(Debug)]
pub struct StepJob {
    bucket: usize,
    range: Range<usize>,
    /// Place of the range's first element in the flat order.
    flat: usize,
    work: Work,
    out: Option<Slot>,
    state: HostState,
    memory: StepMemory,
    /// The late rows, where the work is theirs.
    rows: Option<RowPart>,
}

// SAFETY: the right to the memory is what `StepJob::new` asks for. A piece writes its own part of the range alone: of the state, and of
// the slots.
unsafe impl Job for StepJob {
    fn label(&self) -> (&'static str, u32) {
        let name = match self.work {
            Work::CommitThenSpeculate { pending: None, .. } => "speculate",
            Work::CommitThenSpeculate { .. } => "commit_then_speculate",
            Work::Step { undo: None, .. } => "step",
            Work::Step { .. } => "inverse_then_step",
            Work::Restore { .. } => "restore",
            Work::Commit(_) => "commit",
            Work::SpeculateRows(_) => "speculate_rows",
        };
        (name, self.bucket as u32)
    }

    /// State in its formats, and gradients and weights in that of their slots.
    fn traffic_bytes(&self) -> u64 {
        let state = self.state.moments.state_bytes();
        let (grads, weights) = (self.memory.grads.dtype.bytes(), self.memory.params.dtype.bytes());
        let inverse = |undo: Option<GradUpdate>| if undo.is_some() { 2 * state + grads } else { 0 };
        let bytes_per_elem = match self.work {
            Work::CommitThenSpeculate { pending: None, .. } => state + grads + weights,
            Work::CommitThenSpeculate { .. } => 2 * state + 2 * grads + weights,
            Work::Step { undo, .. } => inverse(undo) + 2 * state + grads + weights,
            Work::Restore { undo } => inverse(undo) + 4 + weights,
            Work::Commit(_) => 2 * state + grads,
            // A gradient goes from one place to another.
            Work::SpeculateRows(_) => state + 2 * grads + weights,
        };
        (self.elems() * bytes_per_elem) as u64
    }

    fn pieces(&self) -> usize {
        self.elems().div_ceil(self.piece_elems())
    }

    unsafe fn run(&self, piece: usize) {
        let start = piece * self.piece_elems();
        let end = (start + self.piece_elems()).min(self.elems());
        match self.state.moments {
            // SAFETY: a part of this piece, which the caller lets nobody else do.
            Moments::Float32 => unsafe { self.run_piece::<f32>(start..end) },
            // SAFETY: as above.
            Moments::Bfloat16 => unsafe { self.run_piece::<bf16>(start..end) },
        }
    }
}

impl StepJob {
    /// `work` on `bucket`, the range `range` of the rank's order, which begins at `flat` of the flat one and whose state is in `state`; its
    /// working weights go to the slot `out`.
    ///
    /// # Safety
    /// Until all pieces are done `state` and `memory` are there, nobody else uses the range's state or the slot `out`, and nobody writes the
    /// gradient slots that `work` names.
    pub unsafe fn new(
        bucket: usize,
        (range, flat): (Range<usize>, usize),
        work: Work,
        out: Option<Slot>,
        state: HostState,
        memory: StepMemory,
    ) -> Self {
        Self { bucket, range, flat, work, out, state, memory, rows: None }
    }

    /// The same on `rows` alone, which lie behind each other in the slot `out`; of these it writes the gradient slot.
    ///
    /// # Safety
    /// As [`StepJob::new`], of the gradient slot nobody else uses these rows, and nobody writes their numbers.
    pub(super) unsafe fn with_rows(self, rows: RowPart) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Elements that are stepped.
    pub(super) fn elems(&self) -> usize {
        self.rows.as_ref().map_or(self.range.len(), |rows| rows.packed.len())
    }

    fn piece_elems(&self) -> usize {
        let page_elems = PAGE_BYTES / self.state.moments.dtype(StatePart::M).bytes();
        self.elems().div_ceil(PIECES_MIN).max(1).next_multiple_of(page_elems).min(PIECE_ELEMS_MAX)
    }

    /// Does the work on so many of its elements.
    ///
    /// # Safety
    /// No two threads work on the same ones.
    unsafe fn run_piece<M: Moment>(&self, piece: Range<usize>) {
        let Some(rows) = &self.rows else {
            let range = self.range.start + piece.start..self.range.start + piece.end;
            // SAFETY: the caller's promise.
            return self.by_decay(&range, |part, decay| unsafe { self.run_part::<M>(part, decay) });
        };
        // SAFETY: nobody writes the numbers of rows while a job has them.
        let packing = PackedRows { rows: unsafe { rows.ids.as_slice() }, channels: rows.channels, start: rows.start };
        for (flat, at) in packing.pieces(rows.packed.start + piece.start..rows.packed.start + piece.end) {
            let slot = at - rows.packed.start;
            // SAFETY: the caller's promise; pieces of the packed order are other elements of the flat one.
            self.by_decay(&flat, |part, decay| unsafe { self.run_rows::<M>(part.clone(), slot + part.start - flat.start, decay) });
        }
    }

    /// The parts of `range` with one decay rule each.
    fn by_decay(&self, range: &Range<usize>, mut run: impl FnMut(Range<usize>, bool)) {
        for segment in self.memory.segments.iter() {
            let part = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            if !part.is_empty() {
                run(part, segment.decay);
            }
        }
    }

    /// Puts the gradient of `part`, some elements of one row, from place `at` of the parameter slot into its own, and their weights there.
    ///
    /// # Safety
    /// No two threads work on the same part.
    unsafe fn run_rows<M: Moment>(&self, part: Range<usize>, at: usize, decay: bool) {
        let StepMemory { grads, params: slots, kernels, .. } = self.memory;
        let (Work::SpeculateRows(next), Some(slot)) = (self.work, self.out) else {
            unreachable!("rows are speculated on: {:?}", self.work)
        };
        let width = slots.dtype.bytes();
        // SAFETY: for both slots, of which this part is this thread's; once each.
        let write = |memory: PinnedSlice| unsafe { memory.as_mut_slice::<u8>() };
        let place = write(grads.part(next.grads, &self.range, &part));
        let packed = write(slots.slot(slot, self.elems()).slice(at * width, part.len() * width));
        place.copy_from_slice(packed);
        // SAFETY: the state of a part that is this thread's.
        let state = unsafe { self.state_of::<M>(&part) };
        let (grads, out) = (Grads::from_bytes(grads.dtype, place), Weights::from_bytes(slots.dtype, packed));
        kernels.speculate(self.step(next.update, decay), &state, grads, out);
    }

    /// # Safety
    /// Nobody else uses the part's state, and the caller this alone.
    unsafe fn state_of<M: Moment>(&self, part: &Range<usize>) -> AdamState<'_, M> {
        let HostState { params, m, v, .. } = self.state.slice(part);
        // SAFETY: the caller's promise.
        let write = |memory: PinnedSlice| unsafe { memory.as_mut_slice::<u8>() };
        let moments = |memory| bytemuck::cast_slice_mut::<u8, M>(write(memory));
        let (first, params) = (self.flat + part.start - self.range.start, bytemuck::cast_slice_mut(write(params)));
        AdamState { first, params, m: moments(m), v: moments(v) }
    }

    /// Does the work on a part of the bucket with one decay rule.
    ///
    /// # Safety
    /// No two threads work on the same part.
    unsafe fn run_part<M: Moment>(&self, part: Range<usize>, decay: bool) {
        let StepMemory { grads, params: slots, kernels, .. } = self.memory;
        let step = |update: Update| self.step(update, decay);
        // SAFETY: for gradients, which the job has a right to and which none of its pieces writes.
        let read = |memory: PinnedSlice| unsafe { memory.as_slice::<u8>() };
        // SAFETY: for weights, which the job has to itself, and of these for the part that is this thread's; once.
        let write = |memory: PinnedSlice| unsafe { memory.as_mut_slice::<u8>() };
        // SAFETY: as above, of the state.
        let mut state = unsafe { self.state_of::<M>(&part) };
        let grads = |g: GradUpdate| Grads::from_bytes(grads.dtype, read(grads.part(g.grads, &self.range, &part)));
        let out = self.out.map(|slot| Weights::from_bytes(slots.dtype, write(slots.part(slot, &self.range, &part))));
        match (self.work, out) {
            #[cfg(feature = "stv")]
            (Work::CommitThenSpeculate { pending: None, next }, Some(out)) => {
                kernels.speculate(step(next.update), &state, grads(next), out);
            }
            #[cfg(feature = "stv")]
            (Work::CommitThenSpeculate { pending: Some(p), next }, Some(out)) => {
                kernels.commit_then_speculate(step(p.update), grads(p), step(next.update), grads(next), &mut state, out);
            }
            (Work::Step { undo, next }, Some(out)) => {
                undo.into_iter().for_each(|u| invert(kernels, step(u.update), &mut state, grads(u)));
                kernels.step(step(next.update), &mut state, grads(next), out);
            }
            (Work::Restore { undo }, Some(out)) => {
                undo.into_iter().for_each(|u| invert(kernels, step(u.update), &mut state, grads(u)));
                kernels.emit(state.params, out);
            }
            #[cfg(feature = "stv")]
            (Work::Commit(g), None) => kernels.commit(step(g.update), &mut state, grads(g)),
            (work, out) => unreachable!("{work:?} with{} room for weights", if out.is_some() { "" } else { "out" }),
        }
    }

    fn step(&self, update: Update, decay: bool) -> AdamStep {
        let hyper = AdamHyper { lr: update.learning_rate, ..self.memory.hyper };
        AdamStep { consts: AdamConsts::new(&hyper, update.optimizer_step, decay), scale: update.scale }
    }
}

/// The paper's rollback; a build without speculation has nothing to take back.
fn invert<M: Moment>(kernels: AdamKernels, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>) {
    if cfg!(feature = "stv") {
        kernels.inverse(step, state, grads);
    }
}
