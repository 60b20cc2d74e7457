//! Vectors of AVX2 for the codec of 8-bit moments: each is a pair of vectors of 256 bits.
//!
//! As with AVX-512, instructions narrow and widen within 128 bits, and half words are left in the order in which `narrow` stores them.

use super::int8_vectors::{HALVES, Vectors};
use crate::optim::int8::BLOCK;
use std::arch::x86_64::{
    __m256i, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_min_epu16, _mm_minpos_epu16, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256,
    _mm256_andnot_si256, _mm256_castsi256_si128, _mm256_cmpeq_epi16, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_min_epu16,
    _mm256_packs_epi32, _mm256_packus_epi16, _mm256_packus_epi32, _mm256_permutevar8x32_epi32, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_setr_epi32, _mm256_setzero_si256, _mm256_sll_epi16, _mm256_sra_epi16, _mm256_srl_epi16, _mm256_srl_epi32, _mm256_storeu_si256,
    _mm256_subs_epu16, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16,
};

/// See the module.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Applies an instruction to both vectors of pairs.
macro_rules! both {
    ($instruction:ident($a:expr)) => {{
        let [lower, upper] = $a;
        [$instruction(lower), $instruction(upper)]
    }};
    ($instruction:ident($a:expr, each $b:expr)) => {{
        let ([lower, upper], b) = ($a, $b);
        [$instruction(lower, b), $instruction(upper, b)]
    }};
    ($instruction:ident($a:expr, $b:expr)) => {{
        let ([a_lower, a_upper], [b_lower, b_upper]) = ($a, $b);
        [$instruction(a_lower, b_lower), $instruction(a_upper, b_upper)]
    }};
}

impl Vectors for Avx2 {
    type Words = [__m256i; 2];
    type Halves = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat(value: u32) -> [__m256i; 2] {
        // SAFETY: the caller upholds the contract, here and below.
        unsafe { [_mm256_set1_epi32(value as i32); 2] }
    }

    #[inline(always)]
    unsafe fn load_bits(from: &[u32; BLOCK], at: usize) -> [__m256i; 2] {
        let from = from[at..][..16].as_ptr().cast::<__m256i>();
        // SAFETY: as above; the slice has two vectors.
        unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
    }

    #[inline(always)]
    unsafe fn and(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_and_si256(a, b)) }
    }

    #[inline(always)]
    unsafe fn add(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_add_epi32(a, b)) }
    }

    #[inline(always)]
    unsafe fn shift<const BITS: u32>(a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_srl_epi32(a, each _mm_cvtsi32_si128(BITS as i32))) }
    }

    #[inline(always)]
    unsafe fn narrow([a, b]: [[__m256i; 2]; HALVES]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_packus_epi32(a, b)) }
    }

    #[inline(always)]
    unsafe fn narrow_signs([a, b]: [[__m256i; 2]; HALVES]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_packs_epi32(a, b)) }
    }

    #[inline(always)]
    unsafe fn halves(value: u16) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_set1_epi16(value as i16); 2] }
    }

    #[inline(always)]
    unsafe fn and_halves(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_and_si256(a, b)) }
    }

    #[inline(always)]
    unsafe fn add_halves(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_add_epi16(a, b)) }
    }

    #[inline(always)]
    unsafe fn less(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_subs_epu16(a, b)) }
    }

    #[inline(always)]
    unsafe fn shift_halves<const BITS: u32>(a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_srl_epi16(a, each _mm_cvtsi32_si128(BITS as i32))) }
    }

    #[inline(always)]
    unsafe fn shift_halves_signed<const BITS: u32>(a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_sra_epi16(a, each _mm_cvtsi32_si128(BITS as i32))) }
    }

    #[inline(always)]
    unsafe fn shift_halves_left<const BITS: u32>(a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { both!(_mm256_sll_epi16(a, each _mm_cvtsi32_si128(BITS as i32))) }
    }

    #[inline(always)]
    unsafe fn where_some(a: [__m256i; 2], bits: [__m256i; 2], then: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let none = both!(_mm256_cmpeq_epi16(both!(_mm256_and_si256(a, bits)), each _mm256_setzero_si256()));
            both!(_mm256_andnot_si256(none, then))
        }
    }

    #[inline(always)]
    unsafe fn least([a, b]: [[__m256i; 2]; 2]) -> [u16; 2] {
        // SAFETY: as above.
        unsafe { [least_of_block(a), least_of_block(b)] }
    }

    #[inline(always)]
    unsafe fn store_upper([lower, upper]: [__m256i; 2], to: &mut [f32; BLOCK]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: as above; a block has four vectors.
        unsafe {
            let zero = _mm256_setzero_si256();
            _mm256_storeu_si256(to, _mm256_unpacklo_epi16(zero, lower));
            _mm256_storeu_si256(to.add(1), _mm256_unpacklo_epi16(zero, upper));
            _mm256_storeu_si256(to.add(2), _mm256_unpackhi_epi16(zero, lower));
            _mm256_storeu_si256(to.add(3), _mm256_unpackhi_epi16(zero, upper));
        }
    }

    #[inline(always)]
    unsafe fn load_codes([a, b]: [&[u8; BLOCK]; 2]) -> [[__m256i; 2]; 2] {
        // SAFETY: as above.
        unsafe { [load_block(a), load_block(b)] }
    }

    #[inline(always)]
    unsafe fn store_codes([a, b]: [[__m256i; 2]; 2], [to_a, to_b]: [&mut [u8; BLOCK]; 2]) {
        // SAFETY: as above.
        unsafe {
            store_block(a, to_a);
            store_block(b, to_b);
        }
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn least_of_block([a, b]: [__m256i; 2]) -> u16 {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let all = _mm256_min_epu16(a, b);
        let eight = _mm_min_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
        _mm_cvtsi128_si32(_mm_minpos_epu16(eight)) as u16
    }
}

/// Four bytes of each vector of 256 bits of words, for the lower lane, then the same for the upper lane.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn load_block(from: &[u8; BLOCK]) -> [__m256i; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let bytes = _mm256_loadu_si256(from.as_ptr().cast());
        let lanes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
        let zero = _mm256_setzero_si256();
        [_mm256_unpacklo_epi8(zero, lanes), _mm256_unpackhi_epi8(zero, lanes)]
    }
}

/// The inverse of [`load_block`].
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn store_block([a, b]: [__m256i; 2], to: &mut [u8; BLOCK]) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
        _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes);
    }
}
