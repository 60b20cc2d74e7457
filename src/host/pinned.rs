//! Host memory that copies and worker threads share.

/// A typed-by-use view of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedSlice {
    /// Address of the first byte.
    pub addr: usize,
    /// Bytes.
    pub bytes: usize,
}
