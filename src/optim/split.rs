//! fp32 master weights in two halves, without loss: the bfloat16 working weight, and 16 bits more.
//!
//! With the bits `P` of a master and its working weight `W`, rounded to nearest even, the lower half of `P` is stored and
//!
//! ```text
//! P = (W << 16) + sign_extended(lower half) + (tie << 16)   (mod 2^32),   tie = (P & 0x1ffff == 0x8000)
//! ```
//!
//! Rounding adds `0x7fff`, and 1 if bit 16 is set, before it drops the lower half. Hence the distance `D = P - (W << 16)` is in
//! `[-0x8000, 0x8000]`, and it has the lower half of `P`. These 16 bits with a sign are `D` itself, except for `D = 0x8000`: a tie that was
//! rounded down, because bit 16 is 0. It needs the bit `tie`. The argument is about integers, so it includes both signs, zeros, subnormal
//! numbers and masters that round to infinity. A NaN remains a NaN, with another payload.
//!
//! The bit is stored in the sign of the second moment, which is never negative.

use crate::dtype::Element;
use crate::optim::adam::{AdamElement, AdamStep, stored_moments};
use crate::optim::int8::{GROUP, MomentGroup};
use crate::optim::int8_state::{self, Int8State};
use crate::optim::moments::{Moment, Rounding};
use crate::optim::state_array::StateArray;
use crate::parallel::{self, PART_ELEMS};
use half::bf16;
use std::fmt;

/// Storage of master weights whose bucket the device steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Masters {
    /// 32 bits beside the working weight.
    #[default]
    Float32,
    /// 16 bits beside the bfloat16 working weight: [`SplitMaster`].
    Split,
}

impl fmt::Display for Masters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Split => "split",
        })
    }
}

/// The halves of a master.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitMaster {
    /// The master rounded to nearest even.
    pub weight: bf16,
    /// Lower half of the master's bits.
    pub lower: u16,
    /// Whether the master lies in the middle of two weights, and the weight is the one nearer to zero.
    pub tie: bool,
}

impl SplitMaster {
    /// The halves of `master`.
    #[inline(always)]
    pub fn of(master: f32) -> Self {
        let bits = master.to_bits();
        Self { weight: <bf16 as Element>::from_f32(master), lower: bits as u16, tie: bits & 0x1_ffff == 0x8000 }
    }

    /// The master.
    #[inline(always)]
    pub fn master(self) -> f32 {
        let distance = i32::from(self.lower as i16) as u32;
        let upper = u32::from(self.weight.to_bits()) << 16;
        f32::from_bits(upper.wrapping_add(distance).wrapping_add(u32::from(self.tie) << 16))
    }
}

/// The state of a range of parameters with split masters: slices of equal length.
#[derive(Debug)]
pub struct SplitState<'a, M = f32> {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// Working weights.
    pub weights: &'a mut [bf16],
    /// Lower halves of the masters.
    pub lower: &'a mut [u16],
    /// First moments.
    pub m: &'a mut [M],
    /// Second moments, with the ties of the masters in their signs.
    pub v: &'a mut [M],
}

impl<M: Moment> SplitState<'_, M> {
    /// This state with a length check: the loop below then needs no further bounds checks.
    #[inline(always)]
    pub(super) fn sized(&mut self, elems: usize) -> SplitState<'_, M> {
        let halves = self.weights.len() == elems && self.lower.len() == elems;
        assert!(halves, "working weights and lower halves must each have {elems} elements, as the gradients");
        assert!(self.m.len() == elems && self.v.len() == elems, "m and v must each have {elems} elements, as the gradients");
        let (weights, lower) = (&mut self.weights[..elems], &mut self.lower[..elems]);
        SplitState { first: self.first, weights, lower, m: &mut self.m[..elems], v: &mut self.v[..elems] }
    }

    #[inline(always)]
    fn get(&self, i: usize) -> AdamElement {
        let (m, v) = (self.m[i].to_f32(), self.v[i]);
        AdamElement { param: decoded(self.weights[i], self.lower[i], v), m, v: v.with_sign(false).to_f32() }
    }

    #[inline(always)]
    fn set(&mut self, i: usize, new: AdamElement, step: AdamStep) {
        let rounding = Rounding { key: step.consts.rounding, first: self.first };
        let (m, v) = stored_moments::<M>(new, rounding.bits(i));
        self.m[i] = m;
        (self.weights[i], self.lower[i], self.v[i]) = encoded(new.param, v);
    }
}

/// The master with a working weight, a lower half, and its tie in the sign of `v`.
#[inline(always)]
pub(crate) fn decoded<M: Moment>(weight: bf16, lower: u16, v: M) -> f32 {
    SplitMaster { weight, lower, tie: v.has_sign() }.master()
}

/// Working weight and lower half of `master`, and `v` with the tie in its sign.
#[inline(always)]
pub(crate) fn encoded<M: Moment>(master: f32, v: M) -> (bf16, u16, M) {
    let SplitMaster { weight, lower, tie } = SplitMaster::of(master);
    (weight, lower, v.with_sign(tie))
}

/// Splits `masters`, as `array` stores them, into `weights` and `lower` halves, on several threads if there are many. Their ties are in the
/// signs of second moments: see [`set_ties`].
///
/// # Panics
/// If lengths differ.
pub(crate) fn split(array: &StateArray, masters: &[f32], weights: &mut [bf16], lower: &mut [u16]) {
    assert!(weights.len() == masters.len() && lower.len() == masters.len(), "room for the halves of {} masters", masters.len());
    let halves = weights.chunks_mut(PART_ELEMS).zip(lower.chunks_mut(PART_ELEMS));
    parallel::for_each(masters.chunks(PART_ELEMS).zip(halves), |(masters, (weights, lower))| {
        split_block(masters.iter().map(|&master| array.settled(master)), weights, lower);
    });
}

fn split_block(masters: impl Iterator<Item = f32>, weights: &mut [bf16], lower: &mut [u16]) {
    for (master, (weight, lower)) in masters.zip(weights.iter_mut().zip(lower)) {
        let halves = SplitMaster::of(master);
        (*weight, *lower) = (halves.weight, halves.lower);
    }
}

/// Writes the ties of `masters` into the signs of `v`, the second moments in their stored form. Returns whether a sign changed. Masters
/// beside 8-bit moments have no ties: see [`settled`](crate::optim::int8::settled).
pub(crate) fn set_ties(masters: &[f32], v: &mut [u8]) -> bool {
    let mut changed = false;
    for (&master, sign) in masters.iter().zip(sign_bytes(v, masters.len())) {
        let with_tie = *sign & !SIGN | u8::from(SplitMaster::of(master).tie) << 7;
        changed |= with_tie != *sign;
        *sign = with_tie;
    }
    changed
}

/// Joins the halves of `masters`, and their ties in the signs of `v`, on several threads if there are many; see [`split`].
pub(crate) fn join(weights: &[bf16], lower: &[u16], v: Option<&[u8]>, masters: &mut [f32]) {
    let width = v.map_or(0, |v| v.len() / masters.len().max(1));
    let halves = weights.chunks(PART_ELEMS).zip(lower.chunks(PART_ELEMS));
    let parts = masters.chunks_mut(PART_ELEMS).zip(halves).enumerate();
    parallel::for_each(parts, |(nth, (masters, (weights, lower)))| match v.map(|v| &v[nth * PART_ELEMS * width..]) {
        None => join_settled(weights, lower, masters),
        Some(v) => {
            for (i, master) in masters.iter_mut().enumerate() {
                let tie = v[(i + 1) * width - 1] & SIGN > 0;
                *master = SplitMaster { weight: weights[i], lower: lower[i], tie }.master();
            }
        }
    });
}

/// Joins the halves of `masters`, none of which is a tie.
#[inline(always)]
pub(crate) fn join_settled(weights: &[bf16], lower: &[u16], masters: &mut [f32]) {
    for ((master, &weight), &lower) in masters.iter_mut().zip(weights).zip(lower) {
        *master = SplitMaster { weight, lower, tie: false }.master();
    }
}

/// Gives the `elems` stored values `to` the signs of `from`.
pub(crate) fn copy_signs(from: &[u8], to: &mut [u8], elems: usize) {
    let width = from.len() / elems.max(1);
    for (i, sign) in sign_bytes(to, elems).enumerate() {
        *sign = *sign & !SIGN | from[(i + 1) * width - 1] & SIGN;
    }
}

/// Clears the signs of `elems` stored values.
pub(crate) fn clear_signs(values: &mut [u8], elems: usize) {
    sign_bytes(values, elems).for_each(|sign| *sign &= !SIGN);
}

/// The sign bit in the last byte of a value.
const SIGN: u8 = 0x80;

/// The last bytes of `elems` little-endian values.
fn sign_bytes(values: &mut [u8], elems: usize) -> impl Iterator<Item = &mut u8> {
    let width = values.len() / elems.max(1);
    values.iter_mut().skip(width.max(1) - 1).step_by(width.max(1))
}

/// The synchronous step: [`adam::step`](crate::optim::adam::step) with split masters, whose working weights are part of the state.
///
/// # Panics
/// If lengths differ.
#[inline(always)]
pub(crate) fn step<M: Moment, G: Element>(step: AdamStep, state: &mut SplitState<'_, M>, grads: &[G]) {
    let mut state = state.sized(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        state.set(i, step.apply(state.get(i), grad.to_f32()), step);
    }
}

/// The state of a range of parameters with split masters and 8-bit moments. The masters are
/// [`settled`](crate::optim::int8::settled), so none has a tie.
#[derive(Debug)]
pub(crate) struct SplitInt8State<'a> {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// Working weights.
    pub weights: &'a mut [bf16],
    /// Lower halves of the masters.
    pub lower: &'a mut [u16],
    /// First moments: the groups that have elements of the range.
    pub m: &'a mut [MomentGroup],
    /// Second moments, in as many groups.
    pub v: &'a mut [MomentGroup],
}

impl SplitInt8State<'_> {
    /// # Panics
    /// If an array does not have `elems` elements, or the state does not begin with a group.
    pub(crate) fn check(&self, elems: usize) {
        assert!(self.first.is_multiple_of(GROUP), "split masters with 8-bit moments from element {} on", self.first);
        let (halves, groups) = ([self.weights.len(), self.lower.len()], [self.m.len(), self.v.len()]);
        assert!(halves == [elems; 2] && groups == [elems.div_ceil(GROUP); 2], "a state of {elems} elements: {halves:?}, groups {groups:?}");
    }
}

/// [`step`] with 8-bit moments.
///
/// # Panics
/// If lengths differ, or the state does not begin with a group.
#[inline(always)]
pub(crate) fn step_int8<G: Element>(step: AdamStep, state: &mut SplitInt8State<'_>, grads: &[G]) {
    state.check(grads.len());
    let SplitInt8State { first, weights, lower, m, v } = state;
    let groups = (m.iter_mut().zip(v.iter_mut())).zip(weights.chunks_mut(GROUP).zip(lower.chunks_mut(GROUP)));
    for ((nth, ((m, v), (weights, lower))), grads) in groups.enumerate().zip(grads.chunks(GROUP)) {
        let mut masters = [0.0; GROUP];
        let params = &mut masters[..grads.len()];
        join_settled(weights, lower, params);
        let groups = (std::slice::from_mut(m), std::slice::from_mut(v));
        let state = &mut Int8State::new(*first + nth * GROUP, params, groups.0, groups.1);
        int8_state::run([Some((step, grads)), None], state, Some(&mut *weights));
        split_block(masters[..grads.len()].iter().copied(), weights, lower);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{self, AdamConsts, AdamHyper, AdamState};
    use crate::optim::samples::{assert_same, ordinary, same, split_masters};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    /// Lower halves at which rounding or the sign of the distance changes.
    const EDGES: [u16; 8] = [0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];

    fn wrongly_decoded(bits: u32) -> bool {
        let master = f32::from_bits(bits);
        let split = SplitMaster::of(master);
        !same(split.master(), master) || split.weight.to_bits() != <bf16 as Element>::from_f32(master).to_bits()
    }

    fn first_wrong(lower: impl Fn(u16) -> Vec<u16>) -> Option<u32> {
        let bits = (0..=u16::MAX).flat_map(|upper| lower(upper).into_iter().map(move |lower| u32::from(upper) << 16 | u32::from(lower)));
        bits.into_iter().find(|&bits| wrongly_decoded(bits))
    }

    #[test]
    fn masters_of_every_upper_half_are_decoded_to_the_bit() {
        let mut rng = ChaCha8Rng::seed_from_u64(65);
        let seeded: Vec<u16> = (0..64).map(|_| rng.next_u32() as u16).collect();
        let lower = |upper: u16| EDGES.into_iter().chain(seeded.iter().map(|lower| lower ^ upper)).collect();
        assert_eq!(first_wrong(lower), None);
    }

    #[test]
    #[ignore = "all 2^32 masters: a minute"]
    fn every_master_is_decoded_to_the_bit() {
        assert_eq!(first_wrong(|_| (0..=u16::MAX).collect()), None);
    }

    #[test]
    fn special_masters_keep_their_halves() {
        let halves = |bits: u32| {
            let split = SplitMaster::of(f32::from_bits(bits));
            (split.weight.to_bits(), split.lower, split.tie)
        };
        assert_eq!(halves(0x3f80_8000), (0x3f80, 0x8000, true), "a tie beside an even weight goes down");
        assert_eq!(halves(0x3f81_8000), (0x3f82, 0x8000, false), "a tie beside an odd weight goes up");
        assert_eq!(halves(0x8000_0000), (0x8000, 0, false), "minus zero");
        assert_eq!(halves(0x0000_0001), (0, 1, false), "the smallest subnormal number");
        assert_eq!(halves(0x8000_8000), (0x8000, 0x8000, true), "a subnormal tie");
        assert_eq!(halves(0x7f7f_ffff), (0x7f80, 0xffff, false), "the largest number rounds to infinity");
        assert_eq!(halves(0x7f7f_8000), (0x7f80, 0x8000, false), "and so does the tie below");
        for nan in [0x7f80_0001u32, 0x7f80_8000, 0x7fff_ffff, 0xff80_0001, 0xffff_8000] {
            assert!(SplitMaster::of(f32::from_bits(nan)).master().is_nan(), "{nan:#x}");
        }
    }

    #[test]
    fn many_masters_are_split_and_joined_in_parts() {
        let masters = split_masters(5, 3 * PART_ELEMS + 77);
        for array in [StateArray::PARAMS, StateArray::SETTLED] {
            let (mut weights, mut lower) = (vec![bf16::ZERO; masters.len()], vec![0; masters.len()]);
            split(&array, &masters, &mut weights, &mut lower);
            let mut v = vec![1; 2 * masters.len()];
            let has_ties = array == StateArray::PARAMS && set_ties(&masters, &mut v);
            let mut joined = vec![0.0; masters.len()];
            join(&weights, &lower, has_ties.then_some(&v), &mut joined);
            let stored: Vec<f32> = masters.iter().map(|&master| array.settled(master)).collect();
            assert!(joined == stored, "{:?}", array.rounding);
        }
    }

    fn steps_match<M: Moment>() {
        let (elems, hyper) = (3000, AdamHyper { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
        let mut params = split_masters(1, elems);
        let zeros = || vec![M::from_f32(0.0); elems];
        let (mut m, mut v, mut out) = (zeros(), zeros(), vec![bf16::ZERO; elems]);
        let (mut weights, mut lower, mut own_m, mut own_v) = (vec![bf16::ZERO; elems], vec![0; elems], zeros(), zeros());
        for i in 0..elems {
            (weights[i], lower[i], own_v[i]) = encoded(params[i], own_v[i]);
        }
        for t in 1..=20 {
            // A step without gradients and decay leaves ties as they are.
            let size = if t % 5 == 1 { 0.0 } else { 1.0 };
            let grads: Vec<bf16> = ordinary::<f32>(t, elems).iter().map(|g| <bf16 as Element>::from_f32(g * size)).collect();
            let at = AdamStep { consts: AdamConsts::new(&hyper, t, t > 1), scale: 0.7 };
            adam::step(at, &mut AdamState { first: 9, params: &mut params, m: &mut m, v: &mut v }, &grads, &mut out);
            let mut state = SplitState { first: 9, weights: &mut weights, lower: &mut lower, m: &mut own_m, v: &mut own_v };
            step(at, &mut state, &grads);
            let masters: Vec<f32> = (0..elems).map(|i| decoded(weights[i], lower[i], own_v[i])).collect();
            assert_same(&masters, &params, "masters");
            assert_same(&weights, &out, "working weights");
            assert_same(&own_m, &m, "m");
            assert_same(&own_v.iter().map(|v| v.with_sign(false)).collect::<Vec<_>>(), &v, "v");
            assert!(own_v.iter().any(|v| v.has_sign()) || t > 1, "ties are among the masters");
        }
    }

    #[test]
    fn steps_of_split_masters_give_the_bits_of_fp32_masters() {
        steps_match::<f32>();
        steps_match::<bf16>();
    }
}
