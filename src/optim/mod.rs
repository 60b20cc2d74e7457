//! The optimizer: the scalar specification, its vector forms, the gradient norm and the learning-rate schedules.
//!
//! [`adam`] and [`norm`] define every result to the bit, one element at a time, in safe generic code. [`simd`] compiles
//! the same code for each instruction set and picks one at run time; it adds no arithmetic of its own.

pub mod adam;
pub mod norm;
#[cfg(test)]
pub(crate) mod samples;
pub mod schedule;
pub mod simd;
