//! The codec of 8-bit moments by AVX-512, bit-identical to [`MomentKind`]. The compiler vectorises the specification, too, but divides the
//! decoding into pieces of odd sizes and moves the exponent of a block through general registers: with this code the fused pass takes about
//! a tenth less time.

use crate::optim::int8::{BLOCK, BlockCodec, DROPPED, HALF_UNIT, MAGNITUDE, MANTISSA, MomentKind};
use crate::optim::moments::Rounding;
use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_max_epu32, _mm_set1_epi32, _mm_shuffle_epi32, _mm_slli_epi32, _mm_srli_epi32,
    _mm_storeu_si128, _mm_sub_epi32, _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_max_epu32, _mm512_add_epi32,
    _mm512_and_si512, _mm512_andnot_si512, _mm512_broadcastd_epi32, _mm512_castsi512_si256, _mm512_cvtepi32_epi8, _mm512_cvtepu8_epi32,
    _mm512_extracti64x4_epi64, _mm512_loadu_si512, _mm512_maskz_or_epi32, _mm512_max_epu32, _mm512_min_epu32, _mm512_set1_epi32,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_si512, _mm512_sub_epi32, _mm512_test_epi32_mask,
};

/// Lanes of a vector.
const LANES: usize = 16;

/// The codec; a value exists only in passes that run with AVX-512.
#[derive(Clone, Copy)]
pub(super) struct Avx512Codec(());

impl Avx512Codec {
    /// # Safety
    /// The caller runs with AVX-512.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl BlockCodec for Avx512Codec {
    #[inline(always)]
    fn decode(self, kind: MomentKind, codes: &[u8; BLOCK], exponent: u8) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        // SAFETY: there is AVX-512, and every access is within an array.
        unsafe {
            let base = splat(u32::from(exponent) << MANTISSA);
            for at in [0, LANES] {
                let code = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().add(at).cast()));
                let value = match kind {
                    MomentKind::First => {
                        let (k, sign) = (_mm512_and_si512(code, splat(0x7f)), _mm512_and_si512(code, splat(0x80)));
                        let magnitude = _mm512_slli_epi32::<DROPPED>(_mm512_add_epi32(k, base));
                        _mm512_maskz_or_epi32(_mm512_test_epi32_mask(k, k), magnitude, _mm512_slli_epi32::<24>(sign))
                    }
                    MomentKind::Second => _mm512_slli_epi32::<DROPPED>(_mm512_add_epi32(code, base)),
                };
                _mm512_storeu_si512(values.as_mut_ptr().add(at).cast(), value);
            }
        }
        values
    }

    #[inline(always)]
    fn encode(self, kind: MomentKind, values: &mut [f32; BLOCK], rounding: Rounding, codes: &mut [u8; BLOCK]) -> u8 {
        let mut random = [0; BLOCK];
        for (i, bits) in random.iter_mut().enumerate() {
            *bits = rounding.bits(i);
        }
        // SAFETY: as above.
        unsafe {
            let magnitude = splat(MAGNITUDE);
            // Without closures: intrinsics are compiled as calls in closures that are not inlined.
            let (mut bits, mut rounded) = ([magnitude; 2], [magnitude; 2]);
            for nth in 0..2 {
                bits[nth] = _mm512_loadu_si512(values.as_ptr().add(nth * LANES).cast());
                let above = match kind {
                    MomentKind::First => splat(HALF_UNIT),
                    MomentKind::Second => {
                        _mm512_srli_epi32::<{ 32 - DROPPED }>(_mm512_loadu_si512(random.as_ptr().add(nth * LANES).cast()))
                    }
                };
                rounded[nth] = _mm512_min_epu32(_mm512_add_epi32(_mm512_and_si512(bits[nth], magnitude), above), magnitude);
            }
            let range = _mm_set1_epi32(kind.range() as i32);
            let largest = _mm_srli_epi32::<23>(largest(_mm512_max_epu32(rounded[0], rounded[1])));
            let exponent = _mm_sub_epi32(_mm_max_epu32(largest, range), range);
            let least = _mm512_broadcastd_epi32(_mm_slli_epi32::<{ MANTISSA as i32 }>(exponent));
            for nth in 0..2 {
                let upper = _mm512_max_epu32(_mm512_srli_epi32::<DROPPED>(rounded[nth]), least);
                let (k, value) = (_mm512_sub_epi32(upper, least), _mm512_slli_epi32::<DROPPED>(upper));
                let (code, value) = match kind {
                    MomentKind::First => {
                        let (some, sign) = (_mm512_test_epi32_mask(k, k), _mm512_andnot_si512(magnitude, bits[nth]));
                        (_mm512_maskz_or_epi32(some, k, _mm512_srli_epi32::<24>(sign)), _mm512_maskz_or_epi32(some, value, sign))
                    }
                    MomentKind::Second => (k, value),
                };
                _mm_storeu_si128(codes.as_mut_ptr().add(nth * LANES).cast(), _mm512_cvtepi32_epi8(code));
                _mm512_storeu_si512(values.as_mut_ptr().add(nth * LANES).cast(), value);
            }
            _mm_cvtsi128_si32(exponent) as u8
        }
    }
}

/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn splat(value: u32) -> __m512i {
    // SAFETY: the caller upholds the contract.
    unsafe { _mm512_set1_epi32(value as i32) }
}

/// The largest of 16 unsigned numbers, in the first lane.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn largest(all: __m512i) -> __m128i {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let eight = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
        let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
        let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b1110>(four));
        _mm_max_epu32(two, _mm_shuffle_epi32::<0b01>(two))
    }
}
