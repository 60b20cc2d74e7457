//! Costs of kernels with little arithmetic: memory traffic, launch overhead and minimum duration.

use super::product::{Product, fill};
use super::samples::Samples;
use super::timer::Timer;
use crate::device::{Cast, Kernel, Kernels, RmsNorm, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

/// Columns of the normalised rows.
const COLS: usize = 4096;
/// Number of kernels enqueued at once, below the capacity of a launch queue.
const LAUNCHES: usize = 256;
/// Elements of a kernel of minimum duration.
const FEW: usize = 8;

/// The measured costs.
#[derive(Clone, Debug)]
pub struct SmallKernels {
    /// Bytes read and written per second.
    pub memory_bytes_per_s: Samples,
    /// Seconds of the driver to enqueue a kernel.
    pub launch_s: Samples,
    /// Device seconds of a kernel with almost no work.
    pub kernel_s: Samples,
}

/// Measures pointwise kernels on `bytes` of bf16, and tiny kernels, for about `time_s`. `large` keeps the device busy during launches.
pub fn measure<D: Kernels>(timer: &mut Timer<'_, D>, bytes: usize, large: Product, time_s: f64) -> Result<SmallKernels> {
    let memory_bytes_per_s = pointwise(timer, bytes, time_s / 3.0)?;
    let (wide, narrow) = (timer.dev.alloc("a few numbers", FEW, Dtype::Float32)?, timer.dev.alloc("the same", FEW, Dtype::Bfloat16)?);
    let launch = |dev: &mut D| (0..LAUNCHES).try_for_each(|_| dev.launch(Cast { stream: Stream::Compute, src: wide, dst: narrow }));
    timer.seconds(launch)?;
    let launch_s = timer.samples(time_s / 3.0, |timer| {
        let start_ns = timer.dev.now_ns();
        launch(timer.dev)?;
        let enqueued_s = timer.since(start_ns);
        timer.settle()?;
        Ok(enqueued_s / LAUNCHES as f64)
    })?;
    // The products take longer than all launches, so the kernels are enqueued before the device reaches them. They do not take much longer,
    // because their duration varies.
    let once_s = timer.seconds(|dev| large.enqueue(dev, large.n))?;
    let share = 2.0 * launch_s.median() * LAUNCHES as f64 / once_s;
    let (products, rows) = (share.ceil().clamp(1.0, LAUNCHES as f64) as usize, (share * large.n as f64).ceil() as usize);
    let busy = |dev: &mut D| (0..products).try_for_each(|_| large.enqueue(dev, rows.min(large.n)));
    let kernel_s = timer.samples(time_s / 3.0, |timer| {
        let (alone_s, both_s) = (timer.seconds(busy)?, timer.seconds(|dev| busy(dev).and_then(|()| launch(dev)))?);
        // The duration of products varies, so a kernel may appear to take no time.
        Ok(((both_s - alone_s) / LAUNCHES as f64).max(1e-9))
    })?;
    Ok(SmallKernels { memory_bytes_per_s, launch_s, kernel_s })
}

/// The rate of norms of rows with `bytes` of input and `bytes` of output.
fn pointwise<D: Kernels>(timer: &mut Timer<'_, D>, bytes: usize, time_s: f64) -> Result<Samples> {
    let (dev, bf16) = (&mut *timer.dev, Dtype::Bfloat16);
    let rows = (bytes / bf16.bytes() / COLS).max(1);
    let (x, out) = (dev.alloc("rows", rows * COLS, bf16)?, dev.alloc("normalised rows", rows * COLS, bf16)?);
    let (weight, rstd) = (dev.alloc("a norm's weight", COLS, bf16)?, dev.alloc("a norm's statistics", rows, Dtype::Float32)?);
    fill(dev, &[x, weight])?;
    let norm = RmsNorm { x, weight, plus_one: false, eps: 1e-5, out, rstd };
    timer.rates(time_s, norm.bytes(), |dev| dev.launch(norm))
}
