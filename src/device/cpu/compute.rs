//! What kernels run on and reach: the compute threads and the device's memory, for tasks of the compute stream.
#![allow(unsafe_code)]

use super::kernels::Compute;
use super::kernels::isa::KernelIsa;
use crate::device::DeviceSlice;
use crate::error::Result;
use std::ptr::NonNull;

/// Owns what kernels run on. A device that holds one must end its streams before it drops it.
pub(crate) struct ComputeOwner {
    pub(super) compute: NonNull<Compute>,
    isa: KernelIsa,
    threads: usize,
}

// SAFETY: it owns the `Compute`, which may go to another thread.
unsafe impl Send for ComputeOwner {}

impl ComputeOwner {
    /// Starts `threads` compute threads (the compute stream's own included) with the widest instruction set of this machine.
    ///
    /// # Errors
    /// `Resource` when a thread cannot be started.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let isa = KernelIsa::detect();
        let compute = Box::new(Compute::new(threads, isa)?);
        Ok(Self { compute: NonNull::from(Box::leak(compute)), isa, threads })
    }

    pub(crate) fn isa(&self) -> KernelIsa {
        self.isa
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }
}

impl Drop for ComputeOwner {
    fn drop(&mut self) {
        // SAFETY: `new` leaked it from a box, and the streams whose tasks follow `ComputeRef`s have ended.
        drop(unsafe { Box::from_raw(self.compute.as_ptr()) });
    }
}

/// How a task of the compute stream reaches the [`Compute`].
#[derive(Clone, Copy)]
pub(super) struct ComputeRef(pub(super) NonNull<Compute>);

// SAFETY: only tasks of the compute stream follow it, one at a time.
unsafe impl Send for ComputeRef {}

impl ComputeRef {
    /// # Safety
    /// Only inside a task of the compute stream, and not twice there.
    pub(super) unsafe fn get<'a>(self) -> &'a mut Compute {
        // SAFETY: the device outlives its streams' tasks, and those of one stream run one after the other.
        unsafe { &mut *self.0.as_ptr() }
    }
}

/// The memory behind `s`, to read. Only inside a task.
///
/// # Safety
/// `s` came from this process's CPU device, which is alive, and no other task writes it now: the streams' order and
/// events see to that.
pub(super) unsafe fn view<'a, T: bytemuck::Pod>(s: DeviceSlice) -> &'a [T] {
    assert_eq!(size_of::<T>(), s.dtype().bytes());
    // SAFETY: the caller's promise; the address is aligned because allocations and slices are.
    unsafe { std::slice::from_raw_parts(s.addr() as *const T, s.elems()) }
}

/// The memory behind `s`, to write. Only inside a task.
///
/// # Safety
/// As [`view`], and no other task reads or writes it now.
pub(super) unsafe fn view_mut<'a, T: bytemuck::Pod>(s: DeviceSlice) -> &'a mut [T] {
    assert_eq!(size_of::<T>(), s.dtype().bytes());
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(s.addr() as *mut T, s.elems()) }
}
