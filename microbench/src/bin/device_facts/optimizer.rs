//! Adam's state in host memory with equal values for all parameters: one element predicts the result of any number of steps.
#![allow(unsafe_code)]

use crate::bench::DeviceBench;
use microbench::fill;
use std::ops::Range;
use std::sync::Arc;
use superoffload::Result;
use superoffload::internals::bucket::Slot;
use superoffload::internals::device::Kernels;
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::{GradUpdate, HostState, Segment, SlotMemory, StepJob, StepMemory, Work};
use superoffload::internals::host::{HostMemory, Job, PinnedSlice};
use superoffload::internals::optim::{self, AdamConsts, AdamElement, AdamHyper, AdamKernels, AdamStep, Isa, Moments, StatePart, Update};

/// Gradient of every parameter; exact in bf16.
pub const GRAD: f32 = 1.0 / 64.0;
/// Initial state of every parameter.
const BEGIN: AdamElement = AdamElement { param: 0.05, m: 1e-3, v: 1e-6 };
const HYPER: AdamHyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
const STEP: u64 = 1000;
const SCALE: f32 = 0.5;

/// Optimizer state, gradients in both formats, and working weights.
pub struct Optimizer {
    state: HostState,
    /// Gradients in fp32.
    pub wide: PinnedSlice,
    /// Gradients in bf16.
    pub narrow: PinnedSlice,
    /// Working weights in bf16.
    pub weights: PinnedSlice,
    kernels: AdamKernels,
}

impl Optimizer {
    /// Allocates memory for `elems` parameters and `wide` fp32 gradients.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory.
    ///
    /// # Safety
    /// The memory of `bench` outlives all jobs on this state. One job runs at a time, after its gradients have arrived.
    pub unsafe fn new<D: Kernels>(bench: &mut DeviceBench<'_, D>, elems: usize, wide: usize) -> Result<Self> {
        let (wide, narrow, weights) = (bench.registered(wide * 4)?, bench.registered(elems * 2)?, bench.registered(elems * 2)?);
        // One case copies the fp32 parameters to the device; `m` and `v` never leave the host.
        let params = bench.registered(elems * 4)?;
        let mut moments = || bench.memory.alloc_periodic("optimizer state", elems * 4, elems * 4);
        let state = HostState { first: 0, list: Moments::Float32.arrays(), arrays: [params, moments()?, moments()?].into(), upper: None };
        Ok(Self { state, wide, narrow, weights, kernels: AdamKernels::new(Isa::detect())? })
    }

    /// Resets the first `elems` parameters to their initial state, and their gradients and weights to zero.
    pub fn reset(&self, host: &mut HostMemory, elems: usize) {
        let [params, m, v] = self.state.arrays.into_array();
        for (memory, value) in [(params, BEGIN.param), (m, BEGIN.m), (v, BEGIN.v)] {
            fill(host, memory.slice(0, 4 * elems), value);
        }
        for (memory, elem_bytes) in [(self.wide, 4), (self.narrow, 2), (self.weights, 2)] {
            fill(host, memory.slice(0, memory.bytes().min(elem_bytes * elems)), 0u16);
        }
    }

    /// Returns a step of the parameters in `range` with the gradients of `slot`. Slots of gradients and weights have `slot_elems` elements.
    pub fn step(&self, range: Range<usize>, slot: usize, slot_elems: usize, grads: Dtype) -> StepJob {
        let update = Update { optimizer_step: STEP, learning_rate: HYPER.lr, scale: SCALE };
        self.job(range, slot, slot_elems, grads, Work::Step { undo: None, next: GradUpdate { grads: Slot(slot), update } })
    }

    /// Returns a cast of the first `elems` parameters to working weights.
    pub fn cast(&self, elems: usize) -> StepJob {
        self.job(0..elems, 0, elems, Dtype::Bfloat16, Work::Restore { undo: None })
    }

    /// Returns a cast of the first `elems` bf16 gradients to fp32.
    pub fn widen(&self, elems: usize) -> Widen {
        Widen { from: self.narrow.slice(0, 2 * elems), to: self.wide.slice(0, 4 * elems) }
    }

    fn job(&self, range: Range<usize>, slot: usize, slot_elems: usize, grads: Dtype, work: Work) -> StepJob {
        let slots = |memory, dtype| SlotMemory { memory, slot_elems, dtype };
        let memory = StepMemory {
            grads: slots(if grads == Dtype::Float32 { self.wide } else { self.narrow }, grads),
            params: slots(self.weights, Dtype::Bfloat16),
            segments: Arc::new([Segment { range: 0..range.end, decay: true }]),
            optimizer: optim::Optimizer::AdamW { hyper: HYPER, moments: Moments::Float32 },
            kernels: self.kernels,
        };
        // SAFETY: the caller of `new` guarantees that the memory stays and that one job runs at a time.
        unsafe { StepJob::new(0, (range.clone(), range.start), work, Some(Slot(slot)), self.state, memory) }
    }

    /// The parameter after `steps`, according to the scalar specification.
    pub fn param_after(steps: usize) -> f32 {
        let step = AdamStep { consts: AdamConsts::new(&HYPER, STEP, true), scale: SCALE };
        (0..steps).fold(BEGIN, |element, _| step.apply(element, GRAD)).param
    }

    /// Whether the first `elems` parameters equal the result of `steps` steps.
    pub fn is_after(&self, host: &HostMemory, elems: usize, steps: usize) -> bool {
        is_all(host, self.params().slice(0, elems * 4), Self::param_after(steps))
    }

    /// The fp32 parameters.
    pub fn params(&self) -> PinnedSlice {
        self.state.arrays[StatePart::PARAMS]
    }
}

/// Whether all elements of `memory` are `value`.
pub fn is_all<T: bytemuck::Pod + PartialEq>(host: &HostMemory, memory: PinnedSlice, value: T) -> bool {
    host.lend::<T>(memory).iter().all(|&each| each == value)
}

/// A cast of bf16 gradients to fp32 on the pool, as a separate pass.
pub struct Widen {
    from: PinnedSlice,
    to: PinnedSlice,
}

/// Elements of a piece.
const PIECE_ELEMS: usize = 32 << 10;

// SAFETY: only `Optimizer::widen` creates this job, on memory that stays; one job runs at a time, and a piece writes only its part of `to`.
unsafe impl Job for Widen {
    fn label(&self) -> (&'static str, u32) {
        ("widen", 0)
    }

    fn traffic_bytes(&self) -> u64 {
        (self.from.bytes() + self.to.bytes()) as u64
    }

    fn pieces(&self) -> usize {
        (self.from.bytes() / 2).div_ceil(PIECE_ELEMS)
    }

    unsafe fn run(&self, piece: usize) {
        let start = piece * PIECE_ELEMS;
        let elems = PIECE_ELEMS.min(self.from.bytes() / 2 - start);
        // SAFETY: no job writes `from` while this one runs.
        let from = unsafe { self.from.slice(2 * start, 2 * elems).as_slice::<u16>() };
        // SAFETY: no other thread runs this piece or accesses its part of `to`.
        let to = unsafe { self.to.slice(4 * start, 4 * elems).as_mut_slice::<u32>() };
        to.iter_mut().zip(from).for_each(|(to, from)| *to = u32::from(*from) << 16);
    }
}

/// A job of the optimizer's threads.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum HostJob {
    /// The optimizer's pass.
    Step(StepJob),
    /// A cast of gradients.
    Widen(Widen),
}

impl HostJob {
    fn job(&self) -> &dyn Job {
        match self {
            Self::Step(job) => job,
            Self::Widen(job) => job,
        }
    }
}

// SAFETY: every method forwards to one of two jobs, which fulfils the contract.
unsafe impl Job for HostJob {
    fn label(&self) -> (&'static str, u32) {
        self.job().label()
    }

    fn traffic_bytes(&self) -> u64 {
        self.job().traffic_bytes()
    }

    fn pieces(&self) -> usize {
        self.job().pieces()
    }

    unsafe fn run(&self, piece: usize) {
        // SAFETY: the caller guarantees that no other thread runs this piece.
        unsafe { self.job().run(piece) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use superoffload::internals::host::run_alone;

    #[test]
    fn widening_keeps_the_number() {
        let mut host = HostMemory::default();
        let elems = PIECE_ELEMS + 5;
        let (from, to) = (host.alloc("from", 2 * elems).unwrap(), host.alloc("to", 4 * elems).unwrap());
        fill(&mut host, from, bf16::from_f32(-1.5));
        let job = HostJob::Widen(Widen { from, to });
        assert_eq!(job.traffic_bytes() as usize, 6 * elems);
        run_alone(job);
        assert!(is_all(&host, to, -1.5f32));
    }
}
