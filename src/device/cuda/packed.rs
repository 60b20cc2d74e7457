//! What rows of several documents need for cuDNN's attention, which knows one document a sequence: see `kernels/packed.rs`.

use crate::device::DeviceSlice;
use crate::device::documents::DocumentTable;
use crate::dtype::Dtype;

/// What documents are gathered to, and the table of those of the present micro-batch.
pub(super) struct Packed {
    pub(super) documents: DocumentTable,
    /// The same on the GPU, `[documents, 2]`.
    pub(super) table: DeviceSlice,
    pub(super) scratch: DeviceSlice,
}

impl Packed {
    pub(super) fn new() -> Self {
        let nothing = |dtype| DeviceSlice::at(0, 0, dtype);
        Self { documents: DocumentTable::default(), table: nothing(Dtype::Int32), scratch: nothing(Dtype::Float32) }
    }
}
