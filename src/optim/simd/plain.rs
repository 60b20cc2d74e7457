//! Memory without hints.

use super::{Isa, Line};

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
pub(super) fn prefetch(_: *const Line) {}
