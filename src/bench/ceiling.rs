//! The speed of one large matrix product, measured just before the timed steps: the upper bound that the speed of a step is compared to.

use crate::device::Kernels;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::probe::product::Product;
use crate::probe::timer::Timer;
use std::time::Duration;

/// FLOP/s of `c[n,n] = a[n,n] b[n,n]^T` in `dtype`: the median over at least `time`. A GPU reaches its power limit only after seconds. The
/// matrices use memory of the device, so pass a device that is dropped afterwards.
///
/// # Errors
/// Errors of the device; `Resource` when the matrices do not fit.
pub(crate) fn matmul_flops<D: Kernels>(dev: &mut D, dtype: Dtype, n: usize, time: Duration) -> Result<f64> {
    let product = Product::new(dev, dtype, n)?;
    let rates = Timer::new(dev)?.rates(time.as_secs_f64(), product.flops(n), |dev| product.enqueue(dev, n))?;
    Ok(rates.median())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::StreamOrder;

    #[test]
    fn a_product_has_a_speed() {
        let mut dev = crate::launch::open::cpu(1, StreamOrder::Threads, Default::default(), 0).unwrap();
        let flops = matmul_flops(&mut dev, Dtype::Bfloat16, 96, Duration::from_millis(5)).unwrap();
        assert!(flops.is_finite() && flops > 1e6, "{flops}");
    }
}
