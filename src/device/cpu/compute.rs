//! The compute threads, as tasks of the compute stream access them.
#![allow(unsafe_code)]

use super::kernels::Compute;
use super::kernels::isa::KernelIsa;
use crate::error::Result;
use std::ptr::NonNull;

/// Owner of the [`Compute`]. A device must end its streams before it drops its `ComputeOwner`.
pub(crate) struct ComputeOwner {
    pub(super) compute: NonNull<Compute>,
    isa: KernelIsa,
    threads: usize,
}

// SAFETY: a `ComputeOwner` is the only owner of its `Compute`, which may move to another thread.
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

/// A pointer to the [`Compute`] for tasks of the compute stream.
#[derive(Clone, Copy)]
pub(super) struct ComputeRef(pub(super) NonNull<Compute>);

// SAFETY: only tasks of the compute stream dereference the pointer, one at a time.
unsafe impl Send for ComputeRef {}

impl ComputeRef {
    /// # Safety
    /// Call this only inside a task of the compute stream, and at most once in each task.
    pub(super) unsafe fn get<'a>(self) -> &'a mut Compute {
        // SAFETY: the device outlives the tasks of its streams, and the tasks of one stream run one after the other.
        unsafe { &mut *self.0.as_ptr() }
    }
}
