//! What GPUs of one process lend each other.
//!
//! Nobody's memory, events or context go while another rank may use them: what a GPU [lends](Lent) is held by all ranks, and each lets it
//! go only when its own streams have ended. What is enqueued there waits for points that were recorded before, so that it always ends.

use super::backlog::Backlog;
use super::driver::RawEvent;
use super::error::check;
use super::ring::Ring;
use crate::device::DeviceSlice;
use crate::device::slice::Allocated;
use crate::error::Result;
use crate::ranks::Seat;
use cust::context::{Context, ContextHandle};
use cust::sys;
use std::sync::Arc;

/// What a GPU has to do with others.
pub(super) struct Peering {
    pub(super) seat: Seat,
    /// What this GPU has lent, unless the others have left.
    pub(super) own: Option<Arc<Lent>>,
    /// By rank.
    pub(super) gpus: Vec<PeerGpu>,
    /// By stream.
    pub(super) backlogs: Vec<Backlog<RawEvent>>,
}

/// Another rank's GPU, or this one.
pub(super) struct PeerGpu {
    pub(super) lent: Arc<Lent>,
    /// This GPU reads its memory itself; otherwise the driver passes it through host memory.
    pub(super) is_direct: bool,
}

/// What others may use of a GPU: its memory and events, and the context in which they live.
pub(crate) struct Lent {
    pub(super) events: Vec<Arc<RawEvent>>,
    pub(super) allocations: Vec<(String, DeviceSlice)>,
    pub(super) rings: Vec<(String, Ring)>,
    /// All of both.
    pub(super) allocated: Allocated,
    pub(super) gpu: sys::CUdevice,
    pub(super) context: Context,
}

impl Lent {
    /// Names and bytes of the memory.
    pub(super) fn allocations(&self) -> impl Iterator<Item = (&str, usize)> {
        let slices = self.allocations.iter().map(|(name, slice)| (name.as_str(), slice.bytes()));
        slices.chain(self.rings.iter().map(|(name, ring)| (name.as_str(), ring.bytes())))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut pushed = std::ptr::null_mut();
        // Whoever is last may be another GPU's thread. An error here has been reported where it arose, or the process is ending.
        // SAFETY: the context is retained until the fields are dropped; all streams that used the memory have ended.
        unsafe { sys::cuCtxPushCurrent_v2(self.context.get_inner()) };
        self.events.clear();
        self.rings.clear();
        free(&self.allocations);
        // SAFETY: pops what was pushed.
        unsafe { sys::cuCtxPopCurrent_v2(&mut pushed) };
    }
}

/// Whether kernels and copies of `gpu` can reach memory of `other`.
pub(super) fn may_read(gpu: sys::CUdevice, other: sys::CUdevice) -> Result<bool> {
    let mut may = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceCanAccessPeer(&mut may, gpu, other) }, || format!("ask whether GPU {gpu} reaches memory of GPU {other}"))?;
    Ok(may != 0)
}

/// Lets `gpu`, whose context is current, reach memory of the GPU that has lent this; false when there is no link between them.
pub(super) fn open_link(gpu: sys::CUdevice, lent: &Lent) -> Result<bool> {
    const ALREADY_ENABLED: u32 = 704;
    if !may_read(gpu, lent.gpu)? {
        return Ok(false);
    }
    // SAFETY: the context is live; the flags are reserved.
    let status = unsafe { sys::cuCtxEnablePeerAccess(lent.context.get_inner(), 0) };
    if status as u32 != ALREADY_ENABLED {
        check(status, || format!("let GPU {gpu} reach memory of GPU {}", lent.gpu))?;
    }
    Ok(true)
}

/// Frees memory that nothing uses any more, of the current context.
pub(super) fn free(allocations: &[(String, DeviceSlice)]) {
    for (_, slice) in allocations {
        // SAFETY: came from cuMemAlloc or cuMemAllocManaged; its owner is being dropped.
        unsafe { sys::cuMemFree_v2(slice.addr()) };
    }
}
