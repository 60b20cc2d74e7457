//! Memory without hints.

use super::{Isa, StoreLine};

/// # Safety
/// `from` points to a line.
#[inline(always)]
pub(super) unsafe fn stream(_: Isa, to: &mut StoreLine, from: *const StoreLine) {
    // SAFETY: the caller's promise.
    *to = unsafe { *from };
}

#[inline(always)]
pub(super) fn fence() {}

#[inline(always)]
pub(super) fn prefetch(_: *const StoreLine) {}
