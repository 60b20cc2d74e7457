//! Buckets on their way: gradients leave the device, the optimizer steps them, weights return; all three at once, by bucket size.

use crate::bench::Bench;
use crate::optimizer::{GRAD, HostJob, Optimizer, is_all};
use half::bf16;
use microbench::fill;
use serde_json::json;
use superoffload::device::{Device, DeviceSlice, EventId, Kernels, Stream};
use superoffload::dtype::Dtype;
use superoffload::engine::pool::Pool;
use superoffload::error::Result;
use superoffload::probe::rig::Rig;
use superoffload::probe::samples::Samples;
use superoffload::probe::workers::Workers;

/// Bytes of a bucket's bf16 gradients: the smallest; they double.
const SMALLEST_BYTES: usize = 1 << 20;
const LARGEST_BYTES: usize = 256 << 20;
/// Buckets on their way at once, as in a run.
const SLOTS: usize = 8;

/// What flows, and where.
struct Pipeline {
    optimizer: Optimizer,
    pool: Pool<HostJob>,
    grads: DeviceSlice,
    weights: DeviceSlice,
    arrived: [EventId; SLOTS],
    sent: [EventId; SLOTS],
}

/// The sweep.
///
/// # Errors
/// The device's and the pool's; `Resource` when a parameter is wrong.
#[allow(unsafe_code)]
pub fn measure<D: Kernels>(bench: &mut Bench<'_, D>) -> Result<()> {
    let params = bench.sizes.pipeline_params;
    // SAFETY: one pool does one job at a time, on gradients whose copy is done, and ends here; the bench's memory stays.
    let optimizer = unsafe { Optimizer::new(bench, params, 1) }?;
    let mut workers = Workers::<HostJob>::new(bench.topology, bench.limits.workers)?;
    let pass = workers.rates(bench.sizes.seconds, |_| HostJob::Step(optimizer.step(0..params, 0, params, Dtype::Bfloat16)))?;
    let dev = &mut *bench.rig.dev;
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
    fn sweep<D: Kernels>(&mut self, bench: &mut Bench<'_, D>, params: usize, bucket: usize, pass: &Samples) -> Result<()> {
        self.optimizer.reset(bench.memory, params);
        let host = self.optimizer.narrow.slice(0, 2 * params);
        fill(bench.memory, host, bf16::from_f32(GRAD));
        bench.rig.seconds(|dev| dev.copy_h2d(Stream::H2d, host, self.grads.slice(0, params)))?;
        fill(bench.memory, host, bf16::ZERO);
        let mut steps = 0;
        let times = bench.rig.samples(bench.sizes.seconds, |rig| {
            steps += 1;
            let start_ns = rig.dev.now_ns();
            self.step(rig, params / bucket, bucket)?;
            Ok(rig.since(start_ns))
        })?;
        let is_stepped = self.optimizer.is_after(bench.memory, params, steps);
        bench.rig.seconds(|dev| dev.copy_d2h(Stream::D2h, self.weights.slice(0, params), host))?;
        let is_right = is_stepped && is_all(bench.memory, host, bf16::from_f32(Optimizer::param_after(steps)));
        let rate = params as f64 / times.median();
        // Bytes a parameter of the pass, and of the link each way.
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

    /// All buckets once. A slot holds a bucket's gradients from the copy that brings them to the copy that sends its weights.
    fn step<D: Device>(&mut self, rig: &mut Rig<'_, D>, buckets: usize, bucket: usize) -> Result<()> {
        let (mut copied, mut submitted, mut sent) = (0, 0, 0);
        let mut stepping = None;
        while sent < buckets {
            if copied < buckets && copied < sent + SLOTS && rig.dev.is_done(self.sent[copied % SLOTS])? {
                self.copy_out(rig.dev, copied, bucket)?;
                copied += 1;
            }
            if self.pool.is_idle()? {
                if let Some(done) = stepping.take() {
                    self.copy_back(rig.dev, done, bucket)?;
                    sent += 1;
                }
                if submitted < copied && rig.dev.is_done(self.arrived[submitted % SLOTS])? {
                    let range = submitted * bucket..(submitted + 1) * bucket;
                    self.pool.submit(HostJob::Step(self.optimizer.step(range, submitted % SLOTS, bucket, Dtype::Bfloat16)));
                    stepping = Some(submitted);
                    submitted += 1;
                }
            }
            std::hint::spin_loop();
        }
        rig.settle()
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
