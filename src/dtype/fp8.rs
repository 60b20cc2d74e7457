//! The two 8-bit formats as defined by OCP and implemented by GPUs: E4M3 without infinities, up to 448, and E5M2, the upper half of a
//! float16. Values beyond the largest number are rounded to it.

use super::{Dtype, Element};
use half::f16;

/// Sign, 4 bits of exponent, 3 of mantissa: values up to 448, and NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// Sign, 5 bits of exponent, 2 of mantissa: values up to 57344, infinities and NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// The canonical NaN of both formats.
const NAN: u8 = 0x7f;
/// All bits but the sign.
const MAGNITUDE: u8 = 0x7f;

impl Element for E4m3 {
    const DTYPE: Dtype = Dtype::Float8E4m3;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 & !MAGNITUDE) << 24, u32::from(self.0 & MAGNITUDE));
        let value = match magnitude {
            0x7f => f32::NAN,
            0..8 => magnitude as f32 / 512.0,
            _ => f32::from_bits((magnitude << 20) + (120 << 23)),
        };
        f32::from_bits(sign | value.to_bits())
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self(narrow::<3, 120, 0x7e>(x))
    }
}

impl Element for E5m2 {
    const DTYPE: Dtype = Dtype::Float8E5m2;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Element::to_f32(f16::from_bits(u16::from(self.0) << 8))
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self(narrow::<2, 112, 0x7b>(x))
    }
}

/// Rounds `x` to a format with `MANTISSA` mantissa bits, an exponent bias `BIAS` less than that of `f32`, and the largest number `LARGEST`.
/// To round to a subnormal, the function adds a power of two with an ulp equal to the format's smallest number.
#[inline(always)]
fn narrow<const MANTISSA: u32, const BIAS: u32, const LARGEST: u8>(x: f32) -> u8 {
    let bits = x.to_bits();
    let (sign, magnitude) = ((bits >> 24) as u8 & !MAGNITUDE, bits & 0x7fff_ffff);
    let (dropped, smallest_normal) = (23 - MANTISSA, (BIAS + 1) << 23);
    let place = (BIAS + 1 + dropped) << 23;
    let subnormal = (f32::from_bits(magnitude.min(smallest_normal)) + f32::from_bits(place)).to_bits() - place;
    let even = (magnitude >> dropped) & 1;
    let normal = (magnitude.wrapping_sub(BIAS << 23).wrapping_add((1 << (dropped - 1)) - 1 + even)) >> dropped;
    let rounded = if magnitude < smallest_normal { subnormal } else { normal };
    if magnitude > f32::INFINITY.to_bits() { NAN } else { sign | rounded.min(u32::from(LARGEST)) as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// The non-negative numbers of a format in ascending order, by definition.
    fn numbers(mantissa_bits: i32, bias: i32, largest: u8) -> Vec<f64> {
        let of = |bits: u8| {
            let (exponent, mantissa) = (i32::from(bits >> mantissa_bits), f64::from(bits & ((1 << mantissa_bits) - 1)));
            let (lead, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
            (lead + mantissa / 2f64.powi(mantissa_bits)) * 2f64.powi(exponent - bias)
        };
        (0..=largest).map(of).collect()
    }

    /// Index of the number nearest to `x`; ties go to the even index, and values beyond the last number to the last.
    fn nearest(numbers: &[f64], x: f64) -> u8 {
        let above = numbers.partition_point(|number| *number < x);
        let Some(high) = numbers.get(above) else { return (numbers.len() - 1) as u8 };
        let low = numbers[above.saturating_sub(1)];
        let takes_low = x - low < high - x || (x - low == high - x && above % 2 == 1);
        if takes_low { above.saturating_sub(1) as u8 } else { above as u8 }
    }

    fn agrees<T: Element + Into<u8>>(numbers: &[f64]) {
        for (bits, number) in (0u8..).zip(numbers) {
            for sign in [0, 0x80] {
                let x: T = bytemuck::cast(bits | sign);
                let want = if sign == 0 { *number } else { -number };
                assert_eq!((f64::from(x.to_f32()), T::from_f32(x.to_f32())), (want, x), "{:#x}", bits | sign);
            }
        }
        // Every bf16, and the neighbours of the midpoint of each pair of numbers.
        let halves = (0..=u16::MAX).map(|bits| Element::to_f32(bf16::from_bits(bits)));
        let middles = numbers.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
        let beside = middles.flat_map(|x| [x.next_down(), x, x.next_up()]);
        for x in halves.chain(beside) {
            let got: u8 = T::from_f32(x).into();
            let sign = if x.is_sign_negative() { 0x80 } else { 0 };
            let want = if x.is_nan() { NAN } else { sign | nearest(numbers, f64::from(x).abs()) };
            assert_eq!(got, want, "{x}");
        }
        assert!(T::from_f32(f32::NAN).to_f32().is_nan());
    }

    impl From<E4m3> for u8 {
        fn from(x: E4m3) -> u8 {
            x.0
        }
    }

    impl From<E5m2> for u8 {
        fn from(x: E5m2) -> u8 {
            x.0
        }
    }

    #[test]
    fn both_formats_take_the_nearest_of_their_numbers() {
        let (e4m3, e5m2) = (numbers(3, 7, 0x7e), numbers(2, 15, 0x7b));
        assert_eq!((e4m3[0x7e], e5m2[0x7b], e4m3[1], e5m2[1]), (448.0, 57344.0, 2f64.powi(-9), 2f64.powi(-16)));
        agrees::<E4m3>(&e4m3);
        agrees::<E5m2>(&e5m2);
    }

    #[test]
    fn too_large_numbers_saturate() {
        assert_eq!([464.0, f32::INFINITY, -1e30].map(|x| E4m3::from_f32(x).0), [0x7e, 0x7e, 0xfe]);
        assert_eq!([65536.0, f32::INFINITY, -1e30].map(|x| E5m2::from_f32(x).0), [0x7b, 0x7b, 0xfb]);
    }
}
