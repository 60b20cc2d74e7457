//! Moments in 8 bits: blocks of elements with one exponent, and codes of 8 bits.
//!
//! A block is 32 elements by their index in the flat order. With the bits of a value as an integer, whose upper bits are the exponent and
//! the first bits of the mantissa,
//!
//! ```text
//! v: r = bits + random bits / 2^12;  e = max(E, 31) - 31, E the largest exponent of r in the block;  code = max((r >> 20) - 8e, 0)
//!    value = float((code + 8e) << 20)
//! m: r = magnitude + 2^19;  e = max(E, 15) - 15;  k = max((r >> 20) - 8e, 0);  code = sign and k, or 0 if k is 0
//!    value = sign and float((k + 8e) << 20), or 0 if k is 0
//! ```
//!
//! The exponent is that of the largest *rounded* value: with the exponent of the largest value, a second moment could not grow beyond 1.875
//! times a power of two.
//!
//! A code of v has 5 bits of exponent below the block's largest and 3 of mantissa, a code of m 4 and 3. First moments are rounded to nearest
//! with ties away from zero, second moments by the random bits of [`Rounding`], so that their mean is
//! correct. A second moment beside much larger ones reads as 2^-31 of the largest: updates of its parameter are then too small. A format in
//! which it reads as zero has updates that are thousands of times too large.
//!
//! Values that the format represents are never changed, and blocks that are read and stored again have the same bytes. The codec has only
//! integer operations, so CPUs and GPUs agree without further argument. Infinite numbers and NaN remain such.
//!
//! Four blocks are stored as a [`MomentGroup`]. Tensors, decay segments, buckets and slices of ranks begin at multiples of a group, so no
//! place at which they are cut decides a bit.

use crate::optim::moments::Rounding;
use bytemuck::{Pod, Zeroable};

/// Elements with one exponent.
pub(crate) const BLOCK: usize = 32;

/// Elements of a [`MomentGroup`].
pub(crate) const GROUP: usize = 128;

/// Moments of 128 consecutive elements: four blocks of codes, then the exponents of the blocks. All bytes zero are moments of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MomentGroup {
    pub(crate) codes: [[u8; BLOCK]; GROUP / BLOCK],
    pub(crate) exponents: [u8; GROUP / BLOCK],
}

impl MomentGroup {
    /// Elements of a group.
    pub const ELEMS: usize = GROUP;
}

/// Bits of a value below those of its code.
pub(crate) const DROPPED: u32 = 20;

/// Half of a unit of a code.
pub(crate) const HALF_UNIT: u32 = 1 << (DROPPED - 1);

/// Bits of the mantissa in a code.
pub(crate) const MANTISSA: u32 = 23 - DROPPED;

/// Bits of a value without its sign.
pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;

/// One of AdamW's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentKind {
    /// The mean of gradients, with signs.
    First,
    /// The mean of squares, never negative.
    Second,
}

impl MomentKind {
    /// Groups with `values` as the first of the flat order, rounded as with key 0. Zeros follow the last value.
    pub fn groups(self, values: &[f32]) -> Vec<MomentGroup> {
        let mut groups = vec![MomentGroup::zeroed(); values.len().div_ceil(GROUP)];
        encode_all(self, values, Rounding { key: 0, first: 0 }, bytemuck::cast_slice_mut(&mut groups));
        groups
    }

    /// The values of `groups`.
    pub fn values(self, groups: &[MomentGroup]) -> Vec<f32> {
        let mut values = vec![0.0; groups.len() * GROUP];
        decode_all(self, bytemuck::cast_slice(groups), &mut values);
        values
    }

    /// Exponents below the largest of a block that its codes have.
    #[inline(always)]
    pub(crate) const fn range(self) -> u32 {
        match self {
            Self::First => 15,
            Self::Second => 31,
        }
    }

    /// The largest stored exponent: that of a block with an infinite number or a NaN.
    #[cfg(test)]
    pub(crate) const fn most(self) -> u8 {
        u8::MAX - self.range() as u8
    }
}

/// The specification of the codec.
impl MomentKind {
    /// The values of block `block` of `group`.
    #[inline(always)]
    fn decode(self, group: &MomentGroup, block: usize) -> [f32; BLOCK] {
        let (codes, base, mut values) = (&group.codes[block], u32::from(group.exponents[block]) << MANTISSA, [0.0; BLOCK]);
        for i in 0..BLOCK {
            let code = u32::from(codes[i]);
            values[i] = f32::from_bits(match self {
                Self::First => {
                    let k = code & 0x7f;
                    if k == 0 { 0 } else { (code & 0x80) << 24 | (k + base) << DROPPED }
                }
                Self::Second => (code + base) << DROPPED,
            });
        }
        values
    }

    /// Stores `values` as block `block` of `group`, and replaces them by the stored values.
    #[inline(always)]
    fn encode(self, values: &mut [f32; BLOCK], rounding: Rounding, group: &mut MomentGroup, block: usize) {
        let random = rounding.block::<BLOCK>();
        let (mut rounded, mut largest) = ([0; BLOCK], 0);
        for i in 0..BLOCK {
            let above = match self {
                Self::First => HALF_UNIT,
                Self::Second => random[i] >> (32 - DROPPED),
            };
            // The bound keeps every NaN.
            rounded[i] = ((values[i].to_bits() & MAGNITUDE) + above).min(MAGNITUDE);
            largest = largest.max(rounded[i]);
        }
        let exponent = (largest >> 23).max(self.range()) - self.range();
        let least = exponent << MANTISSA;
        for i in 0..BLOCK {
            let upper = (rounded[i] >> DROPPED).max(least);
            let (code, value) = match self {
                Self::First => {
                    let sign = values[i].to_bits() & !MAGNITUDE;
                    if upper == least { (0, 0) } else { ((upper - least) | sign >> 24, sign | upper << DROPPED) }
                }
                Self::Second => (upper - least, upper << DROPPED),
            };
            (group.codes[block][i], values[i]) = (code as u8, f32::from_bits(value));
        }
        group.exponents[block] = exponent as u8;
    }
}

/// An implementation of the codec for the first and the second moments of a block. All have the same bits.
pub(crate) trait BlockCodec: Copy {
    /// The values of block `block` of both groups.
    fn decode(self, groups: [&MomentGroup; 2], block: usize) -> [[f32; BLOCK]; 2];

    /// Stores the moments as block `block` of both groups, and replaces them by the stored values. `rounding` has the random bits of the
    /// block's elements.
    fn encode(self, moments: [&mut [f32; BLOCK]; 2], rounding: Rounding, groups: [&mut MomentGroup; 2], block: usize);
}

/// The codec by the specification.
#[derive(Clone, Copy)]
pub(crate) struct PlainCodec;

impl BlockCodec for PlainCodec {
    #[inline(always)]
    fn decode(self, [m, v]: [&MomentGroup; 2], block: usize) -> [[f32; BLOCK]; 2] {
        [MomentKind::First.decode(m, block), MomentKind::Second.decode(v, block)]
    }

    #[inline(always)]
    fn encode(self, [m, v]: [&mut [f32; BLOCK]; 2], rounding: Rounding, [m_group, v_group]: [&mut MomentGroup; 2], block: usize) {
        MomentKind::First.encode(m, rounding, m_group, block);
        MomentKind::Second.encode(v, rounding, v_group, block);
    }
}

/// A master weight as it is stored beside 8-bit moments: one unit nearer to zero if it lies in the middle of two bfloat16 numbers and its
/// bfloat16 weight is the one nearer to zero, otherwise unchanged. The weight stays the same. Split masters need a bit for these ties,
/// which 8-bit moments do not have: see [`SplitMaster`](crate::optim::split::SplitMaster).
#[inline(always)]
pub(crate) fn settled(master: f32) -> f32 {
    let bits = master.to_bits();
    f32::from_bits(bits - u32::from(bits & 0x1_ffff == 0x8000))
}

/// `elems`, rounded down to whole groups, but at least one group: the size of pieces in which state of any format passes.
pub(crate) fn whole_groups(elems: usize) -> usize {
    (elems - elems % GROUP).max(GROUP)
}

/// Fills `to`, whole groups, with the stored form of `values`. Elements behind the values are stored as zeros.
pub(crate) fn encode_all(kind: MomentKind, values: &[f32], rounding: Rounding, to: &mut [u8]) {
    let groups: &mut [MomentGroup] = bytemuck::cast_slice_mut(to);
    assert_eq!(groups.len(), values.len().div_ceil(GROUP), "room for the stored values");
    groups.fill(MomentGroup::zeroed());
    for (nth, values) in values.chunks(BLOCK).enumerate() {
        let mut block = [0.0; BLOCK];
        block[..values.len()].copy_from_slice(values);
        let group = &mut groups[nth * BLOCK / GROUP];
        kind.encode(&mut block, rounding.behind(nth * BLOCK), group, nth % (GROUP / BLOCK));
    }
}

/// Sets `values` from their stored form.
pub(crate) fn decode_all(kind: MomentKind, from: &[u8], values: &mut [f32]) {
    let groups: &[MomentGroup] = bytemuck::cast_slice(from);
    for (nth, values) in values.chunks_mut(BLOCK).enumerate() {
        let block = kind.decode(&groups[nth * BLOCK / GROUP], nth % (GROUP / BLOCK));
        values.copy_from_slice(&block[..values.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Element;
    use crate::optim::moments::rounding_key;
    use crate::optim::samples::{assert_same, faint, ordinary, wild};
    use crate::optim::split::SplitMaster;
    use half::bf16;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    const KINDS: [MomentKind; 2] = [MomentKind::First, MomentKind::Second];

    fn stored(kind: MomentKind, values: &[f32], key: u64) -> Vec<u8> {
        let rounding = Rounding { key: rounding_key(key), first: 256 };
        let mut bytes = vec![0xff; values.len().div_ceil(GROUP) * size_of::<MomentGroup>()];
        encode_all(kind, values, rounding, &mut bytes);
        bytes
    }

    fn read(kind: MomentKind, bytes: &[u8], elems: usize) -> Vec<f32> {
        let mut values = vec![0.0; elems];
        decode_all(kind, bytes, &mut values);
        values
    }

    /// Moments of one kind: ordinary, wild, and of all magnitudes.
    fn samples(kind: MomentKind, elems: usize) -> [Vec<f32>; 3] {
        let mut rng = ChaCha8Rng::seed_from_u64(8);
        let faint = (0..elems).map(|_| faint(&mut rng, 16)).collect();
        [ordinary(1, elems), wild(2, elems), faint].map(|values: Vec<f32>| match kind {
            MomentKind::First => values,
            MomentKind::Second => values.into_iter().map(f32::abs).collect(),
        })
    }

    #[test]
    fn moments_that_are_read_and_stored_again_have_the_same_bytes() {
        for kind in KINDS {
            for elems in [1, 31, 32, 33, 128, 1000, 65_536] {
                for values in samples(kind, elems) {
                    let bytes = stored(kind, &values, 7);
                    let held = read(kind, &bytes, elems);
                    for key in 8..10 {
                        assert_eq!(stored(kind, &held, key), bytes, "{kind:?}, {elems} elements");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_are_zero_bytes_and_second_moments_beside_large_ones_are_never_zero() {
        for kind in KINDS {
            assert!(stored(kind, &[0.0; 200], 1).iter().all(|byte| *byte == 0), "{kind:?}");
        }
        let mut block = [0.0f32; BLOCK];
        block[5] = 1.5;
        assert_same(&read(MomentKind::First, &stored(MomentKind::First, &block, 1), BLOCK), &block, "first moments");
        let seconds = read(MomentKind::Second, &stored(MomentKind::Second, &block, 1), BLOCK);
        assert!(seconds.iter().enumerate().all(|(i, v)| *v == if i == 5 { 1.5 } else { 2f32.powi(-31) }), "{seconds:?}");
    }

    #[test]
    fn infinite_moments_and_nan_remain_such() {
        for kind in KINDS {
            for special in [f32::INFINITY, f32::NAN] {
                let mut block = [1.0; BLOCK];
                block[3] = special;
                let held = read(kind, &stored(kind, &block, 1), BLOCK);
                assert!(held[3].is_nan() == special.is_nan() && held[3].is_infinite() == special.is_infinite(), "{kind:?} {special}");
                assert!(held.iter().enumerate().all(|(i, x)| i == 3 || x.is_finite()), "{kind:?}: {held:?}");
            }
        }
        let infinite = read(MomentKind::First, &stored(MomentKind::First, &[f32::NEG_INFINITY], 1), 1);
        assert_eq!(infinite, [f32::NEG_INFINITY]);
    }

    #[test]
    fn first_moments_round_to_nearest_within_15_exponents_of_the_largest() {
        let values = ordinary::<f32>(3, 1 << 14);
        let held = read(MomentKind::First, &stored(MomentKind::First, &values, 1), values.len());
        for (block, held) in values.chunks(BLOCK).zip(held.chunks(BLOCK)) {
            let largest = block.iter().fold(0.0f32, |largest, m| largest.max(m.abs()));
            for (m, held) in block.iter().zip(held) {
                assert!((m - held).abs() <= (m.abs() / 16.0).max(largest * 2f32.powi(-15)), "{m} reads {held} beside {largest}");
            }
        }
    }

    /// The mean over 2^16 elements equals each value within four standard deviations, also where a value rounds to the next power of two.
    #[test]
    fn rounding_of_second_moments_is_unbiased() {
        const DRAWS: usize = 1 << 16;
        for value in ordinary::<f32>(4, 40).into_iter().map(|v| v.abs() * 1e-3).chain([3.0f32.next_up(), 8.0f32.next_down()]) {
            let values = vec![value; DRAWS];
            let held = read(MomentKind::Second, &stored(MomentKind::Second, &values, 3), DRAWS);
            let (down, lost) = (f32::from_bits(value.to_bits() & !0xf_ffff), f64::from(value.to_bits() & 0xf_ffff) / f64::from(1 << 20));
            let (up, rose) = (f32::from_bits(down.to_bits() + (1 << 20)), held.iter().filter(|v| **v > down).count() as f64 / DRAWS as f64);
            let deviation = (lost * (1.0 - lost) / DRAWS as f64).sqrt();
            assert!(
                held.iter().all(|v| *v == down || *v == up) && (rose - lost).abs() <= 4.0 * deviation + 1e-4,
                "{value:e}: {rose}, not {lost}"
            );
        }
    }

    #[test]
    fn settled_masters_keep_their_weight_and_have_no_tie() {
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let master = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
                let (split, held) = (SplitMaster::of(master), settled(master));
                if master.is_nan() {
                    assert!(held.is_nan(), "{:#x}", master.to_bits());
                    continue;
                }
                assert_eq!(<bf16 as Element>::from_f32(held).to_bits(), split.weight.to_bits(), "{:#x}", master.to_bits());
                assert_eq!(held.to_bits(), master.to_bits() - u32::from(split.tie), "{:#x}", master.to_bits());
                assert!(!SplitMaster::of(held).tie && settled(held).to_bits() == held.to_bits());
            }
        }
    }
}
