//! One step: every micro-batch forward and backward, the verdict, and the updates that it allows.

use super::coordinator::{Counts, Event, Update};
use super::counters::Counters;
use super::executor::{Engine, Exposed, StepData, StepReport};
use super::route::Hop;
use super::verdict::Verdict;
use super::vitals::{Doing, Mark};
use crate::data::batch::{Batch, Batches};
use crate::device::{Kernels, Stream};
use crate::error::{Error, Result};
use crate::model::MicroStep;
use crate::model::tensors::Stage;

/// Which way the stages go.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl<D: Kernels> Engine<D> {
    /// One optimizer step: every micro-batch forward and backward, the verdict, and the updates that it allows. Updates of
    /// late layers may still be under way when this returns; the next forward waits for each where it needs it.
    ///
    /// # Errors
    /// Those of [`Engine::read_data`] and of [`Engine::run_step`].
    pub fn step(&mut self, learning_rate: f64, batches: &mut impl Batches) -> Result<StepReport> {
        let data = self.read_data(batches)?;
        self.run_step(learning_rate, data)
    }

    /// Reads every micro-batch of the next step: what its loss is a mean over is known before the first one runs.
    ///
    /// # Errors
    /// `batches`'; `Resource` that names the step when a token, target, position or document reaches outside, or when no target of the
    /// step counts. The engine is then as after the last step, whose state can be flushed and saved.
    pub fn read_data(&mut self, batches: &mut impl Batches) -> Result<StepData> {
        self.vitals.record(Mark::Step, self.train_step + 1);
        self.vitals.now(Doing::Data, 0);
        let targets: Result<usize> = (0..self.plan.grad_accum_steps).map(|micro_step| self.read_batch(micro_step, batches)).sum();
        self.vitals.now(Doing::Else, 0);
        match targets? {
            0 => Err(self.bad_data(format!("none of its {} targets counts: nothing can be learned from it", self.plan.tokens_per_step()))),
            targets => Ok(StepData { targets }),
        }
    }

    /// Fills the memory of one micro-batch; returns its targets that count.
    pub(super) fn read_batch(&mut self, micro_step: usize, batches: &mut impl Batches) -> Result<usize> {
        // Nothing reads it: the verdict of the last step came after its copies, on the same stream.
        let memory = self.host.lend_mut(self.memory.batch(&self.plan, micro_step));
        let mut batch = Batch::new(memory, self.plan.seq_length, self.plan.separates_documents);
        batches.fill(&mut batch)?;
        batch.count_targets(self.model.shape.vocab).map_err(|cause| self.bad_data(format!("micro-batch {micro_step}: {cause}")))
    }

    fn bad_data(&self, cause: String) -> Error {
        Error::resource(format!("use the data of step {}", self.train_step + 1), cause)
    }

    /// The step whose data was read last.
    ///
    /// # Errors
    /// The device's.
    pub fn run_step(&mut self, learning_rate: f64, data: StepData) -> Result<StepReport> {
        self.vitals.now(Doing::Enqueuing, 0);
        let stepped = self.pass_and_validate(learning_rate, data);
        self.vitals.now(Doing::Else, 0);
        stepped
    }

    fn pass_and_validate(&mut self, learning_rate: f64, data: StepData) -> Result<StepReport> {
        self.exposed = Exposed::default();
        let inv_targets = 1.0 / data.targets as f32;
        let layers = self.model.shape.layers;
        let accum = self.plan.grad_accum_steps;
        for micro_step in 0..accum {
            let (first, last) = (micro_step == 0, micro_step + 1 == accum);
            self.upload_batch(micro_step)?;
            self.forward_stages()?;
            self.wait_for_params(Stage::Head)?;
            if last {
                self.begin_validation(learning_rate)?;
            }
            let micro = MicroStep { first, inv_targets, loss_scale: self.loss_scale.scale() };
            self.wait_for_ring(Stage::Head)?;
            self.with_weights(Stage::Head, Pass::Backward, |engine| engine.model.head(&mut engine.dev, micro, true))?;
            self.grads_written(Stage::Head, last)?;
            (0..layers).rev().map(Stage::Layer).chain([Stage::Embed]).try_for_each(|stage| self.backward(stage, first, last))?;
        }
        self.validate(learning_rate)
    }

    /// All stages but the head.
    pub(super) fn forward_stages(&mut self) -> Result<()> {
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
    pub(super) fn with_weights(&mut self, stage: Stage, pass: Pass, compute: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if !self.streams_weights() {
            return compute(self);
        }
        let at = self.model.table.stage_index(stage);
        self.fetch_weights(at)?;
        if let Some(flow) = &self.flow {
            flow.arrive(&mut self.dev, at)?;
        }
        compute(self)?;
        if let Some(flow) = &self.flow {
            flow.leave(&mut self.dev, at)?;
        }
        match pass {
            Pass::Forward if at == 0 => Ok(()),
            Pass::Forward => self.fetch_weights(at - 1),
            Pass::Backward => self.fetch_weights(at + 1),
        }
    }

    /// Only the first forward of a step may have to wait here: the pool writes a bucket's weights after its gradient has come,
    /// which is after the last stage of the step that uses them.
    fn fetch_weights(&mut self, stage: usize) -> Result<()> {
        let streamed = self.flow.as_ref().map_or(0..0, |flow| flow.streamed(stage));
        self.plan.layout.overlapping(streamed).rev().try_for_each(|bucket| self.wait_until_settled(bucket))?;
        if let Some(flow) = &mut self.flow {
            self.counters.h2d_bytes += flow.fetch(&mut self.dev, stage)?;
        }
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

    pub(super) fn upload_batch(&mut self, micro_step: usize) -> Result<()> {
        self.dev.copy_h2d(Stream::Compute, self.memory.batch(&self.plan, micro_step), self.model.activations.inputs)
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

    /// Serves events until the device is at most `STAGES_AHEAD` stages behind.
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

    /// Waits for the norm, decides, and starts what the verdict allows.
    fn validate(&mut self, learning_rate: f64) -> Result<StepReport> {
        self.report.end(&mut self.dev, self.model.activations.loss)?;
        let start = self.dev.now_ns();
        self.block_until(Doing::Norm, 0, |engine| engine.report.poll(&mut engine.dev, &engine.host))?;
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
        let (norm_sq, nonfinite, loss) = self.report.read(&self.host);
        let grad_norm = norm_sq.norm(self.loss_scale.inverse());
        let verdict = Verdict::new(grad_norm, nonfinite, self.plan.max_grad_norm);
        let (counts, exposed, loss_scale) = (Counts::default(), self.exposed, self.loss_scale.scale());
        StepReport { loss, grad_norm, learning_rate, loss_scale, verdict, counts, exposed, counters: Counters::default() }
    }

    /// The compute stream goes on only when the parameters of `stage` are on the device.
    pub(super) fn wait_for_params(&mut self, stage: Stage) -> Result<()> {
        let buckets = self.plan.layout.overlapping(self.model.table.stage_range(stage));
        buckets.rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    pub(super) fn wait_for_all_params(&mut self) -> Result<()> {
        (0..self.plan.layout.count()).rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    fn wait_for_bucket(&mut self, bucket: usize) -> Result<()> {
        self.wait_until_settled(bucket)?;
        self.dev.wait(Stream::Compute, self.transfers.event(Hop::ParamsIn, bucket))
    }
}
