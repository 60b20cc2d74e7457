//! Common parts of the benchmarks: facts about the machine, a bucket of parameters for the optimizer's passes, timed jobs on the engine's
//! pool, memory bandwidth, and a noisy neighbour.
//!
//! - `cargo bench -p microbench`: every pass and cast on every instruction set, on one thread; `-- avx512/step` selects a part
//! - the benchmark `techniques` of the same command: each technique as steps of a small model with and without it, and the planner's search
//! - `host_adam`: the optimizer pool on buckets, next to the memory bandwidth of the same threads
//! - `host_facts`: memory bandwidth by number of threads, the pool's wake-up time, norms and casts
//! - `prepare`: the speed and the memory use of tokenization by number of CPUs
//! - `device_facts`: on a GPU or the CPU device: the link, casts, latencies, buckets through the optimizer, expert products

pub mod facts;
pub mod hog;
pub mod run;
pub mod stream;

use superoffload::internals::dtype::Dtype;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::internals::optim::{AdamConsts, AdamHyper, AdamKernels, AdamState, AdamStep, Grads, Weights};

/// A pass of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The synchronous step.
    Step,
    /// Writes only working weights.
    Speculate,
    /// Updates only the state.
    Commit,
    /// `Commit` of one step and `Speculate` of the next one, fused.
    CommitThenSpeculate,
    /// The algebraic rollback.
    Inverse,
    /// Casts master weights to working weights.
    Emit,
}

impl Pass {
    /// All passes.
    pub const ALL: [Self; 6] = [Self::Step, Self::Speculate, Self::Commit, Self::CommitThenSpeculate, Self::Inverse, Self::Emit];

    /// Name of the pass's method in [`AdamKernels`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Speculate => "speculate",
            Self::Commit => "commit",
            Self::CommitThenSpeculate => "commit_then_speculate",
            Self::Inverse => "inverse",
            Self::Emit => "emit",
        }
    }

    /// Bytes per parameter that the pass reads and writes, without the reads that a cache adds for lines that the pass overwrites.
    pub const fn bytes_per_param(self, grads: Dtype, weights: Dtype) -> usize {
        let (state, grads, weights) = (3 * Dtype::Float32.bytes(), grads.bytes(), weights.bytes());
        match self {
            Self::Step => 2 * state + grads + weights,
            Self::Speculate => state + grads + weights,
            Self::Commit | Self::Inverse => 2 * state + grads,
            Self::CommitThenSpeculate => 2 * state + 2 * grads + weights,
            Self::Emit => Dtype::Float32.bytes() + weights,
        }
    }
}

/// A range of parameters with all arrays that a [`Pass`] uses.
#[derive(Clone, PartialEq)]
pub struct BucketArrays {
    params: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    grads: Typed,
    pending_grads: Typed,
    out: Typed,
}

/// Memory for elements of a format chosen at run time, aligned for any format.
#[derive(Clone, PartialEq)]
struct Typed {
    dtype: Dtype,
    words: Vec<u32>,
}

impl Typed {
    fn new(kernels: AdamKernels, dtype: Dtype, values: &[f32]) -> Self {
        let mut typed = Self { dtype, words: vec![0; values.len() * dtype.bytes() / 4] };
        kernels.emit(values, typed.weights());
        typed
    }

    fn grads(&self) -> Grads<'_> {
        Grads::from_bytes(self.dtype, bytemuck::cast_slice(&self.words))
    }

    fn weights(&mut self) -> Weights<'_> {
        Weights::from_bytes(self.dtype, bytemuck::cast_slice_mut(&mut self.words))
    }
}

impl BucketArrays {
    /// A bucket of `elems` parameters (an even number) with deterministic values as of mid-training.
    pub fn new(elems: usize, grads: Dtype, weights: Dtype, kernels: AdamKernels) -> Self {
        let squares = |values: Vec<f32>| values.into_iter().map(|x| x * x).collect();
        Self {
            params: values(1, elems),
            m: values(2, elems),
            v: squares(values(3, elems)),
            grads: Typed::new(kernels, grads, &values(4, elems)),
            pending_grads: Typed::new(kernels, grads, &values(5, elems)),
            out: Typed::new(kernels, weights, &values(6, elems)),
        }
    }

    /// Runs one pass.
    pub fn run(&mut self, kernels: AdamKernels, pass: Pass) {
        let step = mid_training();
        let grads = self.grads.grads();
        let state = &mut AdamState { first: 0, params: &mut self.params, m: &mut self.m, v: &mut self.v };
        let out = self.out.weights();
        match pass {
            Pass::Step => kernels.step(step, state, grads, out),
            Pass::Speculate => kernels.speculate(step, state, grads, out),
            Pass::Commit => kernels.commit(step, state, grads),
            Pass::CommitThenSpeculate => kernels.commit_then_speculate(step, self.pending_grads.grads(), step, grads, state, out),
            Pass::Inverse => kernels.inverse(step, state, grads),
            Pass::Emit => kernels.emit(state.params, out),
        }
    }

    /// Sums of squares of the gradients, per block, into `partials`.
    pub fn partials(&self, kernels: AdamKernels, partials: &mut [f32]) -> bool {
        kernels.partials(self.grads.grads(), partials)
    }
}

fn mid_training() -> AdamStep {
    let hyper = AdamHyper { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    AdamStep { consts: AdamConsts::new(&hyper, 1000, true), scale: 0.5 }
}

/// Returns `elems` values spread evenly over (-1, 1); `seed` selects the sequence.
pub fn values(seed: u32, elems: usize) -> Vec<f32> {
    let spread = |i: usize| (i as u32).wrapping_add(seed << 16).wrapping_mul(0x9e37_79b9) as i32;
    (0..elems).map(|i| spread(i) as f32 / 2_147_483_648.0).collect()
}

/// Exit code of a benchmark program. Prints the error, if any, to stderr.
pub fn exit_code(outcome: superoffload::Result<()>) -> std::process::ExitCode {
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Writes `value` to all elements of `memory` in `host`, on all CPUs.
pub fn fill<T: bytemuck::Pod + Send + Sync>(host: &mut HostMemory, memory: PinnedSlice, value: T) {
    fill_from(host, memory, &[value]);
}

/// Fills `memory` in `host` with repeated `values`, on all CPUs.
pub fn fill_from<T: bytemuck::Pod + Send + Sync>(host: &mut HostMemory, memory: PinnedSlice, values: &[T]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let all = host.lend_mut::<T>(memory);
    let part_elems = all.len().div_ceil(threads).next_multiple_of(values.len()).max(1);
    let write = |part: &mut [T]| part.chunks_mut(values.len()).for_each(|to| to.copy_from_slice(&values[..to.len()]));
    std::thread::scope(|scope| all.chunks_mut(part_elems).for_each(|part| drop(scope.spawn(move || write(part)))));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_follows_from_the_formats() {
        let bytes = |pass: Pass| pass.bytes_per_param(Dtype::Bfloat16, Dtype::Bfloat16);
        assert_eq!(Pass::ALL.map(bytes), [28, 16, 26, 30, 26, 6]);
        assert_eq!(Pass::CommitThenSpeculate.bytes_per_param(Dtype::Float32, Dtype::Bfloat16), 34);
    }
}
