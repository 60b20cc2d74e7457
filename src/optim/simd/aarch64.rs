//! Vector shells for aarch64.
//!
//! In the SVE shell the compiler uses scalable vectors for the passes that write 16-bit weights. It assigns a square root of a scalable
//! vector a higher cost than one of a 128-bit vector. Passes without 16-bit results (`commit`, `inverse`, fp32 weights) may therefore stay
//! with 128-bit vectors, which is the vector length of Grace. BFCVT would not help: its NaN is not the specification's, and correcting it
//! takes about as many instructions as rounding with integers.

pub(super) use super::plain::{denormals_noted, fence, forget_denormals, forget_underflow, lifted, prefetch, stream, underflow_noted};
use super::{AdamKernels, Isa};
use std::arch::is_aarch64_feature_detected;

pub(super) const LACKING: &str = "this CPU lacks it";

pub(super) fn runs(isa: Isa) -> bool {
    match isa {
        Isa::Scalar => true,
        Isa::Neon => is_aarch64_feature_detected!("neon"),
        Isa::Sve2 => is_aarch64_feature_detected!("sve2"),
        Isa::Avx2 | Isa::Avx512 => false,
    }
}

/// The vector length is unknown, so there is no suitable block size, and blocks are not necessary: these CPUs detect that whole lines are
/// overwritten and do not read them first (Arm Neoverse V2 technical reference manual, "write streaming mode").
pub(super) const WHOLE: bool = true;

impl AdamKernels {
    /// Inlines `pass` into the shell, where its argument is a constant.
    #[inline]
    pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
        match self.isa {
            // SAFETY: `AdamKernels::new` checked that the CPU has these features.
            Isa::Neon => unsafe { neon(pass) },
            // SAFETY: as above.
            Isa::Sve2 => unsafe { sve2(pass) },
            // `runs` accepts no other instruction set.
            _ => pass(Isa::Scalar),
        }
    }
}

#[target_feature(enable = "neon")]
fn neon<R>(pass: impl FnOnce(Isa) -> R) -> R {
    pass(Isa::Neon)
}

#[target_feature(enable = "sve2")]
fn sve2<R>(pass: impl FnOnce(Isa) -> R) -> R {
    pass(Isa::Sve2)
}
