//! Buckets: contiguous ranges of the flat parameter order that are transferred and stepped as a unit.

pub(crate) mod layout;
pub(crate) mod slices;
pub(crate) mod slot;
