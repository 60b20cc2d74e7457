//! Quantization of 16-bit floats to 8-bit floats with one scale, for FP8 products.
//!
//! Scales are powers of two, so division by a scale is exact, and all devices round once and identically.

use crate::device::kernel::{Access, Kernel, Operand, operands, refused};
use crate::device::kernels::norm::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use crate::device::kernels::pointwise::{Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, Swiglu, SwigluBackward};
use crate::device::slice::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// The dimensions of 8-bit matrices are multiples of this number, so that rows are whole 16-byte vectors in both orientations.
pub(crate) const FP8_GRAIN: usize = 16;

/// Position of fp32's exponent, which follows the mantissa bits.
const MANTISSA_BITS: u32 = 23;
/// Mantissa of 1.75, the mantissa of the largest number of both 8-bit formats.
const LARGEST_MANTISSA: u32 = 0x60_0000;

/// The scale for numbers of magnitude up to `largest`: the smallest power of two, at least 2^-126, such that the quotient lies within
/// `format`. If `largest` is infinite or NaN the scale is NaN, so that every result computed with the matrix is NaN.
///
/// # Panics
/// If the format is not an 8-bit format.
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
/// If the format is not an 8-bit format.
pub(crate) fn largest_exponent(format: Dtype) -> u32 {
    match format {
        Dtype::Float8E4m3 => 8,
        Dtype::Float8E5m2 => 15,
        other => panic!("{other} has no scales"),
    }
}

/// Computes the `scale` of a matrix, see [`scale_of`], from the largest magnitude of its elements.
#[derive(Clone, Copy, Debug)]
pub struct AbsMaxScale {
    /// At least one element.
    pub x: DeviceSlice,
    /// fp32 `[1]`
    pub scale: DeviceSlice,
    /// An 8-bit format.
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

/// A kernel that writes every element of a matrix, so that it can compute the scale of the matrix as well.
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

/// Destination of a matrix's scale.
#[derive(Clone, Copy, Debug)]
pub struct ScaleCell {
    /// fp32 `[1]`, 0 before the kernel. Kernels raise it to the scale, comparing bits, in which NaN is above all numbers.
    pub scale: DeviceSlice,
    /// An 8-bit format.
    pub format: Dtype,
}

/// A kernel that also computes the scale of the matrix that it writes, as [`AbsMaxScale`] does in a separate pass.
#[derive(Clone, Copy, Debug)]
pub struct WithScale<K> {
    pub kernel: K,
    /// `None`: no scale.
    pub cell: Option<ScaleCell>,
}

/// Maximum operands of a [`WithScale`].
const OPERANDS_MAX: usize = 8;

impl<K: WritesMatrix> Kernel for WithScale<K> {
    const NAME: &'static str = K::NAME;

    /// Operands of the kernel, then the scale.
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
        if let Some(cell) = self.cell { check_format(Self::NAME, cell.format) } else { Ok(()) }
    }
}

/// Divides a matrix by its scale and rounds to the nearest 8-bit floats: unchanged, transposed, or both in one pass. A scale that is NaN,
/// or 0 because no kernel computed it, makes all elements NaN.
#[derive(Clone, Copy, Debug)]
pub struct Quantize {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// Result of [`AbsMaxScale`], fp32 `[1]`.
    pub scale: DeviceSlice,
    /// `[rows, cols]`, in an 8-bit format.
    pub out: Option<DeviceSlice>,
    /// `[cols, rows]`, in the same format.
    pub transposed: Option<DeviceSlice>,
    pub cols: usize,
}

impl Quantize {
    /// The 8-bit format.
    ///
    /// # Errors
    /// `Resource` when there is no output, or when the outputs have different formats.
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

    /// The format of `x`.
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
