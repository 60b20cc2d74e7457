//! Number formats: values are `f32` here and are converted to the device's format only in buffers.

use half::{bf16, f16};
use superoffload::internals::dtype::{Dtype, E4m3, E5m2, Element};

/// The float formats.
pub const FLOATS: [Dtype; 3] = [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32];

/// `x` rounded to the format.
pub fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::Bfloat16 => <bf16 as Element>::from_f32(x).to_f32(),
        Dtype::Float16 => Element::to_f32(<f16 as Element>::from_f32(x)),
        Dtype::Float8E4m3 => E4m3::from_f32(x).to_f32(),
        Dtype::Float8E5m2 => E5m2::from_f32(x).to_f32(),
        Dtype::Float32 | Dtype::Int32 | Dtype::Uint16 | Dtype::Uint8 => x,
    }
}

/// The bytes of `values` in a float format.
pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::Bfloat16 => narrow::<bf16>(values),
        Dtype::Float16 => narrow::<f16>(values),
        Dtype::Float8E4m3 => narrow::<E4m3>(values),
        Dtype::Float8E5m2 => narrow::<E5m2>(values),
        Dtype::Float32 | Dtype::Int32 => narrow::<f32>(values),
        Dtype::Uint16 => values.iter().flat_map(|&x| (x as u16).to_le_bytes()).collect(),
        Dtype::Uint8 => values.iter().map(|&x| x as u8).collect(),
    }
}

fn narrow<T: Element>(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(&values.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>()).to_vec()
}

/// The values of bytes in a float format.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::Bfloat16 => widen::<bf16>(bytes),
        Dtype::Float16 => widen::<f16>(bytes),
        Dtype::Float8E4m3 => widen::<E4m3>(bytes),
        Dtype::Float8E5m2 => widen::<E5m2>(bytes),
        Dtype::Float32 | Dtype::Int32 => widen::<f32>(bytes),
        Dtype::Uint16 => bytes.chunks_exact(2).map(|x| f32::from(u16::from_le_bytes([x[0], x[1]]))).collect(),
        Dtype::Uint8 => bytes.iter().map(|&x| f32::from(x)).collect(),
    }
}

fn widen<T: Element>(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(size_of::<T>()).map(|x| bytemuck::pod_read_unaligned::<T>(x).to_f32()).collect()
}

/// The values in `f64`.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Whether two elements have equal bits. The payload of an fp32 NaN is unspecified; narrow formats have one NaN.
pub fn same(dtype: Dtype, a: &[u8], b: &[u8]) -> bool {
    a == b || (dtype == Dtype::Float32 && decode(dtype, a)[0].is_nan() && decode(dtype, b)[0].is_nan())
}
