//! The passes of [`adam`] and [`norm`], compiled for every instruction set and chosen at run time.
//!
//! Each pass is inlined into a shell function that only enables instructions; the compiler then vectorises the specification itself, so all
//! instruction sets agree bit for bit. Hand-written are the stores of results (see [`Stores`]) and, on x86-64, the codec of 8-bit moments,
//! which has only integer operations (`int8_codec.rs`). On x86-64 a block with denormal moments takes a separate path: see [`lifting`].
#![allow(unsafe_code)]

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::formats::{Grads, Weights, typed};
use crate::optim::moments::Moment;
use crate::optim::norm;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Instruction set of the optimizer's passes, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Isa {
    /// The target's baseline. On x86-64 a fused multiply-add is then a library call, which suits tests but is too slow for training.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// Arm's 128-bit vectors.
    Neon,
    /// Arm's vectors of any length; the code does not depend on the length.
    Sve2,
}

impl Isa {
    /// All instruction sets, for each architecture slowest first.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon, Self::Sve2];

    /// Instruction sets supported by this build and this CPU, slowest first; never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|&isa| shells::runs(isa)).collect()
    }

    /// The fastest of [`Isa::available`].
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|&isa| shells::runs(isa)).unwrap_or(Self::Scalar)
    }

    /// The name that [`Isa::from_str`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
            Self::Sve2 => "sve2",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| Error::usage(format!("unknown instruction set `{name}`; known: {}", names(&Self::ALL))))
    }
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

/// Kind of stores with which the passes of every step write their results; it does not change the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches.
    Temporal,
    /// Non-temporal stores of working weights, one cache line at a time. Working weights are only written, and through the caches each line
    /// would be read first.
    StreamWeights,
    /// Non-temporal stores of the state, too, which evicts it from every cache before the next step reads it.
    Streaming,
}

impl Stores {
    /// The fastest on an H200's host, with [`PREFETCH_ELEMS`]: 13 to 26 % faster than temporal stores without prefetching, and as fast as a
    /// non-temporal copy. Non-temporal stores of the state, which has just been read, gain nothing. `host_adam` measures all variants.
    const DEFAULT: Self = Self::StreamWeights;
}

/// Default prefetch distance. Divisions and square roots fill a core's out-of-order window before it reaches the next lines, and hardware
/// prefetchers stop at every page. A distance of 1024 is as fast; 2048, or the second-level cache as target, is a few percent slower;
/// non-temporal prefetches are 30 % slower.
const PREFETCH_ELEMS: usize = 512;

/// The optimizer's passes on one instruction set. A value exists only if the CPU supports the instruction set.
///
/// Every method is the function of the same name in [`adam`] or [`norm`], over formats known at run time, and has the same panics. After a
/// method has returned, its writes are visible to every thread and device that synchronizes with the return.
#[derive(Clone, Copy, Debug)]
pub struct AdamKernels {
    isa: Isa,
    stores: Stores,
    prefetch_elems: usize,
}

impl AdamKernels {
    /// Passes for `isa`.
    ///
    /// # Errors
    /// `Unsupported` if this build or this CPU does not support it.
    pub fn new(isa: Isa) -> Result<Self> {
        if shells::runs(isa) {
            let (stores, prefetch_elems) = if shells::WHOLE { (Stores::Temporal, 0) } else { (Stores::DEFAULT, PREFETCH_ELEMS) };
            return Ok(Self { isa, stores, prefetch_elems });
        }
        let available = names(&Isa::available());
        Err(Error::Unsupported(format!("instruction set {isa}: {}; available: {available}", shells::LACKING)))
    }

    /// Selects the kind of stores. It has no effect if passes run over whole slices (Arm).
    pub fn with_stores(self, stores: Stores) -> Self {
        Self { stores, ..self }
    }

    /// Selects a prefetch distance of `elems` elements; 0 leaves prefetching to the CPU.
    pub fn with_prefetch(self, elems: usize) -> Self {
        Self { prefetch_elems: elems, ..self }
    }

    pub fn isa(self) -> Isa {
        self.isa
    }

    /// See [`adam::step`].
    pub fn step<M: Moment>(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| adam::step(step, state, g, o));
            }
            let (state, lifting) = (state.sized(g.len()), lifting::Lifting::new(step));
            let [p, m, v] = spans(&state);
            self.run_blocks(g.len(), [p, m, v, ArraySpan::of(o)], (state, o), #[inline(always)] move |(state, o), access, at| {
                let (mut block, grads) = (AdamBlock::load(access, state, &at), access.read(g, &at));
                let (mut new, narrow) = block.buffers(at.len());
                let small = access.careful && lifting.step(access.isa, &mut new, grads, narrow);
                if !access.careful {
                    adam::step(step, &mut new, grads, narrow);
                }
                block.store_state(access, state, &at);
                block.store_out(access, o, &at);
                small
            });
        }));
    }

    /// See [`adam::speculate`].
    pub fn speculate<M: Moment>(self, step: AdamStep, state: &AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| adam::speculate(step, state, g, o));
            }
            state.check_len(g.len());
            let lifting = lifting::Lifting::new(step);
            self.run_blocks(g.len(), [ArraySpan::of(o)], o, #[inline(always)] move |o, access, at| {
                let (mut block, grads) = (AdamBlock::load(access, state, &at), access.read(g, &at));
                let (old, narrow) = block.buffers(at.len());
                let small = access.careful && lifting.speculate(access.isa, &old, grads, narrow);
                if !access.careful {
                    adam::speculate(step, &old, grads, narrow);
                }
                block.store_out(access, o, &at);
                small
            });
        }));
    }

    /// See [`adam::commit`].
    pub fn commit<M: Moment>(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| adam::commit(step, state, g));
            }
            let (state, lifting) = (state.sized(g.len()), lifting::Lifting::new(step));
            self.run_blocks(g.len(), spans(&state), state, #[inline(always)] move |state, access, at| {
                let (mut block, grads) = (AdamBlock::<M, f32>::load(access, state, &at), access.read(g, &at));
                let mut new = block.buffers(at.len()).0;
                let small = access.careful && lifting.commit(access.isa, &mut new, grads);
                if !access.careful {
                    adam::commit(step, &mut new, grads);
                }
                block.store_state(access, state, &at);
                small
            });
        });
    }

    /// See [`adam::commit_then_speculate`].
    ///
    /// # Panics
    /// Also if the two gradients have different formats.
    pub fn commit_then_speculate<M: Moment>(
        self,
        pending: AdamStep,
        pending_grads: Grads<'_>,
        next: AdamStep,
        grads: Grads<'_>,
        state: &mut AdamState<'_, M>,
        out: Weights<'_>,
    ) {
        use Grads::{Bf16, F16, F32};
        match (pending_grads, grads) {
            (F32(h), F32(g)) => self.fused(pending, h, next, g, state, out),
            (Bf16(h), Bf16(g)) => self.fused(pending, h, next, g, state, out),
            (F16(h), F16(g)) => self.fused(pending, h, next, g, state, out),
            _ => panic!("pending gradients must have the format of the gradients"),
        }
    }

    fn fused<M: Moment, G: Element>(
        self,
        pending: AdamStep,
        h: &[G],
        next: AdamStep,
        g: &[G],
        state: &mut AdamState<'_, M>,
        out: Weights<'_>,
    ) {
        typed!(Weights(o) = out => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| adam::commit_then_speculate(pending, h, next, g, state, o));
            }
            let (state, first, then) = (state.sized(g.len()), lifting::Lifting::new(pending), lifting::Lifting::new(next));
            let [p, m, v] = spans(&state);
            assert_eq!(h.len(), g.len(), "pending gradients against gradients");
            self.run_blocks(g.len(), [p, m, v, ArraySpan::of(o)], (state, o), #[inline(always)] move |(state, o), access, at| {
                let mut block = AdamBlock::load(access, state, &at);
                let (h, g) = (access.read(h, &at), access.read(g, &at));
                let (mut new, narrow) = block.buffers(at.len());
                let small = access.careful && first.commit(access.isa, &mut new, h) | then.speculate(access.isa, &new, g, narrow);
                if !access.careful {
                    adam::commit_then_speculate(pending, h, next, g, &mut new, narrow);
                }
                block.store_state(access, state, &at);
                block.store_out(access, o, &at);
                small
            });
        });
    }

    /// See [`adam::inverse`].
    pub fn inverse<M: Moment>(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => self.run(#[inline(always)] |_| adam::inverse(step, state, g)));
    }

    /// See [`adam::emit`].
    pub fn emit(self, params: &[f32], out: Weights<'_>) {
        typed!(Weights(o) = out => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| adam::emit(params, o));
            }
            assert_eq!(params.len(), o.len(), "params against working weights");
            self.run_blocks(o.len(), [ArraySpan::of(o)], o, #[inline(always)] move |o, access, at| {
                access.emit(access.read(params, &at), &mut o[at]);
                false
            });
        });
    }

    /// See [`norm::partials`].
    pub fn partials(self, grads: Grads<'_>, out: &mut [f32]) -> bool {
        typed!(Grads(g) = grads => {
            if self.isa != Isa::Scalar && shells::underflow_noted() {
                let (nonfinite, small) = self.run(#[inline(always)] |_| norm::partials_of_any_size(g, out));
                if !small {
                    shells::forget_underflow();
                }
                return nonfinite;
            }
            self.run(#[inline(always)] |_| norm::partials(g, out))
        })
    }
}

impl fmt::Display for AdamKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stores = match self.stores {
            Stores::Temporal => "",
            Stores::StreamWeights => " stream-weights",
            Stores::Streaming => " streaming",
        };
        write!(f, "{}{stores}", self.isa)?;
        if self.prefetch_elems > 0 { write!(f, " +{}", self.prefetch_elems) } else { Ok(()) }
    }
}

/// Size of a cache line.
const LINE_BYTES: usize = 64;

/// Elements of a block: a whole number of cache lines in every format.
const BLOCK: usize = 32;

#[derive(Clone, Copy)]
struct ArraySpan {
    addr: usize,
    elem_bytes: usize,
    elems: usize,
}

impl ArraySpan {
    #[inline(always)]
    fn of<T>(array: &[T]) -> Self {
        Self { addr: array.as_ptr().addr(), elem_bytes: size_of::<T>(), elems: array.len() }
    }

    #[inline(always)]
    fn at(self, elem: usize) -> usize {
        self.addr + elem * self.elem_bytes
    }
}

#[inline(always)]
fn spans<M: Moment>(state: &AdamState<'_, M>) -> [ArraySpan; 3] {
    [ArraySpan::of(state.params), ArraySpan::of(state.m), ArraySpan::of(state.v)]
}

/// Working data of a pass, in registers if the compiler has enough of them. Results are stored one cache line at a time.
#[repr(align(64))]
struct AdamBlock<M, O> {
    first: usize,
    params: [f32; BLOCK],
    m: [M; BLOCK],
    v: [M; BLOCK],
    out: [O; BLOCK],
}

impl<M: Moment, O: Element> AdamBlock<M, O> {
    /// Loads the elements `at` of the state, at most a block.
    #[inline(always)]
    fn load(access: PassAccess, state: &AdamState<'_, M>, at: &Range<usize>) -> Self {
        let (params, m, v) = (access.head(state.params, at), access.head(state.m, at), access.head(state.v, at));
        Self { first: state.first.wrapping_add(at.start), params, m, v, out: [O::from_f32(0.0); BLOCK] }
    }

    /// The first `elems` elements, and memory for their working weights.
    #[inline(always)]
    fn buffers(&mut self, elems: usize) -> (AdamState<'_, M>, &mut [O]) {
        let Self { first, params, m, v, out } = self;
        (AdamState { first: *first, params: &mut params[..elems], m: &mut m[..elems], v: &mut v[..elems] }, &mut out[..elems])
    }

    #[inline(always)]
    fn store_state(&self, access: PassAccess, state: &mut AdamState<'_, M>, at: &Range<usize>) {
        access.write(access.stream_state, &mut state.params[at.clone()], &self.params);
        access.write(access.stream_state, &mut state.m[at.clone()], &self.m);
        access.write(access.stream_state, &mut state.v[at.clone()], &self.v);
    }

    #[inline(always)]
    fn store_out(&self, access: PassAccess, out: &mut [O], at: &Range<usize>) {
        access.write(access.stream_out, &mut out[at.clone()], &self.out);
    }
}

/// Data aligned to cache lines.
#[repr(align(64))]
struct LineAligned<T>(T);

/// Memory access of a pass.
#[derive(Clone, Copy)]
struct PassAccess {
    /// Supported by the CPU.
    isa: Isa,
    stream_state: bool,
    stream_out: bool,
    prefetch_elems: usize,
    /// Whether the block goes through [`Lifting`]; a constant inside the passes.
    careful: bool,
}

impl PassAccess {
    /// The elements `at`; prefetches later elements.
    #[inline(always)]
    fn read<'a, T>(self, array: &'a [T], at: &Range<usize>) -> &'a [T] {
        self.prefetch(array, at.start);
        &array[at.clone()]
    }

    /// Prefetches the block that a pass at element `at` will read later.
    #[inline(always)]
    fn prefetch<T>(self, array: &[T], at: usize) {
        if self.prefetch_elems > 0 {
            let later = array.as_ptr().wrapping_add(at + self.prefetch_elems).cast::<StoreLine>();
            (0..size_of::<[T; BLOCK]>() / LINE_BYTES).for_each(|line| shells::prefetch(later.wrapping_add(line)));
        }
    }

    /// A block that begins with the elements `at`.
    #[inline(always)]
    fn head<T: bytemuck::Pod>(self, array: &[T], at: &Range<usize>) -> [T; BLOCK] {
        let mut block = [T::zeroed(); BLOCK];
        block[..at.len()].copy_from_slice(self.read(array, at));
        block
    }

    /// See [`adam::emit`]; at most a block.
    #[inline(always)]
    fn emit<O: Element>(self, params: &[f32], out: &mut [O]) {
        let mut block = LineAligned([O::from_f32(0.0); BLOCK]);
        adam::emit(params, &mut block.0[..params.len()]);
        self.write(self.stream_out, out, &block.0);
    }

    /// Fills `to` from the beginning of `block`. If it `streams`, `to` must be a whole block, aligned to cache lines.
    #[inline(always)]
    fn write<T: bytemuck::Pod>(self, streams: bool, to: &mut [T], block: &[T; BLOCK]) {
        if !streams {
            return to.copy_from_slice(&block[..to.len()]);
        }
        let (to, from) = (bytemuck::cast_slice_mut::<T, StoreLine>(to), block.as_ptr().cast::<StoreLine>());
        assert!(size_of_val(to) <= size_of_val(block));
        for (i, to) in to.iter_mut().enumerate() {
            // SAFETY: the block has at least as many lines as `to`; the CPU supports the instruction set.
            unsafe { shells::stream(self.isa, to, from.add(i)) };
        }
    }
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct StoreLine([u8; LINE_BYTES]);

mod blocks;
mod int8;
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod int8_avx2;
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod int8_avx512;
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod int8_codec;
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod int8_vectors;
mod lifting;
mod split;

// The shells that run a pass on an instruction set, and their hand-written parts.
#[cfg(not(all(feature = "grace-adam", target_arch = "x86_64")))]
#[path = "simd/plain.rs"]
mod plain;
#[cfg(all(feature = "grace-adam", target_arch = "aarch64"))]
#[path = "simd/aarch64.rs"]
mod shells;
#[cfg(not(all(feature = "grace-adam", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "simd/portable.rs"]
mod shells;
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
#[path = "simd/x86_64.rs"]
mod shells;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{AdamConsts, AdamHyper};
    use crate::optim::samples::{assert_same, ordinary, wild};
    use half::{bf16, f16};

    mod campaign;
    mod guard_pages;
    mod int8;
    mod split;
    #[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
    mod watched;

    /// Inputs of one pass; its outputs overwrite them.
    #[derive(Clone)]
    struct Case<M, G, O> {
        /// Index in the flat order.
        first: usize,
        params: Vec<f32>,
        m: Vec<M>,
        v: Vec<M>,
        grads: Vec<G>,
        pending_grads: Vec<G>,
        out: Vec<O>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Pass {
        Step,
        Speculate,
        Commit,
        CommitThenSpeculate,
        Inverse,
        Emit,
    }

    const PASSES: [Pass; 6] = [Pass::Step, Pass::Speculate, Pass::Commit, Pass::CommitThenSpeculate, Pass::Inverse, Pass::Emit];

    fn steps() -> (AdamStep, AdamStep) {
        let hyper = AdamHyper { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let at = |step, scale| AdamStep { consts: AdamConsts::new(&hyper, step, true), scale };
        (at(3, 0.37), at(4, 1.0))
    }

    /// Runs `pass` of the pending step, or of the pending and the next one, over formats known at run time.
    fn run<M: Moment, G: Element, O: Element>(
        kernels: AdamKernels,
        pass: Pass,
        (pending, next): (AdamStep, AdamStep),
        mut state: AdamState<'_, M>,
        grads: [&[G]; 2],
        out: &mut [O],
    ) {
        let [pending_grads, grads] = grads.map(|grads| Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(grads)));
        let (state, out) = (&mut state, Weights::from_bytes(O::DTYPE, bytemuck::cast_slice_mut(out)));
        match pass {
            Pass::Step => kernels.step(pending, state, grads, out),
            Pass::Speculate => kernels.speculate(pending, state, grads, out),
            Pass::Commit => kernels.commit(pending, state, grads),
            Pass::CommitThenSpeculate => kernels.commit_then_speculate(pending, pending_grads, next, grads, state, out),
            Pass::Inverse => kernels.inverse(pending, state, grads),
            Pass::Emit => kernels.emit(state.params, out),
        }
    }

    /// Chosen so that indices in the flat order cross 2^32 within a case.
    const FIRST: usize = (1 << 32) - 50;

    impl<M: Moment, G: Element, O: Element> Case<M, G, O> {
        fn ordinary(len: usize) -> Self {
            let v = ordinary(3, len).into_iter().map(|v: f32| M::from_f32(v.abs())).collect();
            let (grads, pending_grads) = (ordinary(4, len), ordinary(5, len));
            Self { first: FIRST, params: ordinary(1, len), m: ordinary(2, len), v, grads, pending_grads, out: ordinary(6, len) }
        }

        fn wild(len: usize) -> Self {
            let (grads, pending_grads) = (wild(4, len), wild(5, len));
            Self { first: FIRST, params: wild(1, len), m: wild(2, len), v: wild(3, len), grads, pending_grads, out: ordinary(6, len) }
        }

        fn by_specification(&mut self, pass: Pass, (pending, next): (AdamStep, AdamStep)) {
            let Self { first, params, m, v, grads, pending_grads, out } = self;
            let state = &mut AdamState { first: *first, params, m, v };
            match pass {
                Pass::Step => adam::step(pending, state, grads, out),
                Pass::Speculate => adam::speculate(pending, state, grads, out),
                Pass::Commit => adam::commit(pending, state, grads),
                Pass::CommitThenSpeculate => adam::commit_then_speculate(pending, pending_grads, next, grads, state, out),
                Pass::Inverse => adam::inverse(pending, state, grads),
                Pass::Emit => adam::emit(state.params, out),
            }
        }

        /// Runs `pass` on copies of the arrays that begin `offsets` (state, weights) elements after a cache line, and checks that the
        /// memory around them is unchanged.
        fn by_kernels(&mut self, kernels: AdamKernels, pass: Pass, steps: (AdamStep, AdamStep), offsets: [usize; 2]) {
            let Self { first, params, m, v, grads, pending_grads, out } = self;
            let (mut masters, mut weights) = (Placed::new(params, offsets[0]), Placed::new(out, offsets[1]));
            let mut moments = [m, v].map(|array| (Placed::new(array, offsets[0]), array));
            let [m, v] = moments.each_mut().map(|(placed, _)| placed.inner());
            let state = AdamState { first: *first, params: masters.inner(), m, v };
            run(kernels, pass, steps, state, [pending_grads, grads], weights.inner());
            moments.iter_mut().for_each(|(placed, array)| placed.take_back(array));
            masters.take_back(params);
            weights.take_back(out);
        }

        fn check(&self, pass: Pass, stores: &[Stores], offsets: [usize; 2]) {
            let mut golden = self.clone();
            golden.by_specification(pass, steps());
            for isa in Isa::available() {
                for &stores in stores {
                    let (mut got, kernels) = (self.clone(), AdamKernels::new(isa).unwrap().with_stores(stores));
                    got.by_kernels(kernels, pass, steps(), offsets);
                    let formats = format!("{} to {}, moments {}", G::DTYPE, O::DTYPE, M::DTYPE);
                    let label = |field| format!("{kernels} {pass:?} {formats}, {} elements at {offsets:?}: {field}", self.grads.len());
                    assert_same(&got.params, &golden.params, &label("params"));
                    assert_same(&got.m, &golden.m, &label("m"));
                    assert_same(&got.v, &golden.v, &label("v"));
                    assert_same(&got.out, &golden.out, &label("out"));
                }
            }
        }
    }

    struct Placed<T> {
        buffer: Vec<T>,
        array: Range<usize>,
    }

    impl<T: Element> Placed<T> {
        /// Copies `values` so that they begin `offset` elements after a cache line.
        fn new(values: &[T], offset: usize) -> Self {
            let per_line = LINE_BYTES / size_of::<T>();
            let mut buffer = vec![T::from_f32(7.0); 2 * per_line + offset + values.len()];
            let start = buffer.as_ptr().align_offset(LINE_BYTES) + offset;
            let array = start..start + values.len();
            buffer[array.clone()].copy_from_slice(values);
            Self { buffer, array }
        }

        fn inner(&mut self) -> &mut [T] {
            &mut self.buffer[self.array.clone()]
        }

        fn take_back(&mut self, values: &mut [T]) {
            values.copy_from_slice(self.inner());
            let around = [&self.buffer[..self.array.start], &self.buffer[self.array.end..]];
            assert!(around.iter().all(|part| part.iter().all(|x| *x == T::from_f32(7.0))), "elements around the array");
        }
    }

    const STORES: [Stores; 3] = [Stores::Temporal, Stores::StreamWeights, Stores::Streaming];

    /// Lengths and offsets around the boundaries of lines and blocks; offsets with and without a common boundary.
    fn check_places<M: Moment, G: Element, O: Element>() {
        let offsets = [[0, 0], [1, 1], [15, 15], [16, 16], [31, 31], [17, 1], [0, 1], [5, 4]];
        for pass in PASSES {
            for len in (0..4).chain(14..19).chain(30..35).chain(46..50).chain(62..67).chain(94..99).chain([4096 + 13]) {
                let case = Case::<M, G, O>::wild(len);
                offsets.iter().for_each(|&offsets| case.check(pass, &STORES, offsets));
            }
        }
    }

    #[test]
    fn every_kind_of_store_agrees_with_the_specification_at_every_place() {
        check_places::<f32, f32, f32>();
        check_places::<f32, bf16, bf16>();
        check_places::<f32, f32, f16>();
        check_places::<bf16, f32, f32>();
        check_places::<bf16, bf16, bf16>();
    }

    fn check_formats<M: Moment, G: Element, O: Element>() {
        for pass in PASSES {
            for len in (0..=200).chain([4096 + 13]) {
                Case::<M, G, O>::ordinary(len).check(pass, &[Stores::Streaming], [0, 0]);
                Case::<M, G, O>::wild(len).check(pass, &[Stores::Streaming], [0, 0]);
            }
        }
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_f32() {
        check_formats::<f32, f32, f32>();
        check_formats::<f32, f32, bf16>();
        check_formats::<f32, f32, f16>();
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_bf16() {
        check_formats::<f32, bf16, f32>();
        check_formats::<f32, bf16, bf16>();
        check_formats::<f32, bf16, f16>();
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_f16() {
        check_formats::<f32, f16, f32>();
        check_formats::<f32, f16, bf16>();
        check_formats::<f32, f16, f16>();
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_of_packed_moments() {
        check_formats::<bf16, f32, f32>();
        check_formats::<bf16, f32, bf16>();
        check_formats::<bf16, bf16, bf16>();
        check_formats::<bf16, f16, f16>();
    }

    fn check_partials<G: Element>(grads: &[G]) {
        let mut golden = vec![0.0; grads.len().div_ceil(norm::BLOCK)];
        let nonfinite = norm::partials(grads, &mut golden);
        for isa in Isa::available() {
            let mut got = vec![0.0; golden.len()];
            let grads = Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(grads));
            assert_eq!(AdamKernels::new(isa).unwrap().partials(grads, &mut got), nonfinite, "{isa}");
            assert_same(&got, &golden, &format!("{isa} partials of {}", G::DTYPE));
        }
    }

    #[test]
    fn all_instruction_sets_agree_on_partials() {
        for len in (0..=300).chain([norm::BLOCK, 3 * norm::BLOCK + 129]) {
            check_partials::<f32>(&ordinary(1, len));
            check_partials::<bf16>(&ordinary(2, len));
            check_partials::<f16>(&ordinary(3, len));
            check_partials::<f32>(&wild(4, len));
            check_partials::<bf16>(&wild(5, len));
            check_partials::<f16>(&wild(6, len));
        }
    }

    #[test]
    fn names_read_back_and_unknown_ones_are_usage_errors() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        let error = "sse9".parse::<Isa>().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("scalar, avx2, avx512, neon, sve2"));
    }

    #[test]
    fn the_fastest_available_is_detected_and_the_rest_refused() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        assert_eq!(available.last(), Some(&Isa::detect()));
        for isa in Isa::ALL {
            let kernels = AdamKernels::new(isa);
            assert_eq!(kernels.is_ok(), available.contains(&isa), "{isa}");
        }
        if !cfg!(feature = "grace-adam") {
            assert_eq!(available, [Isa::Scalar]);
        }
    }
}
