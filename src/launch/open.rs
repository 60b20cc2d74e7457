//! Opens devices for the drivers of this crate (engine, bench, probe) and upholds the safety contracts of the constructors.
#![allow(unsafe_code)]

use crate::device::cpu::{CpuDevice, StreamOrder};
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::error::Result;
use crate::host::doorbell::Doorbell;
use std::sync::Arc;

/// Sets environment variables that libraries read once. Must run before the process has a second thread.
pub(crate) fn prepare_environment() {
    #[cfg(feature = "cuda")]
    // SAFETY: `main` calls this function before anything else.
    unsafe {
        crate::device::cuda::nccl::forbid_multicast();
    }
}

/// Opens the CPU device. See [`CpuDevice::new`].
pub(crate) fn cpu(threads: usize, schedule: StreamOrder, driver: Arc<Doorbell>, trace_spans: usize) -> Result<CpuDevice> {
    // SAFETY: these drivers order their streams by events (the adversary's schedules test this). They declare host memory before the device
    // that copies it, or own it beside the device.
    unsafe { CpuDevice::new(threads, schedule, driver, trace_spans) }
}

/// Opens a GPU. See [`CudaDevice::new`].
#[cfg(feature = "cuda")]
pub(crate) fn gpu(ordinal: usize, options: &CudaOptions) -> Result<CudaDevice> {
    // SAFETY: as for the CPU. In addition, batches are checked against vocabulary and sequence length before they are copied.
    unsafe { CudaDevice::new(ordinal, options) }
}
