//! Cost of launches if kernels are recorded once and enqueued as one CUDA graph.

use crate::bench::DeviceBench;
use crate::latency::report;
use crate::optimizer::is_all;
use half::bf16;
use microbench::fill;
use superoffload::Result;
use superoffload::internals::device::{Cast, Device, DeviceSlice, Launch, Stream, cuda::CudaDevice};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::host::PinnedSlice;
use superoffload::internals::probe::Samples;

/// Number of kernels in a small and in a large graph.
const KERNELS: [usize; 2] = [16, 256];
/// Number of consecutive graph launches.
const LAUNCHES: usize = 16;
/// Elements of each cast, and their initial value.
const FEW: usize = 16;
const GRAD: f32 = 0.125;

/// Measures recording, enqueueing and running graphs of casts.
///
/// # Errors
/// Errors of the device; `Resource` if data are wrong.
pub fn measure(bench: &mut DeviceBench<'_, CudaDevice>) -> Result<()> {
    KERNELS.iter().try_for_each(|&kernels| graph(bench, kernels))
}

fn graph(bench: &mut DeviceBench<'_, CudaDevice>, kernels: usize) -> Result<()> {
    let casts = Casts::new(bench)?;
    let record = |dev: &mut CudaDevice| dev.record_graph(|dev| (0..kernels).try_for_each(|_| casts.enqueue(dev)));
    let start_ns = bench.timer.dev.now_ns();
    let graph = record(bench.timer.dev)?;
    let once_s = bench.timer.since(start_ns);
    // The first launch uploads the graph to the device.
    bench.timer.seconds(|dev| dev.launch_graph(graph))?;
    let is_right = casts.are_right(bench)?;

    let seconds = bench.sizes.seconds;
    let enqueued = bench.timer.samples(seconds, |timer| {
        let start_ns = timer.dev.now_ns();
        timer.dev.launch_graph(graph)?;
        let enqueued_s = timer.since(start_ns);
        timer.settle()?;
        Ok(enqueued_s)
    })?;
    // The first launch finds the device idle; each further launch adds only its time on the device.
    let each = bench.timer.samples(seconds, |timer| {
        let one_s = timer.seconds(|dev| dev.launch_graph(graph))?;
        let all_s = timer.seconds(|dev| (0..LAUNCHES).try_for_each(|_| dev.launch_graph(graph)))?;
        Ok(((all_s - one_s) / ((LAUNCHES - 1) * kernels) as f64).max(1e-9))
    })?;
    let recorded = Samples::new(vec![once_s]);
    report(bench, &format!("record and instantiate a graph of {kernels} kernels, once"), is_right, &recorded)?;
    report(bench, &format!("enqueue a graph of {kernels} kernels"), is_right, &enqueued)?;
    report(bench, &format!("a kernel that does nearly nothing, in a graph of {kernels}"), is_right, &each)
}

/// A tiny cast, and the host's copy of its input and its result.
struct Casts {
    wide: DeviceSlice,
    narrow: DeviceSlice,
    host: PinnedSlice,
}

impl Casts {
    fn new(bench: &mut DeviceBench<'_, CudaDevice>) -> Result<Self> {
        let host = bench.registered(4 * FEW)?;
        let mut device = |name, dtype| bench.timer.dev.alloc(name, FEW, dtype);
        let casts = Self { wide: device("wide", Dtype::Float32)?, narrow: device("narrow", Dtype::Bfloat16)?, host };
        fill(bench.memory, host, GRAD);
        bench.timer.seconds(|dev| dev.copy_h2d(Stream::Compute, host, casts.wide))?;
        Ok(casts)
    }

    fn enqueue(&self, dev: &mut CudaDevice) -> Result<()> {
        dev.launch(Cast { stream: Stream::Compute, src: self.wide, dst: self.narrow })
    }

    /// Whether the launched graph has cast. Recording does not run the kernels, so the result was zero before the launch.
    fn are_right(&self, bench: &mut DeviceBench<'_, CudaDevice>) -> Result<bool> {
        let half = self.host.slice(0, 2 * FEW);
        bench.timer.seconds(|dev| dev.copy_d2h(Stream::Compute, self.narrow, half))?;
        Ok(is_all(bench.memory, half, bf16::from_f32(GRAD)))
    }
}
