//! Bounds of errors. Every bound is `rounding of the output format + U * growth * sum of |terms|`. The cases compute the exact value and
//! the second term in f64 from the same inputs; [`Near::admits`] adds the first term.

use super::formats::round;
use superoffload::internals::dtype::Dtype;

/// Unit roundoff of fp32, in which kernels compute: half a unit in the last place of 1.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;

/// An exact result, and the error of fp32 arithmetic before the rounding to the output's format.
#[derive(Clone, Copy, Debug)]
pub struct Near {
    /// The exact value.
    pub want: f64,
    /// The error of the arithmetic.
    pub error: f64,
}

impl Near {
    /// A result whose only error is the rounding of the output.
    pub fn exact(want: f64) -> Self {
        Self { want, error: 0.0 }
    }

    /// This result added to the previous content of the output, which is one more fp32 addition.
    pub fn plus(self, before: f64) -> Self {
        Self { want: self.want + before, error: self.error + U * (self.want.abs() + before.abs()) }
    }

    /// Whether `got` is a number within the error, rounded to the format. Rounding is monotone, so rounding the two ends suffices.
    pub fn admits(self, dtype: Dtype, got: f32) -> bool {
        if self.want.is_nan() {
            return got.is_nan();
        }
        let low = round(dtype, outward(self.want - self.error, f32::next_down, |x, exact| x > exact));
        let high = round(dtype, outward(self.want + self.error, f32::next_up, |x, exact| x < exact));
        low <= got && got <= high
    }

    /// The error of `got` relative to the permitted error, which shows how tight the bound is.
    pub fn ratio(self, dtype: Dtype, got: f32) -> f64 {
        let off = (f64::from(got) - self.want).abs();
        let allowed = self.error + unit(dtype) * (self.want.abs() + self.error) + subnormal(dtype) / 2.0;
        if off == 0.0 { 0.0 } else { off / allowed }
    }
}

/// The nearest fp32 number on the outer side of `exact`.
fn outward(exact: f64, step: fn(f32) -> f32, inside: fn(f64, f64) -> bool) -> f32 {
    let x = exact as f32;
    if inside(f64::from(x), exact) { step(x) } else { x }
}

/// Unit roundoff of a format: the largest relative error of one rounding.
pub fn unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 1.0 / 256.0,
        Dtype::Float16 => 1.0 / 2048.0,
        Dtype::Float8E4m3 => 1.0 / 16.0,
        Dtype::Float8E5m2 => 1.0 / 8.0,
        Dtype::Float32 | Dtype::Int32 | Dtype::Uint16 | Dtype::Uint8 => U,
    }
}

/// The smallest positive number of a format.
pub fn subnormal(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 2f64.powi(-133),
        Dtype::Float16 => 2f64.powi(-24),
        Dtype::Float8E4m3 => 2f64.powi(-9),
        Dtype::Float8E5m2 => 2f64.powi(-16),
        Dtype::Float32 | Dtype::Int32 | Dtype::Uint16 | Dtype::Uint8 => 2f64.powi(-149),
    }
}

/// Error of an fp32 sum of `n` terms, each a product rounded once, in any order: `growth(n) * U * sum of |terms|`.
///
/// Each term passes at most `n` roundings, each with an error of at most `U` times a partial sum, which is at most the sum of magnitudes:
/// the worst case is `n`. Roundings are independent with mean zero, so for long sums Hoeffding's bound `6 sqrt(n)` is exceeded with
/// probability `2 exp(-18)`, once in 30 million elements if all partial sums had their maximum, which they do not. There is one more
/// rounding for the product and one for the result.
pub fn growth(n: usize) -> f64 {
    let n = n as f64;
    n.min(6.0 * n.sqrt()) + 2.0
}

/// The [`growth`] of a matrix product over `k`. Narrow formats use tensor cores, which truncate instead of rounding: always towards zero,
/// by up to `2 U` of the partial sum, once for every 8 or more terms. Errors of one sign add up fully, which gives `2 k / 8` more.
pub fn product_growth(dtype: Dtype, k: usize) -> f64 {
    growth(k) + if dtype == Dtype::Float32 { 0.0 } else { k as f64 / 4.0 }
}

/// The [`growth`] of an 8-bit product over `k` on tensor cores. An instruction adds 32 terms to a sum, and truncates each of these 33
/// numbers below 2^-13 of the largest. After 128 terms the library adds the sum to an fp32 sum and starts a new one. So an error is at most
/// 2^-13 of the magnitudes of 128 terms. There are `33 k / 32` independent errors, which add up as in [`growth`].
pub fn fp8_growth(k: usize) -> f64 {
    let (cuts, of_all) = (33.0 * k as f64 / 32.0, (128.0 / k as f64).min(1.0));
    growth(k) + 2f64.powi(24 - 13) * 6.0 * cuts.sqrt() * of_all
}

/// A sum with its magnitude, the input of [`growth`].
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

    /// The sum with the error of fp32 arithmetic of this growth.
    pub fn near(self, growth: f64) -> Near {
        Near { want: self.sum, error: U * growth * self.size }
    }
}
