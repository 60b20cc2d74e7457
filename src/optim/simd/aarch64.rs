//! Vector shells for aarch64.
//!
//! In SVE's shell the compiler takes vectors of any length for the passes that write 16-bit weights. It rates a square root of such
//! a vector dearer than one of 128 bits, so that passes with nothing to narrow (`commit`, `inverse`, fp32 weights) may stay with
//! those, which is all that Grace has. BFCVT would not help: its NaN is not the specification's, and repairing that takes about as
//! many instructions as rounding in integers does.

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

/// No vector length is known here that blocks could be cut for, and none need be: these CPUs notice that whole lines are
/// overwritten and do not read them first (Arm Neoverse V2 technical reference manual, "write streaming mode").
pub(super) const WHOLE: bool = true;

impl AdamKernels {
    /// Inlines `pass` into the shell; its argument is a constant there.
    #[inline]
    pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
        match self.isa {
            // SAFETY: `AdamKernels::new` saw that the CPU has these features.
            Isa::Neon => unsafe { neon(pass) },
            // SAFETY: as above.
            Isa::Sve2 => unsafe { sve2(pass) },
            // `runs` lets nothing else pass.
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
