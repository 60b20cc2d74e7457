//! Storage of AdamW's moments: as fp32, in 16 bits, or in 8 bits ([`int8`](crate::optim::int8)).
//!
//! A step computes in fp32 in both formats, and computes its parameters from moments before rounding; the next step reads the stored
//! moments. bfloat16 has 8 bits of significand, so a value changes by at least half an ulp, 0.2 to 0.4 %, or not at all. A first moment
//! moves a tenth of the way to the gradient in each step, and is rounded to nearest. A second moment moves by a thousandth, and rounded to
//! nearest it would never change. It is therefore rounded stochastically: the probability of rounding up is its distance from the value
//! below in ulps, so that its mean is correct.
//!
//! The random bits are a hash of the step and of the element's index in the flat order, so they do not depend on thread, instruction set,
//! bucket or device. A value that bfloat16 represents exactly is never changed.

use crate::dtype::{Dtype, Element};
use half::bf16;
use std::fmt;

/// Format of stored moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Moments {
    /// 32 bits: a parameter's state takes 12 bytes.
    #[default]
    Float32,
    /// 16 bits, second moments rounded at random: 8 bytes.
    Bfloat16,
    /// 8 bits and shared exponents, second moments rounded at random: 6.06 bytes.
    Int8,
}

impl Moments {
    /// Largest beta1 with moments in this format. First moments are rounded to nearest. In bfloat16 they stay within 1.3 % of float32 moments
    /// up to 0.99 when gradients become ten times smaller; with 0.999 they are three times too large. In 8 bits, with 4 bits of significand,
    /// a rounded moment no longer moves from 0.944 on.
    pub const fn beta1_max(self) -> f64 {
        match self {
            Self::Float32 => 1.0,
            Self::Bfloat16 => 0.99,
            Self::Int8 => 0.93,
        }
    }
}

impl fmt::Display for Moments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float32 => Dtype::Float32.fmt(f),
            Self::Bfloat16 => Dtype::Bfloat16.fmt(f),
            Self::Int8 => f.write_str("int8"),
        }
    }
}

/// A format of stored moments.
pub trait Moment: Element {
    /// The stored form of a second moment; `bits` choose between its two neighbours.
    fn second(v: f32, bits: u32) -> Self;

    /// Whether the sign bit is set.
    fn has_sign(self) -> bool;

    /// This magnitude with the sign bit `negative`.
    fn with_sign(self, negative: bool) -> Self;
}

impl Moment for f32 {
    #[inline(always)]
    fn second(v: f32, _: u32) -> Self {
        v
    }

    #[inline(always)]
    fn has_sign(self) -> bool {
        self.to_bits() >> 31 == 1
    }

    #[inline(always)]
    fn with_sign(self, negative: bool) -> Self {
        f32::from_bits(self.to_bits() & 0x7fff_ffff | u32::from(negative) << 31)
    }
}

impl Moment for bf16 {
    /// Rounds away from zero if the sum of the 16 lost bits and 16 random bits carries. As with rounding to nearest, values beyond the
    /// largest number may become infinite, and every NaN becomes the canonical NaN.
    #[inline(always)]
    fn second(v: f32, bits: u32) -> Self {
        let rounded = (v.to_bits().wrapping_add(bits >> 16) >> 16) as u16;
        bf16::from_bits(if v.is_nan() { 0x7fff } else { rounded })
    }

    #[inline(always)]
    fn has_sign(self) -> bool {
        self.to_bits() >> 15 == 1
    }

    #[inline(always)]
    fn with_sign(self, negative: bool) -> Self {
        bf16::from_bits(self.to_bits() & 0x7fff | u16::from(negative) << 15)
    }
}

/// Hash key of optimizer step `step`.
pub(crate) fn rounding_key(step: u64) -> u32 {
    mixed(step as u32 ^ mixed((step >> 32) as u32 ^ 0x9e37_79b9))
}

/// Source of the rounding bits for consecutive elements in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounding {
    /// See [`rounding_key`].
    pub key: u32,
    /// Index of the first element in the flat order.
    pub first: usize,
}

impl Rounding {
    /// The random bits of the `i`th element. Elements whose indices differ by 2^32 have the same bits.
    #[inline(always)]
    pub(crate) fn bits(self, i: usize) -> u32 {
        mixed(self.first.wrapping_add(i) as u32 ^ self.key)
    }

    /// The random bits of the `N` elements from the first on, whose index is a multiple of `N`. Their indices differ in their lowest bits
    /// alone, so a part of the hash is the same for all.
    #[inline(always)]
    pub(crate) fn block<const N: usize>(self) -> [u32; N] {
        const { assert!(N.is_power_of_two() && N <= 1 << 16) };
        debug_assert!(self.first.is_multiple_of(N), "random bits of {N} elements from element {} on", self.first);
        let (start, mut bits) = (folded(self.first as u32 ^ self.key), [0; N]);
        for (i, bits) in bits.iter_mut().enumerate() {
            *bits = mixed_further(start ^ i as u32);
        }
        bits
    }

    /// The source for elements from the `i`th on.
    pub(crate) fn behind(self, i: usize) -> Self {
        Self { first: self.first + i, ..self }
    }
}

/// A permutation of 32-bit numbers in which each bit depends on all bits: `lowbias32` of Chris Wellons' hash prospector.
#[inline(always)]
fn mixed(x: u32) -> u32 {
    mixed_further(folded(x))
}

/// The first step of [`mixed`]: the upper half changes the lower half.
#[inline(always)]
fn folded(x: u32) -> u32 {
    x ^ x >> 16
}

/// The steps of [`mixed`] after the first.
#[inline(always)]
fn mixed_further(mut x: u32) -> u32 {
    x = x.wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    folded(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{self, AdamConsts, AdamHyper, AdamState, AdamStep};
    use crate::optim::int8::{self, MomentKind};
    use crate::optim::samples::{assert_same, ordinary, wild};
    use crate::optim::state_array::StatePart;

    /// Bits for which values round up as rarely as possible, half of the time, and as often as possible.
    const BITS: [u32; 3] = [0, 0x8000_0000, u32::MAX];

    #[test]
    fn bfloat16_values_round_to_themselves_and_all_other_values_to_two_neighbours() {
        for held in 0..=u16::MAX {
            let held = bf16::from_bits(held);
            let same = |bits| bf16::second(held.to_f32(), bits).to_bits() == if held.is_nan() { 0x7fff } else { held.to_bits() };
            assert!(BITS.into_iter().all(same), "{held:?}");
        }
        for v in wild::<f32>(1, 100_000).into_iter().filter(|v| v.is_finite()) {
            let [down, _, up] = BITS.map(|bits| bf16::second(v, bits));
            let exact = v.to_bits() & 0xffff == 0;
            let apart = if exact { 0 } else { 1 };
            assert_eq!((down.to_bits(), up.to_bits()), ((v.to_bits() >> 16) as u16, down.to_bits() + apart), "{v:e}");
        }
        assert!(bf16::second(f32::MAX, u32::MAX).is_infinite() && bf16::second(f32::MAX, 0).is_finite());
    }

    /// The mean over 2^16 elements of a step, and over 2^16 steps of an element, equals the value within four standard deviations.
    #[test]
    fn rounding_of_second_moments_is_unbiased_over_elements_and_over_steps() {
        const DRAWS: usize = 1 << 16;
        for v in ordinary::<f32>(2, 50).into_iter().map(|v| v.abs() * 1e-3).chain([1e-40, 3.0f32.next_up(), 7.0f32.next_down()]) {
            let (down, lost) = (f64::from(bf16::second(v, 0).to_f32()), f64::from(v.to_bits() & 0xffff) / 65536.0);
            let unit = f64::from(bf16::second(v, u32::MAX).to_f32()) - down;
            let mean = |bits: &dyn Fn(usize) -> u32| {
                let up = |at: &usize| f64::from(bf16::second(v, bits(*at)).to_f32()) > down;
                (0..DRAWS).filter(up).count() as f64 / DRAWS as f64
            };
            let deviation = (lost * (1.0 - lost) / DRAWS as f64).sqrt();
            for (over, fraction) in [
                ("elements", mean(&|at| Rounding { key: rounding_key(7), first: 0 }.bits(at))),
                ("elements behind 2^32", mean(&|at| Rounding { key: rounding_key(1 << 33), first: 5 << 32 }.bits(3 * at))),
                ("steps", mean(&|at| Rounding { key: rounding_key(at as u64), first: 12_345 }.bits(0))),
            ] {
                assert!(unit > 0.0 && (fraction - lost).abs() <= 4.0 * deviation + 1e-4, "{v:e} over {over}: {fraction} rise, not {lost}");
            }
        }
    }

    #[test]
    fn stored_moments_read_back_and_a_second_moment_rounds_to_either_side() {
        let (values, rounding) = (wild::<f32>(4, 999), Rounding { key: rounding_key(5), first: 77 });
        for moments in [Moments::Float32, Moments::Bfloat16, Moments::Int8] {
            let rounding = if moments == Moments::Int8 { Rounding { first: 128, ..rounding } } else { rounding };
            for part in moments.arrays().parts() {
                let array = moments.arrays()[part];
                let mut stored = vec![0; array.bytes(values.len())];
                array.store(&values, rounding, &mut stored);
                let mut read = vec![0.0; values.len()];
                let copy = |bytes: &mut [u8]| {
                    bytes.copy_from_slice(&stored);
                    Ok(())
                };
                array.load(&mut read, copy).unwrap();
                let mut groups = vec![0.0; values.len()];
                if moments == Moments::Int8 && part != StatePart::PARAMS {
                    let kind = if part == StatePart::M { MomentKind::First } else { MomentKind::Second };
                    int8::decode_all(kind, &stored, &mut groups);
                }
                let want = |i: usize| match (moments, part) {
                    (Moments::Int8, StatePart::PARAMS) => int8::settled(values[i]),
                    (Moments::Int8, _) => groups[i],
                    (Moments::Bfloat16, StatePart::M) => <bf16 as Element>::from_f32(values[i]).to_f32(),
                    (Moments::Bfloat16, StatePart::V) => bf16::second(values[i], rounding.bits(i)).to_f32(),
                    _ => values[i],
                };
                assert_same(&read, &(0..values.len()).map(want).collect::<Vec<_>>(), &format!("{part:?} in {moments}"));
                let mut again = vec![0; stored.len()];
                array.store(&read, Rounding { key: 3, ..rounding }, &mut again);
                assert!(again == stored || values.iter().any(|x| x.is_nan()), "{part:?} in {moments}: what is held stays");
            }
        }
    }

    #[test]
    fn the_random_bits_of_a_block_are_those_of_its_elements() {
        for first in [0, 32, 4096, (1 << 32) - 32, 5 << 32] {
            for key in [0, 1, rounding_key(9)] {
                let rounding = Rounding { key, first };
                assert_eq!(rounding.block::<32>(), std::array::from_fn(|i| rounding.bits(i)), "key {key}, element {first}");
            }
        }
    }

    /// sqrt(v) relative to fp32 after 3000 steps with gradients ten times smaller in the second half: mean, and root mean square of the
    /// distance from 1.
    fn after_gradients_fell<M: Moment>(beta2: f64, nearest: bool) -> (f64, f64) {
        const ELEMS: usize = 500;
        let hyper = AdamHyper { lr: 0.0, beta1: 0.9, beta2, eps: 1e-8, weight_decay: 0.0 };
        let zeros = || vec![M::from_f32(0.0); ELEMS];
        let (mut exact, mut stored, mut params) = ([vec![0.0f32; ELEMS], vec![0.0f32; ELEMS]], [zeros(), zeros()], vec![0.0; ELEMS]);
        for t in 1..=3000u64 {
            let size = if t <= 1500 { 1.0 } else { 0.1 };
            let grads: Vec<f32> = ordinary::<f32>(t, ELEMS).into_iter().map(|g| g * size).collect();
            let step = AdamStep { consts: AdamConsts::new(&hyper, t, false), scale: 1.0 };
            let [m, v] = &mut exact;
            adam::commit(step, &mut AdamState { first: 0, params: &mut params, m, v }, &grads);
            let [m, v] = &mut stored;
            if nearest {
                for i in 0..ELEMS {
                    let old = adam::AdamElement { param: 0.0, m: m[i].to_f32(), v: v[i].to_f32() };
                    v[i] = M::from_f32(step.apply(old, grads[i]).v);
                }
            } else {
                adam::commit(step, &mut AdamState { first: 0, params: &mut params, m, v }, &grads);
            }
        }
        let ratio = |i: usize| f64::from(stored[1][i].to_f32().sqrt()) / f64::from(exact[1][i].sqrt());
        let mean = |of: &dyn Fn(usize) -> f64| (0..ELEMS).map(of).sum::<f64>() / ELEMS as f64;
        (mean(&ratio), mean(&|i| (ratio(i) - 1.0).powi(2)).sqrt())
    }

    #[test]
    fn second_moments_follow_falling_gradients_as_in_float32() {
        assert_eq!(after_gradients_fell::<f32>(0.999, false), (1.0, 0.0));
        for beta2 in [0.999, 0.95] {
            let (mean, rms) = after_gradients_fell::<bf16>(beta2, false);
            assert!((mean - 1.0).abs() < 0.01 && rms < 0.06, "beta2 {beta2}: {mean} of fp32, {rms} apart");
        }
        let (mean, _) = after_gradients_fell::<bf16>(0.999, true);
        assert!(mean > 2.0, "to the nearest: {mean} of fp32");
    }
}
