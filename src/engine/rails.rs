//! Slices that go to other processes and come from them by the devices themselves, on the compute stream: nothing is computed while they go,
//! which is when links between devices are fast.
//!
//! Whoever enters such an exchange waits there for the others, so that all have to enter them in one order. Only the plan decides it: gradients
//! where they are written, weights where the forward pass first needs them, or, where they come with each fetch, before the module that comes before
//! theirs. What a pool finishes first decides nothing. Gradients go from each rank to each of another process, those of groups and weights to its
//! namesakes alone, from which the others of their processes pull weights.

use super::hall::RankMemory;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, EventId, Peers, Stream, Swap};
use crate::error::Result;
use crate::ranks::RailKey;
use std::ops::Range;
use std::path::PathBuf;

/// Which of the two kinds, in the record of what was exchanged.
#[derive(Clone, Copy)]
enum Passed {
    Gradients = 1,
    Weights = 2,
}

/// See above.
pub(super) struct Rails {
    slices: Slices,
    /// The ranks of this process.
    mates: Range<usize>,
    /// Gradients are those of groups, and go to namesakes alone.
    is_grouped: bool,
    /// Where this rank's gradients and weights lie on the device.
    memory: Option<RankMemory>,
    /// What was exchanged so far, as one number, which all ranks have alike.
    passed: u64,
    /// The last exchange is over here, and so on the other side.
    last: EventId,
    key: RailKey,
    /// Folders to search for the library that carries slices.
    libraries: Vec<PathBuf>,
}

impl Rails {
    /// To the devices that open the way by the same `key`.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn new<D: Device>(
        dev: &mut D,
        slices: &Slices,
        (mates, is_grouped): (Range<usize>, bool),
        (key, libraries): (RailKey, Vec<PathBuf>),
    ) -> Result<Self> {
        Ok(Self { slices: slices.clone(), mates, is_grouped, memory: None, passed: 0, last: dev.event()?, key, libraries })
    }

    /// Whether nobody waits in an exchange for this rank, as far as it has entered them.
    pub(super) fn is_quiet<D: Device>(&self, dev: &mut D) -> Result<bool> {
        dev.is_done(self.last)
    }

    /// Opens the way, when all ranks have come as far, and passes something to each, so that nothing is made ready within a step.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    pub(super) fn connect<D: Peers>(&mut self, dev: &mut D, memory: DeviceSlice) -> Result<()> {
        dev.connect(&self.key, &self.libraries)?;
        let (out, into) = (memory.slice(0, 1), memory.slice(1, 1));
        dev.swap(self.others().map(|peer| Swap { peer, out, into }))?;
        dev.record(self.last, Stream::Compute)?;
        dev.synchronize(self.last)
    }

    /// Gradients and weights lie here.
    pub(super) fn settle_down(&mut self, memory: RankMemory) {
        self.memory = Some(memory);
    }

    /// What was exchanged so far.
    pub(super) fn passed(&self) -> u64 {
        self.passed
    }

    /// Exchanges the gradients of `bucket`, which a round has written: that of this rank's slice comes of each rank to where `into` says, once
    /// all these places are `free` of what came before.
    pub(super) fn swap_grads<D: Peers>(
        &mut self,
        dev: &mut D,
        (bucket, round): (usize, u64),
        into: impl Fn(usize) -> DeviceSlice,
        free: EventId,
    ) -> Result<()> {
        let Some(grads) = self.memory.as_ref().map(|memory| memory.grads) else { return Ok(()) };
        self.note(Passed::Gradients, bucket, round);
        dev.wait(Stream::Compute, free)?;
        let swap = |peer: usize| {
            let theirs = self.slices.of(peer, bucket);
            Swap { peer, out: grads.slice(theirs.start, theirs.len()), into: into(peer) }
        };
        dev.swap(self.others().filter(|peer| !self.is_grouped || self.is_namesake(*peer)).map(swap))?;
        dev.record(self.last, Stream::Compute)
    }

    /// What is enqueued on `stream` from now on finds what came in the last exchange.
    pub(super) fn wait<D: Device>(&self, dev: &mut D, stream: Stream) -> Result<()> {
        dev.wait(stream, self.last)
    }

    /// Exchanges the weights of `bucket` within `flat` in a version or with a fetch, of which this rank's are there after `stepped`; then the
    /// namesakes' are `carried`.
    pub(super) fn swap_weights<D: Peers>(
        &mut self,
        dev: &mut D,
        (bucket, nth): (usize, u64),
        flat: &Range<usize>,
        [stepped, carried]: [EventId; 2],
    ) -> Result<()> {
        self.note(Passed::Weights, bucket, nth);
        dev.wait(Stream::Compute, stepped)?;
        let (slices, Some(memory)) = (&self.slices, &self.memory) else { return Ok(()) };
        let of = |rank: usize| memory.weights_within(slices, rank, bucket, flat);
        let own = of(slices.rank());
        dev.swap(self.others().filter(|peer| self.is_namesake(*peer)).map(|peer| Swap { peer, out: own, into: of(peer) }))?;
        dev.record(carried, Stream::Compute)?;
        dev.record(self.last, Stream::Compute)
    }

    /// The ranks of other processes.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let mates = self.mates.clone();
        (0..self.slices.ranks()).filter(move |rank| !mates.contains(rank))
    }

    fn is_namesake(&self, rank: usize) -> bool {
        let place = |rank: usize| rank % self.mates.len();
        place(rank) == place(self.slices.rank())
    }

    fn note(&mut self, what: Passed, bucket: usize, nth: u64) {
        let elems = self.slices.layout().range(bucket).len() as u64;
        for word in [what as u64, bucket as u64, nth, elems] {
            self.passed = (self.passed.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}

#[cfg(test)]
#[path = "rails_tests.rs"]
mod tests;
