//! Cost of small operations: launches, events, small copies, and the path from a gradient's norm on the device to a verdict on the host.

use crate::bench::DeviceBench;
use crate::optimizer::is_all;
use half::bf16;
use microbench::fill;
use serde_json::json;
use superoffload::Result;
use superoffload::internals::device::{Cast, DeviceSlice, GradNormPartials, Kernels, Stream};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::Verdict;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::internals::optim::{BLOCK, ClipMemory, ClipRule, fold};
use superoffload::internals::probe::Samples;
use superoffload::internals::units::NormSq;

/// Round trips between two streams per sample.
const HOPS: usize = 64;
/// Elements of a small copy.
const FEW: usize = 16;
/// Gradients of a small and of a large bucket, for the time to a verdict.
const GRADS: [usize; 2] = [1 << 18, 1 << 25];
/// Value of every gradient; its square is exact.
const GRAD: f32 = 0.125;
/// Rule of clipping of the verdict.
const RULE: ClipRule = ClipRule::GlobalNorm { max_norm: 1.0 };

/// Measures every latency.
///
/// # Errors
/// Errors of the device; `Resource` if data are wrong.
pub fn measure<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let is_cast = casts_right(bench)?;
    let (launch, kernel) = (bench.small.launch_s.clone(), bench.small.kernel_s.clone());
    report(bench, "enqueue a kernel", is_cast, &launch)?;
    report(bench, "a kernel that does nearly nothing, one after the other", is_cast, &kernel)?;
    events(bench)?;
    small_copies(bench)?;
    let largest = bench.sizes.max_bytes / Dtype::Bfloat16.bytes();
    GRADS.iter().try_for_each(|&grads| verdict(bench, grads.min(largest)))
}

/// Prints the time of one operation.
///
/// # Errors
/// `Resource` if its data were wrong.
pub fn report<D: Kernels>(bench: &DeviceBench<'_, D>, what: &str, is_right: bool, seconds: &Samples) -> Result<()> {
    bench.line("latency", is_right, json!({ "what": what, "us": 1e6 * seconds.median(), "spread": seconds.spread() }))
}

/// Whether the launched kernel computes the right result.
fn casts_right<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<bool> {
    let (timer, host) = (&mut bench.timer, bench.memory.alloc("a few numbers", 4 * FEW)?);
    let (wide, narrow) = (timer.dev.alloc("wide", FEW, Dtype::Float32)?, timer.dev.alloc("narrow", FEW, Dtype::Bfloat16)?);
    fill(bench.memory, host, GRAD);
    timer.seconds(|dev| dev.copy_h2d(Stream::Compute, host, wide))?;
    timer.seconds(|dev| dev.launch(Cast { stream: Stream::Compute, src: wide, dst: narrow }))?;
    let half = host.slice(0, 2 * FEW);
    timer.seconds(|dev| dev.copy_d2h(Stream::Compute, narrow, half))?;
    Ok(is_all(bench.memory, half, bf16::from_f32(GRAD)))
}

fn events<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let events = [bench.timer.dev.event()?, bench.timer.dev.event()?];
    let alone = bench.timer.samples(bench.sizes.seconds, |timer| {
        let start_ns = timer.dev.now_ns();
        timer.dev.record(events[0], Stream::Compute)?;
        timer.dev.synchronize(events[0])?;
        Ok(timer.since(start_ns))
    })?;
    let is_done = bench.timer.dev.is_done(events[0])?;
    report(bench, "record an event and wait for it", is_done, &alone)?;
    let hops = bench.timer.samples(bench.sizes.seconds, |timer| {
        let seconds = timer.seconds(|dev| {
            (0..HOPS).try_for_each(|_| {
                dev.record(events[0], Stream::Compute)?;
                dev.wait(Stream::D2h, events[0])?;
                dev.record(events[1], Stream::D2h)?;
                dev.wait(Stream::Compute, events[1])
            })
        })?;
        Ok(seconds / (2 * HOPS) as f64)
    })?;
    let is_done = bench.timer.dev.is_done(events[1])?;
    report(bench, "record an event and have the other stream wait for it", is_done, &hops)
}

/// Copies on a copy stream use the copy engine; copies on the compute stream use a kernel.
fn small_copies<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let (device, host, back) =
        (bench.timer.dev.alloc("a few numbers", FEW, Dtype::Float32)?, bench.registered(4 * FEW)?, bench.registered(4 * FEW)?);
    fill(bench.memory, host, GRAD);
    let ways = [("by the copy engine", Stream::H2d, Stream::D2h), ("by a kernel", Stream::Compute, Stream::Compute)];
    for (way, to, from) in ways {
        fill(bench.memory, back, 0f32);
        let times = bench.timer.samples(bench.sizes.seconds, |timer| {
            let to_device_s = timer.seconds(|dev| dev.copy_h2d(to, host, device))?;
            Ok(to_device_s + timer.seconds(|dev| dev.copy_d2h(from, device, back))?)
        })?;
        let is_right = is_all(bench.memory, back, GRAD);
        report(bench, &format!("64 bytes to the device and back, {way}"), is_right, &times)?;
    }
    Ok(())
}

/// Gradients, the partial sums of their norm on the device, and the host's copies of these sums.
struct NormMemory {
    grads: DeviceSlice,
    partials: DeviceSlice,
    nonfinite: DeviceSlice,
    host_partials: PinnedSlice,
    host_nonfinite: PinnedSlice,
}

impl NormMemory {
    fn new<D: Kernels>(bench: &mut DeviceBench<'_, D>, elems: usize) -> Result<Self> {
        let blocks = elems.div_ceil(BLOCK);
        let (host_partials, host_nonfinite) = (bench.registered(4 * blocks)?, bench.registered(4)?);
        let mut device = |name, elems, dtype| bench.timer.dev.alloc(name, elems, dtype);
        let (grads, partials) = (device("gradients", elems, Dtype::Bfloat16)?, device("partials", blocks, Dtype::Float32)?);
        Ok(Self { grads, partials, nonfinite: device("flag", 1, Dtype::Int32)?, host_partials, host_nonfinite })
    }

    fn enqueue<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        dev.launch(GradNormPartials { stream: Stream::Compute, grads: self.grads, partials: self.partials, nonfinite: self.nonfinite })?;
        dev.copy_d2h(Stream::Compute, self.partials, self.host_partials)?;
        dev.copy_d2h(Stream::Compute, self.nonfinite, self.host_nonfinite)
    }

    fn verdict(&self, host: &HostMemory) -> Verdict {
        let is_nonfinite = host.lend::<i32>(self.host_nonfinite)[0] != 0;
        let sum = fold(NormSq(0.0), host.lend(self.host_partials));
        Verdict::new(sum.norm(1.0), is_nonfinite, RULE, &mut ClipMemory::default())
    }
}

/// Measures the time from gradients on the device to the host's verdict on their norm.
fn verdict<D: Kernels>(bench: &mut DeviceBench<'_, D>, elems: usize) -> Result<()> {
    let norm = NormMemory::new(bench, elems)?;
    let host = bench.registered(norm.grads.bytes())?;
    fill(bench.memory, host, bf16::from_f32(GRAD));
    bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, host, norm.grads))?;
    let (mut verdict, mut folds) = (Verdict::Commit, Vec::new());
    let times = bench.timer.samples(bench.sizes.seconds, |timer| {
        let arrived_s = timer.seconds(|dev| norm.enqueue(dev))?;
        let start_ns = timer.dev.now_ns();
        verdict = norm.verdict(bench.memory);
        folds.push(timer.since(start_ns));
        Ok(arrived_s + timer.since(start_ns))
    })?;
    let length = NormSq(elems as f64 * f64::from(GRAD * GRAD)).norm(1.0);
    let (folds, is_right) = (Samples::new(folds), verdict == Verdict::new(length, false, RULE, &mut ClipMemory::default()));
    let fields = json!({ "what": "verdict", "gradients": elems, "us": 1e6 * times.median(), "spread": times.spread(), "fold_us": 1e6 * folds.median() });
    bench.line("latency", is_right, fields)
}
