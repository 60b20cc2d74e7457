//! One bucket's work for the optimizer pool: which memory, which pass, split by worker and by decay group.
#![allow(unsafe_code)]

use crate::bucket::slot::Slot;
use crate::dtype::Dtype;
use crate::engine::coordinator::{GradUpdate, Update, Work};
use crate::host::pinned::PinnedSlice;
use crate::host::pool::Job;
use crate::optim::adam::{AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::simd::{AdamKernels, Grads, Weights};
use std::ops::Range;
use std::sync::Arc;

/// Elements that a worker takes at once, at most: some tenths of a millisecond, so that all end together, and streams that
/// are long enough. Small buckets are cut, too, into whole pages of fp32 state: no two workers write one page.
const PIECE_ELEMS_MAX: usize = 32 << 10;
const PIECES_MIN: usize = 16;
const PAGE_ELEMS: usize = 1024;

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
    /// All slots.
    pub memory: PinnedSlice,
    /// Elements that a slot has room for.
    pub slot_elems: usize,
    /// Their format.
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

/// fp32 state in host memory, for the flat range `0..elems`.
#[derive(Clone, Copy, Debug)]
pub struct HostState {
    /// Parameters.
    pub params: PinnedSlice,
    /// First moments.
    pub m: PinnedSlice,
    /// Second moments.
    pub v: PinnedSlice,
}

/// What all jobs of a run share.
#[derive(Clone, Debug)]
pub struct StepMemory {
    /// The state of all offloaded buckets.
    pub state: HostState,
    /// Gradient slots.
    pub grads: SlotMemory,
    /// Working-weight slots.
    pub params: SlotMemory,
    /// Decay groups of the flat order.
    pub segments: Arc<[Segment]>,
    /// All of Adam but learning rate and step.
    pub hyper: AdamHyper,
    /// The vector kernels.
    pub kernels: AdamKernels,
}

/// One bucket's work.
#[derive(Clone, Debug)]
pub struct StepJob {
    /// The bucket.
    pub bucket: usize,
    /// Its flat range.
    pub range: Range<usize>,
    /// What to do with it.
    pub work: Work,
    /// Where the working weights go.
    pub out: Option<Slot>,
    /// Where everything lies.
    pub memory: StepMemory,
}

impl Job for StepJob {
    fn label(&self) -> (&'static str, u32) {
        let name = match self.work {
            Work::CommitThenSpeculate { pending: None, .. } => "speculate",
            Work::CommitThenSpeculate { .. } => "commit_then_speculate",
            Work::Step { undo: None, .. } => "step",
            Work::Step { .. } => "inverse_then_step",
            Work::Restore { .. } => "restore",
            Work::Commit(_) => "commit",
        };
        (name, self.bucket as u32)
    }

    /// fp32 state, and gradients and weights in the format of their slots.
    fn traffic_bytes(&self) -> u64 {
        const STATE: usize = 3 * 4;
        let (grads, weights) = (self.memory.grads.dtype.bytes(), self.memory.params.dtype.bytes());
        let inverse = |undo: Option<GradUpdate>| if undo.is_some() { 2 * STATE + grads } else { 0 };
        let bytes_per_elem = match self.work {
            Work::CommitThenSpeculate { pending: None, .. } => STATE + grads + weights,
            Work::CommitThenSpeculate { .. } => 2 * STATE + 2 * grads + weights,
            Work::Step { undo, .. } => inverse(undo) + 2 * STATE + grads + weights,
            Work::Restore { undo } => inverse(undo) + 4 + weights,
            Work::Commit(_) => 2 * STATE + grads,
        };
        (self.range.len() * bytes_per_elem) as u64
    }

    fn pieces(&self) -> usize {
        self.range.len().div_ceil(self.piece_elems())
    }

    fn run(&self, piece: usize) {
        let start = self.range.start + piece * self.piece_elems();
        let end = (start + self.piece_elems()).min(self.range.end);
        for segment in self.memory.segments.iter() {
            let part = segment.range.start.max(start)..segment.range.end.min(end);
            if !part.is_empty() {
                self.run_part(part, segment.decay);
            }
        }
    }
}

impl StepJob {
    fn piece_elems(&self) -> usize {
        self.range.len().div_ceil(PIECES_MIN).next_multiple_of(PAGE_ELEMS).min(PIECE_ELEMS_MAX)
    }

    /// Does the work on a part of the bucket with one decay rule.
    fn run_part(&self, part: Range<usize>, decay: bool) {
        let kernels = self.memory.kernels;
        let step = |update: Update| self.step(update, decay);
        // SAFETY: the shares of a job are disjoint, and while it runs the protocol gives its bucket's state, its
        // gradient slots and its parameter slot to the pool alone.
        let mut state = unsafe { self.state(&part) };
        // SAFETY: as above; gradients are only read.
        let grads = |g: GradUpdate| unsafe { self.grads(g.grads, &part) };
        // SAFETY: as above.
        let out = self.out.map(|slot| unsafe { self.weights(slot, &part) });
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

    /// # Safety
    /// Nobody else uses this part of the state now.
    unsafe fn state(&self, part: &Range<usize>) -> AdamState<'static> {
        let HostState { params, m, v } = self.memory.state;
        // SAFETY: the caller's promise.
        let view = |memory: PinnedSlice| unsafe { memory.slice(part.start * 4, part.len() * 4).as_mut_slice::<f32>() };
        AdamState { params: view(params), m: view(m), v: view(v) }
    }

    /// # Safety
    /// Nobody writes the slot now.
    unsafe fn grads(&self, slot: Slot, part: &Range<usize>) -> Grads<'static> {
        let dtype = self.memory.grads.dtype;
        // SAFETY: the caller's promise.
        Grads::from_bytes(dtype, unsafe { self.memory.grads.part(slot, &self.range, part).as_slice::<u8>() })
    }

    /// # Safety
    /// Nobody else uses this part of the slot now.
    unsafe fn weights(&self, slot: Slot, part: &Range<usize>) -> Weights<'static> {
        let dtype = self.memory.params.dtype;
        // SAFETY: the caller's promise.
        Weights::from_bytes(dtype, unsafe { self.memory.params.part(slot, &self.range, part).as_mut_slice::<u8>() })
    }
}

/// The paper's rollback; a build without speculation has nothing to take back.
fn invert(kernels: AdamKernels, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>) {
    if cfg!(feature = "stv") {
        kernels.inverse(step, state, grads);
    }
}
