//! Vectors of AVX-512 for the codec of 8-bit moments.
//!
//! Instructions that narrow or widen do so within 128 bits. Half words are left in the order in which `narrow` stores them: the first four
//! of each of two vectors, then the next four. Only bytes are brought into the order of elements, for both moments at once.

use super::int8_vectors::{HALVES, Vectors};
use crate::optim::int8::BLOCK;
use std::arch::x86_64::{
    __m256i, __m512i, _mm_cvtsi128_si32, _mm_min_epu16, _mm_minpos_epu16, _mm256_castsi256_si128, _mm256_extracti128_si256,
    _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi16, _mm512_add_epi32, _mm512_and_si512, _mm512_castsi256_si512,
    _mm512_castsi512_si256, _mm512_extracti64x4_epi64, _mm512_inserti64x4, _mm512_loadu_si512, _mm512_maskz_mov_epi16, _mm512_min_epu16,
    _mm512_packs_epi32, _mm512_packus_epi16, _mm512_packus_epi32, _mm512_permutexvar_epi32, _mm512_set1_epi16, _mm512_set1_epi32,
    _mm512_setr_epi32, _mm512_setzero_si512, _mm512_shuffle_i64x2, _mm512_slli_epi16, _mm512_srai_epi16, _mm512_srli_epi16,
    _mm512_srli_epi32, _mm512_storeu_si512, _mm512_subs_epu16, _mm512_test_epi16_mask, _mm512_unpackhi_epi8, _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi8, _mm512_unpacklo_epi16,
};

/// See the module.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl Vectors for Avx512 {
    type Words = __m512i;
    type Halves = __m512i;

    #[inline(always)]
    unsafe fn splat(value: u32) -> __m512i {
        // SAFETY: the caller upholds the contract.
        unsafe { _mm512_set1_epi32(value as i32) }
    }

    #[inline(always)]
    unsafe fn load_bits(from: &[u32; BLOCK], at: usize) -> __m512i {
        // SAFETY: as above; the slice has 16 words.
        unsafe { _mm512_loadu_si512(from[at..][..16].as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn shift<const BITS: u32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srli_epi32::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn narrow([a, b]: [__m512i; HALVES]) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_packus_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn narrow_signs([a, b]: [__m512i; HALVES]) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_packs_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn halves(value: u16) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi16(value as i16) }
    }

    #[inline(always)]
    unsafe fn and_halves(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn add_halves(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi16(a, b) }
    }

    #[inline(always)]
    unsafe fn less(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_subs_epu16(a, b) }
    }

    #[inline(always)]
    unsafe fn shift_halves<const BITS: u32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srli_epi16::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn shift_halves_signed<const BITS: u32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srai_epi16::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn shift_halves_left<const BITS: u32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_slli_epi16::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn where_some(a: __m512i, bits: __m512i, then: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(a, bits), then) }
    }

    #[inline(always)]
    unsafe fn least([a, b]: [__m512i; 2]) -> [u16; 2] {
        // SAFETY: as above.
        unsafe {
            // The least of pairs, `a`'s in the lower half.
            let (lower, upper) = (_mm512_shuffle_i64x2::<0b01_00_01_00>(a, b), _mm512_shuffle_i64x2::<0b11_10_11_10>(a, b));
            let both = _mm512_min_epu16(lower, upper);
            [least_of_16(_mm512_castsi512_si256(both)), least_of_16(_mm512_extracti64x4_epi64::<1>(both))]
        }
    }

    #[inline(always)]
    unsafe fn store_upper(upper: __m512i, to: &mut [f32; BLOCK]) {
        // SAFETY: as above.
        unsafe {
            let zero = _mm512_setzero_si512();
            _mm512_storeu_si512(to[..16].as_mut_ptr().cast(), _mm512_unpacklo_epi16(zero, upper));
            _mm512_storeu_si512(to[16..].as_mut_ptr().cast(), _mm512_unpackhi_epi16(zero, upper));
        }
    }

    #[inline(always)]
    unsafe fn load_codes([a, b]: [&[u8; BLOCK]; 2]) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let lower = _mm512_castsi256_si512(_mm256_loadu_si256(a.as_ptr().cast()));
            let both = _mm512_inserti64x4::<1>(lower, _mm256_loadu_si256(b.as_ptr().cast()));
            // A lane has four bytes of each vector of words: of `a`'s, then of `b`'s.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let (lanes, zero) = (_mm512_permutexvar_epi32(order, both), _mm512_setzero_si512());
            [_mm512_unpacklo_epi8(zero, lanes), _mm512_unpackhi_epi8(zero, lanes)]
        }
    }

    #[inline(always)]
    unsafe fn store_codes([a, b]: [__m512i; 2], [to_a, to_b]: [&mut [u8; BLOCK]; 2]) {
        // SAFETY: as above.
        unsafe {
            // The inverse of the order in `load_codes` is the order itself.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let both = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
            _mm256_storeu_si256(to_a.as_mut_ptr().cast(), _mm512_castsi512_si256(both));
            _mm256_storeu_si256(to_b.as_mut_ptr().cast(), _mm512_extracti64x4_epi64::<1>(both));
        }
    }
}

/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn least_of_16(all: __m256i) -> u16 {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let eight = _mm_min_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
        _mm_cvtsi128_si32(_mm_minpos_epu16(eight)) as u16
    }
}
