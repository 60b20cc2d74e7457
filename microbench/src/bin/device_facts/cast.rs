//! Casts between bf16 and fp32: on the device and on the host's threads, as separate passes and as part of Adam's pass (Figure 9).

use crate::bench::{DeviceBench, rate};
use crate::optimizer::{GRAD, HostJob, Optimizer, is_all};
use half::bf16;
use microbench::facts::join;
use microbench::fill;
use serde_json::{Value, json};
use superoffload::Result;
use superoffload::internals::device::{Cast, Device, DeviceSlice, EventId, Kernels, Stream, Zero};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::Pool;
use superoffload::internals::probe::{Samples, Timer, Workers};

/// The smallest tensor, in fp32.
const SMALLEST_BYTES: usize = 1 << 20;

/// The place of the cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// On the device, as in the paper; fp32 crosses the link.
    Device,
    /// On the host, in a separate pass; bf16 crosses the link.
    Host,
    /// In the optimizer's pass, which reads and writes bf16 directly; bf16 crosses the link.
    Fused,
}

impl Arm {
    const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Fused];

    const fn name(self) -> &'static str {
        match self {
            Self::Device => "cast on the device, fp32 on the link",
            Self::Host => "bf16 on the link, cast on the host",
            Self::Fused => "bf16 on the link, cast in the optimizer's pass",
        }
    }

    const fn link_dtype(self) -> Dtype {
        if matches!(self, Self::Device) { Dtype::Float32 } else { Dtype::Bfloat16 }
    }

    /// Format of the gradients that the optimizer reads.
    const fn grads(self) -> Dtype {
        if matches!(self, Self::Fused) { Dtype::Bfloat16 } else { Dtype::Float32 }
    }
}

/// A tensor on the device in both formats.
struct CastTensor {
    elems: usize,
    wide: DeviceSlice,
    narrow: DeviceSlice,
}

/// The optimizer, its threads, and an event that orders a copy after its cast.
struct Host {
    optimizer: Optimizer,
    pool: Pool<HostJob>,
    ready: EventId,
}

/// Measures every case of casts.
///
/// # Errors
/// Errors of the device and the pool; `Resource` if data are wrong.
#[allow(unsafe_code)]
pub fn measure<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let elems = bench.sizes.max_bytes / 4;
    let (wide, narrow) = (bench.timer.dev.alloc("fp32", elems, Dtype::Float32)?, bench.timer.dev.alloc("bf16", elems, Dtype::Bfloat16)?);
    // SAFETY: one pool runs one job at a time, each after the copy of its gradients, and stops before this function returns; the memory of
    // `bench` outlives it.
    let optimizer = unsafe { Optimizer::new(bench, elems, elems) }?;
    let mut workers = Workers::<HostJob>::new(bench.topology, bench.limits.workers)?;
    for bytes in bench.sizes.by_four(SMALLEST_BYTES) {
        let elems = bytes / 4;
        let tensor = CastTensor { elems, wide: wide.slice(0, elems), narrow: narrow.slice(0, elems) };
        on_the_device(bench, &optimizer, &tensor)?;
        on_the_host(bench, &optimizer, elems, &mut workers)?;
    }
    let mut host = Host { optimizer, pool: workers.pool, ready: bench.timer.dev.event()? };
    for bytes in bench.sizes.by_four(SMALLEST_BYTES) {
        let elems = bytes / 4;
        let tensor = CastTensor { elems, wide: wide.slice(0, elems), narrow: narrow.slice(0, elems) };
        for arm in Arm::ALL {
            gradients(bench, &mut host, &tensor, arm)?;
            weights(bench, &mut host, &tensor, arm)?;
        }
    }
    Ok(())
}

fn size(elems: usize) -> Value {
    json!({ "fp32_bytes": 4 * elems, "fp32_megabytes": 4e-6 * elems as f64 })
}

fn on_the_device<D: Kernels>(bench: &mut DeviceBench<'_, D>, optimizer: &Optimizer, tensor: &CastTensor) -> Result<()> {
    let (elems, host) = (tensor.elems, optimizer.narrow.slice(0, 2 * tensor.elems));
    for (from, to) in [(tensor.narrow, tensor.wide), (tensor.wide, tensor.narrow)] {
        fill(bench.memory, host, bf16::from_f32(GRAD));
        bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, host, tensor.narrow))?;
        bench.timer.seconds(|dev| dev.launch(Cast { stream: Stream::Compute, src: tensor.narrow, dst: tensor.wide }))?;
        let rates = bench
            .timer
            .rates(bench.sizes.seconds, (6 * elems) as f64, |dev| dev.launch(Cast { stream: Stream::Compute, src: from, dst: to }))?;
        let is_right = is_on_the_device(bench, optimizer, tensor, GRAD)?;
        let fields = json!({ "by": "device", "from": from.dtype().to_string(), "to": to.dtype().to_string() });
        bench.line("cast alone", is_right, join(join(fields, size(elems)), rate(&rates, &bench.limits.device)))?;
    }
    Ok(())
}

/// Whether all elements of both formats on the device are `value`.
fn is_on_the_device<D: Kernels>(bench: &mut DeviceBench<'_, D>, optimizer: &Optimizer, tensor: &CastTensor, value: f32) -> Result<bool> {
    let (wide, narrow) = (optimizer.wide.slice(0, 4 * tensor.elems), optimizer.narrow.slice(0, 2 * tensor.elems));
    bench
        .timer
        .seconds(|dev| dev.copy_d2h(Stream::D2h, tensor.wide, wide).and_then(|()| dev.copy_d2h(Stream::D2h, tensor.narrow, narrow)))?;
    Ok(is_all(bench.memory, narrow, bf16::from_f32(value)) && is_all(bench.memory, wide, value))
}

fn on_the_host<D: Kernels>(
    bench: &mut DeviceBench<'_, D>,
    optimizer: &Optimizer,
    elems: usize,
    workers: &mut Workers<HostJob>,
) -> Result<()> {
    optimizer.reset(bench.memory, elems);
    fill(bench.memory, optimizer.narrow.slice(0, 2 * elems), bf16::from_f32(GRAD));
    let widened = workers.rates(bench.sizes.seconds, |_| HostJob::Widen(optimizer.widen(elems)))?;
    let narrowed = workers.rates(bench.sizes.seconds, |_| HostJob::Step(optimizer.cast(elems)))?;
    let is_wide = is_all(bench.memory, optimizer.wide.slice(0, 4 * elems), GRAD);
    let is_narrow = is_all(bench.memory, optimizer.weights.slice(0, 2 * elems), bf16::from_f32(Optimizer::param_after(0)));
    let (bf16, fp32) = (Dtype::Bfloat16.to_string(), Dtype::Float32.to_string());
    for (from, to, rates, is_right) in [(&bf16, &fp32, widened, is_wide), (&fp32, &bf16, narrowed, is_narrow)] {
        let fields = json!({ "by": "host", "threads": bench.limits.workers, "from": from, "to": to });
        bench.line("cast alone", is_right, join(join(fields, size(elems)), rate(&rates, &bench.limits.host)))?;
    }
    Ok(())
}

/// Moves gradients from the device (bf16) to the optimizer's gradient buffer, and then also runs the optimizer's pass.
fn gradients<D: Kernels>(bench: &mut DeviceBench<'_, D>, host: &mut Host, tensor: &CastTensor, arm: Arm) -> Result<()> {
    let (elems, optimizer) = (tensor.elems, &host.optimizer);
    optimizer.reset(bench.memory, elems);
    let narrow = optimizer.narrow.slice(0, 2 * elems);
    fill(bench.memory, narrow, bf16::from_f32(GRAD));
    bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, narrow, tensor.narrow))?;
    fill(bench.memory, narrow, bf16::ZERO);
    host.bring(&mut bench.timer, tensor, arm)?;
    host.step(tensor, arm)?;
    let weights = host.optimizer.weights.slice(0, 2 * elems);
    let is_right =
        host.optimizer.is_after(bench.memory, elems, 1) && is_all(bench.memory, weights, bf16::from_f32(Optimizer::param_after(1)));
    let alone = bench.timer.samples(bench.sizes.seconds, |timer| timed(timer, |timer| host.bring(timer, tensor, arm)))?;
    let stepped = bench
        .timer
        .samples(bench.sizes.seconds, |timer| timed(timer, |timer| host.bring(timer, tensor, arm).and_then(|()| host.step(tensor, arm))))?;
    report(bench, ("gradients to the host", arm, elems), is_right, &alone, Some(&stepped))
}

/// Moves weights from the optimizer's fp32 parameters to the device's bf16 weights.
fn weights<D: Kernels>(bench: &mut DeviceBench<'_, D>, host: &mut Host, tensor: &CastTensor, arm: Arm) -> Result<()> {
    let (elems, expected) = (tensor.elems, Optimizer::param_after(0));
    host.optimizer.reset(bench.memory, elems);
    if arm == Arm::Fused {
        host.run(HostJob::Step(host.optimizer.cast(elems)))?;
    }
    bench.timer.seconds(|dev| dev.launch(Zero { x: tensor.narrow }))?;
    let times = bench.timer.samples(bench.sizes.seconds, |timer| timed(timer, |timer| host.send(timer, tensor, arm)))?;
    let narrow = host.optimizer.narrow.slice(0, 2 * elems);
    bench.timer.seconds(|dev| dev.copy_d2h(Stream::D2h, tensor.narrow, narrow))?;
    report(bench, ("weights to the device", arm, elems), is_all(bench.memory, narrow, bf16::from_f32(expected)), &times, None)
}

fn timed<D: Device>(timer: &mut Timer<'_, D>, work: impl FnOnce(&mut Timer<'_, D>) -> Result<()>) -> Result<f64> {
    let start_ns = timer.dev.now_ns();
    work(timer)?;
    Ok(timer.since(start_ns))
}

fn report<D: Kernels>(
    bench: &DeviceBench<'_, D>,
    case: (&str, Arm, usize),
    is_right: bool,
    seconds: &Samples,
    with_step: Option<&Samples>,
) -> Result<()> {
    let (direction, arm, elems) = case;
    let limit_s = (elems * arm.link_dtype().bytes()) as f64 / bench.limits.link.bytes_per_s;
    let fields = json!({
        "direction": direction,
        "arm": arm.name(),
        "threads": bench.limits.workers,
        "ms": 1e3 * seconds.median(),
        "spread": seconds.spread(),
        "with_optimizer_ms": with_step.map(|seconds| 1e3 * seconds.median()),
        "limit_ms": 1e3 * limit_s,
        "limit": bench.limits.link.what,
        "share_of_limit": limit_s / seconds.median(),
    });
    bench.line("cast and copy", is_right, join(fields, size(elems)))
}

impl Host {
    /// Runs `job` from submission to completion.
    fn run(&mut self, job: HostJob) -> Result<()> {
        self.pool.submit(job);
        while !self.pool.is_idle()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn step(&mut self, tensor: &CastTensor, arm: Arm) -> Result<()> {
        let job = self.optimizer.step(0..tensor.elems, 0, tensor.elems, arm.grads());
        self.run(HostJob::Step(job))
    }

    fn bring<D: Kernels>(&mut self, timer: &mut Timer<'_, D>, tensor: &CastTensor, arm: Arm) -> Result<()> {
        let (wide, narrow) = (self.optimizer.wide.slice(0, 4 * tensor.elems), self.optimizer.narrow.slice(0, 2 * tensor.elems));
        if arm == Arm::Device {
            timer.dev.launch(Cast { stream: Stream::Compute, src: tensor.narrow, dst: tensor.wide })?;
            timer.dev.record(self.ready, Stream::Compute)?;
            timer.dev.wait(Stream::D2h, self.ready)?;
            timer.dev.copy_d2h(Stream::D2h, tensor.wide, wide)?;
            return timer.settle();
        }
        timer.dev.copy_d2h(Stream::D2h, tensor.narrow, narrow)?;
        timer.settle()?;
        if arm == Arm::Host { self.run(HostJob::Widen(self.optimizer.widen(tensor.elems))) } else { Ok(()) }
    }

    fn send<D: Kernels>(&mut self, timer: &mut Timer<'_, D>, tensor: &CastTensor, arm: Arm) -> Result<()> {
        if arm == Arm::Device {
            timer.dev.copy_h2d(Stream::H2d, self.optimizer.params().slice(0, 4 * tensor.elems), tensor.wide)?;
            timer.dev.launch(Cast { stream: Stream::H2d, src: tensor.wide, dst: tensor.narrow })?;
            return timer.settle();
        }
        if arm == Arm::Host {
            self.run(HostJob::Step(self.optimizer.cast(tensor.elems)))?;
        }
        timer.dev.copy_h2d(Stream::H2d, self.optimizer.weights.slice(0, 2 * tensor.elems), tensor.narrow)?;
        timer.settle()
    }
}
