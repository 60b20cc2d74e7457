//! Buckets of optimizer state as the engine lays them out, and jobs over them.
#![allow(unsafe_code)]

use crate::bucket::slot::Slot;
use crate::dtype::Dtype;
use crate::engine::protocol::coordinator::{GradUpdate, Work};
use crate::engine::step_job::{HostState, Segment, SlotMemory, StepJob, StepMemory};
use crate::error::Result;
use crate::hardware::topology::Topology;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::host::pool::Job;
use crate::optim::adam::AdamHyper;
use crate::optim::moments::Moments;
use crate::optim::optimizer::{Optimizer, Update};
use crate::optim::simd::{AdamKernels, Isa};
use std::sync::Arc;

/// Number of buckets over which jobs alternate.
const BUCKETS: usize = 2;
/// Host bytes per parameter: state, two gradients, a weight.
const PARAM_BYTES: usize = 12 + 2 * 2 + 2;
/// Ratio of the state's size to that of the last-level caches.
const CACHES: usize = 4;
/// The state uses at most one part in this many of the free memory.
const FREE_ONE_IN: usize = 8;
/// Bounds of the parameters of a bucket.
const PARAMS_MIN: usize = 1 << 20;
const PARAMS_MAX: usize = 48 << 20;
/// Assumed size of last-level caches if the system does not report it.
const CACHE_BYTES: usize = 32 << 20;

/// Two buckets of optimizer state.
pub struct States {
    state: HostState,
    memory: StepMemory,
    params: usize,
}

impl States {
    /// Buckets that exceed the caches of `topology`, in memory of `host`.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory; errors of [`AdamKernels::new`].
    ///
    /// # Safety
    /// `host` must outlive all jobs over these states, and only one of them may run at a time.
    pub unsafe fn new(topology: &Topology, host: &mut HostMemory) -> Result<Self> {
        let params = bucket_params(topology);
        let mut slots = |name: &str, slots: usize| -> Result<SlotMemory> {
            let memory = host.alloc_periodic(name, slots * params * 2, params * 2)?;
            Ok(SlotMemory { memory, slot_elems: params, dtype: Dtype::Bfloat16 })
        };
        let (grads, out) = (slots("gradient slots", 2 * BUCKETS)?, slots("parameter slots", BUCKETS)?);
        let mut state = |name: &str, value: f32| -> Result<PinnedSlice> {
            let memory = host.alloc_periodic(name, BUCKETS * params * 4, params * 4)?;
            host.lend_mut::<f32>(memory).fill(value);
            Ok(memory)
        };
        let state = HostState {
            upper: None,
            first: 0,
            list: Moments::Float32.arrays(),
            arrays: [state("parameters", 0.05)?, state("m", 1e-3)?, state("v", 1e-6)?].into(),
        };
        // A zero gradient would be as slow; a NaN bit pattern might not.
        host.lend_mut(grads.memory).fill(half::bf16::from_f32(1e-3));
        let hyper = AdamHyper { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let memory = StepMemory {
            grads,
            params: out,
            segments: Arc::new([Segment { range: 0..BUCKETS * params, decay: true }]),
            optimizer: Optimizer::AdamW { hyper, moments: Moments::Float32 },
            kernels: AdamKernels::new(Isa::detect())?,
        };
        Ok(Self { state, memory, params })
    }

    /// The optimizer pass number `index`.
    pub fn adam(&self, index: usize) -> StepJob {
        let bucket = index % BUCKETS;
        let update = |optimizer_step| Update { optimizer_step, learning_rate: 1e-5, scale: 0.5 };
        let pending = GradUpdate { grads: Slot(bucket), update: update(1000) };
        let next = GradUpdate { grads: Slot(BUCKETS + bucket), update: update(1001) };
        let deferred = Work::CommitThenSpeculate { pending: Some(pending), next };
        self.job(index, if cfg!(feature = "stv") { deferred } else { Work::Step { undo: None, next } })
    }

    /// The cast of parameters to bf16 number `index`.
    pub fn cast(&self, index: usize) -> StepJob {
        self.job(index, Work::Restore { undo: None })
    }

    fn job(&self, index: usize, work: Work) -> StepJob {
        let bucket = index % BUCKETS;
        let range = bucket * self.params..(bucket + 1) * self.params;
        // SAFETY: the caller of `new` guarantees that the memory stays and that one job runs at a time.
        unsafe { StepJob::new(index, (range.clone(), range.start), work, Some(Slot(bucket)), self.state, self.memory.clone()) }
    }

    pub fn triad(&self) -> Triad {
        let [params, m, v] = self.state.arrays.into_array();
        Triad { to: m, from: [params, v] }
    }
}

fn bucket_params(topology: &Topology) -> usize {
    let level = topology.caches.iter().map(|cache| cache.level).max();
    let caches = topology.caches.iter().filter(|cache| Some(cache.level) == level).filter_map(|cache| cache.bytes).sum::<u64>() as usize;
    let caches = if caches == 0 { CACHE_BYTES } else { caches };
    let free = topology.memory_usable_bytes().map_or(usize::MAX, |bytes| bytes as usize) / FREE_ONE_IN;
    let wanted = CACHES * caches / (12 * BUCKETS);
    // With hardly any free memory there is still one bucket. Workers without work would never end the measurement.
    wanted.clamp(PARAMS_MIN, PARAMS_MAX).min(free / (PARAM_BYTES * BUCKETS)).max(1).next_multiple_of(PARAMS_MIN)
}

/// `to = from[0] + 3 from[1]`, as in STREAM.
pub struct Triad {
    to: PinnedSlice,
    from: [PinnedSlice; 2],
}

/// fp32 elements per piece of work.
const PIECE_ELEMS: usize = 32 << 10;

// SAFETY: the caller of `States::new` guarantees that the memory stays and that one job runs at a time. A piece writes its own part of
// `to`, which does not overlap `from`.
unsafe impl Job for Triad {
    fn label(&self) -> (&'static str, u32) {
        ("triad", 0)
    }

    /// Bytes counted as in STREAM.
    fn traffic_bytes(&self) -> u64 {
        3 * self.to.bytes() as u64
    }

    fn pieces(&self) -> usize {
        (self.to.bytes() / 4).div_ceil(PIECE_ELEMS)
    }

    unsafe fn run(&self, piece: usize) {
        let start = piece * PIECE_ELEMS * 4;
        let part = |array: PinnedSlice| array.slice(start, (PIECE_ELEMS * 4).min(array.bytes() - start));
        // SAFETY: no job writes `from` while this one runs.
        let [a, b] = self.from.map(|from| unsafe { part(from).as_slice() });
        // SAFETY: no other thread runs this piece or accesses its part of `to`.
        triad(unsafe { part(self.to).as_mut_slice() }, a, b);
    }
}

fn triad(to: &mut [f32], a: &[f32], b: &[f32]) {
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        *to = a + 3.0 * b;
    }
}

#[cfg(test)]
impl States {
    /// States of a test, which has one pool.
    pub(super) fn leaked(topology: &Topology) -> Self {
        // SAFETY: the memory is never freed, and a pool runs one job at a time.
        unsafe { Self::new(topology, Box::leak(Box::default())) }.unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::{Cache, Process, Topology};
    use crate::host::pool::run_alone;

    fn machine(cache_bytes: u64, free_bytes: u64) -> Topology {
        let cache = |level, bytes| Cache { level, kind: "Unified".into(), bytes: Some(bytes), cpus: Default::default() };
        let caches = vec![cache(2, 1 << 30), cache(3, cache_bytes / 2), cache(3, cache_bytes / 2)];
        Topology { caches, memory_available_bytes: Some(free_bytes), ..unknown() }
    }

    /// A machine without facts.
    fn unknown() -> Topology {
        Topology::read(tempfile::tempdir().unwrap().path(), Process::default())
    }

    #[test]
    fn buckets_are_larger_than_the_caches_and_small_beside_free_memory() {
        assert_eq!(bucket_params(&unknown()), 6 << 20);
        assert_eq!(bucket_params(&machine(300 << 20, 128 << 30)), PARAMS_MAX);
        assert_eq!(bucket_params(&machine(64 << 20, 128 << 30)), 11 << 20);
        assert_eq!(bucket_params(&machine(64 << 20, 1 << 30)), 4 << 20);
        assert_eq!(bucket_params(&machine(64 << 20, 0)), PARAMS_MIN, "nothing is free");
    }

    #[test]
    fn every_job_does_its_work_and_counts_its_bytes() {
        let mut host = HostMemory::default();
        // SAFETY: `host` lives to the end of the test, and jobs run one after the other.
        let states = unsafe { States::new(&machine(1 << 20, 1 << 30), &mut host) }.unwrap();
        fn run(job: impl Job) -> usize {
            let bytes = job.traffic_bytes() as usize;
            run_alone(job);
            bytes
        }
        assert_eq!(run(states.adam(1)), if cfg!(feature = "stv") { 30 } else { 28 } * states.params);
        assert_eq!(run(states.cast(0)), 6 * states.params);
        assert!(host.lend::<u16>(states.memory.params.memory).iter().all(|&weight| weight != 0), "both buckets have weights");
        assert_eq!(run(states.triad()), 24 * states.params);
        let [p, m, v] = states.state.arrays.into_array().map(|array| host.lend::<f32>(array));
        assert!((0..m.len()).all(|i| m[i] == p[i] + 3.0 * v[i]));
    }
}
