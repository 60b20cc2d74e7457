//! What a step tells the driver: gradient norm, non-finite flag, loss.
//!
//! The partial sums of the norm leave the device while the backward pass still runs, and are folded as they arrive, in
//! flat order: when the last gradient is written, one small copy and a short fold are left before the verdict.

use crate::device::{Device, DeviceSlice, EventId, GradNormPartials, Kernels, Stream, Zero};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::optim::norm::{self, BLOCK};
use crate::units::NormSq;
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
    /// Where each copy ends, in partials, and how many have been folded.
    ends: Vec<usize>,
    folds: usize,
    norm_sq: NormSq,
}

impl Report {
    pub(super) fn new<D: Device>(flat_elems: usize, shares: usize, dev: &mut D, host: &mut HostMemory) -> Result<Self> {
        let blocks = flat_elems / BLOCK;
        let report = Self {
            partials: dev.alloc("norm partials", blocks, Dtype::Float32)?,
            nonfinite: dev.alloc("non-finite flag", 1, Dtype::Int32)?,
            host_partials: host.alloc("norm partials", blocks * 4)?,
            host_nonfinite: host.alloc("non-finite flag", 4)?,
            host_losses: host.alloc("losses", shares * 4)?,
            copied: (0..=COPIES).map(|_| dev.event()).collect::<Result<_>>()?,
            ends: Vec::with_capacity(COPIES + 1),
            folds: 0,
            norm_sq: NormSq(0.0),
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
        (self.folds, self.norm_sq) = (0, NormSq(0.0));
        dev.launch(Zero { x: self.nonfinite })
    }

    /// The gradients `grads` of the flat range are written: their sums of squares follow. Ranges come in flat order.
    pub(super) fn add<D: Kernels>(&mut self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>) -> Result<()> {
        let (start, end) = (range.start / BLOCK, range.end / BLOCK);
        dev.launch(GradNormPartials { grads, partials: self.partials.slice(start, end - start), nonfinite: self.nonfinite })?;
        let is_last = end == self.partials.elems();
        if !is_last && end - self.copied_to() >= self.partials.elems().div_ceil(COPIES) {
            self.copy_to(dev, end)?;
        }
        Ok(())
    }

    /// The loss of `share` is computed.
    pub(super) fn add_loss<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice, share: usize) -> Result<()> {
        dev.copy_d2h(Stream::Compute, loss, self.host_losses.slice(share * 4, 4))
    }

    /// All gradients are written: what is left of the report follows.
    pub(super) fn end<D: Device>(&mut self, dev: &mut D, loss: DeviceSlice) -> Result<()> {
        dev.copy_d2h(Stream::Compute, self.nonfinite, self.host_nonfinite)?;
        self.add_loss(dev, loss, self.host_losses.bytes() / 4 - 1)?;
        self.copy_to(dev, self.partials.elems())
    }

    fn copied_to(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn copy_to<D: Device>(&mut self, dev: &mut D, end: usize) -> Result<()> {
        let start = self.copied_to();
        let target = self.host_partials.slice(start * 4, (end - start) * 4);
        dev.copy_d2h(Stream::Compute, self.partials.slice(start, end - start), target)?;
        dev.record(self.copied[self.ends.len()], Stream::Compute)?;
        self.ends.push(end);
        Ok(())
    }

    /// Folds what has arrived; true when the report is complete. Never blocks.
    pub(super) fn poll<D: Device>(&mut self, dev: &mut D, host: &HostMemory) -> Result<bool> {
        while self.folds < self.ends.len() && dev.is_done(self.copied[self.folds])? {
            let start = self.folds.checked_sub(1).map_or(0, |before| self.ends[before]);
            let arrived = self.host_partials.slice(start * 4, (self.ends[self.folds] - start) * 4);
            self.norm_sq = norm::fold(self.norm_sq, host.lend(arrived));
            self.folds += 1;
        }
        Ok(self.is_complete())
    }

    /// The complete report: sum of squares of all gradients, whether one is infinite or NaN, the loss: a sum over shares in fp64.
    ///
    /// # Panics
    /// If it is not: what is left is still being copied.
    pub(super) fn read(&self, host: &HostMemory) -> (NormSq, bool, f32) {
        assert!(self.is_complete(), "the report of a step is read before it has come");
        let loss: f64 = host.lend::<f32>(self.host_losses).iter().map(|&loss| f64::from(loss)).sum();
        (self.norm_sq, host.lend::<i32>(self.host_nonfinite)[0] != 0, loss as f32)
    }

    fn is_complete(&self) -> bool {
        self.folds == self.ends.len() && self.copied_to() == self.partials.elems()
    }
}
