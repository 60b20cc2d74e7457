//! The passes of [`adam`] and [`norm`], compiled once for every instruction set and chosen at run time.
//!
//! There is no vector arithmetic here. Each pass is inlined into a shell that only turns instructions on; the compiler
//! then vectorises the specification itself, which is why all instruction sets agree to the bit. Written by hand is only
//! how results reach memory: see [`Stores`].
#![allow(unsafe_code)]

use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::norm;
use half::{bf16, f16};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Instruction set of the optimizer's passes, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target guarantees. On x86-64 a fused multiply-add is then a library call: the specification, not a way to train.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Isa {
    /// All, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Those that this build holds and this CPU runs, slowest first; never empty.
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

/// Gradients of a format known at run time.
#[derive(Clone, Copy, Debug)]
pub enum Grads<'a> {
    /// `float32`.
    F32(&'a [f32]),
    /// `bfloat16`.
    Bf16(&'a [bf16]),
    /// `float16`.
    F16(&'a [f16]),
}

impl<'a> Grads<'a> {
    /// Reads `bytes` as gradients of `dtype`.
    ///
    /// # Panics
    /// If `dtype` is no float, or `bytes` is misaligned for it or no whole number of elements.
    pub fn from_bytes(dtype: Dtype, bytes: &'a [u8]) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32(bytemuck::cast_slice(bytes)),
            Dtype::Bfloat16 => Self::Bf16(bytemuck::cast_slice(bytes)),
            Dtype::Float16 => Self::F16(bytemuck::cast_slice(bytes)),
            Dtype::Int32 => panic!("gradients of {dtype}"),
        }
    }
}

/// Working weights of a format known at run time, to be written.
#[derive(Debug)]
pub enum Weights<'a> {
    /// `float32`.
    F32(&'a mut [f32]),
    /// `bfloat16`.
    Bf16(&'a mut [bf16]),
    /// `float16`.
    F16(&'a mut [f16]),
}

impl<'a> Weights<'a> {
    /// Takes `bytes` as room for working weights of `dtype`.
    ///
    /// # Panics
    /// As [`Grads::from_bytes`].
    pub fn from_bytes(dtype: Dtype, bytes: &'a mut [u8]) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32(bytemuck::cast_slice_mut(bytes)),
            Dtype::Bfloat16 => Self::Bf16(bytemuck::cast_slice_mut(bytes)),
            Dtype::Float16 => Self::F16(bytemuck::cast_slice_mut(bytes)),
            Dtype::Int32 => panic!("working weights of {dtype}"),
        }
    }
}

/// Runs `$body` with the typed slice inside a [`Grads`] or a [`Weights`].
macro_rules! typed {
    ($kind:ident($slice:ident) = $value:expr => $body:expr) => {
        match $value {
            $kind::F32($slice) => $body,
            $kind::Bf16($slice) => $body,
            $kind::F16($slice) => $body,
        }
    };
}

/// How the passes that run every step write their results. The results are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches.
    Temporal,
    /// Past the caches, a line at a time: what a pass writes has left every cache before the next step reads it, and until
    /// then it would only displace what others need. The scalar instruction set has no such stores.
    Streaming,
}

/// The optimizer's passes on one instruction set. Holding one proves that the CPU has it.
///
/// Every method is the function of the same name in [`adam`] or [`norm`], over formats known at run time, and panics
/// where that one does. What it wrote is visible to whoever learns that it has returned, devices included.
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
    /// `Unsupported` if this build or this CPU lacks it.
    pub fn new(isa: Isa) -> Result<Self> {
        if shells::runs(isa) {
            return Ok(Self { isa, stores: Stores::Streaming, prefetch_elems: 0 });
        }
        let available = names(&Isa::available());
        Err(Error::Unsupported(format!("instruction set {isa}: {}; available: {available}", shells::LACKING)))
    }

    /// The same passes, with other stores.
    pub fn with_stores(self, stores: Stores) -> Self {
        Self { stores, ..self }
    }

    /// The same passes, which ask for memory `elems` elements ahead; 0: the CPU guesses well enough.
    pub fn with_prefetch(self, elems: usize) -> Self {
        Self { prefetch_elems: elems, ..self }
    }

    /// The instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// See [`adam::step`].
    pub fn step(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => {
            let [p, m, v] = state_places(state);
            let (read, written) = ([p, m, v, Place::of(g)], [p, m, v, Place::of(o)]);
            self.run_blocks(read, written, #[inline(always)] |writer, at| {
                let mut block = Block::load(state, &at);
                let (mut new, narrow) = block.room(at.len());
                adam::step(step, &mut new, &g[at.clone()], narrow);
                block.store_state(writer, state, &at);
                block.store_out(writer, o, &at);
            });
        }));
    }

    /// See [`adam::speculate`].
    pub fn speculate(self, step: AdamStep, state: &AdamState<'_>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => {
            let [p, m, v] = state_places(state);
            self.run_blocks([p, m, v, Place::of(g)], [Place::of(o)], #[inline(always)] |writer, at| {
                let mut block = Block::load(state, &at);
                let (old, narrow) = block.room(at.len());
                adam::speculate(step, &old, &g[at.clone()], narrow);
                block.store_out(writer, o, &at);
            });
        }));
    }

    /// See [`adam::commit`].
    pub fn commit(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => {
            let [p, m, v] = state_places(state);
            self.run_blocks([p, m, v, Place::of(g)], [p, m, v], #[inline(always)] |writer, at| {
                let mut block = Block::<f32>::load(state, &at);
                adam::commit(step, &mut block.room(at.len()).0, &g[at.clone()]);
                block.store_state(writer, state, &at);
            });
        });
    }

    /// See [`adam::commit_then_speculate`].
    ///
    /// # Panics
    /// Also if the two gradients differ in format.
    pub fn commit_then_speculate(
        self,
        pending: AdamStep,
        pending_grads: Grads<'_>,
        next: AdamStep,
        grads: Grads<'_>,
        state: &mut AdamState<'_>,
        out: Weights<'_>,
    ) {
        use Grads::{Bf16, F16, F32};
        match (pending_grads, grads) {
            (F32(h), F32(g)) => self.fused(pending, h, next, g, state, out),
            (Bf16(h), Bf16(g)) => self.fused(pending, h, next, g, state, out),
            (F16(h), F16(g)) => self.fused(pending, h, next, g, state, out),
            _ => panic!("pending gradients and gradients differ in format"),
        }
    }

    fn fused<G: Element>(
        self,
        pending: AdamStep,
        pending_grads: &[G],
        next: AdamStep,
        grads: &[G],
        state: &mut AdamState<'_>,
        out: Weights<'_>,
    ) {
        typed!(Weights(o) = out => {
            let [p, m, v] = state_places(state);
            let (read, written) = ([p, m, v, Place::of(pending_grads), Place::of(grads)], [p, m, v, Place::of(o)]);
            self.run_blocks(read, written, #[inline(always)] |writer, at| {
                let mut block = Block::load(state, &at);
                let (mut new, narrow) = block.room(at.len());
                adam::commit_then_speculate(pending, &pending_grads[at.clone()], next, &grads[at.clone()], &mut new, narrow);
                block.store_state(writer, state, &at);
                block.store_out(writer, o, &at);
            });
        });
    }

    /// See [`adam::inverse`].
    pub fn inverse(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => self.run(#[inline(always)] |_| adam::inverse(step, state, g)));
    }

    /// See [`adam::emit`].
    pub fn emit(self, params: &[f32], out: Weights<'_>) {
        typed!(Weights(o) = out => self.run(#[inline(always)] |_| adam::emit(params, o)));
    }

    /// See [`norm::partials`].
    pub fn partials(self, grads: Grads<'_>, out: &mut [f32]) -> bool {
        typed!(Grads(g) = grads => self.run(#[inline(always)] |_| norm::partials(g, out)))
    }

    /// Runs `pass` block by block over arrays of equal length, with the writer for what each block `written`.
    #[inline(always)]
    fn run_blocks<const R: usize, const W: usize>(self, read: [Place; R], written: [Place; W], mut pass: impl FnMut(Writer, Range<usize>)) {
        let elems = read[0].elems;
        assert!(read.iter().chain(&written).all(|place| place.elems == elems), "arrays of one pass differ in length");
        let lead = (0..BLOCK).find(|&lead| written.iter().all(|place| place.at(lead).is_multiple_of(LINE_BYTES)));
        self.run(
            #[inline(always)]
            |isa| {
                let writer = if self.stores == Stores::Streaming && lead.is_some() { Writer::Streaming(isa) } else { Writer::Plain };
                let start = lead.unwrap_or(0).min(elems);
                let end = elems - (elems - start) % BLOCK;
                for start in (start..end).step_by(BLOCK) {
                    if self.prefetch_elems > 0 {
                        read.iter().for_each(|place| place.prefetch(start + self.prefetch_elems));
                    }
                    pass(writer, start..start + BLOCK);
                }
                for edge in [0..start, end..elems] {
                    pass(Writer::Plain, edge);
                }
            },
        );
        shells::fence();
    }
}

impl fmt::Display for AdamKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.isa)?;
        match (self.stores, self.prefetch_elems) {
            (Stores::Temporal, 0) => Ok(()),
            (Stores::Streaming, 0) => f.write_str(" streaming"),
            (Stores::Temporal, elems) => write!(f, " +{elems}"),
            (Stores::Streaming, elems) => write!(f, " streaming +{elems}"),
        }
    }
}

/// What memory and cache exchange.
const LINE_BYTES: usize = 64;

/// Elements of a block: a whole number of lines in every format.
const BLOCK: usize = 32;

/// Where an array lies.
#[derive(Clone, Copy)]
struct Place {
    addr: usize,
    elem_bytes: usize,
    elems: usize,
}

impl Place {
    #[inline(always)]
    fn of<T>(array: &[T]) -> Self {
        Self { addr: array.as_ptr().addr(), elem_bytes: size_of::<T>(), elems: array.len() }
    }

    #[inline(always)]
    fn at(self, elem: usize) -> usize {
        self.addr + elem * self.elem_bytes
    }

    /// Asks for the block that starts at `elem`, which may lie beyond the end.
    #[inline(always)]
    fn prefetch(self, elem: usize) {
        for line in 0..BLOCK * self.elem_bytes / LINE_BYTES {
            shells::prefetch(self.at(elem) + line * LINE_BYTES);
        }
    }
}

#[inline(always)]
fn state_places(state: &AdamState<'_>) -> [Place; 3] {
    [Place::of(state.params), Place::of(state.m), Place::of(state.v)]
}

/// What a pass works on, in registers when the compiler has enough of them: results leave it a line at a time.
#[repr(align(64))]
struct Block<O> {
    params: [f32; BLOCK],
    m: [f32; BLOCK],
    v: [f32; BLOCK],
    out: [O; BLOCK],
}

impl<O: Element> Block<O> {
    /// The state of the elements `at`, at most a block.
    #[inline(always)]
    fn load(state: &AdamState<'_>, at: &Range<usize>) -> Self {
        Self { params: head(state.params, at), m: head(state.m, at), v: head(state.v, at), out: [O::from_f32(0.0); BLOCK] }
    }

    /// The first `elems` elements and room for their working weights.
    #[inline(always)]
    fn room(&mut self, elems: usize) -> (AdamState<'_>, &mut [O]) {
        let state = AdamState { params: &mut self.params[..elems], m: &mut self.m[..elems], v: &mut self.v[..elems] };
        (state, &mut self.out[..elems])
    }

    #[inline(always)]
    fn store_state(&self, writer: Writer, state: &mut AdamState<'_>, at: &Range<usize>) {
        writer.write(&mut state.params[at.clone()], &self.params);
        writer.write(&mut state.m[at.clone()], &self.m);
        writer.write(&mut state.v[at.clone()], &self.v);
    }

    #[inline(always)]
    fn store_out(&self, writer: Writer, out: &mut [O], at: &Range<usize>) {
        writer.write(&mut out[at.clone()], &self.out);
    }
}

/// A block that begins with the elements `at` of `array`.
#[inline(always)]
fn head(array: &[f32], at: &Range<usize>) -> [f32; BLOCK] {
    let mut block = [0.0; BLOCK];
    block[..at.len()].copy_from_slice(&array[at.clone()]);
    block
}

/// Writes blocks.
#[derive(Clone, Copy)]
enum Writer {
    Plain,
    /// Whole lines, with the stores of an instruction set that the CPU has.
    Streaming(Isa),
}

impl Writer {
    /// Fills `to` from the beginning of `block`.
    #[inline(always)]
    fn write<T: Element>(self, to: &mut [T], block: &[T; BLOCK]) {
        match self {
            Self::Plain => to.copy_from_slice(&block[..to.len()]),
            Self::Streaming(isa) => {
                let (to, from) = (bytemuck::cast_slice_mut::<T, Line>(to), block.as_ptr().cast::<Line>());
                assert!(size_of_val(to) <= size_of_val(block));
                for (i, to) in to.iter_mut().enumerate() {
                    // SAFETY: the block has as many lines as `to`, and `run` hands out only instruction sets that the CPU has.
                    unsafe { shells::stream(isa, to, from.add(i)) };
                }
            }
        }
    }
}

/// A cache line.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// Vector shells for x86-64.
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod shells {
    use super::{AdamKernels, Isa, Line};
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    pub(super) const LACKING: &str = "this CPU lacks it";

    pub(super) fn runs(isa: Isa) -> bool {
        match isa {
            Isa::Scalar => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            Isa::Avx512 => {
                runs(Isa::Avx2)
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
        }
    }

    impl AdamKernels {
        /// Inlines `pass` into the shell; its argument is a constant there.
        #[inline]
        pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
            match self.isa {
                Isa::Scalar => pass(Isa::Scalar),
                // SAFETY: `AdamKernels::new` saw that the CPU has these features.
                Isa::Avx2 => unsafe { avx2(pass) },
                // SAFETY: as above.
                Isa::Avx512 => unsafe { avx512(pass) },
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2<R>(pass: impl FnOnce(Isa) -> R) -> R {
        pass(Isa::Avx2)
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    fn avx512<R>(pass: impl FnOnce(Isa) -> R) -> R {
        pass(Isa::Avx512)
    }

    /// Writes a line past the caches; [`fence`] makes it visible.
    ///
    /// # Safety
    /// The CPU has `isa`, and `from` points to a line.
    #[inline(always)]
    pub(super) unsafe fn stream(isa: Isa, to: &mut Line, from: *const Line) {
        let to: *mut Line = to;
        // SAFETY: the caller's promise; a line is aligned for every vector.
        unsafe {
            match isa {
                Isa::Scalar => *to = *from,
                Isa::Avx2 => {
                    for half in 0..2 {
                        _mm256_stream_si256(to.cast::<__m256i>().add(half), _mm256_loadu_si256(from.cast::<__m256i>().add(half)));
                    }
                }
                Isa::Avx512 => _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())),
            }
        }
    }

    /// Orders the stores of [`stream`] before everything that follows.
    #[inline(always)]
    pub(super) fn fence() {
        // SAFETY: every x86-64 CPU has this instruction.
        unsafe { _mm_sfence() };
    }

    /// Asks for the line at `addr`, any number.
    #[inline(always)]
    pub(super) fn prefetch(addr: usize) {
        // SAFETY: a prefetch touches nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(addr)) };
    }
}

/// No vector shells: the feature is off, or the target's baseline already has vectors (Arm).
#[cfg(not(all(feature = "grace-adam", target_arch = "x86_64")))]
mod shells {
    use super::{AdamKernels, Isa, Line};

    pub(super) const LACKING: &str = "this build lacks it (cargo feature grace-adam, x86-64 only)";

    pub(super) fn runs(isa: Isa) -> bool {
        isa == Isa::Scalar
    }

    impl AdamKernels {
        #[inline]
        pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
            pass(Isa::Scalar)
        }
    }

    /// # Safety
    /// `from` points to a line.
    #[inline(always)]
    pub(super) unsafe fn stream(_: Isa, to: &mut Line, from: *const Line) {
        // SAFETY: the caller's promise.
        *to = unsafe { *from };
    }

    #[inline(always)]
    pub(super) fn fence() {}

    #[inline(always)]
    pub(super) fn prefetch(_: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{AdamConsts, AdamHyper};
    use crate::optim::samples::{assert_same, ordinary, wild};

    /// One pass's inputs, and its outputs in the same place.
    #[derive(Clone)]
    struct Case<G, O> {
        params: Vec<f32>,
        m: Vec<f32>,
        v: Vec<f32>,
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

    impl<G: Element, O: Element> Case<G, O> {
        fn ordinary(len: usize) -> Self {
            let v = ordinary(3, len).into_iter().map(f32::abs).collect();
            let (grads, pending_grads) = (ordinary(4, len), ordinary(5, len));
            Self { params: ordinary(1, len), m: ordinary(2, len), v, grads, pending_grads, out: ordinary(6, len) }
        }

        fn wild(len: usize) -> Self {
            let (grads, pending_grads) = (wild(4, len), wild(5, len));
            Self { params: wild(1, len), m: wild(2, len), v: wild(3, len), grads, pending_grads, out: ordinary(6, len) }
        }

        fn by_specification(&mut self, pass: Pass) {
            let (pending, next) = steps();
            let Self { params, m, v, grads, pending_grads, out } = self;
            let state = &mut AdamState { params, m, v };
            match pass {
                Pass::Step => adam::step(pending, state, grads, out),
                Pass::Speculate => adam::speculate(pending, state, grads, out),
                Pass::Commit => adam::commit(pending, state, grads),
                Pass::CommitThenSpeculate => adam::commit_then_speculate(pending, pending_grads, next, grads, state, out),
                Pass::Inverse => adam::inverse(pending, state, grads),
                Pass::Emit => adam::emit(state.params, out),
            }
        }

        fn by_kernels(&mut self, kernels: AdamKernels, pass: Pass) {
            let (pending, next) = steps();
            let Self { params, m, v, grads, pending_grads, out } = self;
            let state = &mut AdamState { params, m, v };
            let grads = Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(grads));
            let pending_grads = Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(pending_grads));
            let out = Weights::from_bytes(O::DTYPE, bytemuck::cast_slice_mut(out));
            match pass {
                Pass::Step => kernels.step(pending, state, grads, out),
                Pass::Speculate => kernels.speculate(pending, state, grads, out),
                Pass::Commit => kernels.commit(pending, state, grads),
                Pass::CommitThenSpeculate => kernels.commit_then_speculate(pending, pending_grads, next, grads, state, out),
                Pass::Inverse => kernels.inverse(pending, state, grads),
                Pass::Emit => kernels.emit(state.params, out),
            }
        }

        fn check(&self, pass: Pass) {
            let mut golden = self.clone();
            golden.by_specification(pass);
            for isa in Isa::available() {
                let mut got = self.clone();
                got.by_kernels(AdamKernels::new(isa).unwrap(), pass);
                let what = |field| format!("{isa} {pass:?} {} to {}, {} elements: {field}", G::DTYPE, O::DTYPE, self.grads.len());
                assert_same(&got.params, &golden.params, &what("params"));
                assert_same(&got.m, &golden.m, &what("m"));
                assert_same(&got.v, &golden.v, &what("v"));
                assert_same(&got.out, &golden.out, &what("out"));
            }
        }
    }

    fn check_formats<G: Element, O: Element>() {
        for pass in PASSES {
            for len in (0..=200).chain([4096 + 13]) {
                Case::<G, O>::ordinary(len).check(pass);
                Case::<G, O>::wild(len).check(pass);
            }
        }
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_f32() {
        check_formats::<f32, f32>();
        check_formats::<f32, bf16>();
        check_formats::<f32, f16>();
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_bf16() {
        check_formats::<bf16, f32>();
        check_formats::<bf16, bf16>();
        check_formats::<bf16, f16>();
    }

    #[test]
    fn all_instruction_sets_agree_with_the_specification_f16() {
        check_formats::<f16, f32>();
        check_formats::<f16, bf16>();
        check_formats::<f16, f16>();
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
        assert!(error.to_string().contains("scalar, avx2, avx512"));
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
