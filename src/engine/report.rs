//! What a step tells the driver: gradient norm, non-finite flag, loss.
//!
//! The partial sums of the norm leave the device while the backward pass still runs, and are handed on as they arrive, in their
//! order: when the last gradient is written, one small copy and a short fold are left before the verdict.

use super::exchange::Exchange;
use crate::device::{Device, DeviceSlice, EventId, GradNormPartials, Kernels, Stream, Zero};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::optim::norm::BLOCK;
use std::ops::Range;

/// Copies of partial sums in one step, about; each stops the compute stream for some microseconds.
const COPIES: usize = 16;

/// The memory of a report, and how far this step's has come.
pub(super) struct Report {
    partials: DeviceSlice,
    nonfinite: DeviceSlice,
    host_partials: PinnedSlice,
    host_nonfinite: PinnedSlice,
    /// The loss of each share.
    host_losses: PinnedSlice,
    /// One event a copy.
    copied: Vec<EventId>,
    /// Where all of it is enqueued, but the losses of all shares but the last.
    stream: Stream,
    /// Where each copy ends, in partials, and how many have arrived.
    ends: Vec<usize>,
    arrived: usize,
}

impl Report {
    pub(super) fn new<D: Device>(elems: usize, shares: usize, stream: Stream, dev: &mut D, host: &mut HostMemory) -> Result<Self> {
        let blocks = elems / BLOCK;
        let report = Self {
            partials: dev.alloc("norm partials", blocks, Dtype::Float32)?,
            nonfinite: dev.alloc("non-finite flag", 1, Dtype::Int32)?,
            host_partials: host.alloc("norm partials", blocks * 4)?,
            host_nonfinite: host.alloc("non-finite flag", 4)?,
            host_losses: host.alloc("losses", shares * 4)?,
            copied: (0..=COPIES).map(|_| dev.event()).collect::<Result<_>>()?,
            ends: Vec::with_capacity(COPIES + 1),
            stream,
            arrived: 0,
        };
        [report.host_partials, report.host_nonfinite, report.host_losses].into_iter().try_for_each(|memory| dev.pin(memory))?;
        Ok(report)
    }

    /// Every step's norm is 1, unless a device says otherwise: whether a step is clipped is for the threshold to say.
    pub(super) fn pretend(&self, host: &mut HostMemory) {
        host.lend_mut::<f32>(self.host_partials.slice(0, 4))[0] = 1.0;
    }

    pub(super) fn begin<D: Kernels>(&mut self, dev: &mut D) -> Result<()> {
        self.ends.clear();
        self.arrived = 0;
        dev.launch(Zero { x: self.nonfinite })
    }

    /// The gradients `grads` of this local range are written: their sums of squares follow. Ranges come in their order.
    pub(super) fn add<D: Kernels>(&mut self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>) -> Result<()> {
        let (start, end) = (range.start / BLOCK, range.end / BLOCK);
        let partials = self.partials.slice(start, end - start);
        dev.launch(GradNormPartials { stream: self.stream, grads, partials, nonfinite: self.nonfinite })?;
        let is_last = end == self.partials.elems();
        if !is_last && end - self.copied_to() >= self.partials.elems().div_ceil(COPIES) {
            self.copy_to(dev, end)?;
        }
        Ok(())
    }

    /// The loss of `share` is computed; where gradients follow, that of the last one is a part of the end.
    pub(super) fn add_loss<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice, share: usize) -> Result<()> {
        dev.copy_d2h(Stream::Compute, loss, self.host_losses.slice(share * 4, 4))
    }

    /// The losses of this rank's shares, once they have come.
    pub(super) fn losses<'h>(&self, host: &'h HostMemory) -> &'h [f32] {
        host.lend(self.host_losses)
    }

    /// All gradients are written: what is left of the report follows.
    pub(super) fn end<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice) -> Result<()> {
        dev.copy_d2h(self.stream, self.nonfinite, self.host_nonfinite)?;
        dev.copy_d2h(self.stream, loss, self.host_losses.slice(self.host_losses.bytes() - 4, 4))?;
        self.copy_to(dev, self.partials.elems())
    }

    /// Whether all of this step's is handed on.
    pub(super) fn is_told(&self) -> bool {
        self.arrived == self.ends.len()
    }

    fn copied_to(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn copy_to<D: Device>(&mut self, dev: &mut D, end: usize) -> Result<()> {
        let start = self.copied_to();
        let target = self.host_partials.slice(start * 4, (end - start) * 4);
        dev.copy_d2h(self.stream, self.partials.slice(start, end - start), target)?;
        dev.record(self.copied[self.ends.len()], self.stream)?;
        self.ends.push(end);
        Ok(())
    }

    /// Hands to `exchange` what has arrived of `step`: partial sums in their order, and with the last of them, once, the flag and the
    /// losses. Never blocks.
    pub(super) fn poll<D: Kernels>(&mut self, dev: &mut D, host: &HostMemory, exchange: &mut dyn Exchange<D>, step: u64) -> Result<()> {
        while self.arrived < self.ends.len() && dev.is_done(self.copied[self.arrived])? {
            let start = self.arrived.checked_sub(1).map_or(0, |before| self.ends[before]);
            let end = self.ends[self.arrived];
            exchange.add_partials(host.lend(self.host_partials.slice(start * 4, (end - start) * 4)));
            self.arrived += 1;
            if end == self.partials.elems() {
                exchange.report(step, host.lend::<i32>(self.host_nonfinite)[0] != 0, self.losses(host));
            }
        }
        Ok(())
    }
}
