//! Casts between bf16 and fp32: on the device, on the host's threads, as passes of their own and as part of Adam's (Figure 9).

use crate::bench::{Bench, rate};
use crate::optimizer::{GRAD, HostJob, Optimizer, is_all};
use half::bf16;
use microbench::facts::join;
use microbench::fill;
use serde_json::{Value, json};
use superoffload::device::{Device, DeviceSlice, EventId, Kernels, Stream};
use superoffload::dtype::Dtype;
use superoffload::engine::pool::Pool;
use superoffload::error::Result;
use superoffload::probe::rig::Rig;
use superoffload::probe::samples::Samples;
use superoffload::probe::workers::Workers;

/// The smallest tensor, in fp32.
const SMALLEST_BYTES: usize = 1 << 20;

/// Who casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// The device; fp32 crosses the link (the paper's).
    Device,
    /// The host, in a pass of its own; bf16 crosses the link.
    Host,
    /// The optimizer's pass, which reads and writes bf16 as it is; bf16 crosses the link.
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

    /// What the optimizer reads.
    const fn grads(self) -> Dtype {
        if matches!(self, Self::Fused) { Dtype::Bfloat16 } else { Dtype::Float32 }
    }
}

/// A tensor in both formats on both sides.
struct Tensor {
    elems: usize,
    wide: DeviceSlice,
    narrow: DeviceSlice,
}

/// The optimizer, its threads, and an event between a cast and its copy.
struct Host {
    optimizer: Optimizer,
    pool: Pool<HostJob>,
    ready: EventId,
}

/// Every case of casts.
///
/// # Errors
/// The device's and the pool's; `Resource` when data are wrong.
#[allow(unsafe_code)]
pub fn measure<D: Kernels>(bench: &mut Bench<'_, D>) -> Result<()> {
    let elems = bench.sizes.max_bytes / 4;
    let (wide, narrow) = (bench.rig.dev.alloc("fp32", elems, Dtype::Float32)?, bench.rig.dev.alloc("bf16", elems, Dtype::Bfloat16)?);
    // SAFETY: one pool does one job at a time, on gradients whose copy is done, and ends here; the bench's memory stays.
    let optimizer = unsafe { Optimizer::new(bench, elems, elems) }?;
    let mut workers = Workers::<HostJob>::new(bench.topology, bench.limits.workers)?;
    for bytes in bench.sizes.by_four(SMALLEST_BYTES) {
        let elems = bytes / 4;
        let tensor = Tensor { elems, wide: wide.slice(0, elems), narrow: narrow.slice(0, elems) };
        on_the_device(bench, &optimizer, &tensor)?;
        on_the_host(bench, &optimizer, elems, &mut workers)?;
    }
    let mut host = Host { optimizer, pool: workers.pool, ready: bench.rig.dev.event()? };
    for bytes in bench.sizes.by_four(SMALLEST_BYTES) {
        let elems = bytes / 4;
        let tensor = Tensor { elems, wide: wide.slice(0, elems), narrow: narrow.slice(0, elems) };
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

fn on_the_device<D: Kernels>(bench: &mut Bench<'_, D>, optimizer: &Optimizer, tensor: &Tensor) -> Result<()> {
    let (elems, host) = (tensor.elems, optimizer.narrow.slice(0, 2 * tensor.elems));
    for (from, to) in [(tensor.narrow, tensor.wide), (tensor.wide, tensor.narrow)] {
        fill(bench.memory, host, bf16::from_f32(GRAD));
        bench.rig.seconds(|dev| dev.copy_h2d(Stream::H2d, host, tensor.narrow))?;
        bench.rig.seconds(|dev| dev.cast(Stream::Compute, tensor.narrow, tensor.wide))?;
        let rates = bench.rig.rates(bench.sizes.seconds, (6 * elems) as f64, |dev| dev.cast(Stream::Compute, from, to))?;
        let is_right = is_on_the_device(bench, optimizer, tensor, GRAD)?;
        let fields = json!({ "by": "device", "from": from.dtype.to_string(), "to": to.dtype.to_string() });
        bench.line("cast alone", is_right, join(join(fields, size(elems)), rate(&rates, &bench.limits.device)))?;
    }
    Ok(())
}

/// Whether both formats on the device are `value`.
fn is_on_the_device<D: Kernels>(bench: &mut Bench<'_, D>, optimizer: &Optimizer, tensor: &Tensor, value: f32) -> Result<bool> {
    let (wide, narrow) = (optimizer.wide.slice(0, 4 * tensor.elems), optimizer.narrow.slice(0, 2 * tensor.elems));
    bench
        .rig
        .seconds(|dev| dev.copy_d2h(Stream::D2h, tensor.wide, wide).and_then(|()| dev.copy_d2h(Stream::D2h, tensor.narrow, narrow)))?;
    Ok(is_all(bench.memory, narrow, bf16::from_f32(value)) && is_all(bench.memory, wide, value))
}

fn on_the_host<D: Kernels>(bench: &mut Bench<'_, D>, optimizer: &Optimizer, elems: usize, workers: &mut Workers<HostJob>) -> Result<()> {
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

/// Gradients from the device in bf16 to where the optimizer reads them; and the optimizer's pass after it.
fn gradients<D: Kernels>(bench: &mut Bench<'_, D>, host: &mut Host, tensor: &Tensor, arm: Arm) -> Result<()> {
    let (elems, optimizer) = (tensor.elems, &host.optimizer);
    optimizer.reset(bench.memory, elems);
    let narrow = optimizer.narrow.slice(0, 2 * elems);
    fill(bench.memory, narrow, bf16::from_f32(GRAD));
    bench.rig.seconds(|dev| dev.copy_h2d(Stream::H2d, narrow, tensor.narrow))?;
    fill(bench.memory, narrow, bf16::ZERO);
    host.bring(&mut bench.rig, tensor, arm)?;
    host.step(tensor, arm)?;
    let weights = host.optimizer.weights.slice(0, 2 * elems);
    let is_right =
        host.optimizer.is_after(bench.memory, elems, 1) && is_all(bench.memory, weights, bf16::from_f32(Optimizer::param_after(1)));
    let alone = bench.rig.samples(bench.sizes.seconds, |rig| timed(rig, |rig| host.bring(rig, tensor, arm)))?;
    let stepped = bench
        .rig
        .samples(bench.sizes.seconds, |rig| timed(rig, |rig| host.bring(rig, tensor, arm).and_then(|()| host.step(tensor, arm))))?;
    report(bench, ("gradients to the host", arm, elems), is_right, &alone, Some(&stepped))
}

/// Weights from the optimizer's fp32 to the device's bf16.
fn weights<D: Kernels>(bench: &mut Bench<'_, D>, host: &mut Host, tensor: &Tensor, arm: Arm) -> Result<()> {
    let (elems, expected) = (tensor.elems, Optimizer::param_after(0));
    host.optimizer.reset(bench.memory, elems);
    if arm == Arm::Fused {
        host.run(HostJob::Step(host.optimizer.cast(elems)))?;
    }
    bench.rig.seconds(|dev| dev.zero(tensor.narrow))?;
    let times = bench.rig.samples(bench.sizes.seconds, |rig| timed(rig, |rig| host.send(rig, tensor, arm)))?;
    let narrow = host.optimizer.narrow.slice(0, 2 * elems);
    bench.rig.seconds(|dev| dev.copy_d2h(Stream::D2h, tensor.narrow, narrow))?;
    report(bench, ("weights to the device", arm, elems), is_all(bench.memory, narrow, bf16::from_f32(expected)), &times, None)
}

fn timed<D: Device>(rig: &mut Rig<'_, D>, work: impl FnOnce(&mut Rig<'_, D>) -> Result<()>) -> Result<f64> {
    let start_ns = rig.dev.now_ns();
    work(rig)?;
    Ok(rig.since(start_ns))
}

fn report<D: Kernels>(
    bench: &Bench<'_, D>,
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
    /// Does `job` from its submission to its end.
    fn run(&mut self, job: HostJob) -> Result<()> {
        self.pool.submit(job);
        while !self.pool.is_idle()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn step(&mut self, tensor: &Tensor, arm: Arm) -> Result<()> {
        let job = self.optimizer.step(0..tensor.elems, 0, tensor.elems, arm.grads());
        self.run(HostJob::Step(job))
    }

    fn bring<D: Kernels>(&mut self, rig: &mut Rig<'_, D>, tensor: &Tensor, arm: Arm) -> Result<()> {
        let (wide, narrow) = (self.optimizer.wide.slice(0, 4 * tensor.elems), self.optimizer.narrow.slice(0, 2 * tensor.elems));
        if arm == Arm::Device {
            rig.dev.cast(Stream::Compute, tensor.narrow, tensor.wide)?;
            rig.dev.record(self.ready, Stream::Compute)?;
            rig.dev.wait(Stream::D2h, self.ready)?;
            rig.dev.copy_d2h(Stream::D2h, tensor.wide, wide)?;
            return rig.settle();
        }
        rig.dev.copy_d2h(Stream::D2h, tensor.narrow, narrow)?;
        rig.settle()?;
        if arm == Arm::Host { self.run(HostJob::Widen(self.optimizer.widen(tensor.elems))) } else { Ok(()) }
    }

    fn send<D: Kernels>(&mut self, rig: &mut Rig<'_, D>, tensor: &Tensor, arm: Arm) -> Result<()> {
        if arm == Arm::Device {
            rig.dev.copy_h2d(Stream::H2d, self.optimizer.params().slice(0, 4 * tensor.elems), tensor.wide)?;
            rig.dev.cast(Stream::H2d, tensor.wide, tensor.narrow)?;
            return rig.settle();
        }
        if arm == Arm::Host {
            self.run(HostJob::Step(self.optimizer.cast(tensor.elems)))?;
        }
        rig.dev.copy_h2d(Stream::H2d, self.optimizer.weights.slice(0, 2 * tensor.elems), tensor.narrow)?;
        rig.settle()
    }
}
