//! State for rows of several documents. cuDNN's attention supports one document per sequence, so documents are copied to a padded layout:
//! see `kernels/packed.rs`.

use crate::device::DeviceSlice;
use crate::device::documents::DocumentTable;
use crate::dtype::Dtype;

/// Scratch memory for gathered documents, and the table of the current micro-batch's documents.
pub(super) struct Packed {
    pub(super) documents: DocumentTable,
    /// The table on the GPU, `[documents, 2]`.
    pub(super) table: DeviceSlice,
    pub(super) scratch: DeviceSlice,
}

impl Packed {
    pub(super) fn new() -> Self {
        let nothing = |dtype| DeviceSlice::at(0, 0, dtype);
        Self { documents: DocumentTable::default(), table: nothing(Dtype::Int32), scratch: nothing(Dtype::Float32) }
    }
}
