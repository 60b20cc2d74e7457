//! The passes of [`adam`] and [`norm`], compiled once for every instruction set and chosen at run time.
//!
//! There is no vector code here. Each pass is inlined into a shell that only turns instructions on; the compiler then
//! vectorises the specification itself, which is why all instruction sets agree to the bit.
#![allow(unsafe_code)]

use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::norm;
use half::{bf16, f16};
use std::fmt;
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

/// The optimizer's passes on one instruction set. Holding one proves that the CPU has it.
///
/// Every method is the function of the same name in [`adam`] or [`norm`], over formats known at run time, and panics
/// where that one does.
#[derive(Clone, Copy, Debug)]
pub struct AdamKernels {
    isa: Isa,
}

impl AdamKernels {
    /// Passes for `isa`.
    ///
    /// # Errors
    /// `Unsupported` if this build or this CPU lacks it.
    pub fn new(isa: Isa) -> Result<Self> {
        if shells::runs(isa) {
            return Ok(Self { isa });
        }
        let available = names(&Isa::available());
        Err(Error::Unsupported(format!("instruction set {isa}: {}; available: {available}", shells::LACKING)))
    }

    /// The instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// See [`adam::step`].
    pub fn step(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => self.run(#[inline(always)] || adam::step(step, state, g, o))));
    }

    /// See [`adam::speculate`].
    pub fn speculate(self, step: AdamStep, state: &AdamState<'_>, grads: Grads<'_>, out: Weights<'_>) {
        typed!(Grads(g) = grads => typed!(Weights(o) = out => self.run(#[inline(always)] || adam::speculate(step, state, g, o))));
    }

    /// See [`adam::commit`].
    pub fn commit(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => self.run(#[inline(always)] || adam::commit(step, state, g)));
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
        typed!(Weights(o) = out => self.run(
            #[inline(always)]
            || adam::commit_then_speculate(pending, pending_grads, next, grads, state, o)
        ));
    }

    /// See [`adam::inverse`].
    pub fn inverse(self, step: AdamStep, state: &mut AdamState<'_>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => self.run(#[inline(always)] || adam::inverse(step, state, g)));
    }

    /// See [`adam::emit`].
    pub fn emit(self, params: &[f32], out: Weights<'_>) {
        typed!(Weights(o) = out => self.run(#[inline(always)] || adam::emit(params, o)));
    }

    /// See [`norm::partials`].
    pub fn partials(self, grads: Grads<'_>, out: &mut [f32]) -> bool {
        typed!(Grads(g) = grads => self.run(#[inline(always)] || norm::partials(g, out)))
    }
}

/// Vector shells for x86-64.
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
mod shells {
    use super::{AdamKernels, Isa};

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
        #[inline]
        pub(super) fn run<R>(self, pass: impl FnOnce() -> R) -> R {
            match self.isa {
                Isa::Scalar => pass(),
                // SAFETY: `AdamKernels::new` saw that the CPU has these features.
                Isa::Avx2 => unsafe { avx2(pass) },
                // SAFETY: as above.
                Isa::Avx512 => unsafe { avx512(pass) },
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2<R>(pass: impl FnOnce() -> R) -> R {
        pass()
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    fn avx512<R>(pass: impl FnOnce() -> R) -> R {
        pass()
    }
}

/// No vector shells: the feature is off, or the target's baseline already has vectors (Arm).
#[cfg(not(all(feature = "grace-adam", target_arch = "x86_64")))]
mod shells {
    use super::{AdamKernels, Isa};

    pub(super) const LACKING: &str = "this build lacks it (cargo feature grace-adam, x86-64 only)";

    pub(super) fn runs(isa: Isa) -> bool {
        isa == Isa::Scalar
    }

    impl AdamKernels {
        #[inline]
        pub(super) fn run<R>(self, pass: impl FnOnce() -> R) -> R {
            pass()
        }
    }
}
