//! The optimizer: the scalar specification, its vectorised forms, the gradient norm and the learning-rate schedules.
//!
//! [`adam`] and [`norm`] define every result bit by bit, one element at a time, in safe generic code. [`simd`] compiles the same code for
//! each instruction set and chooses one at run time. For denormal numbers, which x86-64 multiplies slowly, [`lifted_step`] computes the
//! same bits by [`lifted`] arithmetic.

pub(crate) mod adam;
pub(crate) mod clip;
pub(crate) mod formats;
pub(crate) mod host_passes;
pub(crate) mod int8;
pub(crate) mod int8_state;
mod lifted;
mod lifted_step;
pub(crate) mod moments;
pub(crate) mod norm;
pub(crate) mod optimizer;
#[cfg(test)]
pub(crate) mod samples;
pub(crate) mod schedule;
pub(crate) mod simd;
pub(crate) mod split;
pub(crate) mod state_array;

/// Maximum elements that pass at once between state and checkpoint, digest or initial weights; the plan counts one such buffer.
pub(crate) const PIECE_ELEMS: usize = 4 << 20;

/// Bytes of saved state under one checksum.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
