//! The GPU that this build can open, so that only this file asks whether it can open one.

#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaOptions, free_bytes, probe};
use crate::device::{Attention, DeviceKind};
#[cfg(not(feature = "cuda"))]
use crate::error::Error;
use crate::error::Result;
use crate::memory::DeviceMemory;
use std::path::PathBuf;

#[cfg(feature = "cuda")]
pub(crate) type GpuDevice = crate::device::cuda::CudaDevice;

/// Stands for the device that this build lacks; [`open`] never returns one.
#[cfg(not(feature = "cuda"))]
pub(crate) type GpuDevice = crate::device::cpu::CpuDevice;

/// Opens the visible GPU `ordinal`, with room for `trace_spans` on each stream's track. `libraries` are folders to search for NVIDIA's libraries
/// before the usual ones.
///
/// # Errors
/// `Resource` when there is no such GPU or a library is missing; `Unsupported` in a build without the feature `cuda`.
#[cfg(feature = "cuda")]
pub(crate) fn open(ordinal: usize, libraries: Vec<PathBuf>, attention: Attention, trace_spans: usize) -> Result<GpuDevice> {
    super::open::gpu(ordinal, &CudaOptions { libraries, attention, trace_spans })
}

/// As in a build with the feature `cuda`.
///
/// # Errors
/// Always: this build lacks the feature.
#[cfg(not(feature = "cuda"))]
pub(crate) fn open(_: usize, _: Vec<PathBuf>, _: Attention, _: usize) -> Result<GpuDevice> {
    Err(no_cuda())
}

/// The first GPU's kind and free memory.
#[cfg(feature = "cuda")]
pub(super) fn free_memory() -> Result<(DeviceKind, DeviceMemory)> {
    Ok((DeviceKind::Gpu, DeviceMemory::Own { bytes: free_bytes(0)?, addressing: probe(0)? }))
}

#[cfg(not(feature = "cuda"))]
pub(super) fn free_memory() -> Result<(DeviceKind, DeviceMemory)> {
    Err(no_cuda())
}

#[cfg(not(feature = "cuda"))]
fn no_cuda() -> Error {
    Error::Unsupported("a GPU: this build lacks the feature cuda".into())
}
