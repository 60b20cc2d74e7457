//! No vector shells: the feature is off, or there are none for this architecture.

pub(super) use super::plain::{denormals_noted, fence, forget_denormals, forget_underflow, lifted, prefetch, stream, underflow_noted};
use super::{AdamKernels, Isa};

pub(super) const LACKING: &str = "this build lacks it (cargo feature grace-adam, on x86-64 and aarch64)";

pub(super) fn runs(isa: Isa) -> bool {
    isa == Isa::Scalar
}

/// Passes run over whole slices.
pub(super) const WHOLE: bool = true;

impl AdamKernels {
    #[inline]
    pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
        pass(Isa::Scalar)
    }
}
