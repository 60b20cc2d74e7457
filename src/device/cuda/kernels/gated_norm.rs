//! Launches of kernels that no file of PTX has yet.

use super::super::launch::{GpuKernel, Queue};
use crate::device::{GatedNorm, GatedNormBackward, Kernel};
use crate::error::{Error, Result};

impl GpuKernel for GatedNorm {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}

impl GpuKernel for GatedNormBackward {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}
