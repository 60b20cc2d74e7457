//! Launches of kernels that no file of PTX has yet.

use super::super::launch::{GpuKernel, Queue};
use crate::device::{Kernel, ShortConv, ShortConvBackward};
use crate::error::{Error, Result};

impl GpuKernel for ShortConv {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}

impl GpuKernel for ShortConvBackward {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}
