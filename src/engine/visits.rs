//! Visits of segments of layers, for steps that take all micro-batches of a segment before the next segment. The turn, which is also the
//! step of one segment, is in `step.rs`.

use super::executor::Engine;
use super::step::{Pass, PassDirection};
use crate::device::Kernels;
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::model::segments::{Visit, VisitKind};
use crate::model::tensors::Module;
use crate::model::{HeadGradients, MicroStep};
use std::ops::Range;

impl<D: Kernels> Engine<D> {
    /// Whether a step consists of several segments.
    pub(super) fn has_segments(&self) -> bool {
        !self.plan.placement.segments.is_whole()
    }

    /// Records a visit on the driver's track of the timeline, with the index of its segment, if a step consists of several segments.
    pub(super) fn visit_span(&mut self, visit: Visit, start_ns: u64) {
        let name = match visit.kind {
            VisitKind::Forward => "segment forward",
            VisitKind::Turn => "segment turn",
            VisitKind::Backward => "segment backward",
        };
        if self.has_segments() {
            self.driver_span(name, visit.segment as u32, start_ns);
        }
    }

    /// A segment below the turn takes a micro-batch forward.
    pub(super) fn visit_forward(&mut self, visit: Visit) -> Result<()> {
        let Visit { segment, micro_batch, .. } = visit;
        self.upload_batch(micro_batch)?;
        if segment > 0 {
            self.enter_carried(visit)?;
        }
        self.forward_segment(visit)?;
        self.keep_expert_bounds(visit)?;
        self.scratch.boundaries.carry(&mut self.dev, micro_batch, self.model.segment_output())?;
        if segment + 1 < self.turn_segment() {
            self.scratch.boundaries.send(&mut self.dev, (segment + 1, micro_batch))?;
        }
        Ok(())
    }

    /// A segment below the turn takes a micro-batch forward again, and then backward.
    pub(super) fn visit_backward(&mut self, visit: Visit, micro: MicroStep) -> Result<()> {
        let Visit { segment, micro_batch, .. } = visit;
        self.upload_batch(micro_batch)?;
        self.restore_expert_bounds(visit)?;
        if segment > 0 {
            let input = self.model.segment_input(self.first_layer(segment));
            self.scratch.boundaries.read(&mut self.dev, input)?;
            self.fetch_input_after(visit)?;
        } else if self.model.shape.trains_tied_output() {
            self.scratch.boundaries.read(&mut self.dev, self.model.hidden_states())?;
            self.fetch_input_after(visit)?;
            self.wait_for_share_before(visit, micro)?;
            self.wait_for_ring(Module::Embed, micro_batch)?;
            self.model.output_matrix_gradient(&mut self.dev, micro)?;
        }
        self.forward_segment(visit)?;
        self.scratch.boundaries.take(&mut self.dev, micro_batch, self.model.residual_gradient())?;
        let last = self.last_layer(segment);
        self.model.scale_residual_gradient(&mut self.dev, last)?;
        self.wait_for_share_before(visit, micro)?;
        self.backward_segment(visit, micro)
    }

    /// Copies the residual stream below the visited segment to the input of the segment.
    pub(super) fn enter_carried(&mut self, Visit { segment, micro_batch, .. }: Visit) -> Result<()> {
        let input = self.model.segment_input(self.first_layer(segment));
        self.scratch.boundaries.take(&mut self.dev, micro_batch, input)
    }

    /// Enqueues the forward pass of the modules of a segment but the head.
    pub(super) fn forward_segment(&mut self, visit: Visit) -> Result<()> {
        let pass = Pass { direction: PassDirection::Forward, visit: Some(visit) };
        if visit.segment > 0 {
            self.model.forget_scales(&mut self.dev)?;
        }
        let mut modules = self.plan.placement.segments.modules(visit.segment).filter(|module| *module != Module::Head);
        modules.try_for_each(|module| self.forward(module, pass, false))
    }

    /// Enqueues the backward pass of the modules of a segment but the head, and carries the gradient to the segment below.
    pub(super) fn backward_segment(&mut self, visit: Visit, micro: MicroStep) -> Result<()> {
        let mut modules = self.plan.placement.segments.modules(visit.segment).rev().filter(|module| *module != Module::Head);
        modules.try_for_each(|module| self.backward(module, visit, micro))?;
        if visit.segment == 0 {
            return Ok(());
        }
        self.scratch.boundaries.carry(&mut self.dev, visit.micro_batch, self.model.residual_gradient())
    }

    /// The layer of `module` if it is the last of a visit that goes backward next.
    pub(super) fn last_of_backward(&self, pass: Pass, module: Module) -> Option<usize> {
        let visit = pass.visit.filter(|visit| visit.kind == VisitKind::Backward)?;
        let last = self.last_layer(visit.segment);
        (module == Module::Layer(last)).then_some(last)
    }

    /// Starts the copy of the input of the next visit that reads one from the host.
    pub(super) fn fetch_input_after(&mut self, Visit { kind, segment, micro_batch }: Visit) -> Result<()> {
        let is_last = micro_batch + 1 == self.plan.micro_batches_of_rank();
        let next = match (kind, is_last) {
            (VisitKind::Backward, false) => (segment, micro_batch + 1),
            (VisitKind::Turn | VisitKind::Backward, true) if segment > 0 => (segment - 1, 0),
            _ => return Ok(()),
        };
        // The first segment begins with the embedding, and needs the hidden states if the embedding is the output matrix.
        if next.0 == 0 && !self.model.shape.trains_tied_output() { Ok(()) } else { self.scratch.boundaries.fetch(&mut self.dev, next) }
    }

    /// The gradients that the head of the turn computes. A gradient is the sum of its parts in one order, whatever the segments: that of a
    /// tied embedding begins with the output matrix's, and the first segment computes both.
    pub(super) fn head_gradients(&self) -> HeadGradients {
        if self.has_segments() && self.model.shape.trains_tied_output() { HeadGradients::Hidden } else { HeadGradients::All }
    }

    /// Sends the hidden states of the head to the host, for the first segment.
    pub(super) fn keep_hidden_states(&mut self, micro_batch: usize) -> Result<()> {
        if self.head_gradients() == HeadGradients::All {
            return Ok(());
        }
        self.scratch.boundaries.carry(&mut self.dev, micro_batch, self.model.hidden_states())?;
        self.scratch.boundaries.send(&mut self.dev, (0, micro_batch))
    }

    /// Copies the expert bounds of a segment for a micro-batch to host memory. The loss that balances experts depends on the bounds of all
    /// layers.
    fn keep_expert_bounds(&mut self, visit: Visit) -> Result<()> {
        let Some(bounds) = self.model.expert_bounds() else { return Ok(()) };
        let part = self.model.expert_bounds_of(self.plan.placement.segments.layers(visit.segment));
        self.expert_rows.copy_part(&mut self.dev, bounds, visit.micro_batch, part)
    }

    /// Copies the expert bounds of all layers for a micro-batch back from host memory. Bounds of segments that have not run are not valid.
    pub(super) fn restore_expert_bounds(&mut self, visit: Visit) -> Result<()> {
        let Some(bounds) = self.model.expert_bounds() else { return Ok(()) };
        self.expert_rows.restore(&mut self.dev, bounds, visit.micro_batch)
    }

    /// The gradients of `module` are enqueued for the micro-batches of the partial sum `whole`: adds them to the sums of its flat range. With
    /// the last partial sum, this reports all buckets that end within the range. Buckets of several ranks are reported when the parts of all
    /// ranks are added.
    pub(super) fn segment_grads_written(&mut self, module: Module, whole: usize) -> Result<()> {
        let range = self.model.table.module_range(module);
        self.spoil(&range, whole)?;
        let is_summed = self.exchange.sum_range(&mut self.dev, self.model.grads, &range, whole)?;
        if !is_summed || !self.is_last(whole) {
            return Ok(());
        }
        let layout = &self.plan.placement.layout;
        (layout.complete(range.start)..layout.complete(range.end)).try_for_each(|bucket| {
            self.inject(FaultPhase::Backward)?;
            self.bucket_ready(bucket)
        })
    }

    /// Fetches weights that the visit needs after module `at`, and then those of the next segment, as far as no weights that the visit still
    /// needs are in the way. A segment's weights so cross the link once for all its micro-batches in a direction. Several ranks fetch the next
    /// missing module alone: all of them fetch modules in the same order, and one that waited for later weights would delay its peers.
    pub(super) fn fetch_ahead(&mut self, visit: Visit, direction: PassDirection, at: usize) -> Result<()> {
        let own = self.module_indices(visit.segment);
        let (rest, next) = match (direction, visit.kind) {
            (PassDirection::Forward, VisitKind::Forward) => (own.start..at, self.module_indices(visit.segment + 1)),
            (PassDirection::Forward, _) => (own.start..at, own.end..own.end),
            (PassDirection::Backward, _) if visit.segment == 0 => (at + 1..own.end, own.end..own.end),
            (PassDirection::Backward, _) => (at + 1..own.end, self.module_indices(visit.segment - 1)),
        };
        let is_last = visit.micro_batch + 1 == self.plan.micro_batches_of_rank();
        let comes_back = !is_last || direction == PassDirection::Forward && visit.kind != VisitKind::Forward;
        let needed = |module: usize| if comes_back { own.contains(&module) } else { rest.contains(&module) };
        for nth in 0..rest.len() + next.len() {
            let part = if nth < rest.len() { &rest } else { &next };
            let nth = if nth < rest.len() { nth } else { nth - rest.len() };
            let module = if direction == PassDirection::Forward { part.end - 1 - nth } else { part.start + nth };
            let Some(flow) = &self.flow else { break };
            if flow.streamed(module).is_empty() || flow.has(module) {
                continue;
            }
            if flow.overwrites(module, needed) || !self.may_fetch(flow.streamed(module)) {
                break;
            }
            self.fetch_weights(module)?;
            if self.exchange.slices().ranks() > 1 {
                break;
            }
        }
        Ok(())
    }

    /// Whether weights of the flat range `streamed` may be fetched before they are needed: weights from the host when they are final. Ranks
    /// wait for weights of other ranks.
    fn may_fetch(&self, streamed: Range<usize>) -> bool {
        let mut buckets = self.plan.placement.layout.overlapping(streamed);
        self.exchange.slices().ranks() > 1 || buckets.all(|bucket| self.coordinator.is_settled(bucket))
    }

    /// Indices of the modules of `segment`, in backward order.
    fn module_indices(&self, segment: usize) -> Range<usize> {
        let index = |module| self.model.table.module_index(module);
        let indices = self.plan.placement.segments.modules(segment).map(|module| index(module)..index(module) + 1);
        indices.reduce(|below, above| above.start..below.end).unwrap_or(0..0)
    }

    pub(super) fn turn_segment(&self) -> usize {
        self.plan.placement.segments.count() - 1
    }

    /// The last layer of a segment below the turn.
    fn last_layer(&self, segment: usize) -> usize {
        self.first_layer(segment + 1) - 1
    }

    fn first_layer(&self, segment: usize) -> usize {
        self.plan.placement.segments.layers(segment).start
    }
}
