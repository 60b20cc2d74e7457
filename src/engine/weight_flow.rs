//! Weight-flow (paper 4.2), for models whose weights do not fit: layers' weights wait in host memory and come to the device
//! stage by stage, into a ring that holds at least two neighbours, so that one comes while the other is computed with.

use crate::device::{Device, DeviceSlice, EventId, RingShape, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::model::tensors::TensorTable;
use std::ops::Range;

/// What the ring holds of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// Nothing that can be used.
    Nothing,
    /// Weights that have changed since on the host.
    Stale,
    /// Its weights.
    Fresh,
}

/// Which stage's weights lie in the ring. Stages go by their place in backward order.
#[derive(Debug)]
struct Window {
    ring: RingShape,
    /// Of each stage the flat range that is streamed, and what of it the ring holds.
    stages: Vec<(Range<usize>, Held)>,
}

impl Window {
    /// An empty ring.
    ///
    /// # Panics
    /// If a stage is longer than the ring.
    fn new(table: &TensorTable, ring: RingShape) -> Self {
        let streamed = |range: Range<usize>| range.start.min(ring.ringed_elems)..range.end.min(ring.ringed_elems);
        let stages: Vec<_> = table.stages().map(|stage| (streamed(table.stage_range(stage)), Held::Nothing)).collect();
        assert!(stages.iter().all(|(range, _)| range.len() <= ring.period_elems), "a ring shorter than a stage");
        Self { ring, stages }
    }

    /// Whether the device can compute with what lies there.
    fn has(&self, stage: usize) -> bool {
        let (range, held) = &self.stages[stage];
        range.is_empty() || *held == Held::Fresh
    }

    /// The stages that lie where `stage` goes; itself, if it lies there already.
    fn in_the_way(&self, stage: usize) -> impl Iterator<Item = usize> + '_ {
        let place = &self.stages[stage].0;
        let in_the_way = move |(range, held): &(Range<usize>, Held)| *held != Held::Nothing && self.share_a_place(place, range);
        self.stages.iter().enumerate().filter(move |(_, stage)| in_the_way(stage)).map(|(other, _)| other)
    }

    /// `stage` now lies there, and what was in its way no more.
    fn put(&mut self, stage: usize) {
        for other in 0..self.stages.len() {
            if self.share_a_place(&self.stages[stage].0, &self.stages[other].0) {
                self.stages[other].1 = Held::Nothing;
            }
        }
        self.stages[stage].1 = Held::Fresh;
    }

    /// The host writes these weights anew.
    fn forget(&mut self, flat: &Range<usize>) {
        for (range, held) in &mut self.stages {
            if *held == Held::Fresh && range.start < flat.end && flat.start < range.end {
                *held = Held::Stale;
            }
        }
    }

    fn share_a_place(&self, a: &Range<usize>, b: &Range<usize>) -> bool {
        let period = self.ring.period_elems;
        // How far behind `a`'s beginning `b` begins, going round.
        let behind = (b.start % period + period - a.start % period) % period;
        !a.is_empty() && !b.is_empty() && (behind < a.len() || behind + b.len() > period)
    }
}

/// The weights that are streamed, and the events that keep copies and kernels apart.
#[derive(Debug)]
pub(super) struct WeightFlow {
    window: Window,
    /// All streamed weights, in flat order from 0, in the format of the device.
    source: PinnedSlice,
    /// The flat weights, whose first part is the ring.
    weights: DeviceSlice,
    /// The compute stream is done with the stage's weights.
    used: Vec<EventId>,
    /// They have come.
    fetched: Vec<EventId>,
}

impl WeightFlow {
    /// Streams the part of the flat `weights` that lies in `ring` from `source`, which holds it in flat order.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn new<D: Device>(
        dev: &mut D,
        table: &TensorTable,
        ring: RingShape,
        source: PinnedSlice,
        weights: DeviceSlice,
    ) -> Result<Self> {
        let window = Window::new(table, ring);
        let mut events = || window.stages.iter().map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let (used, fetched) = (events()?, events()?);
        Ok(Self { window, source, weights, used, fetched })
    }

    /// The flat range that is streamed of `stage`; empty if there is none, or no such stage.
    pub(super) fn streamed(&self, stage: usize) -> Range<usize> {
        self.window.stages.get(stage).map_or(0..0, |(range, _)| range.clone())
    }

    /// Enqueues the copy of `stage`'s weights, unless they lie in the ring; returns its bytes. What is in their way must have
    /// been used, as far as it was enqueued to be.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn fetch<D: Device>(&mut self, dev: &mut D, stage: usize) -> Result<u64> {
        let range = self.streamed(stage);
        if range.is_empty() || self.window.has(stage) {
            return Ok(0);
        }
        for other in self.window.in_the_way(stage) {
            dev.wait(Stream::H2d, self.used[other])?;
        }
        let width = self.weights.dtype.bytes();
        let (source, target) = (self.source.slice(range.start * width, range.len() * width), self.weights.slice(range.start, range.len()));
        dev.copy_h2d(Stream::H2d, source, target)?;
        dev.record(self.fetched[stage], Stream::H2d)?;
        self.window.put(stage);
        Ok(source.bytes() as u64)
    }

    /// What is computed from now on finds the weights of `stage`, which was fetched.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn arrive<D: Device>(&self, dev: &mut D, stage: usize) -> Result<()> {
        dev.wait(Stream::Compute, self.fetched[stage])
    }

    /// What was enqueued so far is all that is computed with these weights of `stage`, for now.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn leave<D: Device>(&self, dev: &mut D, stage: usize) -> Result<()> {
        dev.record(self.used[stage], Stream::Compute)
    }

    /// New weights are about to be written into the source: what lies in the ring is the last that this step needed.
    pub(super) fn forget(&mut self, flat: &Range<usize>) {
        self.window.forget(flat);
    }

    /// The part of a flat range that is not streamed and has its own place on the device.
    pub(super) fn beside(&self, flat: &Range<usize>) -> Range<usize> {
        flat.start.max(self.window.ring.ringed_elems).min(flat.end)..flat.end
    }
}
