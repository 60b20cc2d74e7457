//! Buckets: contiguous ranges of the flat parameter order that move, and are stepped, as a unit.

pub mod layout;
pub mod slot;
