//! How far a result may lie from the exact one. Every bound is `rounding of the output format + U * growth * sum of |terms|`: cases
//! compute the exact value and the second term in f64 from the same inputs, [`Near::admits`] adds the first.

use super::formats::round;
use superoffload::internals::dtype::Dtype;

/// Unit of rounding of fp32: half a unit in the last place of 1. Kernels calculate in fp32.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;

/// An exact result, and how far fp32 arithmetic may take a kernel from it before it rounds to the output's format.
#[derive(Clone, Copy, Debug)]
pub struct Near {
    /// The exact value.
    pub want: f64,
    /// The error of the arithmetic.
    pub error: f64,
}

impl Near {
    /// Nothing but the rounding of the output.
    pub fn exact(want: f64) -> Self {
        Self { want, error: 0.0 }
    }

    /// This result plus what the output held: one more fp32 addition.
    pub fn plus(self, before: f64) -> Self {
        Self { want: self.want + before, error: self.error + U * (self.want.abs() + before.abs()) }
    }

    /// Whether `got` is some number within the error, rounded to the format. Rounding is monotone: it suffices to round the
    /// two ends.
    pub fn admits(self, dtype: Dtype, got: f32) -> bool {
        if self.want.is_nan() {
            return got.is_nan();
        }
        let low = round(dtype, outward(self.want - self.error, f32::next_down, |x, exact| x > exact));
        let high = round(dtype, outward(self.want + self.error, f32::next_up, |x, exact| x < exact));
        low <= got && got <= high
    }

    /// The error of `got` as a part of what is allowed: for people, to see how tight the bound is.
    pub fn ratio(self, dtype: Dtype, got: f32) -> f64 {
        let off = (f64::from(got) - self.want).abs();
        let allowed = self.error + unit(dtype) * (self.want.abs() + self.error) + subnormal(dtype) / 2.0;
        if off == 0.0 { 0.0 } else { off / allowed }
    }
}

/// The nearest fp32 number on the far side of `exact`.
fn outward(exact: f64, step: fn(f32) -> f32, inside: fn(f64, f64) -> bool) -> f32 {
    let x = exact as f32;
    if inside(f64::from(x), exact) { step(x) } else { x }
}

/// Unit of rounding of a format: the largest relative error of one rounding.
pub fn unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 1.0 / 256.0,
        Dtype::Float16 => 1.0 / 2048.0,
        Dtype::Float8E4m3 => 1.0 / 16.0,
        Dtype::Float8E5m2 => 1.0 / 8.0,
        Dtype::Float32 | Dtype::Int32 => U,
    }
}

/// The smallest positive number of a format.
pub fn subnormal(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 2f64.powi(-133),
        Dtype::Float16 => 2f64.powi(-24),
        Dtype::Float8E4m3 => 2f64.powi(-9),
        Dtype::Float8E5m2 => 2f64.powi(-16),
        Dtype::Float32 | Dtype::Int32 => 2f64.powi(-149),
    }
}

/// Error of an fp32 sum of `n` terms, each a product rounded once, in any order: `growth(n) * U * sum of |terms|`.
///
/// Each term passes at most `n` roundings, each by at most `U` of a partial sum that is at most the sum of magnitudes: the worst
/// case is `n`. Roundings are independent of each other and have mean zero, so that for long sums Hoeffding's bound
/// `6 sqrt(n)` is passed with probability `2 exp(-18)`, once in 30 million elements if all partial sums were as large as they can be,
/// and they are not. One more for the product, one for the end.
pub fn growth(n: usize) -> f64 {
    let n = n as f64;
    n.min(6.0 * n.sqrt()) + 2.0
}

/// [`growth`] of a matrix product over `k`. Narrow formats go through tensor cores, which do not round but cut off: always towards
/// zero, by up to `2 U` of the partial sum, once for every 8 terms or more; errors of one sign add up in full: `2 k / 8` more.
pub fn product_growth(dtype: Dtype, k: usize) -> f64 {
    growth(k) + if dtype == Dtype::Float32 { 0.0 } else { k as f64 / 4.0 }
}

/// [`growth`] of a product of numbers of 8 bits over `k` on tensor cores. An instruction adds 32 terms to a sum and cuts each of these 33 off
/// below 2^-13 of the largest of them; after 128 terms the library adds the sum to one in fp32 and begins anew. So a cut is at most 2^-13 of
/// the magnitudes of 128 terms; there are `33 k / 32`, independent of each other, and [`growth`] says how they add up.
pub fn fp8_growth(k: usize) -> f64 {
    let (cuts, of_all) = (33.0 * k as f64 / 32.0, (128.0 / k as f64).min(1.0));
    growth(k) + 2f64.powi(24 - 13) * 6.0 * cuts.sqrt() * of_all
}

/// A sum with its magnitude: what [`growth`] needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// The sum.
    pub sum: f64,
    /// The sum of magnitudes.
    pub size: f64,
}

impl Sum {
    /// Adds a term.
    pub fn add(&mut self, term: f64) {
        self.sum += term;
        self.size += term.abs();
    }

    /// The sum of all terms.
    pub fn of(terms: impl Iterator<Item = f64>) -> Self {
        let mut sum = Self::default();
        terms.for_each(|term| sum.add(term));
        sum
    }

    /// The sum as fp32 arithmetic of this growth may give it.
    pub fn near(self, growth: f64) -> Near {
        Near { want: self.sum, error: U * growth * self.size }
    }
}
