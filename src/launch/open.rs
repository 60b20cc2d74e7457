//! Devices for the drivers of this crate, the engine, the bench and the probe: here they promise what makers of devices must.
#![allow(unsafe_code)]

use crate::device::cpu::{CpuDevice, Schedule};
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::error::Result;
use crate::host::doorbell::Doorbell;
use std::sync::Arc;

/// Has libraries find in the environment what they read there once. Called before the process has a second thread.
pub(crate) fn prepare_environment() {
    #[cfg(feature = "cuda")]
    // SAFETY: main calls it first of all.
    unsafe {
        crate::device::cuda::nccl::forbid_multicast();
    }
}

/// See [`CpuDevice::new`].
pub(crate) fn cpu(threads: usize, schedule: Schedule, driver: Arc<Doorbell>, trace_spans: usize) -> Result<CpuDevice> {
    // SAFETY: these drivers order their streams by events (the adversary's schedules would show where not) and declare host memory before the
    // device that copies it, or own it beside the device.
    unsafe { CpuDevice::new(threads, schedule, driver, trace_spans) }
}

/// See [`CudaDevice::new`].
#[cfg(feature = "cuda")]
pub(crate) fn gpu(ordinal: usize, options: &CudaOptions) -> Result<CudaDevice> {
    // SAFETY: as for the CPU; batches are checked against vocabulary and sequence length before they are copied.
    unsafe { CudaDevice::new(ordinal, options) }
}
