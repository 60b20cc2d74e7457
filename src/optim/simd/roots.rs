//! Square roots of a block by AVX-512 without the divider of the CPU, with the bits of [`f32::sqrt`].
//!
//! A core computes square roots and quotients in one unit, which its hardware threads share. It takes 18 cycles for 16 square roots and 16
//! for 16 quotients (Intel Golden Cove). A pass with two updates of 8-bit moments needs 4 of each for a block, and little memory traffic,
//! so that this unit limits it. Here a square root takes an estimate of 14 bits and 7 operations of other units: one step of Newton's
//! method for the root and half of its reciprocal, and a correction by the exact remainder, which rounds correctly (Markstein, "IA-64 and
//! Elementary Functions", 2000, chapter 9).

use super::BLOCK;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_castps_si512, _mm512_cmplt_epu32_mask, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_rsqrt14_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_sqrt_ps, _mm512_storeu_ps, _mm512_sub_epi32,
};

/// From 2^-100 on the remainder, 2^-48 times as large, is exact.
const LEAST: u32 = (127 - 100) << 23;
/// Below 2^126 nothing overflows.
const LIMIT: u32 = (127 + 126) << 23;

/// The square roots of `x`. The divider computes those of a block with a number outside of 2^-100 to 2^126.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(super) unsafe fn roots(x: &[f32; BLOCK]) -> [f32; BLOCK] {
    let mut to = [0.0; BLOCK];
    // SAFETY: the caller upholds the contract; both arrays have two vectors.
    unsafe {
        let x = [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr())];
        let roots = if are_ordinary(x) { [root(x[0]), root(x[1])] } else { [_mm512_sqrt_ps(x[0]), _mm512_sqrt_ps(x[1])] };
        _mm512_storeu_ps(to.as_mut_ptr(), roots[0]);
        _mm512_storeu_ps(to[16..].as_mut_ptr(), roots[1]);
    }
    to
}

#[inline(always)]
unsafe fn are_ordinary([a, b]: [__m512; 2]) -> bool {
    // SAFETY: the caller upholds the contract.
    unsafe { above_least(a) & above_least(b) == u16::MAX }
}

/// The lanes with numbers from [`LEAST`] to [`LIMIT`]. NaN and negative numbers have larger bits.
#[inline(always)]
unsafe fn above_least(x: __m512) -> u16 {
    // SAFETY: as above.
    unsafe {
        let above: __m512i = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(LEAST as i32));
        _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32((LIMIT - LEAST) as i32))
    }
}

#[inline(always)]
unsafe fn root(x: __m512) -> __m512 {
    // SAFETY: as above.
    unsafe {
        let (estimate, half) = (_mm512_rsqrt14_ps(x), _mm512_set1_ps(0.5));
        let (root, half_inverse) = (_mm512_mul_ps(x, estimate), _mm512_mul_ps(estimate, half));
        let error = _mm512_fnmadd_ps(root, half_inverse, half);
        let (root, half_inverse) = (_mm512_fmadd_ps(root, error, root), _mm512_fmadd_ps(half_inverse, error, half_inverse));
        _mm512_fmadd_ps(_mm512_fnmadd_ps(root, root, x), half_inverse, root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::simd::Isa;

    /// As [`roots`], where the CPU has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn tested(x: &[f32; BLOCK]) -> [f32; BLOCK] {
        // SAFETY: this function runs with AVX-512.
        unsafe { roots(x) }
    }

    fn assert_exact(x: [f32; BLOCK]) {
        // SAFETY: the tests below run with AVX-512.
        let got = unsafe { tested(&x) };
        for (x, got) in x.into_iter().zip(got) {
            assert!(got.to_bits() == x.sqrt().to_bits() || got.is_nan() && x.sqrt().is_nan(), "{x:e}: {got:e}");
        }
    }

    /// Powers of four only move the exponents, so two binades stand for all.
    #[test]
    fn every_mantissa_has_the_root_of_the_divider() {
        if !Isa::available().contains(&Isa::Avx512) {
            return;
        }
        for first in (1f32.to_bits()..4f32.to_bits()).step_by(BLOCK) {
            assert_exact(std::array::from_fn(|i| f32::from_bits(first + i as u32)));
        }
    }

    #[test]
    fn numbers_beyond_the_range_are_left_to_the_divider() {
        if !Isa::available().contains(&Isa::Avx512) {
            return;
        }
        let edges = [LEAST, LIMIT].map(|bits| [f32::from_bits(bits - 1), f32::from_bits(bits), f32::from_bits(bits + 1)]);
        let special = [0.0, -0.0, 1e-45, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN, -1.0, -f32::INFINITY];
        for x in edges.into_iter().flatten().chain(special) {
            for lane in 0..BLOCK {
                let mut block = [2.0; BLOCK];
                block[lane] = x;
                assert_exact(block);
            }
            assert_exact([x; BLOCK]);
        }
        for exponent in 1..255u32 {
            assert_exact(std::array::from_fn(|i| f32::from_bits(exponent << 23 | (i as u32).wrapping_mul(0x9e37_79b9) >> 9)));
        }
    }
}
