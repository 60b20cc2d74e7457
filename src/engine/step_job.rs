//! One bucket's job for the optimizer pool: the memory and pass, divided into pieces for workers and by weight-decay rule.
#![allow(unsafe_code)]

use crate::bucket::slot::Slot;
use crate::dtype::Dtype;
use crate::engine::late_rows::{PackedRows, RowPart};
use crate::engine::protocol::coordinator::{GradUpdate, Work};
use crate::engine::state_copies::StateCopies;
use crate::host::pinned::PinnedSlice;
use crate::host::pool::Job;
use crate::optim::formats::{Grads, Weights};
use crate::optim::host_passes::{ArrayMemory, HostPasses, UseHostPasses};
use crate::optim::optimizer::Optimizer;
use crate::optim::simd::AdamKernels;
use crate::optim::split::Masters;
use crate::optim::state_array::{PerArray, StateArrays, StatePart};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// Largest piece of a worker: some tenths of a millisecond, short enough that all workers finish together, and long enough for streaming
/// access. Small buckets are divided as well, at multiples of a page of state, so that no two workers write the same page.
const PIECE_ELEMS_MAX: usize = 32 << 10;
const PIECES_MIN: usize = 16;
const PAGE_BYTES: usize = 4096;

/// A range of the flat order, or of a rank's local order, with one weight-decay rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Elements of that order.
    pub range: Range<usize>,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Slots of equal size, consecutive in one allocation.
#[derive(Clone, Copy, Debug)]
pub struct SlotMemory {
    pub memory: PinnedSlice,
    /// Capacity of a slot in elements.
    pub slot_elems: usize,
    pub dtype: Dtype,
}

impl SlotMemory {
    /// The first `elems` elements of `slot`.
    pub fn slot(&self, slot: Slot, elems: usize) -> PinnedSlice {
        let width = self.dtype.bytes();
        self.memory.slice(slot.0 * self.slot_elems * width, elems * width)
    }

    /// The range `part` of the bucket `whole`, which is in `slot`.
    pub fn part(&self, slot: Slot, whole: &Range<usize>, part: &Range<usize>) -> PinnedSlice {
        let width = self.dtype.bytes();
        self.slot(slot, whole.len()).slice((part.start - whole.start) * width, part.len() * width)
    }
}

/// State in host memory, from element `first` of the local order on.
#[derive(Clone, Copy, Debug)]
pub struct HostState {
    pub first: usize,
    /// The arrays of the optimizer, as the host stores them.
    pub list: StateArrays,
    /// The memory of each array.
    pub arrays: PerArray<PinnedSlice>,
    /// The upper halves of split masters: bfloat16 working weights, in the slots of streamed weights.
    pub upper: Option<PinnedSlice>,
}

impl HostState {
    /// End of the state in the local order.
    pub(super) fn end(&self) -> usize {
        let params = StatePart::PARAMS;
        self.first + self.arrays[params].bytes() / self.list[params].bytes(1)
    }

    /// The part within a local range, if any.
    pub(super) fn part(&self, range: &Range<usize>) -> Option<Self> {
        let common = range.start.max(self.first)..range.end.min(self.end());
        (!common.is_empty()).then(|| self.slice(&common))
    }

    /// The part of a local range. Arrays of groups keep the groups that the range begins and ends within.
    ///
    /// # Panics
    /// If the range exceeds this state.
    pub(super) fn slice(&self, range: &Range<usize>) -> Self {
        let list = self.list;
        let part = |part, whole: PinnedSlice| {
            let place = list[part].place(self.first, range);
            whole.slice(place.start, place.len())
        };
        let halves = |upper: PinnedSlice| upper.slice((range.start - self.first) * size_of::<bf16>(), range.len() * size_of::<bf16>());
        Self { first: range.start, list, arrays: self.arrays.map(part), upper: self.upper.map(halves) }
    }
}

/// Memory and settings shared by all jobs of a run.
#[derive(Clone, Debug)]
pub struct StepMemory {
    pub grads: SlotMemory,
    /// Slots of working weights.
    pub params: SlotMemory,
    /// Weight-decay segments of the local order.
    pub segments: Arc<[Segment]>,
    /// The optimizer; learning rate and step come from the job.
    pub optimizer: Optimizer,
    pub kernels: AdamKernels,
}

#[derive(Debug)]
pub struct StepJob {
    bucket: usize,
    range: Range<usize>,
    /// Position of the range's first element in the flat order.
    flat: usize,
    work: Work,
    out: Option<Slot>,
    state: HostState,
    memory: StepMemory,
    /// The late rows, if the job is a speculation on rows.
    rows: Option<RowPart>,
    /// The slots for copies of states, if the job copies one.
    copies: Option<StateCopies>,
}

// SAFETY: `StepJob::new` requires exclusive use of the memory. A piece writes only its own part of the range, in the state and in the
// slots.
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
            Work::Copy(_) => "copy_state",
        };
        (name, self.bucket as u32)
    }

    /// Bytes of state in its formats, and of gradients and weights in the format of their slots.
    fn traffic_bytes(&self) -> u64 {
        let elems = self.elems();
        let (state, params) = (self.state.list.bytes(elems), self.state.list[StatePart::PARAMS].bytes(elems));
        let (grads, weights) = (elems * self.memory.grads.dtype.bytes(), elems * self.memory.params.dtype.bytes());
        let inverse = |undo: Option<GradUpdate>| if undo.is_some() { 2 * state + grads } else { 0 };
        // Split masters are halves of the weights, which are read as well.
        let (halves, emitted) = if self.state.upper.is_some() { (weights, 0) } else { (0, params + weights) };
        let bytes = match self.work {
            Work::CommitThenSpeculate { pending: None, .. } => state + grads + weights,
            Work::CommitThenSpeculate { .. } => 2 * state + 2 * grads + weights,
            Work::Step { undo, .. } => inverse(undo) + 2 * state + grads + weights + halves,
            Work::Restore { undo } => inverse(undo) + emitted,
            Work::Commit(_) => 2 * state + grads,
            // The gradient is moved from one slot to another.
            Work::SpeculateRows(_) => state + 2 * grads + weights,
            Work::Copy(_) => 2 * state,
        };
        bytes as u64
    }

    fn pieces(&self) -> usize {
        self.elems().div_ceil(self.piece_elems())
    }

    unsafe fn run(&self, piece: usize) {
        let start = piece * self.piece_elems();
        let end = (start + self.piece_elems()).min(self.elems());
        let masters = if self.state.upper.is_some() { Masters::Split } else { Masters::Float32 };
        self.memory.optimizer.with_host_passes((self.memory.kernels, masters), JobPiece { job: self, piece: start..end });
    }
}

/// A piece of a job that its thread runs.
struct JobPiece<'a> {
    job: &'a StepJob,
    piece: Range<usize>,
}

impl UseHostPasses for JobPiece<'_> {
    fn use_passes(self, passes: impl HostPasses) {
        // SAFETY: only `StepJob::run` makes such a piece, and its caller runs a piece on one thread only.
        unsafe { self.job.run_piece(passes, self.piece) }
    }
}

impl StepJob {
    /// `work` on `bucket`, the local range `range`, which begins at `flat` in the flat order and has its state in `state`. Working weights
    /// go to the slot `out`.
    ///
    /// # Safety
    /// Until all pieces are complete, `state` and `memory` must stay allocated, nothing else may use the range's state or the slot `out`,
    /// and nothing may write the gradient slots named by `work`.
    pub unsafe fn new(
        bucket: usize,
        (range, flat): (Range<usize>, usize),
        work: Work,
        out: Option<Slot>,
        state: HostState,
        memory: StepMemory,
    ) -> Self {
        Self { bucket, range, flat, work, out, state, memory, rows: None, copies: None }
    }

    /// Limits the job to `rows`, which are consecutive in the slot `out`. The job writes their elements of the gradient slot.
    ///
    /// # Safety
    /// As [`StepJob::new`]. In addition, nothing else may use these rows of the gradient slot, and nothing may write the row numbers.
    pub(super) unsafe fn with_rows(self, rows: RowPart) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Gives the job the slots for copies of states.
    ///
    /// # Safety
    /// As [`StepJob::new`], for the slot of the copy.
    pub(super) unsafe fn with_copies(self, copies: StateCopies) -> Self {
        Self { copies: Some(copies), ..self }
    }

    /// Number of stepped elements.
    pub(super) fn elems(&self) -> usize {
        self.rows.as_ref().map_or(self.range.len(), |rows| rows.packed.len())
    }

    fn piece_elems(&self) -> usize {
        let page_elems = PAGE_BYTES / self.state.list.narrowest_bytes();
        self.elems().div_ceil(PIECES_MIN).max(1).next_multiple_of(page_elems).min(PIECE_ELEMS_MAX)
    }

    /// Runs the job on a range of its elements.
    ///
    /// # Safety
    /// No two threads may work on the same elements.
    unsafe fn run_piece(&self, passes: impl HostPasses, piece: Range<usize>) {
        let Some(rows) = &self.rows else {
            let range = self.range.start + piece.start..self.range.start + piece.end;
            if let Work::Copy(slot) = self.work {
                // SAFETY: guaranteed by the caller.
                return unsafe { self.copy_state(slot, &range) };
            }
            // SAFETY: guaranteed by the caller.
            return self.by_decay(&range, |part, decay| unsafe { self.run_part(passes, part, decay) });
        };
        // SAFETY: row numbers are not written while a job uses them.
        let packing = PackedRows { rows: unsafe { rows.ids.as_slice() }, channels: rows.channels, start: rows.start };
        for (flat, at) in packing.pieces(rows.packed.start + piece.start..rows.packed.start + piece.end) {
            let slot = at - rows.packed.start;
            // SAFETY: guaranteed by the caller; disjoint pieces of the packed order are disjoint in the flat order.
            self.by_decay(&flat, |part, decay| unsafe { self.run_rows(passes, part.clone(), slot + part.start - flat.start, decay) });
        }
    }

    /// Calls `run` for each part of `range` with one decay rule.
    fn by_decay(&self, range: &Range<usize>, mut run: impl FnMut(Range<usize>, bool)) {
        for segment in self.memory.segments.iter() {
            let part = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            if !part.is_empty() {
                run(part, segment.decay);
            }
        }
    }

    /// Moves the gradient of `part`, elements of one row, from position `at` of the parameter slot into the gradient slot, and writes their
    /// new weights at that position.
    ///
    /// # Safety
    /// No two threads may work on the same part.
    unsafe fn run_rows<P: HostPasses>(&self, passes: P, part: Range<usize>, at: usize, decay: bool) {
        let StepMemory { grads, params: slots, .. } = self.memory;
        let (Work::SpeculateRows(next), Some(slot)) = (self.work, self.out) else {
            unreachable!("rows are speculated on: {:?}", self.work)
        };
        let width = slots.dtype.bytes();
        // SAFETY: used once for each slot, for the part that belongs to this thread.
        let write = |memory: PinnedSlice| unsafe { memory.as_mut_slice::<u8>() };
        let place = write(grads.part(next.grads, &self.range, &part));
        let packed = write(slots.slot(slot, self.elems()).slice(at * width, part.len() * width));
        place.copy_from_slice(packed);
        // SAFETY: the state of a part that belongs to this thread. Groups in which it begins or ends are shared, and no piece writes them.
        let mut state = unsafe { self.state_of(passes, &part, true) };
        let (grads, out) = (Grads::from_bytes(grads.dtype, place), Weights::from_bytes(slots.dtype, packed));
        passes.speculate(passes.constants(next.update, decay), &mut state, grads, out);
    }

    /// Copies the state of `part` into `slot`.
    ///
    /// # Safety
    /// No two threads may work on the same part.
    unsafe fn copy_state(&self, slot: Slot, part: &Range<usize>) {
        let (list, first) = (self.state.list, part.start - self.range.start);
        let copies = self.copies.expect("slots for copies");
        for at in list.parts() {
            let source = self.state.slice(part).arrays[at];
            let target = copies.array(slot, at, self.range.len()).slice(list[at].bytes(first), source.bytes());
            // SAFETY: the job owns the slot, and this thread its part. The state is not written meanwhile; a save may read it as well.
            unsafe { target.as_mut_slice::<u8>().copy_from_slice(source.as_slice::<u8>()) };
        }
    }

    /// The state of a part. `shares` says that it may begin and end within groups, which are then only read.
    ///
    /// # Safety
    /// The caller must be the only user of the part's state, and must use it through one result at a time. Nothing may write shared groups.
    unsafe fn state_of<P: HostPasses>(&self, passes: P, part: &Range<usize>, shares: bool) -> P::State<'_> {
        let list = self.state.list;
        let memory = |part, memory: PinnedSlice| match shares && list[part].has_groups() {
            // SAFETY: guaranteed by the caller.
            true => ArrayMemory::Shared(unsafe { memory.as_slice() }),
            // SAFETY: as above.
            false => ArrayMemory::Own(unsafe { memory.as_mut_slice() }),
        };
        passes.state(self.flat + part.start - self.range.start, self.state.slice(part).arrays.map(memory))
    }

    /// Runs the job on a part of the bucket with one decay rule.
    ///
    /// # Safety
    /// No two threads may work on the same part.
    unsafe fn run_part<P: HostPasses>(&self, passes: P, part: Range<usize>, decay: bool) {
        let StepMemory { grads, params: slots, .. } = self.memory;
        // SAFETY: used for gradients, which the job may read and none of its pieces writes.
        let read = |memory: PinnedSlice| unsafe { memory.as_slice::<u8>() };
        // SAFETY: used once, for the part of the weights that belongs to this thread; the job owns the slot.
        let write = |memory: PinnedSlice| unsafe { memory.as_mut_slice::<u8>() };
        // SAFETY: as above, for the state.
        let mut state = unsafe { self.state_of(passes, &part, false) };
        let grads = |of: GradUpdate| Grads::from_bytes(grads.dtype, read(grads.part(of.grads, &self.range, &part)));
        let constants = |of: GradUpdate| passes.constants(of.update, decay);
        let out = self.out.map(|slot| Weights::from_bytes(slots.dtype, write(slots.part(slot, &self.range, &part))));
        // The paper's rollback by the algebraic inverse. A build without speculation never needs it.
        let invert = |undo: Option<GradUpdate>, state: &mut P::State<'_>| {
            if let Some(undo) = undo.filter(|_| cfg!(feature = "stv")) {
                passes.inverse(constants(undo), state, grads(undo));
            }
        };
        match (self.work, out) {
            #[cfg(feature = "stv")]
            (Work::CommitThenSpeculate { pending: None, next }, Some(out)) => {
                passes.speculate(constants(next), &mut state, grads(next), out);
            }
            #[cfg(feature = "stv")]
            (Work::CommitThenSpeculate { pending: Some(p), next }, Some(out)) => {
                passes.commit_then_speculate((constants(p), grads(p)), (constants(next), grads(next)), &mut state, out);
            }
            (Work::Step { undo, next }, Some(out)) => {
                invert(undo, &mut state);
                passes.step(constants(next), &mut state, grads(next), out);
            }
            (Work::Restore { undo }, Some(out)) => {
                invert(undo, &mut state);
                passes.emit(&state, out);
            }
            #[cfg(feature = "stv")]
            (Work::Commit(g), None) => passes.commit(constants(g), &mut state, grads(g)),
            (work, out) => unreachable!("{work:?} with{} room for weights", if out.is_some() { "" } else { "out" }),
        }
    }
}
