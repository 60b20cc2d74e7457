//! Elementary functions as branch-free polynomials with a fixed order of operations, so that loops over them become
//! vector code with the same bits on every instruction set.

/// `1.5 * 2^23`: adding this constant rounds a small number to an integer, which is then in the low bits.
const ROUND: f32 = 12_582_912.0;
/// `ln 2` in two parts; products of the first with small integers are exact.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// `(e^r - 1 - r) / r^2` on `|r| <= ln(2) / 2`, interpolated at Chebyshev nodes: relative error of `e^r` under 2^-26.
const EXP: [f32; 5] = [0.5, 0.166_665_76, 0.041_666_556, 0.008_363_179, 0.001_392_618_4];

/// `e^x` within 1.1 ulp (subnormal results included); `+inf` and 0 beyond the range; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let (n, r, p) = powers(x);
    let p = (r * r).mul_add(p, r) + 1.0;
    // Two factors, because 2^n leaves the range of floats before the product does.
    p * pow2(n >> 1) * pow2(n.wrapping_sub(n >> 1))
}

/// `n`, `r` and `(e^r - 1 - r) / r^2` with `e^x = 2^n e^r` and `|r| <= ln(2) / 2`.
#[inline(always)]
fn powers(x: f32) -> (i32, f32, f32) {
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = EXP[4];
    for c in [EXP[3], EXP[2], EXP[1], EXP[0]] {
        p = p.mul_add(r, c);
    }
    ((shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32), r, p)
}

/// `2^n` for normal results.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `e^x - 1` for `|x| < 88`, also precise near 0.
#[inline(always)]
fn exp_m1(x: f32) -> f32 {
    let (n, r, p) = powers(x);
    let power = pow2(n);
    (r * r).mul_add(p, r).mul_add(power, power - 1.0)
}

/// `tanh x` within 3 ulp.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    // Beyond 10 the result rounds to 1.
    let x = if x > 10.0 { 10.0 } else { x };
    let x = if x < -10.0 { -10.0 } else { x };
    let e = exp_m1(2.0 * x);
    e / (e + 2.0)
}

/// The soft cap `cap * tanh(x / cap)`, which lies between `-cap` and `cap`, and its slope.
#[inline(always)]
pub(crate) fn soft_capped(x: f32, cap: f32) -> (f32, f32) {
    let t = tanh(x / cap);
    (cap * t, t.mul_add(-t, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance between `got` and `want` in ulps of an f32 near `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let ulp = f64::from(f32::from_bits((want.abs() as f32).to_bits() + 1)) - f64::from(want.abs() as f32);
        (f64::from(got) - want).abs() / ulp
    }

    fn sweep(from: f32, to: f32) -> impl Iterator<Item = f32> {
        (0..=1_000_000).map(move |i| from + (to - from) * (i as f32 / 1e6))
    }

    #[test]
    fn exp_is_within_its_bound() {
        let worst = sweep(-104.0, 88.7).chain(sweep(-1.0, 1.0)).map(|x| ulps(exp(x), f64::from(x).exp())).fold(0.0, f64::max);
        assert!(worst < 1.1, "{worst} ulp");
    }

    #[test]
    fn exp_keeps_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!((exp(f32::INFINITY), exp(89.0), exp(1e30)), (f32::INFINITY, f32::INFINITY, f32::INFINITY));
        assert_eq!((exp(f32::NEG_INFINITY), exp(-104.0), exp(-1e30)), (0.0, 0.0, 0.0));
        assert!(exp(88.722_83).is_finite() && exp(-103.9) > 0.0);
        assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
    }

    #[test]
    fn a_soft_cap_is_within_four_ulp_and_keeps_the_edges() {
        let reference = |x: f32| 30.0 * (f64::from(x) / 30.0).tanh();
        let worst = sweep(-400.0, 400.0).chain(sweep(-0.01, 0.01)).map(|x| ulps(soft_capped(x, 30.0).0, reference(x))).fold(0.0, f64::max);
        assert!(worst < 5.0, "{worst} ulp");
        let slope = |x: f32| 1.0 - (f64::from(x) / 30.0).tanh().powi(2);
        assert!(sweep(-100.0, 100.0).all(|x| (f64::from(soft_capped(x, 30.0).1) - slope(x)).abs() < 4e-7));
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 1e30, 0.0].map(|x| soft_capped(x, 30.0).0), [30.0, -30.0, 30.0, 0.0]);
        assert!(soft_capped(f32::NAN, 30.0).0.is_nan());
    }

    #[test]
    fn sigmoid_is_within_two_ulp_and_keeps_the_edges() {
        let reference = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let worst = sweep(-87.0, 30.0).map(|x| ulps(sigmoid(x), reference(x))).fold(0.0, f64::max);
        assert!(worst < 2.5, "{worst} ulp");
        assert_eq!((sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY), sigmoid(0.0)), (1.0, 0.0, 0.5));
        assert!(sigmoid(f32::NAN).is_nan());
    }
}
