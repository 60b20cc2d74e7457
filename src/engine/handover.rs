//! Ranks that share sequences exchange activations around attention: each records that its own are written, publishes that, and once all of
//! them have, pulls from them on its compute stream.
//!
//! Nobody overwrites what others still pull: every rank's next record comes, on its compute stream, after its pulls of this exchange, and
//! whatever was handed over is written again only after another exchange. No rank is further ahead of another than one exchange, since
//! none goes on before all have published: two events by turns let one that is behind wait for no more than it needs.

use super::executor::Engine;
use super::hall::Introduction;
use super::vitals::Doing;
use crate::config::options::FaultPhase;
use crate::device::{Device, EventId, Kernels, Peers, Stream};
use crate::error::Result;
use crate::model::Model;
use crate::model::sequence::{Handover, PassRunner, SharedActivations};
use crate::ranks::Seat;
use crate::ranks::board::Board;
use std::ops::Range;

/// What one rank has of it.
pub(super) struct Handovers {
    /// The ranks that share its sequences, itself among them.
    group: Range<usize>,
    /// By turns: what is handed over is written.
    events: [EventId; 2],
    /// How often it has published.
    published: u64,
}

impl Handovers {
    /// Those of `rank`, of `sequence_ranks` that share sequences.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn new<D: Device>(dev: &mut D, rank: usize, sequence_ranks: usize) -> Result<Self> {
        let first = rank / sequence_ranks * sequence_ranks;
        Ok(Self { group: first..first + sequence_ranks, events: [dev.event()?, dev.event()?], published: 0 })
    }

    /// For the others.
    pub(super) fn events(&self) -> [EventId; 2] {
        self.events
    }

    /// What this rank hands over is enqueued.
    pub(super) fn publish<D: Device>(&mut self, dev: &mut D, seat: &Seat) -> Result<()> {
        dev.record(self.events[turn(self.published)], Stream::Compute)?;
        self.published += 1;
        seat.board.publish_handed(seat.rank);
        seat.pass()
    }

    /// Whether all have published as often.
    pub(super) fn is_there(&self, board: &Board) -> bool {
        self.group.clone().all(|rank| board.handed(rank) >= self.published)
    }

    /// Enqueues the pulls from `ranks`, by rank, of what they have published last.
    pub(super) fn pull<D: Kernels + Peers>(
        &self,
        dev: &mut D,
        ranks: &[Introduction<D::Card>],
        model: &Model,
        (what, layer): (Handover, usize),
    ) -> Result<()> {
        let first = self.group.start;
        let own = first + model.activations.sequence.rank;
        if what.is_new() {
            let last = turn(self.published - 1);
            let mut others = self.group.clone().filter(|rank| *rank != own);
            others.try_for_each(|rank| dev.wait_for(Stream::Compute, rank, ranks[rank].handed[last]))?;
        }
        let shared =
            |place: usize| -> &SharedActivations { ranks[first + place].memory.activations.as_ref().expect("all of them share sequences") };
        model.take_over(dev, (what, layer), shared, |dev, place, from, to| dev.pull_rows(Stream::Compute, first + place, from, to))
    }
}

/// The engine's passes: while it waits for others, it does for them what they wait for.
impl<D: Kernels> PassRunner for Engine<D> {
    type Dev = D;

    fn dev(&mut self) -> &mut D {
        &mut self.dev
    }

    fn hand_over(&mut self, what: Handover, layer: usize) -> Result<()> {
        if !self.model.shares_sequences() {
            return Ok(());
        }
        self.strike(FaultPhase::HandOver)?;
        if what.is_new() {
            self.exchange.hand_over(&mut self.dev)?;
            self.wait_for_peers(Doing::HandOver, self.plan.sequence_ranks, |engine| Ok(engine.exchange.is_handed_over()))?;
        }
        self.exchange.take_over(&mut self.dev, &self.model, (what, layer))
    }
}

/// Which of the two events belongs to an exchange.
fn turn(exchange: u64) -> usize {
    (exchange % 2) as usize
}
