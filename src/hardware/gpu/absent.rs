//! Replacement for the management library in a build without the CUDA device.

use super::GpuLink;
use super::facts::{GpuFacts, GpuId, Sample, no_cuda};
use crate::error::Result;

/// A type without values: no GPU can be opened.
pub(super) enum VisibleGpu {}

impl VisibleGpu {
    pub(super) fn open() -> Result<Self> {
        Err(no_cuda())
    }

    pub(super) fn facts(&self) -> GpuFacts {
        match *self {}
    }

    pub(super) fn sample(&self) -> Sample {
        match *self {}
    }
}

pub(super) fn links(_: &[GpuId]) -> Result<Vec<([usize; 2], GpuLink)>> {
    Err(no_cuda())
}
