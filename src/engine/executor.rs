//! Does what the coordinator decides: enqueues kernels and copies, feeds the pool, and waits only where the protocol
//! says so. One thread, the driver, runs all of this; see ARCHITECTURE.md for one step from top to bottom.

use super::coordinator::{Command, Coordinator, Counts, Event, Load, Staging, Update, Work};
use super::counters::Counters;
use super::havoc::Havoc;
use super::loss_scale::LossScale;
use super::memory::Memory;
use super::pool::Pool;
use super::report::Report;
use super::route::Hop;
use super::transfers::Transfers;
use super::verdict::{SpeculationHistory, Verdict};
use super::vitals::{Doing, Mark, Vitals};
use super::weight_flow::WeightFlow;
use crate::bucket::slot::Slot;
use crate::device::{AdamArgs, DeviceSlice, EventId, Kernels, ProductAlgorithm, Stream};
use crate::dtype::Dtype;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::host::pinned::HostMemory;
use crate::host::pool::Job;
use crate::memory::{Place, RingShape};
use crate::model::activations::ActivationPlan;
use crate::model::rope::rope_table;
use crate::model::shape::{ModelShape, Positions};
use crate::model::tensors::{Stage, TensorTable};
use crate::model::{MicroStep, Model};
use crate::optim::StatePart;
use crate::optim::adam::{AdamConsts, AdamHyper};
use crate::planner::plan::Plan;
use crate::trace::Recorder;
use crate::units::Norm;
use std::ops::Range;
use std::sync::Arc;

/// Where the batches come from.
pub trait Batches {
    /// Writes the next micro-batch: token ids and the tokens that follow them, both `[batch * seq_length]`.
    ///
    /// # Errors
    /// When the data cannot be read.
    fn fill(&mut self, inputs: &mut [i32], targets: &mut [i32]) -> Result<()>;
}

/// What a step did.
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Mean loss over the step's tokens, before the update.
    pub loss: f32,
    /// Gradient norm before clipping.
    pub grad_norm: Norm,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Factor on the loss during the step.
    pub loss_scale: f32,
    /// What became of it.
    pub verdict: Verdict,
    /// Bucket steps since the last report.
    pub counts: Counts,
    /// Time in which the device had nothing to compute.
    pub exposed: Exposed,
    /// What moved and was stepped since the last report.
    pub counters: Counters,
}

/// Time of idle compute, by cause, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposed {
    /// The next forward waited for the optimizer.
    pub cpu_ns: u64,
    /// It waited for a copy.
    pub transfer_ns: u64,
}

/// Stages (a layer's forward or backward) that the driver enqueues ahead of the device: enough that the device never
/// waits for a launch, and not so many that a full launch queue blocks the driver, who has a pool to feed.
const STAGES_AHEAD: usize = 2;

/// The training engine on one device.
pub struct Engine<D: Kernels> {
    plan: Plan,
    dev: D,
    pool: Pool<StepJob>,
    // Threads that use the memory are declared, and so dropped, before it.
    host: HostMemory,
    memory: Memory,
    report: Report,
    model: Model,
    flow: Option<WeightFlow>,
    coordinator: Coordinator,
    transfers: Transfers,
    /// The bucket that the pool was given.
    in_pool: Option<usize>,
    compute_tail: EventId,
    /// The ends of the last stages that were enqueued.
    stages: [EventId; STAGES_AHEAD + 1],
    stages_enqueued: usize,
    bell: Arc<Doorbell>,
    vitals: Arc<Vitals>,
    havoc: Option<Havoc>,
    recorder: Recorder,
    optimizer_step: u64,
    train_step: u64,
    loss_scale: LossScale,
    reported: Counts,
    waited_ns: u64,
    exposed: Exposed,
    counters: Counters,
    counters_reported: Counters,
}

/// Which way the stages go.
#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

fn staging(plan: &Plan) -> Staging {
    Staging {
        ringed_grads: plan.grad_ring.is_some(),
        grad_slots: plan.grad_slots,
        param_slots: plan.param_slots,
        streamed_weights: plan.weight_ring.is_some(),
    }
}

impl<D: Kernels> Engine<D> {
    /// Allocates everything; the state is zero until [`Engine::write_state`] and [`Engine::send_weights`].
    /// Use it from one thread: `bell` wakes the one that waits first.
    ///
    /// # Errors
    /// `Resource` when memory or threads cannot be had.
    pub fn new(plan: Plan, shape: ModelShape, dev: D, pool: Pool<StepJob>, bell: Arc<Doorbell>) -> Result<Self> {
        // Declared before the threads' owners, and so dropped after them, also when something below fails.
        let mut host = HostMemory::new(plan.host_memory.clone());
        let (mut dev, pool) = (dev, pool);
        let table = TensorTable::new(&shape);
        let flat = plan.layout.flat_elems();
        let mut flat_memory = |name: &str, ring: Option<RingShape>| match ring {
            None => dev.alloc(name, flat, plan.dtype),
            Some(ring) => dev.alloc_ring(name, flat, plan.dtype, ring),
        };
        let (weights, grads) = (flat_memory("weights", plan.weight_ring)?, flat_memory("gradients", plan.grad_ring)?);
        let activations = ActivationPlan::new(&shape, plan.batch, plan.seq_length, plan.dtype, plan.loss_tile, &plan.layer_policies)?;
        let activations = activations.allocate(&mut dev, &mut host)?;
        let memory = Memory::new(&plan, &table, &mut dev, &mut host)?;
        let flow = |ring| WeightFlow::new(&mut dev, &table, ring, memory.step.params.memory, weights);
        let flow = plan.weight_ring.map(flow).transpose()?;
        let report = Report::new(flat, &mut dev, &mut host)?;
        let model = Model::new(shape, weights, grads, activations)?;
        model.prepare(&mut dev)?;
        if let (Positions::Rope(rope), Some(target)) = (model.shape.positions, model.activations.rope_table) {
            memory.upload(&mut dev, &rope_table(&rope, plan.seq_length), target)?;
        }
        Ok(Self {
            coordinator: Coordinator::new(plan.layout.clone(), plan.rules, staging(&plan)),
            transfers: Transfers::new(&mut dev, &plan.layout, plan.param_slots)?,
            in_pool: None,
            compute_tail: dev.event()?,
            stages: [dev.event()?, dev.event()?, dev.event()?],
            havoc: Havoc::of(&plan),
            recorder: Recorder::new("driver", plan.trace_spans),
            loss_scale: LossScale::new(plan.dtype),
            stages_enqueued: 0,
            optimizer_step: 0,
            train_step: 0,
            reported: Counts::default(),
            waited_ns: 0,
            exposed: Exposed::default(),
            counters: Counters::default(),
            counters_reported: Counters::default(),
            vitals: Arc::new(Vitals::new(plan.layout.count(), bell.clone(), pool.pulse())),
            plan,
            dev,
            pool,
            host,
            memory,
            report,
            model,
            flow,
            bell,
        })
    }

    /// The plan it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The device, in words.
    pub fn describe(&self) -> String {
        self.dev.describe()
    }

    /// The algorithms of the device's matrix products so far.
    pub fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        self.dev.product_algorithms()
    }

    /// Its signs of life, for a watchdog.
    pub fn vitals(&self) -> Arc<Vitals> {
        self.vitals.clone()
    }

    /// The device's clock.
    pub fn now_ns(&self) -> u64 {
        self.dev.now_ns()
    }

    /// The model's shape.
    pub fn shape(&self) -> &ModelShape {
        &self.model.shape
    }

    /// The model's tensors in canonical order.
    pub fn table(&self) -> &TensorTable {
        &self.model.table
    }

    /// Optimizer steps done (skipped steps do not count).
    pub fn optimizer_step(&self) -> u64 {
        self.optimizer_step
    }

    /// Training steps done (skipped ones count: their data is used up).
    pub fn train_step(&self) -> u64 {
        self.train_step
    }

    /// Dynamic loss scaling.
    pub fn loss_scale(&self) -> LossScale {
        self.loss_scale
    }

    /// The last verdicts.
    pub fn history(&self) -> SpeculationHistory {
        self.coordinator.history()
    }

    /// Host memory mapped by the engine.
    pub fn host_memory(&self) -> &HostMemory {
        &self.host
    }

    /// Clips above this gradient norm from the next verdict on; 0 never clips.
    pub fn set_max_grad_norm(&mut self, max_grad_norm: f64) {
        self.plan.max_grad_norm = max_grad_norm;
    }

    /// Takes over counters from a checkpoint.
    pub fn resume(&mut self, train_step: u64, optimizer_step: u64, loss_scale: LossScale, history: SpeculationHistory) {
        (self.train_step, self.optimizer_step, self.loss_scale) = (train_step, optimizer_step, loss_scale);
        self.coordinator.set_history(history);
    }

    /// Sets all parameters to random values that depend on `seed` alone; the moments stay as they are: zero in an engine that
    /// has not stepped. Call [`Engine::send_weights`] after it.
    ///
    /// # Errors
    /// The device's; `Resource` when a thread cannot start.
    pub fn init_state(&mut self, seed: u64, threads: usize) -> Result<()> {
        self.memory.init_params(&mut self.dev, &self.model.table, seed, threads)
    }

    /// Sets parameters or moments from element `start` of the flat range on. Call [`Engine::send_weights`] after the last.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// If they reach beyond the flat range.
    pub fn write_state(&mut self, part: StatePart, start: usize, source: &[f32]) -> Result<()> {
        self.memory.write(&mut self.dev, part, start..start + source.len(), source)
    }

    /// Reads parameters or moments from element `start` of the flat range on. Call [`Engine::flush`] first.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// If they reach beyond the flat range.
    pub fn read_state(&mut self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.memory.read(&mut self.dev, part, start..start + out.len(), out)
    }

    /// Derives the device's working weights from the state.
    ///
    /// # Errors
    /// The device's.
    pub fn send_weights(&mut self) -> Result<()> {
        for state in &self.memory.device {
            self.dev.cast(Stream::Compute, state.params, self.model.weights.slice(state.flat.start, state.flat.len()))?;
        }
        self.coordinator.restore();
        self.obey()?;
        self.wait_for_all_params()
    }

    /// Writes every decided update into the state, so that it can be read.
    ///
    /// # Errors
    /// The device's.
    pub fn flush(&mut self) -> Result<()> {
        self.vitals.now(Doing::Updates, 0);
        let flushed = self.write_updates();
        self.vitals.now(Doing::Else, 0);
        flushed
    }

    fn write_updates(&mut self) -> Result<()> {
        self.block_until(Doing::Updates, 0, |engine| Ok(engine.coordinator.all_settled()))?;
        self.coordinator.flush();
        self.obey()?;
        self.wait_for_all_params()?;
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.dev.synchronize(self.compute_tail)
    }

    /// The logits `[batch * seq_length, vocab]` of one batch, as fp32, for evaluation.
    ///
    /// # Errors
    /// The device's; `batches`'.
    pub fn logits(&mut self, batches: &mut impl Batches) -> Result<Vec<f32>> {
        self.wait_for_all_params()?;
        self.upload_batch(0, batches)?;
        let elems = self.plan.batch * self.plan.seq_length * self.model.shape.vocab;
        let out = self.dev.alloc("logits", elems, self.plan.dtype)?;
        let wide = self.dev.alloc("logits fp32", elems, Dtype::Float32)?;
        self.forward_stages()?;
        self.with_weights(Stage::Head, Pass::Forward, |engine| engine.model.logits(&mut engine.dev, out))?;
        self.dev.cast(Stream::Compute, out, wide)?;
        let mut values = vec![0.0; elems];
        self.memory.download(&mut self.dev, wide, &mut values)?;
        Ok(values)
    }

    /// One optimizer step: every micro-batch forward and backward, the verdict, and the updates that it allows. Updates of
    /// late layers may still be under way when this returns; the next forward waits for each where it needs it.
    ///
    /// # Errors
    /// The device's; `batches`', after which the engine is as after the last step, whose state can be flushed and saved: all data of a
    /// step is read before its first gradient counts.
    pub fn step(&mut self, learning_rate: f64, batches: &mut impl Batches) -> Result<StepReport> {
        self.vitals.record(Mark::Step, self.train_step + 1);
        self.vitals.now(Doing::Enqueuing, 0);
        let stepped = self.pass_and_validate(learning_rate, batches);
        self.vitals.now(Doing::Else, 0);
        stepped
    }

    fn pass_and_validate(&mut self, learning_rate: f64, batches: &mut impl Batches) -> Result<StepReport> {
        self.exposed = Exposed::default();
        let layers = self.model.shape.layers;
        let accum = self.plan.grad_accum_steps;
        for micro_step in 0..accum {
            let (first, last) = (micro_step == 0, micro_step + 1 == accum);
            self.upload_batch(micro_step, batches)?;
            self.forward_stages()?;
            self.wait_for_params(Stage::Head)?;
            if last {
                self.begin_validation(learning_rate)?;
            }
            let inv_tokens = 1.0 / self.plan.tokens_per_step() as f32;
            let micro = MicroStep { first, inv_tokens, loss_scale: self.loss_scale.scale() };
            self.wait_for_ring(Stage::Head)?;
            self.with_weights(Stage::Head, Pass::Backward, |engine| engine.model.head(&mut engine.dev, micro, true))?;
            self.grads_written(Stage::Head, last)?;
            (0..layers).rev().map(Stage::Layer).chain([Stage::Embed]).try_for_each(|stage| self.backward(stage, first, last))?;
        }
        self.validate(learning_rate)
    }

    /// All stages but the head.
    fn forward_stages(&mut self) -> Result<()> {
        let layers = (0..self.model.shape.layers).map(Stage::Layer);
        [Stage::Embed].into_iter().chain(layers).try_for_each(|stage| self.forward(stage))
    }

    fn forward(&mut self, stage: Stage) -> Result<()> {
        self.wait_for_params(stage)?;
        self.with_weights(stage, Pass::Forward, |engine| engine.model.forward(&mut engine.dev, stage))?;
        self.stage_enqueued()
    }

    fn backward(&mut self, stage: Stage, first: bool, last: bool) -> Result<()> {
        self.wait_for_ring(stage)?;
        self.with_weights(stage, Pass::Backward, |engine| engine.model.backward(&mut engine.dev, stage, first))?;
        self.grads_written(stage, last)
    }

    /// Enqueues `compute` so that it finds the weights of `stage`, and then the copy of those that `pass` needs next, which
    /// runs beside it.
    fn with_weights(&mut self, stage: Stage, pass: Pass, compute: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if !self.streams_weights() {
            return compute(self);
        }
        let at = self.model.table.stage_index(stage);
        self.fetch_weights(at)?;
        self.flow.iter().try_for_each(|flow| flow.arrive(&mut self.dev, at))?;
        compute(self)?;
        self.flow.iter().try_for_each(|flow| flow.leave(&mut self.dev, at))?;
        let next = match pass {
            Pass::Forward => at.checked_sub(1),
            Pass::Backward => Some(at + 1),
        };
        next.map_or(Ok(()), |next| self.fetch_weights(next))
    }

    /// Only the first forward of a step may have to wait here: the pool writes a bucket's weights after its gradient has come,
    /// which is after the last stage of the step that uses them.
    fn fetch_weights(&mut self, stage: usize) -> Result<()> {
        let streamed = self.flow.as_ref().map_or(0..0, |flow| flow.streamed(stage));
        self.plan.layout.overlapping(streamed).rev().try_for_each(|bucket| self.wait_until_settled(bucket))?;
        let fetched = self.flow.as_mut().map(|flow| flow.fetch(&mut self.dev, stage)).transpose()?;
        self.counters.h2d_bytes += fetched.unwrap_or(0);
        Ok(())
    }

    /// Without the feature `weight-flow` known at compile time.
    fn streams_weights(&self) -> bool {
        cfg!(feature = "weight-flow") && self.flow.is_some()
    }

    /// In a ring of gradients `stage` writes where earlier buckets' gradients lie until they are copied.
    fn wait_for_ring(&mut self, stage: Stage) -> Result<()> {
        let Some(ring) = self.plan.grad_ring else { return Ok(()) };
        let range = self.model.table.stage_range(stage);
        let end = range.end.min(ring.ringed_elems).saturating_sub(ring.period_elems);
        let before = range.start.saturating_sub(ring.period_elems)..end;
        for bucket in self.plan.layout.overlapping(before) {
            self.block_until(Doing::Gradient, bucket, |engine| Ok(engine.coordinator.is_copied(bucket)))?;
            self.dev.wait(Stream::Compute, self.transfers.event(Hop::GradsOut, bucket))?;
        }
        // No kernel writes padding, and it counts in the norm.
        let mut padding = self.model.table.padding(stage);
        padding.try_for_each(|pad| self.dev.zero(self.model.grads.slice(pad.start, pad.len())))
    }

    fn upload_batch(&mut self, micro_step: usize, batches: &mut impl Batches) -> Result<()> {
        let buffer = self.memory.batches[micro_step % 2];
        // The buffer's last copy may still be under way.
        self.vitals.now(Doing::Device, 0);
        self.dev.synchronize(buffer.copied)?;
        self.vitals.now(Doing::Data, 0);
        buffer.inputs.with(|inputs| buffer.targets.with(|targets| batches.fill(inputs, targets)))?;
        self.vitals.now(Doing::Enqueuing, 0);
        self.dev.copy_h2d(Stream::Compute, buffer.inputs, self.model.activations.tokens)?;
        self.dev.copy_h2d(Stream::Compute, buffer.targets, self.model.activations.targets)?;
        self.dev.record(buffer.copied, Stream::Compute)
    }

    fn begin_validation(&mut self, learning_rate: f64) -> Result<()> {
        let update = Update { optimizer_step: self.optimizer_step + 1, learning_rate, scale: self.loss_scale.inverse() };
        self.coordinator.begin_step(update);
        let decision = if self.coordinator.is_speculating() { "speculate" } else { "validate first" };
        let now = self.dev.now_ns();
        self.recorder.past_span(decision, (self.train_step + 1) as u32, now, 0);
        self.report.begin(&mut self.dev)
    }

    /// The gradients of `stage` are enqueued; when they are final, so are all buckets up to the end of its flat range.
    fn grads_written(&mut self, stage: Stage, last: bool) -> Result<()> {
        if last {
            let range = self.model.table.stage_range(stage);
            let layout = &self.plan.layout;
            let end = if stage == Stage::Embed { layout.flat_elems() } else { range.end };
            let before = layout.complete(range.start);
            (before..layout.complete(end)).try_for_each(|bucket| self.bucket_ready(bucket))?;
        }
        self.stage_enqueued()
    }

    /// Serves events until the device is at most [`STAGES_AHEAD`] stages behind.
    fn stage_enqueued(&mut self) -> Result<()> {
        let stages = self.stages;
        self.dev.record(stages[self.stages_enqueued % stages.len()], Stream::Compute)?;
        self.stages_enqueued += 1;
        self.vitals.record(Mark::Stage, self.stages_enqueued as u64);
        let oldest = stages[self.stages_enqueued % stages.len()];
        self.block_until(Doing::Device, 0, |engine| engine.dev.is_done(oldest))
    }

    fn bucket_ready(&mut self, bucket: usize) -> Result<()> {
        let range = self.plan.layout.range(bucket);
        if let Some(havoc) = &self.havoc {
            havoc.spoil(&mut self.dev, self.model.grads, &range, self.train_step + 1)?;
        }
        self.report.add(&mut self.dev, self.model.grads.slice(range.start, range.len()), &range)?;
        self.issue(Hop::Backward, bucket, None)?;
        self.tell(Event::GradReady(bucket))
    }

    fn grads(&self, range: &Range<usize>) -> DeviceSlice {
        self.model.grads.slice(range.start, range.len())
    }

    fn weights(&self, range: &Range<usize>) -> DeviceSlice {
        self.model.weights.slice(range.start, range.len())
    }

    /// Waits for the norm, decides, and starts what the verdict allows.
    fn validate(&mut self, learning_rate: f64) -> Result<StepReport> {
        self.report.end(&mut self.dev, self.model.activations.loss)?;
        let start = self.dev.now_ns();
        self.block_until(Doing::Norm, 0, |engine| engine.report.poll(&mut engine.dev))?;
        self.driver_span("await verdict", (self.train_step + 1) as u32, start);
        let mut out = self.read_report(learning_rate);
        let validated = Event::Validated(out.verdict);
        self.vitals.event(validated, self.train_step + 1);
        self.coordinator.handle(validated);
        let skipped = out.verdict == Verdict::SkipNonFinite;
        self.loss_scale.update(skipped);
        self.optimizer_step += u64::from(!skipped);
        self.train_step += 1;
        self.obey()?;
        if self.plan.barrier {
            self.wait_for_all_params()?;
        }
        out.counts = self.coordinator.counts() - self.reported;
        self.reported = self.coordinator.counts();
        self.counters.adam_busy_ns = self.pool.busy_ns();
        out.counters = self.counters - self.counters_reported;
        self.counters_reported = self.counters;
        out.exposed = self.exposed;
        out.exposed.transfer_ns += self.dev.waited_ns() - self.waited_ns;
        self.waited_ns = self.dev.waited_ns();
        Ok(out)
    }

    fn read_report(&self, learning_rate: f64) -> StepReport {
        let (norm_sq, nonfinite, loss) = self.report.read();
        let grad_norm = norm_sq.norm(self.loss_scale.inverse());
        let verdict = Verdict::new(grad_norm, nonfinite, self.plan.max_grad_norm);
        let (counts, exposed, loss_scale) = (Counts::default(), self.exposed, self.loss_scale.scale());
        StepReport { loss, grad_norm, learning_rate, loss_scale, verdict, counts, exposed, counters: Counters::default() }
    }

    /// The compute stream goes on only when the parameters of `stage` are on the device.
    fn wait_for_params(&mut self, stage: Stage) -> Result<()> {
        let buckets = self.plan.layout.overlapping(self.model.table.stage_range(stage));
        buckets.rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    fn wait_for_all_params(&mut self) -> Result<()> {
        (0..self.plan.layout.count()).rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    fn wait_for_bucket(&mut self, bucket: usize) -> Result<()> {
        self.wait_until_settled(bucket)?;
        self.dev.wait(Stream::Compute, self.transfers.event(Hop::ParamsIn, bucket))
    }

    fn wait_until_settled(&mut self, bucket: usize) -> Result<()> {
        if self.coordinator.is_settled(bucket) {
            return Ok(());
        }
        let (start, mut idle_since) = (self.dev.now_ns(), None);
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.block_until(Doing::Params, bucket, |engine| {
            engine.count_exposed(bucket, &mut idle_since)?;
            Ok(engine.coordinator.is_settled(bucket))
        })?;
        self.driver_span("await params", bucket as u32, start);
        Ok(())
    }

    /// While the compute stream has nothing to do, the time goes to what `bucket` waits for now.
    fn count_exposed(&mut self, bucket: usize, idle_since: &mut Option<u64>) -> Result<()> {
        if idle_since.is_some() || self.dev.is_done(self.compute_tail)? {
            let (now, link) = (self.dev.now_ns(), self.coordinator.waits_for_link(bucket));
            let exposed = if link { &mut self.exposed.transfer_ns } else { &mut self.exposed.cpu_ns };
            *exposed += now - idle_since.replace(now).unwrap_or(now);
        }
        Ok(())
    }

    /// Records what the driver did from `start_ns` until now.
    fn driver_span(&mut self, name: &'static str, index: u32, start_ns: u64) {
        let duration_ns = self.dev.now_ns() - start_ns;
        self.recorder.past_span(name, index, start_ns, duration_ns);
    }

    /// Serves events until `ready`, for which `doing` waits, of bucket `number` where one belongs.
    fn block_until(&mut self, doing: Doing, number: usize, mut ready: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let before = self.vitals.doing();
        self.vitals.now(doing, number as u64);
        loop {
            let rung = self.bell.rings();
            let told = self.pump()?;
            if ready(self)? {
                self.vitals.now(before.0, before.1);
                return Ok(());
            }
            if !self.go_on()? && !told {
                if self.havoc.as_ref().is_some_and(Havoc::decides) {
                    return Err(Error::resource("wait for the step", "nothing is under way: a deadlock in the step protocol"));
                }
                self.bell.wait(rung);
            }
        }
    }

    /// Lets a device and a pool without threads do something; false when they have threads, or nothing to do.
    fn go_on(&mut self) -> Result<bool> {
        if self.havoc.as_mut().is_some_and(Havoc::pool_is_first) && self.pool.advance() {
            return Ok(true);
        }
        Ok(self.dev.idle()? || self.pool.advance())
    }

    /// Tells the coordinator what has happened since the last call; false when nothing has. Never blocks.
    fn pump(&mut self) -> Result<bool> {
        let mut told = false;
        if self.havoc.as_mut().is_some_and(Havoc::pool_hurries) {
            self.pool.advance();
        }
        for stream in Stream::ALL {
            while let Some((hop, bucket)) = self.transfers.poll(&mut self.dev, stream)? {
                told = true;
                self.vitals.front(stream, self.transfers.front(stream));
                self.tell(Event::Done { hop, bucket })?;
            }
        }
        self.report.poll(&mut self.dev)?;
        while let Some(bucket) = self.in_pool
            && self.pool.is_idle()?
        {
            self.in_pool = None;
            told = true;
            self.tell(Event::Done { hop: Hop::Optimize, bucket })?;
        }
        Ok(told)
    }

    fn tell(&mut self, event: Event) -> Result<()> {
        self.vitals.event(event, self.train_step + 1);
        self.coordinator.handle(event);
        self.obey()
    }

    fn obey(&mut self) -> Result<()> {
        while let Some(command) = self.coordinator.next_command() {
            self.vitals.command(&command);
            let Command::Start { hop, bucket, load } = command;
            self.start(hop, bucket, load)?;
        }
        Ok(())
    }

    fn start(&mut self, hop: Hop, bucket: usize, load: Load) -> Result<()> {
        let range = self.plan.layout.range(bucket);
        self.transfers.wait(&mut self.dev, hop, bucket)?;
        match (hop, load) {
            (Hop::GradsOut, Load::Slot(slot)) => self.copy_grads(&range, slot)?,
            (Hop::Optimize, Load::Job(work, params)) => self.give_to_pool(bucket, range, work, params),
            (Hop::ParamsIn, Load::Slot(_)) if self.beside_flow(&range).is_empty() => {
                let done = Event::Done { hop, bucket };
                self.vitals.event(done, self.train_step + 1);
                self.coordinator.handle(done);
                return Ok(());
            }
            (Hop::ParamsIn, Load::Slot(slot)) => self.copy_params(&range, slot)?,
            (Hop::PageIn, Load::Update(_)) => self.counters.h2d_bytes += self.page(Stream::H2d, &range, Place::Device)?,
            (Hop::StepOnDevice, Load::Update(update)) => self.step_on_device(&range, update)?,
            (Hop::PageOut, Load::Update(_)) => self.counters.d2h_bytes += self.page(Stream::D2h, &range, Place::Host)?,
            (hop, load) => unreachable!("{hop:?} does not start with {load:?}"),
        }
        let slot = if let Load::Slot(slot) = load { Some(slot) } else { None };
        self.issue(hop, bucket, slot)
    }

    /// What was enqueued last is `hop` of `bucket`.
    fn issue(&mut self, hop: Hop, bucket: usize, slot: Option<Slot>) -> Result<()> {
        self.transfers.issue(&mut self.dev, hop, bucket, slot)?;
        if let Some(stream) = hop.leg().stream {
            self.vitals.front(stream, self.transfers.front(stream));
        }
        Ok(())
    }

    fn give_to_pool(&mut self, bucket: usize, range: Range<usize>, work: Work, params: Option<Slot>) {
        if let (Some(flow), Some(_)) = (&mut self.flow, params) {
            flow.forget(&range);
        }
        let job = StepJob { bucket, range, work, out: params, memory: self.memory.step.clone() };
        self.counters.adam_elems += job.range.len() as u64;
        self.counters.adam_bytes += job.traffic_bytes();
        self.pool.submit(job);
        self.in_pool = Some(bucket);
    }

    fn copy_grads(&mut self, range: &Range<usize>, slot: Slot) -> Result<()> {
        let (mut source, target) = (self.grads(range), self.memory.step.grads.slot(slot, range.len()));
        if self.plan.device_casts() {
            let staging = self.memory.staging_d2h.slice(0, range.len());
            self.dev.cast(Stream::D2h, source, staging)?;
            source = staging;
        }
        self.counters.d2h_bytes += target.bytes() as u64;
        self.dev.copy_d2h(Stream::D2h, source, target)
    }

    fn copy_params(&mut self, whole: &Range<usize>, slot: Slot) -> Result<()> {
        let range = self.beside_flow(whole);
        let (source, weights) = (self.memory.step.params.part(slot, whole, &range), self.weights(&range));
        self.counters.h2d_bytes += source.bytes() as u64;
        if !self.plan.device_casts() {
            return self.dev.copy_h2d(Stream::H2d, source, weights);
        }
        let staging = self.memory.staging_h2d.slice(0, range.len());
        self.dev.copy_h2d(Stream::H2d, source, staging)?;
        self.dev.cast(Stream::H2d, staging, weights)
    }

    /// The part of a bucket that has its own place on the device: all that does not stream.
    fn beside_flow(&self, range: &Range<usize>) -> Range<usize> {
        self.flow.as_ref().map_or(range.clone(), |flow| flow.beside(range))
    }

    fn step_on_device(&mut self, range: &Range<usize>, update: Update) -> Result<()> {
        let hyper = AdamHyper { lr: update.learning_rate, ..self.plan.hyper };
        let segments = self.memory.step.segments.clone();
        for segment in segments.iter() {
            let part = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            if part.is_empty() {
                continue;
            }
            let state = self.memory.device_part(&part);
            let consts = AdamConsts::new(&hyper, update.optimizer_step, segment.decay);
            let (grads, out) = (self.grads(&part), self.weights(&part));
            self.dev.adam_step(AdamArgs { params: state.params, m: state.m, v: state.v, grads, out, consts, scale: update.scale })?;
        }
        Ok(())
    }

    /// Moves a bucket's state between the two sides; returns its bytes. All of a step is enqueued at once: states that come and states
    /// that go cross the link beside the steps of others.
    fn page(&mut self, stream: Stream, range: &Range<usize>, place: Place) -> Result<u64> {
        let arrays = self.memory.device_part(range).arrays();
        arrays.into_iter().try_for_each(|memory| self.dev.prefetch(stream, memory, place))?;
        Ok(arrays.map(|memory| memory.bytes() as u64).iter().sum())
    }

    /// Ends all threads and returns the tracks of the timeline.
    ///
    /// # Errors
    /// When an optimizer worker had panicked.
    pub fn finish(mut self) -> Result<Vec<Recorder>> {
        let mut tracks = vec![self.recorder];
        tracks.extend(self.dev.finish());
        tracks.extend(self.pool.finish()?);
        Ok(tracks)
    }
}
