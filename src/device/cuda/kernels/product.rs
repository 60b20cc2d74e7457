//! Matrix products: by cuBLASLt.

use super::super::CudaDevice;
use crate::device::{Checked, Kernel, Launch, Matmul, Stream};
use crate::error::Result;

impl Launch<Matmul> for CudaDevice {
    fn accept(&mut self, kernel: Checked<Matmul>) -> Result<()> {
        let product = self.gemm.product(*kernel)?;
        product.map_or(Ok(()), |product| self.timed(Stream::Compute, Matmul::NAME, product))
    }
}
