//! Memory access without hints, for targets without hand-written stores.

use super::{AdamKernels, BLOCK, Isa, StoreLine};
use crate::optim::lifted_step::{LiftedStep, Numbers};

impl AdamKernels {
    /// Passes of these targets have no blocks.
    pub(super) fn run_vectors<R>(self, _: impl FnOnce(Isa) -> R) -> R {
        unreachable!("passes run over whole slices")
    }
}

/// # Safety
/// `from` points to a line.
#[inline(always)]
pub(super) unsafe fn stream(_: Isa, to: &mut StoreLine, from: *const StoreLine) {
    // SAFETY: the caller upholds the contract.
    *to = unsafe { *from };
}

#[inline(always)]
pub(super) fn fence() {}

#[inline(always)]
pub(super) fn prefetch(_: *const StoreLine) {}

/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn lifted(_: Isa, step: &LiftedStep, block: &mut Numbers<BLOCK>) -> bool {
    step.apply(block)
}

#[inline(always)]
pub(super) fn underflow_noted() -> bool {
    false
}

#[inline(always)]
pub(super) fn forget_underflow() {}

#[inline(always)]
pub(super) fn denormals_noted() -> bool {
    false
}

#[inline(always)]
pub(super) fn forget_denormals() {}
