//! The CPU as a device: the specification of every kernel.
//!
//! (First form: runs every operation at once. Streams, threads and the seeded adversary replace `enqueue` later; the
//! signatures used by kernels and model stay.)
#![allow(unsafe_code)]

mod kernels;
mod launch;
mod team;

use super::{Device, DeviceSlice, EventId, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::pinned::PinnedSlice;

/// The CPU device.
pub struct CpuDevice {
    memory: Vec<Vec<u128>>,
    events: u32,
    compute: launch::ComputeOwner,
}

impl CpuDevice {
    /// A device with `threads` compute threads.
    pub fn new(threads: usize) -> Result<Self> {
        Ok(Self { memory: Vec::new(), events: 0, compute: launch::ComputeOwner::new(threads)? })
    }

    /// Runs `task` on `stream`, after everything enqueued there before.
    pub(crate) fn enqueue(&mut self, stream: Stream, name: &'static str, task: impl FnOnce() + Copy + Send + 'static) -> Result<()> {
        let _ = (stream, name);
        task();
        Ok(())
    }
}

/// The memory behind `s`, to read. Only inside a task.
///
/// # Safety
/// `s` came from this process's CPU device and no other task writes it now: the streams' order and events see to that.
pub(crate) unsafe fn view<T: bytemuck::Pod>(s: DeviceSlice) -> &'static [T] {
    assert_eq!(size_of::<T>(), s.dtype.bytes());
    // SAFETY: the caller's promise; the address is aligned because allocations and slices are.
    unsafe { std::slice::from_raw_parts(s.addr as *const T, s.elems) }
}

/// The memory behind `s`, to write. Only inside a task.
///
/// # Safety
/// As [`view`], and no other task reads or writes it now.
pub(crate) unsafe fn view_mut<T: bytemuck::Pod>(s: DeviceSlice) -> &'static mut [T] {
    assert_eq!(size_of::<T>(), s.dtype.bytes());
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(s.addr as *mut T, s.elems) }
}

impl Device for CpuDevice {
    fn describe(&self) -> String {
        format!("cpu ({} threads, {})", self.compute.threads(), self.compute.isa())
    }
    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let words = (elems * dtype.bytes()).div_ceil(16) + 16;
        let mut block: Vec<u128> = Vec::new();
        block.try_reserve_exact(words).map_err(|e| Error::resource(format!("allocate {name}"), e))?;
        block.resize(words, 0);
        let addr = (block.as_ptr() as u64).next_multiple_of(256);
        self.memory.push(block);
        Ok(DeviceSlice { addr, elems, dtype })
    }
    fn event(&mut self) -> Result<EventId> {
        self.events += 1;
        Ok(EventId(self.events - 1))
    }
    fn record(&mut self, _event: EventId, _stream: Stream) -> Result<()> {
        Ok(())
    }
    fn wait(&mut self, _stream: Stream, _event: EventId) -> Result<()> {
        Ok(())
    }
    fn is_done(&mut self, _event: EventId) -> Result<bool> {
        Ok(true)
    }
    fn synchronize(&mut self, _event: EventId) -> Result<()> {
        Ok(())
    }
    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes);
        self.enqueue(stream, "copy_d2h", move || {
            // SAFETY: both live as long as the device; sizes agree.
            unsafe { std::ptr::copy_nonoverlapping(src.addr as *const u8, dst.addr as *mut u8, dst.bytes) }
        })
    }
    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes, dst.bytes());
        self.enqueue(stream, "copy_h2d", move || {
            // SAFETY: both live as long as the device; sizes agree.
            unsafe { std::ptr::copy_nonoverlapping(src.addr as *const u8, dst.addr as *mut u8, src.bytes) }
        })
    }
}
