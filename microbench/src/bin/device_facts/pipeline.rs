//! Buckets in the pipeline of a step, by bucket size: gradients leave the device, the optimizer updates parameters, and weights return, all
//! concurrently.

use crate::bench::DeviceBench;
use crate::optimizer::{GRAD, HostJob, Optimizer, is_all};
use half::bf16;
use microbench::fill;
use serde_json::json;
use superoffload::Result;
use superoffload::internals::device::{Device, DeviceSlice, EventId, Kernels, Stream};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::Pool;
use superoffload::internals::probe::{Samples, Timer, Workers};

/// Bytes of the smallest bucket's bf16 gradients. Each further size doubles.
const SMALLEST_BYTES: usize = 1 << 20;
const LARGEST_BYTES: usize = 256 << 20;
/// Buckets in flight, as in training.
const SLOTS: usize = 8;

/// The optimizer, its pool, and the device's memory and events.
struct Pipeline {
    optimizer: Optimizer,
    pool: Pool<HostJob>,
    grads: DeviceSlice,
    weights: DeviceSlice,
    arrived: [EventId; SLOTS],
    sent: [EventId; SLOTS],
}

/// Measures all bucket sizes.
///
/// # Errors
/// Errors of the device and the pool; `Resource` if a parameter is wrong.
#[allow(unsafe_code)]
pub fn measure<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let params = bench.sizes.pipeline_params;
    // SAFETY: one pool runs one job at a time, each after the copy of its gradients, and stops before this function returns; the memory of
    // `bench` outlives it.
    let optimizer = unsafe { Optimizer::new(bench, params, 1) }?;
    let mut workers = Workers::<HostJob>::new(bench.topology, bench.limits.workers)?;
    let pass = workers.rates(bench.sizes.seconds, |_| HostJob::Step(optimizer.step(0..params, 0, params, Dtype::Bfloat16)))?;
    let dev = &mut *bench.timer.dev;
    let (grads, weights) = (dev.alloc("gradients", params, Dtype::Bfloat16)?, dev.alloc("weights", params, Dtype::Bfloat16)?);
    let mut events = || -> Result<[EventId; SLOTS]> {
        let mut events = [dev.event()?; SLOTS];
        events[1..].iter_mut().try_for_each(|event| dev.event().map(|new| *event = new))?;
        Ok(events)
    };
    let (arrived, sent) = (events()?, events()?);
    let mut pipeline = Pipeline { optimizer, pool: workers.pool, grads, weights, arrived, sent };
    let sizes =
        std::iter::successors(Some(SMALLEST_BYTES), |size| Some(2 * size)).take_while(|&size| size <= LARGEST_BYTES.min(params / 2));
    for bucket in sizes.map(|bytes| bytes / 2).chain((params < SMALLEST_BYTES * 2).then_some(params / SLOTS)) {
        pipeline.sweep(bench, params / bucket * bucket, bucket, &pass)?;
    }
    Ok(())
}

impl Pipeline {
    fn sweep<D: Kernels>(&mut self, bench: &mut DeviceBench<'_, D>, params: usize, bucket: usize, pass: &Samples) -> Result<()> {
        self.optimizer.reset(bench.memory, params);
        let host = self.optimizer.narrow.slice(0, 2 * params);
        fill(bench.memory, host, bf16::from_f32(GRAD));
        bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, host, self.grads.slice(0, params)))?;
        fill(bench.memory, host, bf16::ZERO);
        let mut steps = 0;
        let times = bench.timer.samples(bench.sizes.seconds, |timer| {
            steps += 1;
            let start_ns = timer.dev.now_ns();
            self.step(timer, params / bucket, bucket)?;
            Ok(timer.since(start_ns))
        })?;
        let is_stepped = self.optimizer.is_after(bench.memory, params, steps);
        bench.timer.seconds(|dev| dev.copy_d2h(Stream::D2h, self.weights.slice(0, params), host))?;
        let is_right = is_stepped && is_all(bench.memory, host, bf16::from_f32(Optimizer::param_after(steps)));
        let rate = params as f64 / times.median();
        // The pass moves 28 bytes per parameter; the link moves 2 bytes per parameter in each direction.
        let (pass_rate, link_rate) = (pass.median() / 28.0, bench.limits.link.bytes_per_s / 2.0);
        let limit = pass_rate.min(link_rate);
        let fields = json!({
            "bucket_params": bucket,
            "bucket_bytes": 2 * bucket,
            "params": params,
            "threads": bench.limits.workers,
            "slots": SLOTS,
            "gparams_per_s": 1e-9 * rate,
            "spread": times.spread(),
            "pass_alone_gparams_per_s": 1e-9 * pass_rate,
            "link_limit_gparams_per_s": 1e-9 * link_rate,
            "limit": if pass_rate < link_rate { "the optimizer's pass alone" } else { bench.limits.link.what.as_str() },
            "share_of_limit": rate / limit,
        });
        bench.line("pipeline", is_right, fields)
    }

    /// Passes all buckets through the pipeline once. A bucket holds its slot from the copy of its gradients to the copy of its weights.
    fn step<D: Device>(&mut self, timer: &mut Timer<'_, D>, buckets: usize, bucket: usize) -> Result<()> {
        let (mut copied, mut submitted, mut sent) = (0, 0, 0);
        let mut stepping = None;
        while sent < buckets {
            if copied < buckets && copied < sent + SLOTS && timer.dev.is_done(self.sent[copied % SLOTS])? {
                self.copy_out(timer.dev, copied, bucket)?;
                copied += 1;
            }
            if self.pool.is_idle()? {
                if let Some(done) = stepping.take() {
                    self.copy_back(timer.dev, done, bucket)?;
                    sent += 1;
                }
                if submitted < copied && timer.dev.is_done(self.arrived[submitted % SLOTS])? {
                    let range = submitted * bucket..(submitted + 1) * bucket;
                    self.pool.submit(HostJob::Step(self.optimizer.step(range, submitted % SLOTS, bucket, Dtype::Bfloat16)));
                    stepping = Some(submitted);
                    submitted += 1;
                }
            }
            std::hint::spin_loop();
        }
        timer.settle()
    }

    fn copy_out<D: Device>(&self, dev: &mut D, index: usize, bucket: usize) -> Result<()> {
        let slot = index % SLOTS;
        let to = self.optimizer.narrow.slice(2 * slot * bucket, 2 * bucket);
        dev.copy_d2h(Stream::D2h, self.grads.slice(index * bucket, bucket), to)?;
        dev.record(self.arrived[slot], Stream::D2h)
    }

    fn copy_back<D: Device>(&self, dev: &mut D, index: usize, bucket: usize) -> Result<()> {
        let slot = index % SLOTS;
        let from = self.optimizer.weights.slice(2 * slot * bucket, 2 * bucket);
        dev.copy_h2d(Stream::H2d, from, self.weights.slice(index * bucket, bucket))?;
        dev.record(self.sent[slot], Stream::H2d)
    }
}
