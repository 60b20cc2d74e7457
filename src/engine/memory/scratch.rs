//! Memory that depends on the plan and holds nothing between two steps: gradients, activations and slots. Another plan allocates it anew.

use super::boundaries::Boundaries;
use super::frozen_weights::FrozenWeights;
use super::permanent::Memory;
use super::weight_flow::{Source, WeightFlow};
use crate::bucket::layout::Tier;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Kernels, Lease, PagesToCome, Sides};
use crate::dtype::Dtype;
use crate::engine::late_rows::LateRows;
use crate::engine::state_copies::{CopyMemory, StateCopies};
use crate::engine::step_job::{Segment, SlotMemory, StepMemory};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::memory::RingShape;
use crate::model::activations::ActivationPlan;
use crate::model::rope::RopeTable;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::model::{Model, ParamMemory};
use crate::optim::simd::AdamKernels;
use crate::planner::plan::Plan;
use std::sync::Arc;

/// Memory that depends on the plan, without the model's, and the lease of all.
pub(in crate::engine) struct StepScratch {
    /// Slots of gradients and of working weights, and other data shared by jobs.
    pub(in crate::engine) step: StepMemory,
    /// Slots for copies of states that wait to be saved.
    pub(in crate::engine) copies: StateCopies,
    /// The slots that are pinned from the first save on: those for states that leave the device from their own memory.
    pinned_copies: PinnedCopies,
    /// fp32 staging buffers for one bucket in each direction, if the device casts.
    pub(in crate::engine) staging_d2h: DeviceSlice,
    pub(in crate::engine) staging_h2d: DeviceSlice,
    /// The residual stream between segments of layers.
    pub(in crate::engine) boundaries: Boundaries,
    /// Late rows, if buckets leave early.
    pub(in crate::engine) rows: Option<LateRows>,
    lease: Lease,
}

/// Whether slots for copies are pinned.
#[derive(Clone, Copy, Debug, PartialEq)]
enum PinnedCopies {
    No,
    /// The device does not pin them beside steps.
    Declined,
    /// The device pins them beside steps.
    Begun(PinnedSlice),
    Yes(PinnedSlice),
}

impl StepScratch {
    /// Allocates the memory of `plan`. Returns it with the model that uses it and the weights, and the streamed weights, if there are any.
    ///
    /// # Errors
    /// `Resource` when memory is not available or cannot be locked; then nothing stays allocated.
    pub(in crate::engine) fn take<D: Kernels>(
        plan: &Plan,
        shape: &ModelShape,
        slices: &Slices,
        permanent: &Memory,
        (dev, host): Sides<'_, D>,
    ) -> Result<(Self, Arc<Model>, Option<WeightFlow>)> {
        let mut lease = Lease::default();
        match Self::fill(plan, shape, (slices, permanent), (dev, host), &mut lease) {
            Ok((scratch, model, flow)) => Ok((Self { lease, ..scratch }, model, flow)),
            Err(error) => lease.give_back(dev, host).and(Err(error)),
        }
    }

    fn fill<D: Kernels>(
        plan: &Plan,
        shape: &ModelShape,
        (slices, permanent): (&Slices, &Memory),
        (dev, host): Sides<'_, D>,
        lease: &mut Lease,
    ) -> Result<(Self, Arc<Model>, Option<WeightFlow>)> {
        let (table, flat, weights) = (TensorTable::new(shape), plan.placement.layout.flat_elems(), permanent.weights);
        let grads = lease.alloc_flat(dev, "gradients", flat, plan.recipe.numerics.dtype, plan.placement.rings.grads)?;
        let mut activations = ActivationPlan::new(plan.micro_batch(shape))?.allocate(dev, host, lease)?;
        activations.sequence = plan.sequence_rank(slices.rank());
        for (rope, target) in shape.ropes.iter().zip(&activations.rope_tables) {
            let table = RopeTable::new(rope, plan.recipe.step.seq_length);
            permanent.bounce_buffer.fill((dev, host), *target, |elems, bytes| table.write(elems, bytemuck::cast_slice_mut(bytes)))?;
        }
        let casts = plan.device_casts() && plan.placement.layout.offloaded() > 0;
        let mut staging = |name| lease.alloc(dev, name, if casts { slices.slice_elems() } else { 0 }, Dtype::Float32);
        let (staging_d2h, staging_h2d) = (staging("gradient staging")?, staging("parameter staging")?);
        let step = step_memory(plan, (slices, permanent.split_weights), &table, (dev, host), lease)?;
        let copies = state_copies(plan, slices, (dev, host), lease)?;
        let source = if plan.streams_from_host() { Source::Host(step.params.memory) } else { Source::Ranks };
        // Peers may still pull gradients when this rank no longer needs them.
        let spare = if slices.ranks() == 1 { distinct(grads, plan.placement.rings.grads) } else { grads.slice(0, 0) };
        let flow = plan.placement.rings.weights.map(|ring| WeightFlow::new(dev, &table, ring, source, (weights, spare))).transpose()?;
        let tokens = plan.recipe.step.micro_batch * plan.recipe.step.seq_length;
        let rows = LateRows::take(&plan.placement.layout, (shape, &table), tokens, (dev, host), lease)?;
        let boundaries = Boundaries::new(plan, (dev, host), lease)?;
        let FrozenWeights(frozen) = permanent.frozen;
        let model = Arc::new(Model::new(shape.clone(), ParamMemory { weights, grads, frozen }, activations)?);
        let (pinned_copies, lease) = (PinnedCopies::No, Lease::default());
        Ok((Self { step, copies, pinned_copies, staging_d2h, staging_h2d, boundaries, rows, lease }, model, flow))
    }

    /// Frees all of the memory. It must not be used afterwards.
    ///
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn give_back<D: Device>(&mut self, (dev, host): Sides<'_, D>) -> Result<()> {
        if let PinnedCopies::Begun(memory) | PinnedCopies::Yes(memory) = std::mem::replace(&mut self.pinned_copies, PinnedCopies::No) {
            dev.unpin(memory)?;
        }
        self.lease.give_back(dev, host)
    }

    /// Lets the device begin to pin the slots for copies from slot `first` on, and to fault in the first `pageable` of the slots before them,
    /// beside steps.
    ///
    /// # Panics
    /// If there are no such slots.
    pub(in crate::engine) fn begin_to_pin_copies<D: Device>(&mut self, dev: &mut D, first: usize, pageable: usize) {
        if self.pinned_copies == PinnedCopies::No {
            let pinned = self.copies.memory_of(first..self.copies.slots());
            let pageable = self.copies.memory_of(0..pageable.min(first));
            let has_begun = dev.pin_beside_steps(PagesToCome { pinned, pageable, part_bytes: self.copies.page_aligned_bytes() });
            self.pinned_copies = if has_begun { PinnedCopies::Begun(pinned) } else { PinnedCopies::Declined };
        }
    }

    /// Whether pinning has begun beside steps, or was declined.
    pub(in crate::engine) fn has_begun_to_pin(&self) -> bool {
        self.pinned_copies != PinnedCopies::No
    }

    /// Pins all slots for copies from slot `first` on, once. Threads fault in the pages that are not there yet. Returns whether the slots
    /// are pinned: a system that refuses to lock the memory has the same copies by way of another buffer.
    pub(in crate::engine) fn pin_copies<D: Device>(&mut self, (dev, host): Sides<'_, D>, first: usize) -> bool {
        if !matches!(self.pinned_copies, PinnedCopies::Yes(_)) {
            let memory = self.copies.memory_of(first..self.copies.slots());
            let pinned = host.fault_in_part(memory).and_then(|()| dev.pin(memory));
            self.pinned_copies = if pinned.is_ok() { PinnedCopies::Yes(memory) } else { PinnedCopies::Declined };
        }
        matches!(self.pinned_copies, PinnedCopies::Yes(_))
    }
}

/// The part of `flat` that contains each of its pages once. The first part of `flat` lies in `ring`.
fn distinct(flat: DeviceSlice, ring: Option<RingShape>) -> DeviceSlice {
    let start = ring.map_or(0, |ring| ring.ringed_elems.saturating_sub(ring.period_elems));
    flat.slice(start, flat.elems() - start)
}

/// The memory of the pool's jobs. `split_weights` are the slots of working weights, if these are halves of masters.
fn step_memory<D: Device>(
    plan: &Plan,
    (slices, split_weights): (&Slices, Option<PinnedSlice>),
    table: &TensorTable,
    (dev, host): Sides<'_, D>,
    lease: &mut Lease,
) -> Result<StepMemory> {
    let offloaded = slices.elems_in(Tier::Host).len();
    let slot_elems = slices.slice_elems().min(offloaded);
    let slot_bytes = slot_elems * plan.protocol.link_dtype.bytes();
    let mut slots = |name: &str, count: usize| lease.alloc_pinned((dev, host), name, count * slot_bytes, slot_bytes);
    let grads = slots("gradient slots", plan.placement.grad_slots)?;
    let params = split_weights.map_or_else(|| slots("parameter slots", plan.placement.param_slots), Ok)?;
    let [grads, params] = [grads, params].map(|memory| SlotMemory { memory, slot_elems, dtype: plan.protocol.link_dtype });
    let (segments, kernels) = (local_segments(&segments(table), slices), AdamKernels::new(plan.site.isa)?);
    Ok(StepMemory { grads, params, segments, optimizer: plan.optimizer(), kernels })
}

/// The slots for copies of states that wait to be saved. The first save that needs a slot of the host writes its pages first: until then
/// they take no memory. The staged slots are pinned, unless the system refuses that.
fn state_copies<D: Device>(plan: &Plan, slices: &Slices, (dev, host): Sides<'_, D>, lease: &mut Lease) -> Result<StateCopies> {
    let (arrays, slot_elems, copies) = (plan.optimizer().arrays(), slices.slice_elems(), plan.placement.save_copies);
    let (slot_bytes, (words, word)) = (arrays.bytes(slot_elems), StateCopies::words_of(copies.device, arrays, slot_elems));
    let device = lease.alloc(dev, "checkpoint copies", words, word)?;
    let host_slots = lease.alloc_untouched(host, "checkpoint copies", copies.host * slot_bytes)?;
    let staged_bytes = copies.staged() * slot_bytes;
    let (staged, is_staged_pinned) = lease.alloc_pinned_or_not((dev, host), "staged checkpoint copies", staged_bytes, slot_bytes)?;
    Ok(StateCopies::new(CopyMemory { host: host_slots, staged, is_staged_pinned, device }, arrays, slot_elems))
}

/// Neighbouring tensors with the same decay rule, joined. Padding belongs to the tensor before it.
fn segments(table: &TensorTable) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let ends = table.specs().iter().skip(1).map(|next| next.offset_elems).chain([table.flat_elems()]);
    for (spec, end) in table.specs().iter().zip(ends) {
        match segments.last_mut() {
            Some(last) if last.decay == spec.decay => last.range.end = end,
            _ => segments.push(Segment { range: spec.offset_elems..end, decay: spec.decay }),
        }
    }
    segments
}

/// The segments in the local order of one rank.
fn local_segments(segments: &[Segment], slices: &Slices) -> Arc<[Segment]> {
    let mut local: Vec<Segment> = Vec::new();
    for (flat, start) in slices.pieces(0..slices.elems()) {
        for segment in segments {
            let part = segment.range.start.max(flat.start)..segment.range.end.min(flat.end);
            let range = (start + part.start).saturating_sub(flat.start)..(start + part.end).saturating_sub(flat.start);
            match local.last_mut() {
                _ if part.is_empty() => {}
                Some(last) if last.decay == segment.decay => last.range.end = range.end,
                _ => local.push(Segment { range, decay: segment.decay }),
            }
        }
    }
    local.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::ModelShape;

    #[test]
    fn segments_cover_the_flat_order_and_alternate() {
        let table = TensorTable::new(&ModelShape::demo());
        let segments = segments(&table);
        assert_eq!((segments[0].range.start, segments[segments.len() - 1].range.end), (0, table.flat_elems()));
        assert!(segments.windows(2).all(|w| w[0].range.end == w[1].range.start && w[0].decay != w[1].decay));
        for spec in table.specs() {
            assert!(
                segments.iter().any(|s| s.decay == spec.decay && s.range.start <= spec.offset_elems && spec.range().end <= s.range.end)
            );
        }
    }
}
