//! One step: forward and backward of every micro-batch, the verdict, and the updates that it allows.

use super::executor::{Engine, StepData, StepReport};
use super::idle_times::IdleCause;
use super::protocol::coordinator::{Counts, Event};
use super::protocol::counters::Counters;
use super::protocol::order::Order;
use super::protocol::route::Hop;
use super::protocol::verdict::Verdict;
use super::ranks::exchange::Exchange;
use super::watch::driver_state::{DriverActivity, DriverEvent};
use crate::data::loss_weight::inverse_of_units;
use crate::data::rows::batch::{self, Batch, Batches, CountedTargets};
use crate::device::{Kernels, Stream, Zero};
use crate::error::{Error, Result};
use crate::faults::FaultPhase;
use crate::model::MicroStep;
use crate::model::head_rows;
use crate::model::segments::{Visit, VisitKind};
use crate::model::tensors::Module;
use crate::optim::optimizer::Update;
use crate::planner::plan::Plan;
use crate::ranks::RANKS_MAX;
use crate::ranks::progress::StepOutcome;
use crate::recipe::StepShape;
use crate::trace::STEP_SPAN;
use crate::units::NormSq;
use std::ops::Range;
use std::sync::Arc;

/// PassDirection of a pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PassDirection {
    Forward,
    Backward,
}

/// A pass over modules.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) direction: PassDirection,
    /// The visit of a segment that the pass belongs to; `None` for a pass over all modules.
    pub(super) visit: Option<Visit>,
}

impl Pass {
    /// A forward pass over all modules.
    pub(super) const FORWARD: Self = Self { direction: PassDirection::Forward, visit: None };
}

impl<D: Kernels> Engine<D> {
    /// One optimizer step: forward and backward of every micro-batch, the verdict, and the updates that it allows. Updates of late layers
    /// may still be pending on return; the next forward pass waits for each where it needs it.
    ///
    /// # Errors
    /// Errors of [`Engine::read_data`] and of [`Engine::run_step`].
    pub fn step(&mut self, learning_rate: f64, batches: &mut impl Batches) -> Result<StepReport> {
        let data = self.read_data(batches)?;
        self.run_step(learning_rate, data)
    }

    /// Reads every micro-batch of the next step. The weights of its targets must be known before the first micro-batch runs, because the loss
    /// is a weighted mean.
    ///
    /// # Errors
    /// Errors of `batches`; `Resource` that names the step when a token, target, position or document is out of range, or when no target of
    /// the step counts. The engine is then in the state after the last step, which can be flushed and saved.
    pub(crate) fn read_data(&mut self, batches: &mut impl Batches) -> Result<StepData> {
        self.driver_state.record(DriverEvent::Step, self.steps.current());
        match self.read_micro_batches(batches)?.units {
            0 => Err(self.bad_data(format!("none of its {} targets is trained, so the step has no loss", self.plan.tokens_per_step()))),
            weight_units => Ok(StepData { weight_units }),
        }
    }

    /// Reads the micro-batches of a step; returns the counted targets.
    pub(crate) fn read_micro_batches(&mut self, batches: &mut impl Batches) -> Result<CountedTargets> {
        self.await_done()?;
        self.driver_state.set_activity(DriverActivity::Data, 0);
        let targets: Result<CountedTargets> =
            (0..self.plan.recipe.step.micro_batches).map(|micro_batch| self.deal(micro_batch, batches)).sum();
        self.driver_state.set_activity(DriverActivity::Else, 0);
        targets
    }

    /// Reads micro-batch `micro_batch` of a step and passes it to the ranks that compute it; returns its counted targets.
    fn deal(&mut self, micro_batch: usize, batches: &mut impl Batches) -> Result<CountedTargets> {
        match self.exchange.place(micro_batch) {
            Some(place) if self.plan.recipe.step.sequence_ranks == 1 => self.read_batch(place, micro_batch, batches),
            _ => {
                let mut word_buffer = self.exchange.word_buffer();
                let targets = fill(&self.plan, self.model.shape.vocab, &mut word_buffer, batches);
                for rank in 0..self.plan.recipe.step.sequence_ranks {
                    self.deal_part(micro_batch, rank, &word_buffer);
                }
                self.exchange.return_word_buffer(word_buffer);
                targets?.map_err(|cause| self.bad_data(format!("micro-batch {micro_batch}: {cause}")))
            }
        }
    }

    /// Passes the part of micro-batch `micro_batch` (`whole`) that belongs to the `rank`-th rank of a sequence group to that rank.
    fn deal_part(&mut self, micro_batch: usize, rank: usize, whole: &[i32]) {
        let StepShape { micro_batch: batch, seq_length, sequence_ranks: ranks, .. } = self.plan.recipe.step;
        let (part, mut words) = (micro_batch * ranks + rank, batch::parts(whole, (batch * seq_length, seq_length), (rank, ranks)));
        let Some(place) = self.exchange.place(part) else { return self.exchange.send_part(part, &mut words) };
        let mut memory = self.host.lend_mut(self.memory.batch(&self.plan, place));
        for piece in words {
            let (target, rest) = memory.split_at_mut(piece.len());
            target.copy_from_slice(piece);
            memory = rest;
        }
    }

    /// Reads micro-batch `micro_batch` into index `place` of this rank's memory; returns its counted targets.
    pub(super) fn read_batch(&mut self, place: usize, micro_batch: usize, batches: &mut impl Batches) -> Result<CountedTargets> {
        // No copy still reads this memory: the verdict of the last step followed its copies on the same stream.
        let memory = self.host.lend_mut(self.memory.batch(&self.plan, place));
        let targets = fill(&self.plan, self.model.shape.vocab, memory, batches)?;
        targets.map_err(|cause| self.bad_data(format!("micro-batch {micro_batch}: {cause}")))
    }

    fn bad_data(&self, cause: String) -> Error {
        Error::resource(format!("use the data of step {}", self.steps.current()), cause)
    }

    /// Runs the step of the data that was read last.
    pub(crate) fn run_step(&mut self, learning_rate: f64, data: StepData) -> Result<StepReport> {
        self.lead(Order::Step, [learning_rate.to_bits(), data.weight_units, self.plan.recipe.max_grad_norm.to_bits(), 0, 0, 0])?;
        self.driver_state.set_activity(DriverActivity::Enqueuing, 0);
        let start = self.dev.now_ns();
        let stepped = self.pass_and_validate(learning_rate, data);
        self.driver_span(STEP_SPAN, self.steps.train() as u32, start);
        self.driver_state.set_activity(DriverActivity::Else, 0);
        let own = self.named(stepped)?;
        self.of_all_ranks(own)
    }

    fn pass_and_validate(&mut self, learning_rate: f64, data: StepData) -> Result<StepReport> {
        self.idle.reset();
        for visit in self.plan.placement.segments.visits(self.plan.micro_batches_of_rank()) {
            let (micro, start) = (self.micro_step(visit.micro_batch, data), self.dev.now_ns());
            match visit.kind {
                VisitKind::Forward => self.visit_forward(visit)?,
                VisitKind::Turn => self.turn(visit, micro, learning_rate)?,
                VisitKind::Backward => self.visit_backward(visit, micro)?,
            }
            self.visit_span(visit, start);
        }
        self.end_report()?;
        self.validate(learning_rate)
    }

    fn micro_step(&self, micro_batch: usize, data: StepData) -> MicroStep {
        MicroStep {
            first: micro_batch.is_multiple_of(self.plan.micro_batches_per_partial_sum()),
            inv_weight: inverse_of_units(data.weight_units),
            loss_scale: self.steps.loss_scale().scale(),
            // The loss is a mean over micro-batches, each of which balances its own experts.
            balance: (self.plan.recipe.router_aux_loss_coef / self.plan.recipe.step.micro_batches as f64) as f32,
            head_rows: None,
        }
    }

    /// The partial sum of this rank that `micro_batch` completes. Micro-batches of this rank are one share a round.
    fn completed(&self, micro_batch: usize) -> Option<usize> {
        let per_partial_sum = self.plan.micro_batches_per_partial_sum();
        (micro_batch + 1).is_multiple_of(per_partial_sum).then_some(micro_batch / per_partial_sum)
    }

    /// The last segment, or all layers if they are one segment, takes a micro-batch forward and backward.
    fn turn(&mut self, visit: Visit, micro: MicroStep, learning_rate: f64) -> Result<()> {
        let micro_batch = visit.micro_batch;
        let is_last = micro_batch + 1 == self.plan.micro_batches_of_rank();
        let micro = MicroStep { head_rows: self.upload_inputs(micro_batch)?, ..micro };
        if self.has_segments() {
            self.restore_expert_bounds(visit)?;
            self.enter_carried(visit)?;
            self.forward_segment(visit)?;
        } else {
            self.forward_modules(micro_batch == 0)?;
        }
        if let Some(bounds) = self.model.expert_bounds() {
            self.expert_rows.copy(&mut self.dev, bounds, micro_batch)?;
        }
        self.wait_for_params(Module::Head)?;
        if is_last {
            self.begin_validation(learning_rate)?;
        }
        self.wait_for_share_before(visit, micro)?;
        self.wait_for_ring(Module::Head, micro_batch)?;
        let pass = Pass { direction: PassDirection::Backward, visit: Some(visit).filter(|_| self.has_segments()) };
        let gradients = Some(self.head_gradients());
        self.with_weights(Module::Head, pass, |engine| engine.model.head(&mut engine.dev, micro, gradients))?;
        self.keep_hidden_states(micro_batch)?;
        self.fetch_input_after(visit)?;
        self.grads_written(Module::Head, micro_batch)?;
        if is_last {
            self.head_grads_ready(micro_batch)?;
        }
        self.backward_segment(visit, micro)?;
        match self.completed(micro_batch).filter(|partial_sum| !self.is_last(*partial_sum)) {
            Some(partial_sum) => self.report.add_loss(&mut self.dev, self.model.activations.loss, partial_sum),
            None => Ok(()),
        }
    }

    /// Enqueues the forward pass of all modules but the head. Weights change between steps only: `first` must be true for the first
    /// micro-batch of a step or evaluation.
    pub(super) fn forward_modules(&mut self, first: bool) -> Result<()> {
        if let Some(flow) = self.flow.as_mut().filter(|_| first) {
            flow.open_prefetch_buffer(&mut self.dev)?;
        }
        let layers = (0..self.model.shape.layers.len()).map(Module::Layer);
        [Module::Embed].into_iter().chain(layers).try_for_each(|module| self.forward(module, Pass::FORWARD, first))?;
        if let Some(flow) = &mut self.flow {
            flow.close_prefetch_buffer();
        }
        Ok(())
    }

    pub(super) fn forward(&mut self, module: Module, pass: Pass, first: bool) -> Result<()> {
        // Later visits of a step read the same weights.
        let first = pass.visit.map_or(first, |visit| visit.kind != VisitKind::Backward && visit.micro_batch == 0);
        if first || pass.visit.is_none() {
            self.wait_for_params(module)?;
        }
        self.with_weights(module, pass, |engine| {
            let model = Arc::clone(&engine.model);
            if first {
                model.scale_weights(&mut engine.dev, module)?;
            }
            if let (Module::Layer(layer), None) = (module, pass.visit) {
                model.enter_segment(&mut engine.dev, layer)?;
            }
            match engine.last_of_backward(pass, module) {
                Some(layer) => model.forward_last(engine, layer),
                None => model.forward(engine, module),
            }
        })?;
        self.module_enqueued()
    }

    pub(super) fn backward(&mut self, module: Module, visit: Visit, micro: MicroStep) -> Result<()> {
        let (micro_batch, pass) =
            (visit.micro_batch, Pass { direction: PassDirection::Backward, visit: Some(visit).filter(|_| self.has_segments()) });
        self.wait_for_ring(module, micro_batch)?;
        let ends = module == Module::Embed && self.completed(micro_batch).is_some_and(|partial_sum| self.is_last(partial_sum));
        if ends {
            self.rows_begin()?;
        }
        self.with_weights(module, pass, |engine| Arc::clone(&engine.model).backward(engine, module, micro))?;
        if ends {
            self.pack_rows()?;
        }
        self.grads_written(module, micro_batch)
    }

    /// Enqueues `compute` after the weights of `module` have arrived, and then the copy of the weights that `pass` needs next, which
    /// overlaps with it.
    pub(super) fn with_weights(&mut self, module: Module, pass: Pass, compute: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if !self.streams_weights() {
            return compute(self);
        }
        let at = self.model.table.module_index(module);
        let Pass { direction, visit } = pass;
        let next = if direction == PassDirection::Forward { at.checked_sub(1) } else { Some(at + 1) };
        self.fetch_weights(at)?;
        if let Some(next) = next.filter(|_| self.exchange.fetches_ahead()) {
            self.fetch_weights(next)?;
        }
        if direction == PassDirection::Forward && visit.is_none() {
            self.fetch_early(at)?;
        }
        if let Some(flow) = &mut self.flow {
            flow.arrive(&mut self.dev, &*self.exchange, at)?;
        }
        compute(self)?;
        if let Some(flow) = &self.flow {
            flow.leave(&mut self.dev, at)?;
        }
        match (visit, next) {
            (Some(visit), _) => self.fetch_ahead(visit, direction, at),
            (None, Some(next)) => self.fetch_weights(next),
            (None, None) => Ok(()),
        }
    }

    /// Prefetches final weights of the next modules, so that the link is not idle during the first modules of a forward pass, which are not
    /// streamed. The ring is filled first. Modules without room there, and all modules after them, go to the prefetch buffer, once nothing
    /// of the last step is pending. Until then the link is left to the modules in between, and gradients may still be copied from the
    /// buffer's memory.
    fn fetch_early(&mut self, at: usize) -> Result<()> {
        if !self.plan.streams_from_host() {
            return Ok(());
        }
        let mut is_full = false;
        for module in (0..at).rev() {
            let Some(flow) = self.flow.as_mut() else { return Ok(()) };
            is_full |= flow.awaits_place(module) || !flow.streamed(at).is_empty();
            if flow.has(module) {
                continue;
            }
            let mut buckets = self.plan.placement.layout.overlapping(flow.streamed(module));
            if !is_full && flow.has_capacity(module) && buckets.all(|bucket| self.coordinator.is_settled(bucket)) {
                self.fetch_weights(module)?;
                continue;
            }
            // The head is not prefetched: it is computed when gradients are written.
            let may_wait = module != self.model.table.module_index(Module::Head) && self.coordinator.is_between_steps();
            let is_shelved = if may_wait { flow.prefetch(&mut self.dev, module)? } else { None };
            let Some(bytes) = is_shelved else { return Ok(()) };
            self.counters.h2d_bytes += bytes;
            is_full = true;
        }
        Ok(())
    }

    /// Fetches the weights of `module` into the ring. Only the first forward pass of a step may have to wait here: the pool writes a
    /// bucket's weights after its gradient has arrived, which is after the last module of the step that uses them.
    pub(super) fn fetch_weights(&mut self, module: usize) -> Result<()> {
        let streamed = self.flow.as_ref().map_or(0..0, |flow| flow.streamed(module));
        let buckets = self.plan.placement.layout.overlapping(streamed.clone());
        buckets.clone().rev().try_for_each(|bucket| self.wait_until_final(bucket))?;
        if !self.flow.as_ref().map_or(Ok(false), |flow| flow.make_way(&mut self.dev, module))? {
            return Ok(());
        }
        if self.plan.placement.rings.fully_sharded {
            self.await_fetch(buckets.start, |exchange, dev| exchange.bring(dev, &streamed))?;
            self.await_fetch(buckets.start, |exchange, dev| exchange.is_brought(dev, &streamed))?;
        }
        if let Some(flow) = &mut self.flow {
            self.counters.h2d_bytes += flow.fetch(&mut self.dev, &mut *self.exchange, module)?;
        }
        Ok(())
    }

    /// Waits for one half of a fetch, unless it is complete.
    fn await_fetch(&mut self, bucket: usize, mut done: impl FnMut(&mut dyn Exchange<D>, &mut D) -> Result<bool>) -> Result<()> {
        if done(&mut *self.exchange, &mut self.dev)? {
            return Ok(());
        }
        self.wait_for_peers(DriverActivity::Gather, bucket, |engine| done(&mut *engine.exchange, &mut engine.dev))
    }

    /// Constant at compile time without the feature `weight-flow`.
    fn streams_weights(&self) -> bool {
        cfg!(feature = "weight-flow") && self.flow.is_some()
    }

    /// Before the first micro-batch of a gradient share overwrites the gradients of the visited segment, waits until those of the share before
    /// are summed by all ranks.
    pub(super) fn wait_for_share_before(&mut self, Visit { segment, micro_batch, .. }: Visit, micro: MicroStep) -> Result<()> {
        if !micro.first || micro_batch == 0 {
            return Ok(());
        }
        let end = self.plan.placement.segments.flat_range(segment, &self.model.table).end;
        self.wait_for_sums(end)
    }

    /// Waits until the gradients before the flat position `end` that were written last may be overwritten: they are summed by all ranks.
    fn wait_for_sums(&mut self, end: usize) -> Result<()> {
        let bucket = self.plan.placement.layout.overlapping(0..end).last().unwrap_or(0);
        self.wait_for_peers(DriverActivity::Sums, bucket, |engine| engine.exchange.may_overwrite(&mut engine.dev, end))
    }

    /// Whether share `round` of this rank is the last of a step.
    pub(super) fn is_last(&self, round: usize) -> bool {
        (round + 1) * self.exchange.slices().ranks() == self.plan.recipe.step.shares
    }

    /// In a ring of gradients, waits until the gradients that `module` overwrites are summed, and in the last round also copied. A ring of
    /// segments is overwritten once a step, by the first micro-batch.
    pub(super) fn wait_for_ring(&mut self, module: Module, micro_batch: usize) -> Result<()> {
        if self.has_segments() && micro_batch > 0 {
            return Ok(());
        }
        let Some(ring) = self.plan.placement.rings.grads else {
            return if self.plan.streams_from_host() { self.zero_padding(module) } else { Ok(()) };
        };
        let range = self.model.table.module_range(module);
        let end = range.end.min(ring.ringed_elems).saturating_sub(ring.period_elems);
        let before = range.start.saturating_sub(ring.period_elems)..end;
        let buckets = self.plan.placement.layout.overlapping(before);
        let sums_wait = self.plan.placement.rings.sums_on_host || self.exchange.slices().ranks() > 1;
        // Whole buckets, because a bucket whose other parts are missing is not reported, and so not copied.
        if let Some(last) = buckets.clone().last().filter(|_| sums_wait) {
            self.wait_for_sums(self.plan.placement.layout.range(last).end)?;
        }
        let are_sent = self.has_segments() || self.completed(micro_batch).is_some_and(|round| self.is_last(round));
        let copied = if are_sent { self.plan.placement.layout.offloaded() } else { 0 };
        for bucket in buckets.start..buckets.end.min(copied) {
            self.wait_until_copied(bucket)?;
            self.dev.wait(Stream::Compute, self.transfers.event(Hop::GradsOut, bucket))?;
        }
        self.zero_padding(module)
    }

    /// Zeroes the padding of `module`, which is included in the norm. No kernel writes padding, and the memory held other gradients (in a
    /// ring) or prefetched weights.
    fn zero_padding(&mut self, module: Module) -> Result<()> {
        let mut padding = self.model.table.padding(module);
        padding.try_for_each(|pad| self.dev.launch(Zero { x: self.model.grads.slice(pad.start, pad.len()) }))
    }

    /// Enqueues the copy of the micro-batch's inputs. Returns the number of rows that the head computes; `None` if it computes all.
    pub(super) fn upload_inputs(&mut self, micro_step: usize) -> Result<Option<usize>> {
        let head_rows = self.select_head_rows(micro_step);
        self.set_documents(micro_step)?;
        self.dev.copy_h2d(Stream::Compute, self.memory.inputs(&self.plan, micro_step), self.model.activations.inputs)?;
        Ok(head_rows)
    }

    /// Enqueues the copy of the micro-batch's inputs, for segments without the head.
    pub(super) fn upload_batch(&mut self, micro_step: usize) -> Result<()> {
        self.set_documents(micro_step)?;
        let (batch, inputs) = (self.memory.batch(&self.plan, micro_step), self.model.activations.inputs);
        self.dev.copy_h2d(Stream::Compute, batch, inputs.slice(0, self.plan.batch_words()))
    }

    /// Passes the documents of the micro-batch to the device, if rows may hold several.
    fn set_documents(&mut self, micro_step: usize) -> Result<()> {
        if !self.plan.recipe.separates_documents() {
            return Ok(());
        }
        let batch = self.memory.batch(&self.plan, micro_step);
        let words = self.host.lend(batch.slice(0, batch.bytes() - 4 * self.plan.recipe.list_words()));
        let starts = batch::documents(words, self.plan.recipe.step.micro_batch * self.plan.recipe.step.seq_length);
        self.dev.set_documents(starts, self.plan.recipe.step.seq_length)
    }

    /// Writes the lists of selected rows of the head behind the micro-batch, if the recipe computes trained rows alone.
    fn select_head_rows(&mut self, micro_step: usize) -> Option<usize> {
        let (words, tokens) = (self.plan.head_row_words(), self.plan.recipe.step.tokens_of_rank());
        if words == 0 {
            return None;
        }
        let inputs = self.host.lend_mut(self.memory.inputs(&self.plan, micro_step));
        let (batch, lists) = inputs.split_at_mut(self.plan.batch_words());
        let (rows, targets) = lists.split_at_mut(words / 2);
        let selected = head_rows::select(batch::targets(batch, tokens), rows, targets, self.plan.recipe.numerics.loss_tile.rows);
        let list = batch.len() - self.plan.recipe.list_words();
        if let Some((count, objective)) = selected.zip(self.plan.recipe.objective) {
            head_rows::place_list(&objective, &mut batch[list..], &rows[..count]);
        }
        selected
    }

    fn begin_validation(&mut self, learning_rate: f64) -> Result<()> {
        let update = Update { optimizer_step: self.steps.optimizer() + 1, learning_rate, scale: self.steps.loss_scale().inverse() };
        self.coordinator.begin_step(update);
        let decision = if self.coordinator.is_speculating() { "speculate" } else { "validate first" };
        let now = self.dev.now_ns();
        self.recorder.past_span(decision, self.steps.current() as u32, now, 0);
        self.report.begin(&mut self.dev)
    }

    /// The gradients of `module` are enqueued. If `micro_batch` completes a partial sum, this reports all buckets that end within the module's
    /// flat range.
    fn grads_written(&mut self, module: Module, micro_batch: usize) -> Result<()> {
        let whole = self.completed(micro_batch);
        if let Some(partial_sum) = whole.filter(|_| self.has_segments()) {
            self.segment_grads_written(module, partial_sum)?;
        } else if let Some(partial_sum) = whole {
            let range = self.model.table.module_range(module);
            let layout = &self.plan.placement.layout;
            let end = if module == Module::Embed { layout.flat_elems() } else { range.end };
            let before = layout.complete(range.start);
            (before..layout.complete(end)).try_for_each(|bucket| self.bucket_written(bucket, partial_sum))?;
        }
        self.module_enqueued()
    }

    /// Runs the event loop until the device is at most `MODULES_AHEAD` modules behind.
    pub(super) fn module_enqueued(&mut self) -> Result<()> {
        self.inject(FaultPhase::Module)?;
        let oldest = self.modules.record(&mut self.dev)?;
        self.driver_state.record(DriverEvent::Module, self.modules.enqueued() as u64);
        self.block_until(DriverActivity::Device, 0, |engine| engine.dev.is_done(oldest))
    }

    /// The gradient of `bucket` for one of this rank's partial sums is enqueued.
    fn bucket_written(&mut self, bucket: usize, round: usize) -> Result<()> {
        self.inject(FaultPhase::Backward)?;
        self.spoil(&self.plan.placement.layout.range(bucket), round)?;
        let is_whole = self.exchange.written(&mut self.dev, self.model.grads, bucket)?;
        let [to_device, to_host] = self.exchange.crossed();
        (self.counters.h2d_bytes, self.counters.d2h_bytes) = (self.counters.h2d_bytes + to_device, self.counters.d2h_bytes + to_host);
        if is_whole { self.bucket_ready(bucket) } else { Ok(()) }
    }

    /// Writes injected values over the gradient of the flat `range`, if a test has any.
    pub(super) fn spoil(&mut self, range: &Range<usize>, round: usize) -> Result<()> {
        let slices = self.exchange.slices();
        let partial_sum = round * slices.ranks() + slices.rank();
        let Some(fault_injector) = &self.fault_injector else { return Ok(()) };
        fault_injector.spoil(&mut self.dev, self.model.grads, range, self.steps.current(), partial_sum)
    }

    /// The step's gradient of this rank's slice of `bucket` is enqueued.
    pub(super) fn bucket_ready(&mut self, bucket: usize) -> Result<()> {
        let (flat, local) = (self.exchange.slices().global(bucket), self.exchange.slices().local(bucket));
        let grads = self.grads(&flat, local.start);
        self.report.add(&mut self.dev, grads, &local)?;
        self.issue(Hop::Backward, bucket, None)?;
        self.notify(Event::GradReady(bucket))
    }

    /// Reports the last partial sum of this rank, which completes the step's report.
    fn end_report(&mut self) -> Result<()> {
        if !self.exchange.is_summed() {
            self.wait_for_peers(DriverActivity::Sums, 0, |engine| Ok(engine.exchange.is_summed()))?;
        }
        self.report.end(&mut self.dev, self.model.activations.loss)
    }

    /// Waits for the norm, decides the verdict, and starts the allowed updates.
    fn validate(&mut self, learning_rate: f64) -> Result<StepReport> {
        let start = self.dev.now_ns();
        let (step, mut found, mut reported_at) = (self.steps.current(), None, None);
        self.inject(FaultPhase::Verdict)?;
        self.block_until(DriverActivity::Norm, 0, |engine| {
            found = found.or_else(|| engine.exchange.outcome(step));
            reported_at = reported_at.or_else(|| (found.is_none() && engine.report.is_reported()).then(|| engine.dev.now_ns()));
            Ok(found.is_some())
        })?;
        // After its own report is complete, this rank waits for its peers.
        self.idle.add(IdleCause::Peers, reported_at.map_or(0, |reported_at| self.dev.now_ns() - reported_at));
        self.driver_span("await verdict", step as u32, start);
        let Some(outcome) = found else { unreachable!("waited for it") };
        let mut out = self.judge(learning_rate, outcome);
        let validated = Event::Validated(out.verdict);
        self.driver_state.event(validated, self.steps.current());
        self.coordinator.handle(validated);
        let skipped = out.verdict == Verdict::SkipNonFinite;
        self.steps.advance(skipped);
        self.run_commands()?;
        self.next_version();
        if self.plan.protocol.barrier {
            self.wait_for_all_params()?;
        }
        self.counters.adam_busy_ns = self.pool.busy_ns();
        (out.counts, out.counters) = self.reported.report(self.coordinator.counts(), self.counters);
        self.count_waits_of_streams();
        out.exposed = self.idle.of_step();
        Ok(out)
    }

    /// Begins the next version of the weights: the weights of every bucket will change.
    pub(super) fn next_version(&mut self) {
        self.exchange.next_version();
        self.settlings_reported = None;
        if let Some(flow) = self.flow.as_mut().filter(|_| !self.plan.streams_from_host()) {
            flow.forget_all();
        }
    }

    fn judge(&mut self, learning_rate: f64, outcome: StepOutcome) -> StepReport {
        let StepOutcome { norm_sq, nonfinite, loss } = outcome;
        let grad_norm = NormSq(norm_sq).norm(self.steps.loss_scale().inverse());
        let verdict = Verdict::new(grad_norm, nonfinite, self.plan.clip(), &mut self.clip_memory);
        let (counts, exposed, loss_scale) = (Counts::default(), self.idle.of_step(), self.steps.loss_scale().scale());
        StepReport {
            loss,
            grad_norm,
            learning_rate,
            loss_scale,
            verdict,
            counts,
            exposed,
            counters: Counters::default(),
            objective: self.objective_metrics(),
            exposed_to_peers_ns: [0; RANKS_MAX],
            expert_load: None,
        }
    }

    /// Makes the compute stream wait for the parameters of `module`.
    pub(super) fn wait_for_params(&mut self, module: Module) -> Result<()> {
        let buckets = self.plan.placement.layout.overlapping(self.model.table.module_range(module));
        buckets.rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    pub(super) fn wait_for_all_params(&mut self) -> Result<()> {
        (0..self.plan.placement.layout.count()).rev().try_for_each(|bucket| self.wait_for_bucket(bucket))
    }

    fn wait_for_bucket(&mut self, bucket: usize) -> Result<()> {
        self.wait_until_final(bucket)?;
        self.dev.wait(Stream::Compute, self.transfers.event(Hop::ParamsIn, bucket))?;
        if self.plan.placement.layout.early().contains(&bucket) {
            self.dev.wait(Stream::Compute, self.transfers.event(Hop::RowsIn, bucket))?;
        }
        self.exchange.arrive(&mut self.dev, bucket)
    }

    /// Waits until all ranks have published their slices of the weights of `bucket`, and copies of them are enqueued.
    fn wait_until_final(&mut self, bucket: usize) -> Result<()> {
        self.wait_until_settled(bucket)?;
        self.inject(FaultPhase::Gather)?;
        for next in self.exchange.to_swap(bucket).rev() {
            self.wait_until_settled(next)?;
            self.exchange.swap_weights(&mut self.dev, next)?;
        }
        if !self.exchange.is_gathered(bucket) {
            self.wait_for_peers(DriverActivity::Gather, bucket, |engine| Ok(engine.exchange.is_gathered(bucket)))?;
        }
        Ok(())
    }
}

/// Fills `memory` with a micro-batch. Returns its counted targets, or a description of invalid data.
fn fill(plan: &Plan, vocab: usize, memory: &mut [i32], batches: &mut impl Batches) -> Result<std::result::Result<CountedTargets, String>> {
    let (seq_length, separates_documents) = (plan.recipe.step.seq_length, plan.recipe.separates_documents());
    let mut batch = match &plan.recipe.objective {
        Some(objective) => Batch::of_objective(memory, seq_length, objective),
        None => Batch::new(memory, seq_length, separates_documents),
    };
    batches.fill(&mut batch)?;
    Ok(batch.count_targets(vocab))
}
