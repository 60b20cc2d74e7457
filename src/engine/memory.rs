//! All memory of a run, allocated once: where each bucket's state, gradients and weights lie, on both sides of the link.

use crate::bucket::layout::Tier;
use crate::bucket::slices::Slices;
use crate::data::batch;
use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::dtype::Dtype;
use crate::engine::step_job::{HostState, Segment, SlotMemory, StepMemory};
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::model::init::init_flat;
use crate::model::tensors::TensorTable;
use crate::optim::simd::AdamKernels;
use crate::optim::{PIECE_ELEMS, StatePart};
use crate::planner::budget::BOUNCE_ELEMS;
use crate::planner::plan::Plan;
use std::ops::Range;
use std::sync::Arc;

/// Optimizer state that the device steps.
#[derive(Clone, Debug)]
pub(super) struct DeviceState {
    /// What of this rank's own order it is the state of.
    pub(super) local: Range<usize>,
    pub(super) params: DeviceSlice,
    pub(super) m: DeviceSlice,
    pub(super) v: DeviceSlice,
}

impl DeviceState {
    fn new(name: &str, local: Range<usize>, mut alloc: impl FnMut(&str, usize) -> Result<DeviceSlice>) -> Result<Self> {
        let mut array = |what: &str| alloc(&format!("{name} {what}"), local.len());
        let (params, m, v) = (array("parameters")?, array("m")?, array("v")?);
        Ok(Self { local, params, m, v })
    }

    /// The part that it has of a local range, if any.
    fn part(&self, local: &Range<usize>) -> Option<Self> {
        let common = local.start.max(self.local.start)..local.end.min(self.local.end);
        let part = |s: DeviceSlice| s.slice(common.start - self.local.start, common.len());
        let [params, m, v] = self.arrays();
        (!common.is_empty()).then(|| Self { params: part(params), m: part(m), v: part(v), local: common.clone() })
    }

    pub(super) fn arrays(&self) -> [DeviceSlice; 3] {
        [self.params, self.m, self.v]
    }
}

/// Both sides of the link: the device, and the owner of the host's memory.
type Sides<'a, D> = (&'a mut D, &'a mut HostMemory);

/// Every allocation but the model's own.
pub(super) struct Memory {
    pub(super) step: StepMemory,
    /// Paged states, then resident ones.
    pub(super) device: [DeviceState; 2],
    /// Every micro-batch of a step.
    batches: PinnedSlice,
    /// fp32 room for one bucket on its way out and in, when the device casts.
    pub(super) staging_d2h: DeviceSlice,
    pub(super) staging_h2d: DeviceSlice,
    offloaded_elems: usize,
    bounce: PinnedSlice,
    bounced: EventId,
}

impl Memory {
    pub(super) fn new<D: Device>(plan: &Plan, slices: &Slices, table: &TensorTable, dev: &mut D, host: &mut HostMemory) -> Result<Self> {
        let (offloaded, bucket) = (slices.elems_in(Tier::Host).len(), slices.slice_elems());
        let paged =
            DeviceState::new("paged", slices.elems_in(Tier::Unified), |name, elems| dev.alloc_unified(name, elems, Dtype::Float32))?;
        let mut fp32 = |name: &str, elems: usize| dev.alloc(name, elems, Dtype::Float32);
        let resident = DeviceState::new("resident", slices.elems_in(Tier::Device), &mut fp32)?;
        let staging_elems = if plan.device_casts() && offloaded > 0 { bucket } else { 0 };
        let (staging_d2h, staging_h2d) = (fp32("gradient staging", staging_elems)?, fp32("parameter staging", staging_elems)?);
        let batches = host.alloc("batches", plan.grad_accum_steps / slices.ranks() * batch_bytes(plan))?;
        let step = step_memory(plan, slices, table, host)?;
        let bounce = host.alloc("bounce buffer", BOUNCE_ELEMS * 4)?;
        // The state itself never crosses the link: it stays pageable.
        [step.grads.memory, step.params.memory, batches, bounce].into_iter().try_for_each(|memory| dev.pin(memory))?;
        Ok(Self {
            step,
            device: [paged, resident],
            batches,
            staging_d2h,
            staging_h2d,
            offloaded_elems: offloaded,
            bounce,
            bounced: dev.event()?,
        })
    }

    /// The memory of one micro-batch: a [`crate::data::batch::Batch`], int32 `[arrays, T]`.
    pub(super) fn batch(&self, plan: &Plan, micro_step: usize) -> PinnedSlice {
        self.batches.slice(micro_step * batch_bytes(plan), batch_bytes(plan))
    }

    /// The state of a local range of one bucket that the device steps.
    ///
    /// # Panics
    /// If the device does not.
    pub(super) fn device_part(&self, local: &Range<usize>) -> DeviceState {
        self.device.iter().find_map(|state| state.part(local)).expect("a bucket that the device steps")
    }

    /// Writes random initial parameters where they lie, on `threads` threads; m and v are left as they are.
    /// No job may be running.
    pub(super) fn init_params<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        slices: &Slices,
        table: &TensorTable,
        seed: u64,
        threads: usize,
    ) -> Result<()> {
        for (flat, local) in slices.pieces(0..self.offloaded_elems) {
            let memory = self.step.state.params.slice(local * 4, flat.len() * 4);
            init_flat(table, seed, flat.start, host.lend_mut(memory), threads)?;
        }
        for DeviceState { local, params, .. } in &self.device {
            let mut room = vec![0.0; PIECE_ELEMS.min(params.elems())];
            for (flat, start) in slices.pieces(local.clone()) {
                for piece in (0..flat.len()).step_by(PIECE_ELEMS) {
                    let part = &mut room[..PIECE_ELEMS.min(flat.len() - piece)];
                    init_flat(table, seed, flat.start + piece, part, threads)?;
                    self.upload((dev, host), part, params.slice(start - local.start + piece, part.len()))?;
                }
            }
        }
        Ok(())
    }

    /// Copies state into its place, from element `start` of this rank's own order on. No job may be running.
    pub(super) fn write<D: Device>(&self, (dev, host): Sides<'_, D>, part: StatePart, start: usize, source: &[f32]) -> Result<()> {
        let local = start..start + source.len();
        let (memory, on_host) = self.host_part(part, &local);
        host.lend_mut(memory).copy_from_slice(&source[..on_host]);
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let memory = state.arrays()[part as usize];
            self.upload((dev, host), &source[state.local.start - start..][..memory.elems()], memory)?;
        }
        Ok(())
    }

    /// Copies state out of its place, from element `start` of this rank's own order on. No job may be running.
    pub(super) fn read<D: Device>(&self, (dev, host): Sides<'_, D>, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        let local = start..start + out.len();
        let (memory, on_host) = self.host_part(part, &local);
        out[..on_host].copy_from_slice(host.lend(memory));
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let memory = state.arrays()[part as usize];
            self.download((dev, host), memory, &mut out[state.local.start - start..][..memory.elems()])?;
        }
        Ok(())
    }

    /// Where the host has its share of a local range, the first so many elements.
    fn host_part(&self, part: StatePart, local: &Range<usize>) -> (PinnedSlice, usize) {
        let (on_host, state) = (self.on_host(local), self.step.state);
        let memory = [state.params, state.m, state.v][part as usize];
        (memory.slice(on_host.start * 4, on_host.len() * 4), on_host.len())
    }

    /// Copies fp32 values to the device through the bounce buffer.
    pub(super) fn upload<D: Device>(&self, (dev, host): Sides<'_, D>, source: &[f32], target: DeviceSlice) -> Result<()> {
        for (i, part) in source.chunks(BOUNCE_ELEMS).enumerate() {
            let buffer = self.bounce.slice(0, part.len() * 4);
            host.lend_mut(buffer).copy_from_slice(part);
            dev.copy_h2d(Stream::Compute, buffer, target.slice(i * BOUNCE_ELEMS, part.len()))?;
            self.settle(dev)?;
        }
        Ok(())
    }

    /// Copies fp32 values from the device through the bounce buffer.
    pub(super) fn download<D: Device>(&self, (dev, host): Sides<'_, D>, source: DeviceSlice, target: &mut [f32]) -> Result<()> {
        for (i, part) in target.chunks_mut(BOUNCE_ELEMS).enumerate() {
            let buffer = self.bounce.slice(0, part.len() * 4);
            dev.copy_d2h(Stream::Compute, source.slice(i * BOUNCE_ELEMS, part.len()), buffer)?;
            self.settle(dev)?;
            part.copy_from_slice(host.lend(buffer));
        }
        Ok(())
    }

    fn settle<D: Device>(&self, dev: &mut D) -> Result<()> {
        dev.record(self.bounced, Stream::Compute)?;
        dev.synchronize(self.bounced)
    }

    /// The part of a local range that the pool steps.
    fn on_host(&self, local: &Range<usize>) -> Range<usize> {
        local.start.min(self.offloaded_elems)..local.end.min(self.offloaded_elems)
    }
}

fn batch_bytes(plan: &Plan) -> usize {
    batch::arrays(plan.separates_documents) * plan.batch * plan.seq_length * 4
}

fn step_memory(plan: &Plan, slices: &Slices, table: &TensorTable, host: &mut HostMemory) -> Result<StepMemory> {
    let offloaded = slices.elems_in(Tier::Host).len();
    let slot_elems = slices.slice_elems().min(offloaded);
    let mut slots = |name: &str, count: usize| -> Result<SlotMemory> {
        let slot_bytes = slot_elems * plan.link_dtype.bytes();
        let memory = host.alloc_periodic(name, count * slot_bytes, slot_bytes)?;
        Ok(SlotMemory { memory, slot_elems, dtype: plan.link_dtype })
    };
    let (grads, params) = (slots("gradient slots", plan.grad_slots)?, slots("parameter slots", plan.param_slots)?);
    let mut fp32 = |name: &str| host.alloc_periodic(name, offloaded * 4, slot_elems * 4);
    let state = HostState { params: fp32("parameters")?, m: fp32("m")?, v: fp32("v")? };
    let (segments, kernels) = (local_segments(&segments(table), slices), AdamKernels::new(plan.isa)?);
    Ok(StepMemory { state, grads, params, segments, hyper: plan.hyper, kernels })
}

/// Neighbouring tensors with the same decay rule, joined; padding goes with the tensor before it.
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

/// The same in the order of one rank's own elements.
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
