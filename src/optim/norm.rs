//! The gradient's sum of squares in an order that nothing can change.
//!
//! The flat gradient is cut into blocks of [`BLOCK`]. Within a block, element `i` adds its square to running fp32 sum
//! `i % 128`, ascending and fused; a fixed tree then folds the 128 sums in pairs at distance 64, 32, ... 1. Partials are
//! folded in flat order in f64. Buckets begin at multiples of `BLOCK`, so neither their size nor the split of the work
//! between threads and devices changes a bit.

use crate::dtype::Element;
use crate::units::NormSq;

/// Gradients of one partial sum; bucket boundaries are multiples of it.
pub const BLOCK: usize = 4096;

/// Running sums of a block: enough independent chains to hide the latency of a fused add on the widest vectors.
const SUMS: usize = 128;

/// One sum of squares per block of `grads` into `out`; a last block that is short counts as filled up with zeros.
/// Returns whether any gradient is infinite or NaN. A sum may be infinite although no gradient is: its squares overflow.
///
/// # Panics
/// If `out` does not hold one element per block.
#[inline(always)]
pub fn partials<G: Element>(grads: &[G], out: &mut [f32]) -> bool {
    assert_eq!(out.len(), grads.len().div_ceil(BLOCK), "partials of {} gradients", grads.len());
    let mut nonfinite = false;
    for (block, partial) in grads.chunks(BLOCK).zip(out) {
        *partial = sum_of_squares(block);
        // A gradient that is not finite leaves its mark on the sum, so only marked blocks need a second look.
        nonfinite |= !partial.is_finite() && block.iter().any(|g| !g.to_f32().is_finite());
    }
    nonfinite
}

/// Folds all partials of a step, in flat order.
pub fn fold(partials: &[f32]) -> NormSq {
    NormSq(partials.iter().fold(0.0, |sum, &partial| sum + f64::from(partial)))
}

#[inline(always)]
fn sum_of_squares<G: Element>(block: &[G]) -> f32 {
    let mut sums = [0.0; SUMS];
    let (rows, tail) = block.as_chunks::<SUMS>();
    for row in rows {
        add_squares(&mut sums, row);
    }
    add_squares(&mut sums, tail);
    fold_pairs(sums)
}

#[inline(always)]
fn add_squares<G: Element>(sums: &mut [f32; SUMS], row: &[G]) {
    for (sum, g) in sums.iter_mut().zip(row) {
        let g = g.to_f32();
        *sum = g.mul_add(g, *sum);
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
