//! Memory and events that GPUs of one process share.
//!
//! All ranks hold a reference to each GPU's [`SharedContext`] memory, events and context, and a rank drops its references only after its
//! own streams have ended. Memory, events and contexts are therefore never freed while another rank may use them. Operations wait only for
//! points that were recorded earlier, so the streams always end.

use super::backlog::Backlog;
use super::driver::RawEvent;
use super::error::check;
use super::ring::Ring;
use crate::device::DeviceSlice;
use crate::device::slice::Allocated;
use crate::error::Result;
use crate::ranks::RankContext;
use cust::context::{Context, ContextHandle};
use cust::sys;
use std::sync::Arc;

/// Connections of a GPU to the GPUs of other ranks.
pub(super) struct Peering {
    pub(super) rank_context: RankContext,
    /// Memory and events of this GPU that peers may use; `None` once the peers have dropped theirs.
    pub(super) own: Option<Arc<SharedContext>>,
    /// Indexed by rank.
    pub(super) gpus: Vec<PeerGpu>,
    /// Indexed by stream.
    pub(super) backlogs: Vec<Backlog<RawEvent>>,
}

/// The GPU of a rank, possibly this one.
pub(super) struct PeerGpu {
    pub(super) shared_context: Arc<SharedContext>,
    /// Whether this GPU reads the peer's memory directly; otherwise the driver stages copies through host memory.
    pub(super) is_direct: bool,
}

/// Parts of a GPU that its peers may use: memory and events, and their context.
pub(crate) struct SharedContext {
    pub(super) events: Vec<Arc<RawEvent>>,
    pub(super) allocations: Vec<(String, DeviceSlice)>,
    pub(super) rings: Vec<(String, Ring)>,
    /// Slices of `allocations` and `rings`.
    pub(super) allocated: Allocated,
    pub(super) gpu: sys::CUdevice,
    pub(super) context: Context,
}

impl SharedContext {
    /// Names and bytes of the memory.
    pub(super) fn allocations(&self) -> impl Iterator<Item = (&str, usize)> {
        let slices = self.allocations.iter().map(|(name, slice)| (name.as_str(), slice.bytes()));
        slices.chain(self.rings.iter().map(|(name, ring)| (name.as_str(), ring.bytes())))
    }
}

impl Drop for SharedContext {
    fn drop(&mut self) {
        let mut pushed = std::ptr::null_mut();
        // The last owner may be the thread of another GPU. Errors are ignored: they were reported where they arose, or the process is
        // ending. SAFETY: the context is retained until the fields are dropped; all streams that used the memory have ended.
        unsafe { sys::cuCtxPushCurrent_v2(self.context.get_inner()) };
        self.events.clear();
        self.rings.clear();
        free(&self.allocations);
        // SAFETY: pops what was pushed.
        unsafe { sys::cuCtxPopCurrent_v2(&mut pushed) };
    }
}

/// Whether kernels and copies of `gpu` can access memory of `other`.
pub(super) fn may_read(gpu: sys::CUdevice, other: sys::CUdevice) -> Result<bool> {
    let mut may = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceCanAccessPeer(&mut may, gpu, other) }, || {
        format!("query whether GPU {gpu} can access memory of GPU {other}")
    })?;
    Ok(may != 0)
}

/// Enables access of `gpu`, whose context is current, to the memory of the GPU of `shared_context`; false when the two GPUs have no direct
/// link.
pub(super) fn open_link(gpu: sys::CUdevice, shared_context: &SharedContext) -> Result<bool> {
    const ALREADY_ENABLED: u32 = 704;
    if !may_read(gpu, shared_context.gpu)? {
        return Ok(false);
    }
    // SAFETY: the context is live; the flags are reserved.
    let status = unsafe { sys::cuCtxEnablePeerAccess(shared_context.context.get_inner(), 0) };
    if status as u32 != ALREADY_ENABLED {
        check(status, || format!("enable access of GPU {gpu} to memory of GPU {}", shared_context.gpu))?;
    }
    Ok(true)
}

/// Frees unused memory of the current context.
pub(super) fn free(allocations: &[(String, DeviceSlice)]) {
    for (_, slice) in allocations {
        // SAFETY: allocated by cuMemAlloc or cuMemAllocManaged; its owner is being dropped.
        unsafe { sys::cuMemFree_v2(slice.addr()) };
    }
}
