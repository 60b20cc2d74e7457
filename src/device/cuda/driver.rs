//! Owned driver objects that cust does not offer in the required form: non-blocking streams, timed events that can be recorded again,
//! registered host memory.

use super::error::check;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::units::Bytes;
use cust::sys;
use std::ptr;

/// A stream that does not synchronize with the default stream (streams of cust always do).
pub(super) struct RawStream(pub(super) sys::CUstream);

impl RawStream {
    /// `priority`: lower numbers run first; see [`priorities`].
    pub(super) fn new(priority: i32) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, priority) };
        check(status, || "create a CUDA stream".into())?;
        Ok(Self(stream))
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// Priorities of streams on this device: the least and the most urgent.
pub(super) fn priorities() -> Result<(i32, i32)> {
    let (mut least, mut most) = (0, 0);
    // SAFETY: writes two integers.
    check(unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut most) }, || "query stream priorities".into())?;
    Ok((least, most))
}

/// An event, with or without timing.
pub(super) struct RawEvent(pub(super) sys::CUevent);

// SAFETY: driver handles are valid on every thread of a process, and driver functions may be called from several threads at once.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    pub(super) fn new(timed: bool) -> Result<Self> {
        const DISABLE_TIMING: u32 = 2;
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cuEventCreate(&mut event, if timed { 0 } else { DISABLE_TIMING }) };
        check(status, || "create a CUDA event".into())?;
        Ok(Self(event))
    }

    pub(super) fn record(&self, stream: &RawStream) -> Result<()> {
        // SAFETY: both are live.
        check(unsafe { sys::cuEventRecord(self.0, stream.0) }, || "record a CUDA event".into())
    }

    /// Whether all operations before the last record have run; true for an event that was never recorded.
    pub(super) fn is_done(&self) -> Result<bool> {
        const NOT_READY: u32 = 600;
        // SAFETY: live.
        let status = unsafe { sys::cuEventQuery(self.0) };
        match status as u32 {
            NOT_READY => Ok(false),
            _ => check(status, || "run the enqueued kernels and copies".into()).map(|()| true),
        }
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: live.
        check(unsafe { sys::cuEventSynchronize(self.0) }, || "run the enqueued kernels and copies".into())
    }

    /// Nanoseconds from `start` to this event, negative if `start` passed later. Both events were recorded with timing and are done.
    pub(super) fn ns_since(&self, start: &RawEvent) -> Result<i64> {
        let mut ms = 0f32;
        // SAFETY: both are live; writes one float.
        check(unsafe { sys::cuEventElapsedTime(&mut ms, start.0, self.0) }, || "read the time of a CUDA event".into())?;
        Ok((f64::from(ms) * 1e6) as i64)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// Page-locks host memory for asynchronous copies. The memory stays cached because the CPU reads it, too.
pub(super) struct Registered(PinnedSlice);

impl Registered {
    pub(super) fn new(memory: PinnedSlice) -> Result<Self> {
        const PORTABLE: u32 = 1;
        // SAFETY: the range is mapped and outlives the device, which is dropped first.
        let status = unsafe { sys::cuMemHostRegister_v2(memory.addr() as *mut _, memory.bytes(), PORTABLE) };
        check(status, || format!("page-lock {} of host memory", Bytes(memory.bytes() as u64)))?;
        Ok(Self(memory))
    }

    pub(super) fn memory(&self) -> PinnedSlice {
        self.0
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered by `new`, once.
        unsafe { sys::cuMemHostUnregister(self.0.addr() as *mut _) };
    }
}
