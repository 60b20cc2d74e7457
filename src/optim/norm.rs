//! The gradient's sum of squares in a fixed order.
//!
//! The flat gradient is divided into blocks of [`BLOCK`]. Within a block, element `i` adds its square to running fp32 sum `i % 128`,
//! ascending and fused; a fixed tree then adds the 128 sums in pairs at distance 64, 32, ... 1. The sums of blocks are added in flat order
//! in f64. Buckets begin at multiples of `BLOCK`, so neither their size nor the division of work between threads and devices changes a bit.

use crate::dtype::Element;
use crate::optim::lifted::{add_square, lift, lowered, magnitude, power};
use crate::units::NormSq;

/// Gradients of one partial sum; bucket boundaries are multiples of it.
pub const BLOCK: usize = 4096;

/// Running sums of a block: enough independent sums to hide the latency of a fused add on the widest vectors.
const SUMS: usize = 128;

/// Writes one sum of squares for each block of `grads` to `out`; a short last block counts as padded with zeros. Returns whether any
/// gradient is infinite or NaN. A sum may be infinite although all gradients are finite, because squares overflow.
///
/// # Panics
/// If `out` does not hold one element for each block.
#[inline(always)]
pub(crate) fn partials<G: Element>(grads: &[G], out: &mut [f32]) -> bool {
    partials_of::<false, G>(grads, out).0
}

/// [`partials`] by arithmetic that is fast with denormal squares and has the same bits. Also returns whether some squares may be denormal.
#[inline(always)]
pub(super) fn partials_of_any_size<G: Element>(grads: &[G], out: &mut [f32]) -> (bool, bool) {
    partials_of::<true, G>(grads, out)
}

#[inline(always)]
fn partials_of<const ANY_SIZE: bool, G: Element>(grads: &[G], out: &mut [f32]) -> (bool, bool) {
    assert_eq!(out.len(), grads.len().div_ceil(BLOCK), "partials of {} gradients", grads.len());
    let (mut nonfinite, mut any_small) = (false, false);
    for (block, partial) in grads.chunks(BLOCK).zip(out) {
        let small = ANY_SIZE && has_small_squares(block);
        *partial = if small { lifted_sum_of_squares(block) } else { sum_of_squares(block) };
        any_small |= small;
        // A gradient that is not finite makes the sum not finite, so only such blocks need a second look.
        nonfinite |= !partial.is_finite() && block.iter().any(|g| !g.to_f32().is_finite());
    }
    (nonfinite, any_small)
}

/// Adds the next partial sums of a step, in flat order, to the `sum` of the earlier ones. Zeros change no sum. Because nearly all partial
/// sums of a simulation are zero, zeros are detected and skipped as whole vectors.
pub fn fold(sum: NormSq, partials: &[f32]) -> NormSq {
    let bits = |partials: &[f32]| partials.iter().fold(0, |bits, partial| bits | partial.to_bits());
    let add = |sum, partials: &[f32]| partials.iter().fold(sum, |sum, &partial| sum + f64::from(partial));
    NormSq(partials.chunks(64).filter(|chunk| bits(chunk) != 0).fold(sum.0, add))
}

#[inline(always)]
fn sum_of_squares<G: Element>(block: &[G]) -> f32 {
    fold_pairs(sums_of_squares::<false, G>(block))
}

/// [`sum_of_squares`] of gradients below 2^16.
#[inline(always)]
fn lifted_sum_of_squares<G: Element>(block: &[G]) -> f32 {
    let mut sums = sums_of_squares::<true, G>(block);
    for sum in &mut sums {
        *sum = lowered(*sum);
    }
    fold_pairs(sums)
}

/// Whether the square of one of the gradients may be denormal, and none is too large for [`lifted_sum_of_squares`].
#[inline(always)]
fn has_small_squares<G: Element>(block: &[G]) -> bool {
    let (mut least, mut largest) = (u32::MAX, 0);
    for g in block {
        let magnitude = magnitude(g.to_f32());
        least = least.min(magnitude.wrapping_sub(1));
        largest = largest.max(magnitude);
    }
    least < power(-62).to_bits() && largest < power(16).to_bits()
}

/// The running sums, lifted if `LIFTED`.
#[inline(always)]
fn sums_of_squares<const LIFTED: bool, G: Element>(block: &[G]) -> [f32; SUMS] {
    let mut sums = [0.0; SUMS];
    let (rows, tail) = block.as_chunks::<SUMS>();
    for row in rows {
        add_squares::<LIFTED, G>(&mut sums, row);
    }
    add_squares::<LIFTED, G>(&mut sums, tail);
    sums
}

#[inline(always)]
fn add_squares<const LIFTED: bool, G: Element>(sums: &mut [f32; SUMS], row: &[G]) {
    for (sum, g) in sums.iter_mut().zip(row) {
        let g = g.to_f32();
        *sum = if LIFTED { add_square(lift(magnitude(g)), *sum) } else { g.mul_add(g, *sum) };
    }
}

#[inline(always)]
fn fold_pairs(mut sums: [f32; SUMS]) -> f32 {
    let mut distance = SUMS / 2;
    while distance > 0 {
        for i in 0..distance {
            sums[i] += sums[i + distance];
        }
        distance /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::samples::{faint, ordinary};
    use half::bf16;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// A literal implementation of the module's first paragraph.
    fn as_documented(block: &[f32]) -> f32 {
        let mut sums = vec![0.0f32; 128];
        for (i, g) in block.iter().enumerate() {
            sums[i % 128] = g.mul_add(*g, sums[i % 128]);
        }
        for distance in [64, 32, 16, 8, 4, 2, 1] {
            sums = (0..distance).map(|i| sums[i] + sums[i + distance]).collect();
        }
        sums[0]
    }

    #[test]
    fn a_partial_sum_matches_the_documentation() {
        for len in (1..300).chain([4095, 4096]) {
            let grads: Vec<f32> = ordinary(len as u64, len);
            let mut out = [f32::NAN];
            assert!(!partials(&grads, &mut out));
            assert_eq!(out[0].to_bits(), as_documented(&grads).to_bits(), "{len} gradients");
        }
    }

    #[test]
    fn blocks_of_small_gradients_have_the_same_partials() {
        let rng = &mut ChaCha8Rng::seed_from_u64(3);
        for (below, is_small) in [(16, true), (-60, true), (-70, true), (17, false)] {
            let mut grads: Vec<f32> = (0..BLOCK).map(|_| faint(rng, below)).collect();
            grads[BLOCK - 1] = 2f32.powi(below - 1);
            assert_eq!(has_small_squares(&grads), is_small, "below 2^{below}");
            let [mut got, mut golden] = [[0.0]; 2];
            assert_eq!(partials_of_any_size(&grads, &mut got), (partials(&grads, &mut golden), is_small));
            assert_eq!(got.map(f32::to_bits), golden.map(f32::to_bits), "below 2^{below}");
        }
        assert!(!has_small_squares(&[0.0f32, 1e-3]) && !has_small_squares(&[1e-30, f32::NAN]) && has_small_squares(&[-1e-30f32, 0.0]));
    }

    #[test]
    fn cutting_at_blocks_and_filling_with_zeros_change_nothing() {
        let mut grads: Vec<bf16> = ordinary(1, 5 * BLOCK + 77);
        let mut whole = vec![0.0; 6];
        partials(&grads, &mut whole);
        for cut in 0..=5 {
            let mut parts = vec![0.0; 6];
            let (left, right) = parts.split_at_mut(cut);
            partials(&grads[..cut * BLOCK], left);
            partials(&grads[cut * BLOCK..], right);
            assert_eq!(parts, whole, "cut after block {cut}");
        }
        grads.resize(6 * BLOCK, bf16::ZERO);
        let mut filled = vec![0.0; 6];
        partials(&grads, &mut filled);
        assert_eq!(filled, whole);
    }

    #[test]
    fn every_nonfinite_gradient_is_seen_and_an_overflow_is_none() {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 127, 128, BLOCK - 1, BLOCK, BLOCK + 199] {
                let mut grads = vec![1.0f32; BLOCK + 200];
                grads[at] = poison;
                assert!(partials(&grads, &mut [0.0; 2]), "{poison} at {at}");
            }
        }
        let mut out = [0.0];
        assert!(!partials(&[1e30f32], &mut out));
        assert_eq!(out[0], f32::INFINITY);
    }

    #[test]
    fn partials_fold_in_f64() {
        // In f32 the small numbers would vanish beside the large one.
        let all = [16_777_216.0, 0.5, 0.5];
        assert_eq!(fold(NormSq(0.0), &all), NormSq(16_777_217.0));
        assert_eq!(fold(fold(NormSq(0.0), &all[..2]), &all[2..]), NormSq(16_777_217.0));
        assert_eq!(fold(NormSq(0.0), &[]), NormSq(0.0));
        // Zeros on all sides of the other numbers.
        let sparse: Vec<f32> = (0..400).map(|i| if [63, 200, 399].contains(&i) { i as f32 } else { 0.0 }).collect();
        assert_eq!(fold(NormSq(0.25), &sparse), NormSq(662.25));
    }
}
