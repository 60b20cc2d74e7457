//! Vector shells for x86-64.
//!
//! AVX-512's own conversion to bfloat16 (`VCVTNEPS2BF16`) is not used: it treats denormals as zero, so its bits are not the
//! specification's. The time of the conversion by integers is hidden by memory access.

use super::{AdamKernels, BLOCK, Isa, StoreLine};
use crate::optim::lifted_step::{LiftedStep, Numbers};
use std::arch::asm;
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
        Isa::Neon | Isa::Sve2 => false,
    }
}

/// Passes run in blocks, whose results are stored one cache line at a time, with non-temporal stores if selected.
pub(super) const WHOLE: bool = false;

impl AdamKernels {
    /// Inlines `pass` into the shell, where its argument is a constant.
    #[inline]
    pub(super) fn run<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
        match self.isa {
            // SAFETY: `AdamKernels::new` checked that the CPU has these features.
            Isa::Avx2 => unsafe { avx2(pass) },
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512(pass) },
            // `runs` accepts no other instruction set.
            _ => pass(Isa::Scalar),
        }
    }
}

impl AdamKernels {
    /// Like [`AdamKernels::run`], for blocks: the scalar specification, which needs no blocks, is not compiled again for them.
    #[inline]
    pub(super) fn run_vectors<R>(self, pass: impl FnOnce(Isa) -> R) -> R {
        match self.isa {
            // SAFETY: `AdamKernels::new` checked that the CPU has these features.
            Isa::Avx2 => unsafe { avx2(pass) },
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512(pass) },
            _ => unreachable!("{} has no vectors", self.isa),
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

/// [`LiftedStep::apply`], as a separate function for each instruction set, so that it is not compiled for every combination of formats.
///
/// # Safety
/// The CPU supports `isa`.
#[inline(always)]
pub(super) unsafe fn lifted(isa: Isa, step: &LiftedStep, block: &mut Numbers<BLOCK>) -> bool {
    match isa {
        // SAFETY: the caller upholds the contract.
        Isa::Avx2 => unsafe { avx2_lifted(step, block) },
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512_lifted(step, block) },
        _ => step.apply(block),
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2_lifted(step: &LiftedStep, block: &mut Numbers<BLOCK>) -> bool {
    step.apply(block)
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn avx512_lifted(step: &LiftedStep, block: &mut Numbers<BLOCK>) -> bool {
    step.apply(block)
}

/// Flag of MXCSR: an operand was denormal.
const DENORMAL: u32 = 1 << 1;

/// Flag of MXCSR: a result underflowed.
const UNDERFLOW: u32 = 1 << 4;

#[inline(always)]
fn status() -> u32 {
    let mut status = 0u32;
    // SAFETY: every x86-64 CPU has this register, and `status` has its size.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut status, options(nostack, preserves_flags)) };
    status
}

/// Whether the CPU's flags show a denormal operand or an underflow since [`forget_denormals`].
#[inline(always)]
pub(super) fn denormals_noted() -> bool {
    status() & (DENORMAL | UNDERFLOW) != 0
}

/// Whether the CPU's flags show an underflow since [`forget_underflow`] or [`forget_denormals`].
#[inline(always)]
pub(super) fn underflow_noted() -> bool {
    status() & UNDERFLOW != 0
}

#[inline(always)]
pub(super) fn forget_denormals() {
    forget(DENORMAL | UNDERFLOW);
}

#[inline(always)]
pub(super) fn forget_underflow() {
    forget(UNDERFLOW);
}

#[inline(always)]
fn forget(flags: u32) {
    let status = status() & !flags;
    // SAFETY: only exception flags change, which an assembly block may change.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const status, options(nostack, readonly)) };
}

/// Writes a line with non-temporal stores; [`fence`] makes it visible.
///
/// # Safety
/// The CPU supports `isa`, and `from` points to a line.
#[inline(always)]
pub(super) unsafe fn stream(isa: Isa, to: &mut StoreLine, from: *const StoreLine) {
    let to: *mut StoreLine = to;
    // SAFETY: the caller upholds the contract; a line is aligned for every vector.
    unsafe {
        match isa {
            Isa::Avx2 => {
                for half in 0..2 {
                    _mm256_stream_si256(to.cast::<__m256i>().add(half), _mm256_loadu_si256(from.cast::<__m256i>().add(half)));
                }
            }
            Isa::Avx512 => _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())),
            _ => *to = *from,
        }
    }
}

/// Orders the stores of [`stream`] before all later memory accesses.
#[inline(always)]
pub(super) fn fence() {
    // SAFETY: every x86-64 CPU has this instruction.
    unsafe { _mm_sfence() };
}

/// Prefetches a line, at any address.
#[inline(always)]
pub(super) fn prefetch(line: *const StoreLine) {
    // SAFETY: a prefetch reads nothing and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}
