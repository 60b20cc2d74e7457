//! Gradients and working weights of a format that is known at run time. A pass chooses its code by the format once, before its loop.

use crate::dtype::Dtype;
use half::{bf16, f16};
use std::ops::Range;

/// Runs `$body` with the typed slice inside a [`Grads`] or a [`Weights`].
macro_rules! typed {
    ($kind:ident($slice:ident) = $value:expr => $body:expr) => {
        match $value {
            $kind::F32($slice) => $body,
            $kind::Bf16($slice) => $body,
            $kind::F16($slice) => $body,
        }
    };
}
pub(super) use typed;

/// Gradients of a format known at run time.
#[derive(Clone, Copy, Debug)]
pub enum Grads<'a> {
    /// `float32`.
    F32(&'a [f32]),
    /// `bfloat16`.
    Bf16(&'a [bf16]),
    /// `float16`.
    F16(&'a [f16]),
}

impl<'a> Grads<'a> {
    /// The gradients of the elements `at`.
    ///
    /// # Panics
    /// If there are fewer.
    pub(super) fn part(self, at: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[at]),
            Self::Bf16(all) => Self::Bf16(&all[at]),
            Self::F16(all) => Self::F16(&all[at]),
        }
    }

    /// Reads `bytes` as gradients of `dtype`.
    ///
    /// # Panics
    /// If `dtype` is not a float format, or `bytes` is misaligned or not a whole number of elements.
    pub fn from_bytes(dtype: Dtype, bytes: &'a [u8]) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32(bytemuck::cast_slice(bytes)),
            Dtype::Bfloat16 => Self::Bf16(bytemuck::cast_slice(bytes)),
            Dtype::Float16 => Self::F16(bytemuck::cast_slice(bytes)),
            _ => panic!("gradients must be floats of 16 or 32 bits, these are {dtype}"),
        }
    }
}

/// Working weights of a format known at run time, for writing.
#[derive(Debug)]
pub enum Weights<'a> {
    /// `float32`.
    F32(&'a mut [f32]),
    /// `bfloat16`.
    Bf16(&'a mut [bf16]),
    /// `float16`.
    F16(&'a mut [f16]),
}

impl<'a> Weights<'a> {
    /// Views `bytes` as working weights of `dtype`, for writing.
    ///
    /// # Panics
    /// As [`Grads::from_bytes`].
    pub fn from_bytes(dtype: Dtype, bytes: &'a mut [u8]) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32(bytemuck::cast_slice_mut(bytes)),
            Dtype::Bfloat16 => Self::Bf16(bytemuck::cast_slice_mut(bytes)),
            Dtype::Float16 => Self::F16(bytemuck::cast_slice_mut(bytes)),
            _ => panic!("working weights must be floats of 16 or 32 bits, these are {dtype}"),
        }
    }

    /// Number of weights.
    pub(super) fn len(&self) -> usize {
        typed!(Weights(weights) = self => weights.len())
    }
}
