//! Buckets with the engine's memory layout and mid-training values, and the jobs that update them.
#![allow(unsafe_code)]

use half::bf16;
use microbench::{fill_from, values};
use std::sync::Arc;
use superoffload::internals::bucket::Slot;
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::{GradUpdate, HostState, Segment, SlotMemory, StepJob, StepMemory, Work};
use superoffload::internals::host::{HostMemory, Job};
use superoffload::internals::optim::{
    AdamHyper, AdamKernels, Isa, Masters, MomentKind, Moments, Optimizer, SplitMaster, StatePart, Update,
};
use superoffload::{Error, Result};

/// A pass of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PoolPass {
    /// Working weights only.
    Speculate,
    /// The synchronous step.
    Step,
    /// State only.
    Commit,
    /// The last step's commit and the next one's weights, fused.
    CommitThenSpeculate,
}

impl PoolPass {
    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Speculate => "speculate",
            Self::Step => "step",
            Self::Commit => "commit",
            Self::CommitThenSpeculate => "commit_then_speculate",
        }
    }

    fn work(self, buckets: usize, bucket: usize) -> Work {
        let update = |optimizer_step| Update { optimizer_step, learning_rate: 1e-5, scale: 0.5 };
        let pending = GradUpdate { grads: Slot(bucket), update: update(1000) };
        let next = GradUpdate { grads: Slot(buckets + bucket), update: update(1001) };
        match self {
            Self::Speculate => Work::CommitThenSpeculate { pending: None, next },
            Self::Step => Work::Step { undo: None, next },
            Self::Commit => Work::Commit(next),
            Self::CommitThenSpeculate => Work::CommitThenSpeculate { pending: Some(pending), next },
        }
    }
}

/// Parameter slots: the number of buckets whose weights may be in transit to the device.
const PARAM_SLOTS: usize = 4;

/// Elements after which the values repeat.
const PATTERN: usize = 1 << 16;

/// Elements of a row with denormal moments.
const ROW: usize = 1 << 12;

/// Buckets of equal size, with two gradient slots each.
pub struct Buckets {
    state: HostState,
    moments: Moments,
    memory: StepMemory,
    param_slots: usize,
    /// Number of buckets.
    pub count: usize,
    /// Parameters of a bucket.
    pub elems: usize,
    host: HostMemory,
}

impl Buckets {
    /// Allocates in `host` as many buckets of `elems` parameters as `params` parameters fill, at least one.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory.
    ///
    /// # Safety
    /// The buckets outlive all jobs on them, and one job runs at a time.
    pub unsafe fn new(params: usize, elems: usize, (moments, masters): (Moments, Masters), mut host: HostMemory) -> Result<Self> {
        let count = (params / elems).max(1);
        let mut slots = |name: &str, slots: usize| -> Result<SlotMemory> {
            let memory = host.alloc_periodic(name, slots * elems * 2, elems * 2)?;
            Ok(SlotMemory { memory, slot_elems: elems, dtype: Dtype::Bfloat16 })
        };
        // The upper halves of split masters are the working weights, which stay in their slots.
        let (is_split, param_slots) = if masters == Masters::Split { (true, count) } else { (false, PARAM_SLOTS) };
        let (grads, params) = (slots("gradient slots", 2 * count)?, slots("parameter slots", param_slots)?);
        let list = moments.device_arrays(masters);
        let mut array = |part| host.alloc_periodic(list[part].name, list[part].bytes(count * elems), list[part].bytes(elems));
        let arrays = [array(StatePart::PARAMS)?, array(StatePart::M)?, array(StatePart::V)?].into();
        let state = HostState { first: 0, list, arrays, upper: is_split.then_some(params.memory) };
        let hyper = AdamHyper { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let memory = StepMemory {
            grads,
            params,
            segments: Arc::new([Segment { range: 0..count * elems, decay: true }]),
            optimizer: Optimizer::AdamW { hyper, moments },
            kernels: AdamKernels::new(Isa::Scalar)?,
        };
        Ok(Self { state, moments, memory, param_slots, count, elems, host })
    }

    /// Writes deterministic values as of mid-training. In `denormal` of all rows of [`ROW`] elements, the gradients are zero and the first
    /// moments have decayed to denormal numbers, as in rows of an embedding whose tokens no longer occur.
    pub fn fill(&mut self, denormal: f64) {
        let [params, m, v] = self.state.arrays.into_array();
        let pattern = |seed, factor: f32| values(seed, PATTERN).into_iter().map(|x| x * factor).collect::<Vec<_>>();
        let rows = (denormal * (PATTERN / ROW) as f64).round() as usize;
        let decayed = |mut values: Vec<f32>, factor: f32| {
            values[..rows * ROW].iter_mut().for_each(|x| *x *= factor);
            values
        };
        let host = &mut self.host;
        let masters = pattern(1, 0.05);
        match self.state.upper {
            None => {
                fill_from(host, params, &masters);
                fill_from(host, self.memory.params.memory, &[bf16::ZERO]);
            }
            Some(upper) => {
                let halves = masters.into_iter().map(SplitMaster::of).map(|half| (half.weight, half.lower));
                let (weights, lower): (Vec<bf16>, Vec<u16>) = halves.unzip();
                fill_from(host, upper, &weights);
                fill_from(host, params, &lower);
            }
        }
        let first = decayed(pattern(2, 1e-3), 1e-36);
        let second = pattern(3, 1e-3).into_iter().map(|x| x * x).collect();
        for (memory, values, kind) in [(m, first, MomentKind::First), (v, second, MomentKind::Second)] {
            match self.moments {
                Moments::Float32 => fill_from(host, memory, &values),
                Moments::Bfloat16 => fill_from(host, memory, &values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
                Moments::Int8 => fill_from(host, memory, &kind.groups(&values)),
            }
        }
        let grads = decayed(pattern(4, 1e-2), 0.0);
        fill_from(host, self.memory.grads.memory, &grads.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
    }

    /// Fraction of the first moments in memory that are denormal.
    pub fn denormal_moments(&self) -> f64 {
        let m = self.state.arrays[StatePart::M];
        match self.moments {
            Moments::Float32 => fraction(self.host.lend::<f32>(m).iter().map(|x| x.is_subnormal())),
            Moments::Bfloat16 => fraction(self.host.lend::<bf16>(m).iter().map(|x| x.to_f32().is_subnormal())),
            Moments::Int8 => fraction(MomentKind::First.values(self.host.lend(m)).iter().map(|x| x.is_subnormal())),
        }
    }

    /// Job number `index` of a row.
    pub fn job(&self, kernels: AdamKernels, pass: PoolPass, index: usize) -> StepJob {
        let bucket = index % self.count;
        let work = pass.work(self.count, bucket);
        let out = (!matches!(work, Work::Commit(_))).then_some(Slot(index % self.param_slots));
        let range = bucket * self.elems..(bucket + 1) * self.elems;
        // SAFETY: the caller of `new` guarantees that the buckets stay and that one job runs at a time.
        unsafe { StepJob::new(index, (range.clone(), range.start), work, out, self.state, StepMemory { kernels, ..self.memory.clone() }) }
    }

    /// Compares the result of `kernels` on a piece of the first bucket with the scalar specification.
    ///
    /// # Errors
    /// `Resource` that names the pass and the kernels if the results differ.
    pub fn verify(&mut self, kernels: AdamKernels, pass: PoolPass) -> Result<()> {
        let [params, m, v] = self.state.arrays.into_array();
        let written = [params, m, v, self.memory.params.memory].map(|memory| memory.slice(0, memory.bytes().min(HEAD_BYTES)));
        let before = written.map(|memory| self.host.lend::<u8>(memory).to_vec());
        let mut outcome = |kernels| {
            // SAFETY: only this thread has the job.
            unsafe { self.job(kernels, pass, 0).run(0) };
            let after = written.map(|memory| self.host.lend::<u8>(memory).to_vec());
            written.iter().zip(&before).for_each(|(memory, before)| self.host.lend_mut(*memory).copy_from_slice(before));
            after
        };
        if outcome(kernels) == outcome(AdamKernels::new(Isa::Scalar)?) {
            return Ok(());
        }
        Err(Error::resource(format!("verify {} on {kernels}", pass.name()), "it differs from the scalar specification"))
    }
}

/// Fraction of the first [`PATTERN`] `flags` that are set.
fn fraction(flags: impl Iterator<Item = bool>) -> f64 {
    let (set, all) = flags.take(PATTERN).fold((0, 0), |(set, all), flag| (set + u32::from(flag), all + 1));
    f64::from(set) / f64::from(all)
}

/// Bytes of each array that `verify` compares: more than one piece.
const HEAD_BYTES: usize = 140 << 10;
