//! Ranks that share sequences exchange activations around attention. Each rank records an event after its own are written and publishes it.
//! Once all ranks of the group have published, it pulls from them on its compute stream.
//!
//! No rank overwrites activations that a peer still pulls. Every rank's next event follows, on its compute stream, its pulls of this
//! exchange, and exchanged memory is written again only after another exchange. No rank is more than one exchange ahead of a peer, since
//! none proceeds before all have published. So two alternating events suffice, and a slower rank never waits for the later one.

use super::rendezvous::RankHandles;
use crate::device::{Device, EventId, Kernels, Peers, Stream};
use crate::error::Result;
use crate::model::Model;
use crate::model::sequence::{Handover, SharedActivations};
use crate::ranks::RankContext;
use crate::ranks::progress::ProgressCounters;
use std::ops::Range;

/// State of one rank's activation exchanges.
pub(in crate::engine) struct Handovers {
    /// The ranks that share sequences with this one, itself included.
    sequence_group: Range<usize>,
    /// Alternating events: the activations are written.
    events: [EventId; 2],
    /// Number of published exchanges.
    published: u64,
}

impl Handovers {
    /// The exchanges of `rank`, in groups of `sequence_ranks` ranks.
    ///
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Device>(dev: &mut D, rank: usize, sequence_ranks: usize) -> Result<Self> {
        let first = rank / sequence_ranks * sequence_ranks;
        Ok(Self { sequence_group: first..first + sequence_ranks, events: [dev.event()?, dev.event()?], published: 0 })
    }

    /// The two events, for the peers.
    pub(in crate::engine) fn events(&self) -> [EventId; 2] {
        self.events
    }

    /// Records the event after this rank's activations and publishes it.
    pub(in crate::engine) fn publish<D: Device>(&mut self, dev: &mut D, context: &RankContext) -> Result<()> {
        dev.record(self.events[turn(self.published)], Stream::Compute)?;
        self.published += 1;
        context.progress.publish_handed(context.rank);
        context.pass()
    }

    /// Whether all ranks of the group have published as many exchanges.
    pub(in crate::engine) fn has_arrived(&self, progress: &ProgressCounters) -> bool {
        self.sequence_group.clone().all(|rank| progress.handed(rank) >= self.published)
    }

    /// Enqueues the pulls of the last published activations from `ranks`, indexed by rank.
    pub(in crate::engine) fn pull<D: Kernels + Peers>(
        &self,
        dev: &mut D,
        ranks: &[RankHandles<D::PeerHandle>],
        model: &Model,
        (handover, layer): (Handover, usize),
    ) -> Result<()> {
        let first = self.sequence_group.start;
        let own = first + model.activations.sequence.rank;
        if handover.is_new() {
            let last = turn(self.published - 1);
            let mut others = self.sequence_group.clone().filter(|rank| *rank != own);
            others.try_for_each(|rank| dev.wait_for(Stream::Compute, rank, ranks[rank].handed[last]))?;
        }
        let shared =
            |place: usize| -> &SharedActivations { ranks[first + place].memory.activations.as_ref().expect("all of them share sequences") };
        model.take_over(dev, (handover, layer), shared, |dev, place, from, to| dev.pull_rows(Stream::Compute, first + place, from, to))
    }
}

/// Index of the event of an exchange.
fn turn(exchange: u64) -> usize {
    (exchange % 2) as usize
}
