//! Launches of kernels that no file of PTX has yet.

use super::super::launch::{GpuKernel, Queue};
use crate::device::{DeltaRule, DeltaRuleBackward, DeltaShape, Kernel};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

impl GpuKernel for DeltaRule {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}

impl GpuKernel for DeltaRuleBackward {
    fn enqueue(self, _queue: &mut impl Queue) -> Result<()> {
        Err(Error::Unsupported(format!("{} on a GPU", Self::NAME)))
    }
}

/// # Errors
/// `Unsupported` unless there are kernels for this shape and format.
pub(in super::super) fn check_delta(shape: &DeltaShape, dtype: Dtype) -> Result<()> {
    Err(Error::Unsupported(format!("delta rules of heads of {} channels in {dtype} on a GPU", shape.width)))
}
