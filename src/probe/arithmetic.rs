//! Compute rates of a device: matrix products, attention, and kernels limited by memory bandwidth.

use super::attention::{self, PassRates};
use super::grouped;
use super::kernels::{self, SmallKernels};
use super::product::{self, Products};
use super::sharing::Sharing;
use super::sizes::ProbeSizes;
use super::timer::Timer;
use crate::device::Kernels;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::hardware::profile::CpuDevice;
use crate::hardware::sourced::Curve;

/// Rates in bf16.
#[derive(Clone, Debug)]
pub(crate) struct Arithmetic {
    pub products: Products,
    /// FLOP/s of expert products by the rows of an expert.
    pub(crate) grouped_by_rows: Curve,
    pub attention: PassRates,
    pub small: SmallKernels,
}

impl Arithmetic {
    /// Measures for about `time_s`. The device must have rested before.
    pub(crate) fn measure<D: Kernels>(timer: &mut Timer<'_, D>, sizes: ProbeSizes, time_s: f64) -> Result<Self> {
        let products = product::measure(timer, Dtype::Bfloat16, sizes.product, 0.62 * time_s)?;
        let grouped_by_rows = grouped::measure(timer, products.large, 0.1 * time_s)?;
        let attention = attention::measure(timer, sizes.seq_length, products.sustained.median(), 0.18 * time_s)?;
        let small = kernels::measure(timer, sizes.copy_bytes, products.large, 0.1 * time_s)?;
        Ok(Self { products, grouped_by_rows, attention, small })
    }

    /// These rates as a section of a profile for CPUs, whose cores also run the optimizer.
    pub(crate) fn cpu_device(self, sharing: Sharing) -> CpuDevice {
        let Self { products, grouped_by_rows, attention, small } = self;
        CpuDevice {
            memory_bytes_per_s: small.memory_bytes_per_s.sourced(),
            matmul_flops: products.sustained.sourced(),
            matmul_share_by_least_dim: products.share_by_least_dim,
            grouped_flops_by_rows: Some(grouped_by_rows),
            attention_forward_flops: attention.forward.sourced(),
            attention_backward_flops: attention.backward.sourced(),
            launch_s: small.launch_s.sourced(),
            kernel_s: small.kernel_s.sourced(),
            matmul_under_adam: Some(sharing.matmul),
            adam_under_matmul: Some(sharing.adam),
        }
    }
}
