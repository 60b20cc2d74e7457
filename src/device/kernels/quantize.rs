//! From numbers of 16 bits to numbers of 8 and one scale for all of them: what products in FP8 read.
//!
//! A scale is a power of two, so that dividing by it is exact, and every device rounds once and alike.

use crate::device::kernel::{Access, Kernel, Operand, operands, refused};
use crate::device::kernels::norm::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use crate::device::kernels::pointwise::{Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, Swiglu, SwigluBackward};
use crate::device::slice::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// What the dimensions of matrices of 8 bits are multiples of: rows of them, in either orientation, are whole 16-byte vectors.
pub(crate) const FP8_GRAIN: usize = 16;

/// Bits of fp32's exponent and mantissa.
const MANTISSA_BITS: u32 = 23;
/// The mantissa of 1.75: that of the largest number of both formats of 8 bits.
const LARGEST_MANTISSA: u32 = 0x60_0000;

/// The scale for numbers of which the largest has the magnitude `largest`: the least power of two, from 2^-126 on, by whose division it lies
/// within `format`; NaN where it is no number, so that nothing that is computed with the matrix is one either.
///
/// # Panics
/// If the format is none of 8 bits.
pub(crate) fn scale_of(largest: f32, format: Dtype) -> f32 {
    let bits = largest.abs().to_bits();
    if bits >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    let (exponent, mantissa) = (bits >> MANTISSA_BITS, bits & ((1 << MANTISSA_BITS) - 1));
    let exponent = (exponent + u32::from(mantissa > LARGEST_MANTISSA)).saturating_sub(largest_exponent(format));
    f32::from_bits(exponent.max(1) << MANTISSA_BITS)
}

/// The exponent of the format's largest number, 448 or 57344.
///
/// # Panics
/// If the format is none of 8 bits.
pub(crate) fn largest_exponent(format: Dtype) -> u32 {
    match format {
        Dtype::Float8E4m3 => 8,
        Dtype::Float8E5m2 => 15,
        other => panic!("{other} has no scales"),
    }
}

/// `scale` of a matrix, see [`scale_of`], from the largest magnitude of its elements.
#[derive(Clone, Copy, Debug)]
pub struct AbsMaxScale {
    /// Any size but none.
    pub x: DeviceSlice,
    /// fp32 `[1]`
    pub scale: DeviceSlice,
    /// Of 8 bits.
    pub format: Dtype,
}

impl Kernel for AbsMaxScale {
    const NAME: &'static str = "abs_max_scale";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read x[self.x.elems()]; Write scale[1] Float32]
    }

    fn check_shape(&self) -> Result<()> {
        check_format(Self::NAME, self.format)
    }
}

/// A kernel that has each element of a matrix in its hands when it writes it, and so may find the matrix's scale.
pub trait WritesMatrix: Kernel {
    /// The matrix; every element of it is written.
    fn written(&self) -> DeviceSlice;
}

macro_rules! write_matrices {
    ($($kernel:ident . $field:ident),+ $(,)?) => {
        $(impl WritesMatrix for $kernel {
            fn written(&self) -> DeviceSlice {
                self.$field
            }
        })+
    };
}

write_matrices! {
    RmsNorm.out,
    RmsNormBackward.dx,
    LayerNorm.out,
    LayerNormBackward.dx,
    Swiglu.out,
    SwigluBackward.dgate_up,
    Geglu.out,
    GegluBackward.dgate_up,
    Gelu.out,
    GeluBackward.dx,
    ScaleAdd.out,
}

/// Where a matrix's scale goes.
#[derive(Clone, Copy, Debug)]
pub struct ScaleCell {
    /// fp32 `[1]`, 0 before: it is raised to the scale, in the order of bits, in which NaN is above all numbers.
    pub scale: DeviceSlice,
    /// Of 8 bits.
    pub format: Dtype,
}

/// A kernel that also finds the scale of the matrix that it writes, as [`AbsMaxScale`] does in a pass of its own.
#[derive(Clone, Copy, Debug)]
pub struct WithScale<K> {
    pub kernel: K,
    /// `None`: the kernel alone.
    pub cell: Option<ScaleCell>,
}

/// Most operands of a [`WithScale`].
const OPERANDS_MAX: usize = 8;

impl<K: WritesMatrix> Kernel for WithScale<K> {
    const NAME: &'static str = K::NAME;

    /// The kernel's, then the scale.
    fn operands(&self) -> impl AsRef<[Operand]> {
        let none = Operand { name: "scale", slice: None, dtype: Some(Dtype::Float32), elems: 1, access: Access::Update, small: true };
        let (kernel, mut all) = (self.kernel.operands(), [none; OPERANDS_MAX]);
        let kernel = kernel.as_ref();
        all[..kernel.len()].copy_from_slice(kernel);
        all[kernel.len()].slice = self.cell.map(|cell| cell.scale);
        all
    }

    fn check_shape(&self) -> Result<()> {
        self.kernel.check_shape()?;
        self.cell.map_or(Ok(()), |cell| check_format(Self::NAME, cell.format))
    }
}

/// Divides a matrix by its scale and rounds to the nearest numbers of 8 bits: as it is, transposed, or both in one pass. A scale that is NaN, or
/// 0 because nobody found it, makes NaN of all.
#[derive(Clone, Copy, Debug)]
pub struct Quantize {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// As [`AbsMaxScale`] leaves it, fp32 `[1]`.
    pub scale: DeviceSlice,
    /// `[rows, cols]`, of 8 bits.
    pub out: Option<DeviceSlice>,
    /// `[cols, rows]`, in the same format.
    pub transposed: Option<DeviceSlice>,
    pub cols: usize,
}

impl Quantize {
    /// The format of 8 bits.
    ///
    /// # Errors
    /// `Resource` when there is none, or there are two.
    pub(crate) fn format(&self) -> Result<Dtype> {
        let formats = [self.out, self.transposed].map(|out| out.map(DeviceSlice::dtype));
        match formats {
            [Some(one), Some(other)] if one != other => Err(refused(Self::NAME, format!("out is {one}, transposed {other}"))),
            [None, None] => Err(refused(Self::NAME, "there is nothing to write".into())),
            [one, other] => Ok(one.or(other).unwrap_or(Dtype::Float8E4m3)),
        }
    }
}

impl Kernel for Quantize {
    const NAME: &'static str = "quantize";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.x.elems();
        operands![self; Read x[n], Write out[n], Write transposed[n]; Read scale[1] Float32]
    }

    fn check_shape(&self) -> Result<()> {
        check_format(Self::NAME, self.format()?)?;
        let (cols, rows) = (self.cols, self.x.elems() / self.cols.max(1));
        if rows * cols == self.x.elems() && cols.is_multiple_of(FP8_GRAIN) && rows.is_multiple_of(FP8_GRAIN) {
            return Ok(());
        }
        let elems = self.x.elems();
        Err(refused(Self::NAME, format!("{elems} elements in rows of {cols} are no matrix of multiples of {FP8_GRAIN}")))
    }

    /// That of `x`.
    fn float_format(&self) -> Result<Dtype> {
        Ok(self.x.dtype())
    }
}

fn check_format(kernel: &str, format: Dtype) -> Result<()> {
    if format.is_fp8() { Ok(()) } else { Err(Error::Unsupported(format!("{kernel} to {format}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(largest: f32) -> [f32; 2] {
        [Dtype::Float8E4m3, Dtype::Float8E5m2].map(|format| scale_of(largest, format))
    }

    #[test]
    fn the_largest_number_just_fits() {
        assert_eq!(scales(448.0), [1.0, 2f32.powi(-7)]);
        assert_eq!(scales(448f32.next_up()), [2.0, 2f32.powi(-6)]);
        assert_eq!(scales(57344.0), [128.0, 1.0]);
        assert_eq!(scales(-1.75), [2f32.powi(-8), 2f32.powi(-15)]);
        assert_eq!(scales(f32::MAX), [2f32.powi(120), 2f32.powi(113)]);
        for exponent in -110..127 {
            let largest = 1.3 * 2f32.powi(exponent);
            let [wide, narrow] = scales(largest);
            assert!((224.0..=448.0).contains(&(largest / wide)) && (28672.0..=57344.0).contains(&(largest / narrow)), "{largest}");
        }
    }

    #[test]
    fn nothing_has_the_least_scale_and_no_number_none() {
        let least = 2f32.powi(-126);
        assert_eq!((scales(0.0), scales(f32::MIN_POSITIVE), scales(1e-45)), ([least; 2], [least; 2], [least; 2]));
        assert!([f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().flat_map(scales).all(f32::is_nan));
    }
}
