//! What launches cost when kernels are recorded once and enqueued as one graph.

use crate::bench::Bench;
use crate::latency::report;
use crate::optimizer::is_all;
use half::bf16;
use microbench::fill;
use superoffload::device::cuda::CudaDevice;
use superoffload::device::{Device, DeviceSlice, Kernels, Stream};
use superoffload::dtype::Dtype;
use superoffload::error::Result;
use superoffload::host::pinned::PinnedSlice;
use superoffload::probe::samples::Samples;

/// Kernels of a small graph and of a large one.
const KERNELS: [usize; 2] = [16, 256];
/// Graphs that are enqueued one after the other.
const LAUNCHES: usize = 16;
/// Elements of each kernel's cast, and what they are at first.
const FEW: usize = 16;
const GRAD: f32 = 0.125;

/// Recording, enqueueing and running of graphs of casts.
///
/// # Errors
/// The device's; `Resource` when data are wrong.
pub fn measure(bench: &mut Bench<'_, CudaDevice>) -> Result<()> {
    KERNELS.iter().try_for_each(|&kernels| graph(bench, kernels))
}

fn graph(bench: &mut Bench<'_, CudaDevice>, kernels: usize) -> Result<()> {
    let casts = Casts::new(bench)?;
    let record = |dev: &mut CudaDevice| dev.record_graph(|dev| (0..kernels).try_for_each(|_| casts.enqueue(dev)));
    let start_ns = bench.rig.dev.now_ns();
    let graph = record(bench.rig.dev)?;
    let once_s = bench.rig.since(start_ns);
    // The first launch moves the graph to the device.
    bench.rig.seconds(|dev| dev.launch_graph(graph))?;
    let is_right = casts.are_right(bench)?;

    let seconds = bench.sizes.seconds;
    let enqueued = bench.rig.samples(seconds, |rig| {
        let start_ns = rig.dev.now_ns();
        rig.dev.launch_graph(graph)?;
        let enqueued_s = rig.since(start_ns);
        rig.settle()?;
        Ok(enqueued_s)
    })?;
    // The first of many is enqueued while nothing runs: what the others add is the device's time.
    let each = bench.rig.samples(seconds, |rig| {
        let one_s = rig.seconds(|dev| dev.launch_graph(graph))?;
        let all_s = rig.seconds(|dev| (0..LAUNCHES).try_for_each(|_| dev.launch_graph(graph)))?;
        Ok(((all_s - one_s) / ((LAUNCHES - 1) * kernels) as f64).max(1e-9))
    })?;
    let recorded = Samples::new(vec![once_s]);
    report(bench, &format!("record and instantiate a graph of {kernels} kernels, once"), is_right, &recorded)?;
    report(bench, &format!("enqueue a graph of {kernels} kernels"), is_right, &enqueued)?;
    report(bench, &format!("a kernel that does nearly nothing, in a graph of {kernels}"), is_right, &each)
}

/// A cast that does nearly nothing, and the host's copy of what goes in and comes out.
struct Casts {
    wide: DeviceSlice,
    narrow: DeviceSlice,
    host: PinnedSlice,
}

impl Casts {
    fn new(bench: &mut Bench<'_, CudaDevice>) -> Result<Self> {
        let host = bench.registered(4 * FEW)?;
        let mut device = |name, dtype| bench.rig.dev.alloc(name, FEW, dtype);
        let casts = Self { wide: device("wide", Dtype::Float32)?, narrow: device("narrow", Dtype::Bfloat16)?, host };
        fill(bench.memory, host, GRAD);
        bench.rig.seconds(|dev| dev.copy_h2d(Stream::Compute, host, casts.wide))?;
        Ok(casts)
    }

    fn enqueue(&self, dev: &mut CudaDevice) -> Result<()> {
        dev.cast(Stream::Compute, self.wide, self.narrow)
    }

    /// Recording alone left zeros; the launched graph must have cast.
    fn are_right(&self, bench: &mut Bench<'_, CudaDevice>) -> Result<bool> {
        let half = self.host.slice(0, 2 * FEW);
        bench.rig.seconds(|dev| dev.copy_d2h(Stream::Compute, self.narrow, half))?;
        Ok(is_all(bench.memory, half, bf16::from_f32(GRAD)))
    }
}
