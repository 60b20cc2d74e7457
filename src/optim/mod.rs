//! The optimizer: the scalar specification, its vectorised forms, the gradient norm and the learning-rate schedules.
//!
//! [`adam`] and [`norm`] define every result bit by bit, one element at a time, in safe generic code. [`simd`] compiles the same code for
//! each instruction set and chooses one at run time. For denormal numbers, which x86-64 multiplies slowly, [`lifted_step`] computes the
//! same bits by [`lifted`] arithmetic.

pub(crate) mod adam;
mod lifted;
mod lifted_step;
pub(crate) mod moments;
pub(crate) mod norm;
#[cfg(test)]
pub(crate) mod samples;
pub(crate) mod schedule;
pub(crate) mod simd;

/// One of the three arrays of AdamW's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// The parameters.
    Params = 0,
    /// First moments.
    M = 1,
    /// Second moments.
    V = 2,
}

impl StatePart {
    /// All parts, in their order in checkpoints and digests.
    pub const ALL: [Self; 3] = [Self::Params, Self::M, Self::V];
}

/// Maximum elements that pass at once between state and checkpoint, digest or initial weights; the plan counts one such buffer.
pub(crate) const PIECE_ELEMS: usize = 4 << 20;

/// Bytes of saved state under one checksum.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
