//! Results of a step that the driver waits for: gradient norm, non-finite flag and loss.
//!
//! The partial sums of the norm are copied from the device while the backward pass runs, and are passed on in order as they arrive. After
//! the last gradient is written, only one small copy and a short fold remain before the verdict.

use super::ranks::exchange::ReportPort;
use crate::device::{Device, DeviceSlice, EventId, GradNormPartials, Kernels, Sides, Stream, Zero};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::optim::norm::BLOCK;
use std::ops::Range;

/// Approximate number of copies of partial sums in one step; each copy stops the compute stream for some microseconds.
const COPIES: usize = 16;

/// Memory of a report, and its progress in this step.
pub(super) struct StepResults {
    norm_partials: DeviceSlice,
    nonfinite: DeviceSlice,
    host_partials: PinnedSlice,
    host_nonfinite: PinnedSlice,
    /// The numbers that each partial sum reports, the loss first.
    host_losses: PinnedSlice,
    /// How many they are.
    loss_words: usize,
    /// One event for each copy.
    copied: Vec<EventId>,
    /// The stream of all copies, except those of the losses of all partial sums but the last.
    stream: Stream,
    /// End of each copy in partial sums, and the number of copies that have arrived.
    ends: Vec<usize>,
    arrived: usize,
}

impl StepResults {
    /// Memory for reports of `elems` elements, and of partial sums that report so many numbers each.
    pub(super) fn new<D: Device>(
        elems: usize,
        (partial_sums, loss_words): (usize, usize),
        stream: Stream,
        (dev, host): Sides<'_, D>,
    ) -> Result<Self> {
        let blocks = elems / BLOCK;
        let report = Self {
            norm_partials: dev.alloc("norm partials", blocks, Dtype::Float32)?,
            nonfinite: dev.alloc("non-finite flag", 1, Dtype::Int32)?,
            host_partials: host.alloc("norm partials", blocks * 4)?,
            host_nonfinite: host.alloc("non-finite flag", 4)?,
            host_losses: host.alloc("losses", partial_sums * loss_words * 4)?,
            loss_words,
            copied: (0..=COPIES).map(|_| dev.event()).collect::<Result<_>>()?,
            ends: Vec::with_capacity(COPIES + 1),
            stream,
            arrived: 0,
        };
        [report.host_partials, report.host_nonfinite, report.host_losses].into_iter().try_for_each(|memory| dev.pin(memory))?;
        Ok(report)
    }

    /// Sets every step's norm to 1 on a device that computes none, so that only the threshold decides whether a step is clipped.
    pub(super) fn pretend(&self, host: &mut HostMemory) {
        host.lend_mut::<f32>(self.host_partials.slice(0, 4))[0] = 1.0;
    }

    pub(super) fn begin<D: Kernels>(&mut self, dev: &mut D) -> Result<()> {
        self.ends.clear();
        self.arrived = 0;
        dev.launch(Zero { x: self.nonfinite })
    }

    /// Enqueues the sums of squares of the gradients `grads` of a local range, after they are written. Ranges must arrive in order.
    pub(super) fn add<D: Kernels>(&mut self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>) -> Result<()> {
        let (start, end) = (range.start / BLOCK, range.end / BLOCK);
        let partials = self.norm_partials.slice(start, end - start);
        dev.launch(GradNormPartials { stream: self.stream, grads, partials, nonfinite: self.nonfinite })?;
        let is_last = end == self.norm_partials.elems();
        if !is_last && end - self.copied_to() >= self.norm_partials.elems().div_ceil(COPIES) {
            self.copy_to(dev, end)?;
        }
        Ok(())
    }

    /// Enqueues the copy of the numbers that `partial_sum` reports. In a step, the last partial sum's loss is copied by [`Report::end`].
    pub(super) fn add_loss<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice, partial_sum: usize) -> Result<()> {
        dev.copy_d2h(Stream::Compute, loss, self.host_losses.slice(partial_sum * self.loss_words * 4, self.loss_words * 4))
    }

    /// The numbers that this rank's partial sums report, once they have arrived.
    pub(super) fn losses<'h>(&self, host: &'h HostMemory) -> &'h [f32] {
        host.lend(self.host_losses)
    }

    /// Enqueues the rest of the report, after all gradients are written.
    pub(super) fn end<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice) -> Result<()> {
        dev.copy_d2h(self.stream, self.nonfinite, self.host_nonfinite)?;
        let bytes = self.loss_words * 4;
        dev.copy_d2h(self.stream, loss, self.host_losses.slice(self.host_losses.bytes() - bytes, bytes))?;
        self.copy_to(dev, self.norm_partials.elems())
    }

    /// Whether all of this step's report has been passed on.
    pub(super) fn is_reported(&self) -> bool {
        self.arrived == self.ends.len()
    }

    fn copied_to(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn copy_to<D: Device>(&mut self, dev: &mut D, end: usize) -> Result<()> {
        let start = self.copied_to();
        let target = self.host_partials.slice(start * 4, (end - start) * 4);
        dev.copy_d2h(self.stream, self.norm_partials.slice(start, end - start), target)?;
        dev.record(self.copied[self.ends.len()], self.stream)?;
        self.ends.push(end);
        Ok(())
    }

    /// Passes everything of `step` that has arrived to `exchange`: partial sums in order, and with the last of them the flag and the
    /// losses. Never blocks.
    pub(super) fn poll<D: Kernels>(&mut self, dev: &mut D, host: &HostMemory, exchange: &mut dyn ReportPort<D>, step: u64) -> Result<()> {
        while self.arrived < self.ends.len() && dev.is_done(self.copied[self.arrived])? {
            let start = self.arrived.checked_sub(1).map_or(0, |before| self.ends[before]);
            let end = self.ends[self.arrived];
            exchange.add_norm_partials(host.lend(self.host_partials.slice(start * 4, (end - start) * 4)));
            self.arrived += 1;
            if end == self.norm_partials.elems() {
                exchange.report(step, host.lend::<i32>(self.host_nonfinite)[0] != 0, self.losses(host));
            }
        }
        Ok(())
    }
}
