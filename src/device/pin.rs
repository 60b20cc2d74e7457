//! Host memory that a device copies asynchronously.

use crate::error::Result;
use crate::host::pinned::PinnedSlice;

/// Host memory that copies will need, and whose pages the kernel has not granted yet.
#[derive(Clone, Copy, Debug)]
pub struct PagesToCome {
    /// Memory to be pinned.
    pub pinned: PinnedSlice,
    /// Memory that stays pageable.
    pub pageable: PinnedSlice,
    /// Bytes that are faulted in and pinned at once. No two parts share a page.
    pub part_bytes: usize,
}

/// Pinned memory of a device.
pub trait PinMemory {
    /// Prepares host memory for asynchronous copies. Only between steps.
    ///
    /// # Errors
    /// `Resource` when the system refuses to lock the memory.
    fn pin(&mut self, memory: PinnedSlice) -> Result<()>;

    /// Begins to pin memory beside steps: [`PinMemory::pin`] of it waits for the rest, and [`PinMemory::unpin`] ends it. Returns false, and
    /// does nothing, if the device cannot.
    fn pin_beside_steps(&mut self, _pages: PagesToCome) -> bool {
        false
    }

    /// Reverts [`PinMemory::pin`], once all enqueued operations have run. The memory may be freed afterwards.
    ///
    /// # Errors
    /// Errors of the device.
    fn unpin(&mut self, memory: PinnedSlice) -> Result<()>;
}
