//! Number formats and the definition of their conversions.
//!
//! Every device and instruction set must agree with these conversions bit for bit. Widening is exact, narrowing rounds to the nearest even
//! value, subnormals are kept, and every NaN narrows to the same quiet NaN, as in the PTX casts.

mod fp8;
pub(crate) mod mxfp4;

use half::{bf16, f16};
use std::fmt;

pub use fp8::{E4m3, E5m2};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit float.
    Float32,
    /// 16-bit float, 8-bit exponent.
    Bfloat16,
    /// 16-bit float, 5-bit exponent.
    Float16,
    /// 32-bit signed integer (token ids).
    Int32,
    /// 16-bit unsigned integer (lower halves of split master weights).
    Uint16,
    /// 8-bit unsigned integer (groups of 8-bit moments).
    Uint8,
    /// 8-bit float, 4-bit exponent.
    Float8E4m3,
    /// 8-bit float, 5-bit exponent.
    Float8E5m2,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Float32 | Self::Int32 => 4,
            Self::Bfloat16 | Self::Float16 | Self::Uint16 => 2,
            Self::Uint8 | Self::Float8E4m3 | Self::Float8E5m2 => 1,
        }
    }

    /// Whether the format has 8 bits, so that its numbers have a scale.
    pub(crate) const fn is_fp8(self) -> bool {
        matches!(self, Self::Float8E4m3 | Self::Float8E5m2)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Int32 => "int32",
            Self::Uint16 => "uint16",
            Self::Uint8 => "uint8",
            Self::Float8E4m3 => "float8e4m3",
            Self::Float8E5m2 => "float8e5m2",
        })
    }
}

/// A float format that kernels load into and store from `f32`.
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq + 'static {
    /// This format as a [`Dtype`].
    const DTYPE: Dtype;
    /// Widens exactly.
    fn to_f32(self) -> f32;
    /// Narrows: rounds to nearest even, keeps subnormals, and turns NaN into the canonical quiet NaN.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::Float32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bfloat16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        bf16::from_bits(if x.is_nan() { 0x7fff } else { rounded })
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::Float16;
    // Integer operations and selects without branches, so that the compiler vectorises loops over these conversions for every instruction
    // set. Subnormals take one exact float subtraction or addition.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let h = self.to_bits() as u32;
        let sign = (h & 0x8000) << 16;
        let magnitude = h & 0x7fff;
        let normal = (magnitude << 13) + (112 << 23);
        let subnormal = (f32::from_bits((magnitude << 13) + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
        let special = (magnitude << 13) | 0x7f80_0000;
        let m = if magnitude >= 0x7c00 {
            special
        } else if magnitude < 0x0400 {
            subnormal
        } else {
            normal
        };
        f32::from_bits(sign | m)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let sign = ((bits >> 16) & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        // Adding 2^-1 (ulp 2^-24) in float arithmetic rounds to a subnormal of float16.
        let magic = f32::from_bits(126 << 23);
        let subnormal = (f32::from_bits(magnitude.min(113 << 23)) + magic).to_bits().wrapping_sub(126 << 23);
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
        let m = if magnitude > 0x7f80_0000 {
            0x7fff
        } else if magnitude >= 0x4780_0000 {
            0x7c00
        } else if magnitude < (113 << 23) {
            subnormal
        } else {
            normal
        };
        // The canonical NaN carries no sign, so that all devices agree.
        f16::from_bits(if m == 0x7fff { 0x7fff } else { sign | m as u16 })
    }
}

/// Index of the first value that is infinite or NaN. Without such a value this is one vectorised pass.
pub(crate) fn first_nonfinite(values: &[f32]) -> Option<usize> {
    let exponents = values.iter().fold(0, |largest, x| (x.to_bits() & f32::INFINITY.to_bits()).max(largest));
    if exponents == f32::INFINITY.to_bits() { values.iter().position(|x| !x.is_finite()) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_pattern_widens_as_the_library_does() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(h.is_nan() || Element::to_f32(h).to_bits() == h.to_f32().to_bits(), "f16 {bits:#x}");
            assert!(b.is_nan() || Element::to_f32(b).to_bits() == b.to_f32().to_bits(), "bf16 {bits:#x}");
            assert_eq!(h.is_nan(), Element::to_f32(h).is_nan());
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even_as_the_library_does() {
        // Every upper half with the lower halves that decide rounding, and a stride through all remaining bit patterns.
        let edges = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff];
        let upper = (0..=0xffffu32).flat_map(|u| edges.map(|l| (u << 16) | l));
        for bits in upper.chain((0..u32::MAX).step_by(4099)) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                assert_eq!(<bf16 as Element>::from_f32(x).to_bits(), 0x7fff);
                assert_eq!(<f16 as Element>::from_f32(x).to_bits(), 0x7fff);
            } else {
                assert_eq!(<bf16 as Element>::from_f32(x).to_bits(), bf16::from_f32(x).to_bits(), "{bits:#x}");
                assert_eq!(<f16 as Element>::from_f32(x).to_bits(), f16::from_f32(x).to_bits(), "{bits:#x}");
            }
        }
    }
}
