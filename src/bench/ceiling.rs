//! The speed of one large matrix product: what the device can do at best, measured just before the steps.

use crate::device::{DeviceSlice, Kernels, MatmulLayout, MatmulShape, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::HostMemory;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::time::{Duration, Instant};

/// Products between two looks at the clock.
const BATCH: usize = 16;
/// Random numbers, repeated over a matrix: regular data would draw less power and run at a higher clock.
const RANDOM_ELEMS: usize = 1 << 20;

/// FLOP/s of `c[n,n] = a[n,n] b[n,n]^T` in `dtype`, the median over at least `time`: seconds are what it takes until the
/// power limit shows. The device's memory is spent for it: give it one that is dropped afterwards.
///
/// # Errors
/// The device's; `Resource` when the matrices do not fit.
pub fn matmul_flops<D: Kernels>(dev: &mut D, dtype: Dtype, n: usize, time: Duration) -> Result<f64> {
    let (a, b, c) = (dev.alloc("matrix a", n * n, dtype)?, dev.alloc("matrix b", n * n, dtype)?, dev.alloc("matrix c", n * n, dtype)?);
    fill(dev, &[a, b])?;
    let done = dev.event()?;
    let shape = MatmulShape { layout: MatmulLayout::Nt, m: n, n, k: n };
    let mut batch = || -> Result<Duration> {
        let start = Instant::now();
        (0..BATCH).try_for_each(|_| dev.matmul(shape, a, b, None, None, c))?;
        dev.record(done, Stream::Compute)?;
        dev.synchronize(done)?;
        Ok(start.elapsed())
    };
    batch()?;
    let (mut samples, start) = (Vec::new(), Instant::now());
    while samples.is_empty() || start.elapsed() < time {
        samples.push(batch()?);
    }
    samples.sort_unstable();
    Ok(2.0 * (n as f64).powi(3) * BATCH as f64 / samples[samples.len() / 2].as_secs_f64())
}

/// Uniform numbers between -1 and 1.
fn fill<D: Kernels>(dev: &mut D, matrices: &[DeviceSlice]) -> Result<()> {
    let elems = matrices.iter().map(|matrix| matrix.elems).max().unwrap_or(0).min(RANDOM_ELEMS);
    let (mut host, mut rng) = (HostMemory::default(), ChaCha8Rng::seed_from_u64(1));
    let (source, wide) = (host.alloc("random numbers", elems * 4)?, dev.alloc("random numbers", elems, Dtype::Float32)?);
    source.with(|x: &mut [f32]| x.fill_with(|| (rng.next_u32() as i32) as f32 / (1u32 << 31) as f32));
    dev.copy_h2d(Stream::Compute, source, wide)?;
    for matrix in matrices {
        for start in (0..matrix.elems).step_by(elems) {
            let part = matrix.slice(start, elems.min(matrix.elems - start));
            dev.cast(Stream::Compute, wide.slice(0, part.elems), part)?;
        }
    }
    // The copy reads `host`, which ends here.
    let filled = dev.event()?;
    dev.record(filled, Stream::Compute)?;
    dev.synchronize(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::{CpuDevice, Schedule};

    #[test]
    fn a_product_has_a_speed() {
        let mut dev = CpuDevice::new(1, Schedule::Threads, Default::default(), 0).unwrap();
        let flops = matmul_flops(&mut dev, Dtype::Bfloat16, 96, Duration::from_millis(5)).unwrap();
        assert!(flops.is_finite() && flops > 1e6, "{flops}");
    }
}
