//! A save that the simulated disk writes.

/// Pieces of a save, and the rate of the disk.
pub(super) struct DiskWrites {
    pub(super) bytes_per_s: f64,
    /// Most pieces in memory at once.
    pub(super) most: usize,
    /// Returns the bytes of the next piece, or `None` while no piece is ready.
    pub(super) next_piece: Box<dyn FnMut() -> Option<usize>>,
}

impl DiskWrites {
    /// Nanoseconds of the next piece, if one is ready and fewer than the most pieces are in memory.
    pub(super) fn next_ns(&mut self, in_memory: usize) -> Option<f64> {
        let bytes = if in_memory < self.most { (self.next_piece)() } else { None };
        bytes.map(|bytes| bytes as f64 / self.bytes_per_s * 1e9)
    }
}
