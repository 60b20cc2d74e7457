//! MXFP4, the format in which GPT-OSS's experts are distributed: 4-bit numbers, with a power of two as the scale of each 32 numbers. Every
//! product of number and scale is a bfloat16 number, so expansion is exact.

use super::Element;

/// Numbers that share a scale.
pub(crate) const BLOCK_ELEMS: usize = 32;
pub(crate) const BLOCK_BYTES: usize = BLOCK_ELEMS / 2;

/// The smallest scale with which a code exceeds the range of the format, or is NaN.
pub(crate) const UNSAFE_SCALE: u8 = 253;

/// Values of the codes: a sign, two bits of exponent, one of fraction.
const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Numbers in MXFP4: whole blocks of [`BLOCK_ELEMS`] numbers.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4<'a> {
    /// Two codes in each byte, the low half first.
    pub codes: &'a [u8],
    /// The scale of each block, as the exponent of a power of two plus 127.
    pub scales: &'a [u8],
}

impl<'a> Mxfp4<'a> {
    /// Bytes of `elems` numbers: codes, then scales.
    pub(crate) const fn bytes(elems: usize) -> [usize; 2] {
        [elems / 2, elems / BLOCK_ELEMS]
    }

    /// Number of numbers.
    pub(crate) fn elems(self) -> usize {
        self.scales.len() * BLOCK_ELEMS
    }

    /// `elems` numbers from number `start` on, both whole blocks.
    ///
    /// # Panics
    /// If there are not so many numbers.
    pub(crate) fn slice(self, start: usize, elems: usize) -> Self {
        let ([code, scale], [codes, scales]) = (Self::bytes(start), Self::bytes(elems));
        Self { codes: &self.codes[code..code + codes], scales: &self.scales[scale..scale + scales] }
    }

    /// Widens all numbers into `out`. The scale 255, which is NaN, makes all numbers of its block NaN.
    pub(crate) fn widen<E: Element>(self, out: &mut [E]) {
        let blocks = self.codes.as_chunks::<BLOCK_BYTES>().0;
        for ((block, &scale), out) in blocks.iter().zip(self.scales).zip(out.as_chunks_mut::<BLOCK_ELEMS>().0) {
            let scale = power_of_two(scale);
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(block) {
                *pair = [byte & 15, byte >> 4].map(|code| E::from_f32(VALUES[usize::from(code)] * scale));
            }
        }
    }
}

/// `2^(scale - 127)`; the smallest scale is subnormal.
fn power_of_two(scale: u8) -> f32 {
    match scale {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_times_every_scale_is_exact_and_a_bfloat16() {
        let block: Vec<u8> = (0..8).map(|i| (i * 2) | ((i * 2 + 1) << 4)).cycle().take(BLOCK_BYTES).collect();
        for scale in 0..255u8 {
            let mut out = [f32::NAN; BLOCK_ELEMS];
            Mxfp4 { codes: &block, scales: &[scale] }.widen(&mut out);
            for (i, x) in out.into_iter().enumerate() {
                let exact = f64::from(VALUES[i % 16]) * 2f64.powi(i32::from(scale) - 127);
                // With the largest scales, the larger codes exceed the range of the format.
                assert!(f64::from(x) == exact || x.is_infinite() && exact.abs() > f64::from(f32::MAX), "{scale} {i}: {x} for {exact}");
                assert!(x.is_finite() || scale >= UNSAFE_SCALE, "{scale} {i}");
                assert!(x.is_infinite() || half::bf16::from_f32(x).to_f32() == x);
            }
        }
        let mut out = [0.0; BLOCK_ELEMS];
        Mxfp4 { codes: &block, scales: &[255] }.widen(&mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
