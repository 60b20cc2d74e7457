//! The gradient norm in a fixed order.

/// Gradients of one partial sum; bucket boundaries are multiples of it.
pub const BLOCK: usize = 4096;
