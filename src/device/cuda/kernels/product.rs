//! Matrix products by cuBLASLt.

use super::super::CudaDevice;
use super::super::gemm::CublasProduct;
use crate::device::{Checked, Kernel, Launch, Matmul, ScaledMatmul, Stream};
use crate::error::Result;

impl Launch<Matmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<Matmul>) -> Result<()> {
        let product = self.gemm.product(CublasProduct::of(*kernel)?)?;
        if let Some(product) = product { self.timed(Stream::Compute, Matmul::NAME, product) } else { Ok(()) }
    }
}

impl Launch<ScaledMatmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<ScaledMatmul>) -> Result<()> {
        let product = self.gemm.product(CublasProduct::scaled(*kernel)?)?;
        if let Some(product) = product { self.timed(Stream::Compute, ScaledMatmul::NAME, product) } else { Ok(()) }
    }
}
