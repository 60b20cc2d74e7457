//! The codec of 8-bit moments by vectors, bit-identical to the specification in [`int8`](crate::optim::int8). The compiler vectorises the
//! specification, too, but with 32 bits for each code: here codes have 16 bits after rounding, so that one instruction has twice as many.

use super::int8_vectors::{HALVES, LANES, Vectors};
use crate::optim::int8::{BLOCK, BlockCodec, DROPPED, HALF_UNIT, MAGNITUDE, MANTISSA, MomentGroup, MomentKind};
use crate::optim::moments::Rounding;
use std::marker::PhantomData;

/// The codec by the vectors `V`; a value exists only in passes that run with their instruction set.
#[derive(Clone, Copy)]
pub(super) struct VectorCodec<V>(PhantomData<V>);

impl<V> VectorCodec<V> {
    /// # Safety
    /// The caller runs with the instruction set of `V`.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(PhantomData)
    }
}

/// The upper bits of a value from its code on: no value has more, and every NaN has at most these.
const LARGEST: u16 = (MAGNITUDE >> DROPPED) as u16;

/// Shift of a code in the upper half of a value.
const IN_UPPER: u32 = DROPPED - 16;

/// Sign in the upper half of a value.
const SIGN: u16 = 1 << 15;

impl<V: Vectors> BlockCodec for VectorCodec<V> {
    #[inline(always)]
    fn decode(self, [m, v]: [&MomentGroup; 2], block: usize) -> [[f32; BLOCK]; 2] {
        let mut moments = [[0.0; BLOCK]; 2];
        // SAFETY: the pass runs with the instruction set.
        unsafe {
            let bytes = V::load_codes([&m.codes[block], &v.codes[block]]);
            let signed = V::and_halves(V::shift_halves_signed::<{ 8 - IN_UPPER }>(bytes[0]), V::halves(SIGN | 0x7f << IN_UPPER));
            let first = V::add_halves(signed, base::<V>(m.exponents[block]));
            let second = V::add_halves(V::shift_halves::<{ 8 - IN_UPPER }>(bytes[1]), base::<V>(v.exponents[block]));
            V::store_upper(V::where_some(signed, V::halves(0x7f << IN_UPPER), first), &mut moments[0]);
            V::store_upper(second, &mut moments[1]);
        }
        moments
    }

    #[inline(always)]
    fn encode(self, [m, v]: [&mut [f32; BLOCK]; 2], rounding: Rounding, [m_group, v_group]: [&mut MomentGroup; 2], block: usize) {
        // SAFETY: as above.
        unsafe {
            let below = rounded::<V>([m, v], rounding);
            let least = V::least(below);
            let exponents = [exponent(MomentKind::First, least[0]), exponent(MomentKind::Second, least[1])];
            [m_group.exponents[block], v_group.exponents[block]] = exponents;
            store::<V>(below, exponents, [m, v], [&mut m_group.codes[block], &mut v_group.codes[block]]);
        }
    }
}

/// The moments of a block after rounding, each as the distance of its bits from the code on below the largest number. A subtraction with
/// saturation bounds these bits, and the next one, in [`store`], finds codes of at least zero.
#[inline(always)]
unsafe fn rounded<V: Vectors>([m, v]: [&[f32; BLOCK]; 2], rounding: Rounding) -> [V::Halves; 2] {
    let random = rounding.block();
    // SAFETY: the caller upholds the contract.
    unsafe {
        let (mut m, mut v) = (V::load(m), V::load(v));
        for nth in 0..HALVES {
            let above = V::shift::<{ 32 - DROPPED }>(V::load_bits(&random, nth * LANES));
            m[nth] = from_code_on::<V>(m[nth], V::splat(HALF_UNIT));
            v[nth] = from_code_on::<V>(v[nth], above);
        }
        let largest = V::halves(LARGEST);
        [V::less(largest, V::narrow(m)), V::less(largest, V::narrow(v))]
    }
}

/// The bits of values from the code on, after the addition of `above`.
#[inline(always)]
unsafe fn from_code_on<V: Vectors>(bits: V::Words, above: V::Words) -> V::Words {
    // SAFETY: the caller upholds the contract.
    unsafe { V::shift::<{ DROPPED }>(V::add(V::and(bits, V::splat(MAGNITUDE)), above)) }
}

/// Stores the codes of moments that were [`rounded`], and replaces the moments by the stored values.
#[inline(always)]
unsafe fn store<V: Vectors>(below: [V::Halves; 2], exponents: [u8; 2], [m, v]: [&mut [f32; BLOCK]; 2], codes: [&mut [u8; BLOCK]; 2]) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let k = V::less(V::halves(LARGEST - (u16::from(exponents[0]) << MANTISSA)), below[0]);
        let code = V::less(V::halves(LARGEST - (u16::from(exponents[1]) << MANTISSA)), below[1]);
        let sign = V::and_halves(V::narrow_signs(V::load(m)), V::halves(SIGN));
        let signed = V::where_some(k, k, V::add_halves(k, V::shift_halves::<8>(sign)));
        V::store_codes([signed, code], codes);
        let first = V::add_halves(V::shift_halves_left::<{ IN_UPPER }>(k), base::<V>(exponents[0]));
        let second = V::add_halves(V::shift_halves_left::<{ IN_UPPER }>(code), base::<V>(exponents[1]));
        V::store_upper(V::where_some(k, k, V::add_halves(first, sign)), m);
        V::store_upper(second, v);
    }
}

/// The stored exponent of a block whose largest rounded value is `below` the largest number.
#[inline(always)]
fn exponent(kind: MomentKind, below: u16) -> u8 {
    (u32::from(LARGEST - below) >> MANTISSA).saturating_sub(kind.range()) as u8
}

/// The number that a block's codes are added to, in the upper halves of values.
#[inline(always)]
unsafe fn base<V: Vectors>(exponent: u8) -> V::Halves {
    // SAFETY: the caller upholds the contract.
    unsafe { V::halves(u16::from(exponent) << (MANTISSA + IN_UPPER)) }
}
