//! Ranks of one process: how they come to know each other, and what those behind rank 0 do.

use super::bounce::Sides;
use super::exchange::{Exchange, Order, Words};
use super::executor::{Engine, StepData};
use super::hall::{Hall, RankMemory};
use super::loss_scale::LossScale;
use super::pool::Pool;
use super::pulls::{Pulls, Reach};
use super::route::Hop;
use super::step_job::StepJob;
use super::verdict::SpeculationHistory;
use super::vitals::Doing;
use crate::bucket::layout::Tier;
use crate::config::options::FaultPhase;
use crate::device::{EventId, Kernels, Peers};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::optim::StatePart;
use crate::planner::plan::Plan;
use crate::ranks::board::Board;
use crate::ranks::{RailKey, Seat};
use std::ops::Range;
use std::sync::Arc;

/// Threads that another process may ask for, at most: no machine has more CPUs.
const THREADS_MAX: u64 = 1 << 13;

impl<D: Kernels> Engine<D> {
    /// Rank 0 has the others do this, too, once they have done what came before.
    pub(super) fn lead(&mut self, order: Order, words: Words) -> Result<()> {
        self.while_ordering(|exchange, dev| exchange.lead(dev, order, words))
    }

    /// Rank 0 waits until the others have done what they were told.
    pub(super) fn await_done(&mut self) -> Result<()> {
        self.while_ordering(|exchange, dev| exchange.await_done(dev))
    }

    /// By bucket what ends a step of this rank's slice of its weights.
    pub(super) fn stepped(&self) -> Vec<EventId> {
        let written_by = |bucket: usize| match self.plan.layout.tier(bucket) {
            Tier::Host => Hop::ParamsIn,
            Tier::Unified | Tier::Device => Hop::StepOnDevice,
        };
        (0..self.plan.layout.count()).map(|bucket| self.transfers.event(written_by(bucket), bucket)).collect()
    }

    fn while_ordering(&mut self, wait: impl FnOnce(&mut dyn Exchange<D>, &mut D) -> Result<()>) -> Result<()> {
        let (before, number) = self.vitals.doing();
        self.vitals.now(Doing::Orders, 0);
        let waited = wait(&mut *self.exchange, &mut self.dev);
        self.vitals.now(before, number);
        waited
    }
}

#[expect(private_bounds, reason = "ranks are this crate's own")]
impl<D: Kernels + Peers> Engine<D> {
    /// As [`Engine::new`], for the rank that has `seat`, on its thread, whose bell is the board's. Returns when all ranks have come as far: those
    /// in the same `hall`, or those of other processes, which it can `reach` so.
    ///
    /// # Errors
    /// As there; what ended another rank.
    pub(crate) fn join(
        (plan, shape): (Plan, ModelShape),
        (dev, pool): (D, Pool<StepJob>),
        seat: &Seat,
        hall: &Arc<Hall<D::Card>>,
        reach: Reach,
    ) -> Result<Self> {
        let bell = seat.board.bell(seat.rank);
        let exchange = |(dev, _): Sides<'_, D>, plan: &Plan| -> Result<Box<dyn Exchange<D>>> {
            Ok(Box::new(Pulls::new(dev, plan, seat.clone(), hall.clone(), reach)?))
        };
        let mut engine = Self::assemble(plan, shape, dev, pool, bell.clone(), exchange)?;
        engine.strike(FaultPhase::Start)?;
        engine.introduce();
        (0..seat.board.ranks()).for_each(|rank| seat.board.bell(rank).ring());
        bell.wait_until(|| hall.is_full() || seat.board.has_failed());
        seat.check()?;
        engine.exchange.greet(&mut engine.dev)?;
        engine.exchange.connect(&mut engine.dev)?;
        if let Some(baton) = seat.board.baton() {
            baton.take(seat.rank);
        }
        Ok(engine)
    }

    /// As [`Engine::new`], for rank 0 of the plan's, on a device whose peers are its mirror images: they do what it does when it does it.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn mirrored(plan: Plan, shape: ModelShape, dev: D, pool: Pool<StepJob>) -> Result<Self> {
        let reach = match (plan.processes, plan.by_nccl) {
            (1, _) => Reach::Memory,
            (_, true) => Reach::Rail(RailKey([0; 128])),
            (_, false) => Reach::Images,
        };
        let board = Board::mirrored(plan.board_sizes(), plan.ranks / plan.processes);
        let seat = Seat { board: Arc::new(board), rank: 0 };
        let (bell, hall) = (seat.board.bell(0), Arc::new(Hall::new(1)));
        let mut engine =
            Self::assemble(plan, shape, dev, pool, bell, |(dev, _), plan| Ok(Box::new(Pulls::new(dev, plan, seat, hall, reach)?)))?;
        engine.introduce();
        engine.exchange.greet(&mut engine.dev)?;
        engine.exchange.connect(&mut engine.dev)?;
        Ok(engine)
    }

    /// What the other ranks need to know of this one.
    fn introduce(&mut self) {
        let stepped = self.stepped();
        let memory = RankMemory::of(&self.model);
        self.exchange.introduce(&mut self.dev, memory, stepped, &self.vitals);
    }

    /// Does what rank 0 says, until a rank ends; before the first step, once the state is there, `settle_down`.
    ///
    /// # Errors
    /// The device's; those of `settle_down`; what ended another rank.
    pub(crate) fn follow(&mut self, settle_down: impl FnOnce() -> Result<()>) -> Result<()> {
        self.follow_and_save(settle_down, |_, _| Err(Error::resource("save", "no rank of this process saves for itself")))
    }

    /// The same where this rank saves its slices itself: `save` does, and gives their checksums.
    ///
    /// # Errors
    /// As there; those of `save`.
    pub(crate) fn follow_and_save(
        &mut self,
        settle_down: impl FnOnce() -> Result<()>,
        mut save: impl FnMut(&mut Self, [u64; 2]) -> Result<Vec<u32>>,
    ) -> Result<()> {
        let mut settle_down = Some(settle_down);
        for seen in 0.. {
            let (order, words) = self.exchange.next_order(&mut self.dev, seen)?;
            if matches!(order, Order::Step | Order::Evaluate) {
                settle_down.take().map_or(Ok(()), |settle_down| settle_down())?;
            }
            match order {
                Order::Save => {
                    let crc32c = save(self, [words[0], words[1]])?;
                    self.tell_checksums(&crc32c)?;
                }
                _ => self.obey_order(order, words)?,
            }
            self.exchange.obeyed();
        }
        Ok(())
    }

    fn obey_order(&mut self, order: Order, words: Words) -> Result<()> {
        match order {
            Order::Step => {
                self.take_batches();
                self.set_max_grad_norm(f64::from_bits(words[2]));
                self.run_step(f64::from_bits(words[0]), StepData { targets: words[1] as usize }).map(|_| ())
            }
            Order::Flush => self.flush(),
            Order::Evaluate => {
                self.take_batches();
                self.run_evaluation(words[0] as usize)
            }
            Order::Finish => {
                let tracks = self.end_threads()?;
                self.exchange.publish_tracks(tracks);
                Ok(())
            }
            // Whoever follows does it.
            Order::Save => Ok(()),
            Order::Replan => self.exchange.announced().map_or(Ok(()), |plan| self.change_places(plan).map(drop)),
            Order::Init => self.init_state(words[0], words[1].min(THREADS_MAX) as usize),
            Order::Send => self.send_weights(),
            Order::Resume => {
                let mut loss_scale = LossScale::new(self.plan.dtype);
                loss_scale.restore(f32::from_bits(words[2] as u32), words[3]);
                self.resume(words[0], words[1], loss_scale, SpeculationHistory::of(words[4]))
            }
            Order::Write => {
                let (part, flat) = self.piece_of(words)?;
                let mut piece = vec![0.0; flat.len()];
                self.exchange.mail(0, &mut piece);
                self.write_own(part, flat.start, &piece)
            }
            Order::Read => {
                self.strike(FaultPhase::Read)?;
                let (part, piece) = self.piece_of(words)?;
                let start = piece.start;
                let parts: Vec<_> = self.exchange.slices().owned(piece).collect();
                for (flat, local) in parts {
                    let mut piece = vec![0.0; flat.len()];
                    self.expect_no_job();
                    self.memory.states.read((&mut self.dev, &mut self.host), &self.memory.bounce, part, local, &mut piece)?;
                    self.exchange.post(flat.start - start, &piece);
                }
                Ok(())
            }
        }
    }

    /// As [`piece_of`], of this engine's state and mail.
    ///
    /// # Errors
    /// As there.
    fn piece_of(&self, words: Words) -> Result<(StatePart, Range<usize>)> {
        piece_of(words, self.exchange.slices().layout().flat_elems(), self.exchange.mail_words())
    }

    /// Takes what rank 0 has dealt to this rank.
    fn take_batches(&mut self) {
        for place in 0..self.plan.micro_batches_of_rank() {
            let memory = self.host.lend_mut(self.memory.batch(&self.plan, place));
            self.exchange.sent_batch(place, memory);
        }
    }
}

/// The part of a state of so many elements that an order is about, and which of them, as far as they exist and the mail has room for them.
///
/// # Errors
/// `Resource` when there are none.
fn piece_of([part, start, elems, ..]: Words, all: usize, mail_words: usize) -> Result<(StatePart, Range<usize>)> {
    let end = start.checked_add(elems).filter(|end| *end <= all as u64 && elems <= mail_words as u64);
    let known = usize::try_from(part).ok().and_then(|part| StatePart::ALL.get(part).copied());
    let wrong =
        || Error::resource("follow process 0", format!("there is no part {part} of the state with {elems} elements from {start} on"));
    known.zip(end).map(|(part, end)| (part, start as usize..end as usize)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of orders come over the network, and none of them panics or takes memory.
    #[test]
    fn an_order_about_what_does_not_exist_is_an_error() {
        let of = |part, start, elems| piece_of([part, start, elems, 0, 0, 0], 100, 40).map_err(|e| e.to_string());
        assert_eq!(of(1, 60, 40), Ok((StatePart::ALL[1], 60..100)));
        let none = StatePart::ALL.len() as u64;
        for (part, start, elems) in
            [(none, 0, 1), (u64::MAX, 0, 1), (0, 61, 40), (0, 0, 41), (0, u64::MAX, 1), (0, 1, u64::MAX), (0, 1 << 63, 1 << 63)]
        {
            let refused = of(part, start, elems).unwrap_err();
            assert!(refused.starts_with("follow process 0: there is no part "), "{refused}");
        }
        for number in [11, 255, 1 << 32, u64::MAX] {
            assert_eq!(Order::of(number), None);
        }
        assert_eq!((Order::of(0), Order::of(10)), (Some(Order::Step), Some(Order::Save)));
    }
}
