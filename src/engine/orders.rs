//! Start of the ranks of one process, and the loop of ranks other than rank 0.

use super::executor::{Engine, StepData};
use super::packed_mail;
use super::part_saves::{NoSlices, SaveSlices};
use super::pool::Pool;
use super::protocol::loss_scale::LossScale;
use super::protocol::order::Order;
use super::protocol::route::Hop;
use super::protocol::verdict::SpeculationHistory;
use super::ranks::exchange::{Exchange, OrderWords};
use super::ranks::peer_exchange::{PeerExchange, PeerTransport};
use super::ranks::rendezvous::{RankMemory, Rendezvous};
use super::reference_numbers::{KEEP_REFERENCE, POST_REFERENCE};
use super::step_job::StepJob;
use super::watch::driver_state::DriverActivity;
use crate::bucket::layout::Tier;
use crate::device::{EventId, Kernels, Peers, Sides};
use crate::dtype::mxfp4::BLOCK_ELEMS;
use crate::error::{Error, Result};
use crate::faults::FaultPhase;
use crate::model::shape::ModelShape;
use crate::optim::clip::ClipMemory;
use crate::optim::state_array::{StateArrays, StatePart};
use crate::planner::plan::Plan;
use crate::ranks::progress::ProgressCounters;
use crate::ranks::{NcclUniqueId, RankContext};
use std::ops::Range;
use std::sync::Arc;

/// Largest number of threads that another process can request; no machine has more CPUs.
const THREADS_MAX: u64 = 1 << 13;

impl<D: Kernels> Engine<D> {
    /// On rank 0, issues an order to all other ranks, once they have completed the order before it.
    pub(super) fn lead(&mut self, order: Order, words: OrderWords) -> Result<()> {
        self.while_ordering(|exchange, dev| exchange.give_order(dev, order, words))
    }

    /// On rank 0, waits until all other ranks have completed their order.
    pub(super) fn await_done(&mut self) -> Result<()> {
        self.while_ordering(|exchange, dev| exchange.await_done(dev))
    }

    /// By bucket, the event after which this rank's slice of its weights is written.
    pub(super) fn stepped(&self) -> Vec<EventId> {
        let written_by = |bucket: usize| match self.plan.placement.layout.tier(bucket) {
            Tier::Host => Hop::ParamsIn,
            Tier::Unified | Tier::Device => Hop::StepOnDevice,
        };
        (0..self.plan.placement.layout.count()).map(|bucket| self.transfers.event(written_by(bucket), bucket)).collect()
    }

    fn while_ordering(&mut self, wait: impl FnOnce(&mut dyn Exchange<D>, &mut D) -> Result<()>) -> Result<()> {
        let (before, number) = self.driver_state.activity();
        self.driver_state.set_activity(DriverActivity::Orders, 0);
        let waited = wait(&mut *self.exchange, &mut self.dev);
        self.driver_state.set_activity(before, number);
        waited
    }
}

#[expect(private_bounds, reason = "ranks are this crate's own")]
impl<D: Kernels + Peers> Engine<D> {
    /// Like [`Engine::new`], for the rank of `context`, on that rank's own thread, with its doorbell. Returns when all ranks have arrived:
    /// the local ranks in `rendezvous`, and ranks of other processes over `transport`.
    ///
    /// # Errors
    /// As [`Engine::new`]; the failure that ended another rank.
    pub(crate) fn join(
        (plan, shape): (Plan, ModelShape),
        (dev, pool): (D, Pool<StepJob>),
        context: &RankContext,
        rendezvous: &Arc<Rendezvous<D::PeerHandle>>,
        transport: PeerTransport,
    ) -> Result<Self> {
        let bell = context.progress.bell(context.rank);
        let exchange = |(dev, _): Sides<'_, D>, plan: &Plan| -> Result<Box<dyn Exchange<D>>> {
            Ok(Box::new(PeerExchange::new(dev, plan, context.clone(), rendezvous.clone(), transport)?))
        };
        let mut engine = Self::assemble(plan, shape, dev, pool, bell.clone(), exchange)?;
        engine.inject(FaultPhase::Start)?;
        engine.introduce();
        for rank in 0..context.progress.ranks() {
            context.progress.bell(rank).ring();
        }
        bell.wait_until(|| rendezvous.is_full() || context.progress.has_failed());
        context.check()?;
        engine.exchange.exchange_handles(&mut engine.dev)?;
        engine.exchange.connect(&mut engine.dev)?;
        if let Some(turn_token) = context.progress.turn_token() {
            turn_token.take(context.rank);
        }
        Ok(engine)
    }

    /// Like [`Engine::new`], for rank 0 of the plan on a simulated device. All other ranks are mirrored: they act like rank 0 at the same
    /// times.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub(crate) fn mirrored(plan: Plan, shape: ModelShape, dev: D, pool: Pool<StepJob>) -> Result<Self> {
        let transport = match (plan.site.processes, plan.site.by_nccl) {
            (1, _) => PeerTransport::Memory,
            (_, true) => PeerTransport::Nccl(NcclUniqueId([0; 128])),
            (_, false) => PeerTransport::Images,
        };
        let progress = ProgressCounters::mirrored(plan.board_sizes(), plan.site.ranks / plan.site.processes);
        let context = RankContext { progress: Arc::new(progress), rank: 0 };
        let (bell, rendezvous) = (context.progress.bell(0), Arc::new(Rendezvous::new(1)));
        let mut engine = Self::assemble(plan, shape, dev, pool, bell, |(dev, _), plan| {
            Ok(Box::new(PeerExchange::new(dev, plan, context, rendezvous, transport)?))
        })?;
        engine.introduce();
        engine.exchange.exchange_handles(&mut engine.dev)?;
        engine.exchange.connect(&mut engine.dev)?;
        Ok(engine)
    }

    /// Publishes this rank's memory and events to its peers.
    fn introduce(&mut self) {
        let stepped = self.stepped();
        let memory = RankMemory::of(&self.model);
        self.exchange.introduce(&mut self.dev, memory, stepped, &self.driver_state);
    }

    /// Executes the orders of rank 0 until a rank ends. Calls `settle_down` once, after the state is initialized and before the first step
    /// or evaluation.
    ///
    /// # Errors
    /// Errors of the device and of `settle_down`; the failure that ended another rank.
    pub(crate) fn follow(&mut self, settle_down: impl FnOnce() -> Result<()>) -> Result<()> {
        self.follow_and_save(settle_down, NoSlices)
    }

    /// Like [`Engine::follow`], for a rank that saves its own slices by `saver`.
    ///
    /// # Errors
    /// As [`Engine::follow`]; errors of `saver`.
    pub(crate) fn follow_and_save(&mut self, settle_down: impl FnOnce() -> Result<()>, mut saver: impl SaveSlices<D>) -> Result<()> {
        let mut settle_down = Some(settle_down);
        for seen in 0.. {
            let (order, words) = self.exchange.next_order(&mut self.dev, seen)?;
            if matches!(order, Order::Step | Order::Evaluate)
                && let Some(settle_down) = settle_down.take()
            {
                settle_down()?;
            }
            if !self.obey_save_order(order, words, &mut saver)? {
                self.obey_order(order, words)?;
            }
            self.exchange.publish_done();
        }
        Ok(())
    }

    fn obey_order(&mut self, order: Order, words: OrderWords) -> Result<()> {
        match order {
            Order::Step => {
                self.take_batches();
                self.set_max_grad_norm(f64::from_bits(words[2]));
                self.run_step(f64::from_bits(words[0]), StepData { weight_units: words[1] }).map(|_| ())
            }
            Order::Flush => self.flush(),
            Order::Evaluate if words[2] == POST_REFERENCE => {
                self.post_reference();
                Ok(())
            }
            Order::Evaluate => {
                self.take_batches();
                let micro_steps = words[1].min(self.plan.micro_batches_of_rank() as u64) as usize;
                if words[2] == KEEP_REFERENCE {
                    self.reserve_reference()?;
                }
                self.run_evaluation(words[0], micro_steps, &[])
            }
            Order::Finish => {
                let tracks = self.end_threads()?;
                self.exchange.publish_tracks(tracks);
                Ok(())
            }
            // `obey_save_order` executes these orders.
            Order::Save | Order::ReportPart | Order::FinishPart => Ok(()),
            Order::PrepareSave => {
                self.prepare_own_save();
                Ok(())
            }
            Order::BeginSave => {
                let state = self.begin_own_save()?;
                self.exchange.publish_frozen(state);
                Ok(())
            }
            Order::EndSave => self.end_own_save(),
            Order::Replan => self.exchange.announced().map_or(Ok(()), |plan| self.change_placement(plan).map(drop)),
            Order::Init => self.init_state(words[0], words[1].min(THREADS_MAX) as usize),
            Order::Send => self.send_weights(),
            Order::Resume => {
                let mut loss_scale = LossScale::new(self.plan.recipe.numerics.dtype);
                loss_scale.restore(f32::from_bits(words[2] as u32), words[3]);
                let clip_memory = self.sent_clip_memory(words[5])?;
                self.resume_own(words[0], words[1], loss_scale, SpeculationHistory::of(words[4]), clip_memory);
                Ok(())
            }
            Order::Write => {
                let (part, flat) = self.piece_of(words)?;
                let mut piece = vec![0.0; flat.len()];
                self.exchange.mail(0, &mut piece);
                self.write_own(part, flat.start, &piece)
            }
            Order::WriteFrozen => self.take_frozen([words[0], words[1]]),
            Order::WritePacked => self.take_packed([words[0], words[1]]),
            Order::Read => {
                self.inject(FaultPhase::Read)?;
                let (part, piece) = self.piece_of(words)?;
                let start = piece.start;
                let parts: Vec<_> = self.exchange.slices().owned(piece).collect();
                for (flat, local) in parts {
                    let mut piece = vec![0.0; flat.len()];
                    self.expect_no_job();
                    self.memory.states.read((&mut self.dev, &mut self.host), &self.memory.bounce_buffer, part, local, &mut piece)?;
                    self.exchange.post(flat.start - start, &piece);
                }
                Ok(())
            }
        }
    }

    /// Like [`piece_of`], for this engine's state and mail buffer.
    ///
    /// # Errors
    /// As [`piece_of`].
    fn piece_of(&self, words: OrderWords) -> Result<(StatePart, Range<usize>)> {
        piece_of(words, self.plan.optimizer().arrays(), self.exchange.slices().layout().flat_elems(), self.exchange.mail_words())
    }

    /// The `count` values in the mail buffer that the rule of clipping keeps.
    ///
    /// # Errors
    /// `Resource` if the rule of this rank keeps another number of values.
    fn sent_clip_memory(&self, count: u64) -> Result<ClipMemory> {
        let kept = self.clip_memory.values().len();
        if count != kept as u64 {
            let cause = format!("it has {count} values of the rule of clipping, and the rule keeps {kept} here");
            return Err(Error::resource("follow process 0", cause));
        }
        let mut values = vec![0.0; kept];
        self.exchange.mail(0, &mut values);
        Ok(ClipMemory::of(values))
    }

    /// Writes weights of frozen tensors from the mail buffer: so many elements from the first one on.
    ///
    /// # Errors
    /// `Resource` when there is no such range; errors of the device.
    fn take_frozen(&mut self, words: [u64; 2]) -> Result<()> {
        let flat = range_of(words, self.model.table.frozen_elems(), self.exchange.mail_words())
            .ok_or_else(|| Error::resource("follow process 0", "it has other frozen tensors than this process"))?;
        let mut piece = vec![0.0; flat.len()];
        self.exchange.mail(0, &mut piece);
        self.write_own_frozen(flat.start, &piece)
    }

    /// Writes weights of frozen tensors in MXFP4 from the mail buffer: so many elements from the first one on.
    ///
    /// # Errors
    /// `Resource` when there is no such range of whole blocks; errors of the device.
    fn take_packed(&mut self, words: [u64; 2]) -> Result<()> {
        let range = range_of(words, self.model.table.packed_elems(), packed_mail::elems(self.exchange.mail_words()))
            .filter(|range| [range.start, range.end].iter().all(|end| end.is_multiple_of(BLOCK_ELEMS)))
            .ok_or_else(|| Error::resource("follow process 0", "it has other frozen tensors in MXFP4 than this process"))?;
        let mut piece = packed_mail::empty(range.len());
        self.exchange.mail(0, &mut piece);
        self.write_own_packed(range.start, packed_mail::piece(&piece, range.len()))
    }

    /// Receives the micro-batches that rank 0 has sent to this rank.
    fn take_batches(&mut self) {
        for place in 0..self.plan.micro_batches_of_rank() {
            let memory = self.host.lend_mut(self.memory.batch(&self.plan, place));
            self.exchange.sent_batch(place, memory);
        }
    }
}

/// The part of the state and the range of elements of an order. The state has `all` elements, and the mail buffer has `mail_words` words.
///
/// # Errors
/// `Resource` when the part or the range does not exist, the range begins within a unit of the arrays, or the mail buffer is too small.
fn piece_of([part, start, elems, ..]: OrderWords, arrays: StateArrays, all: usize, mail_words: usize) -> Result<(StatePart, Range<usize>)> {
    let range = range_of([start, elems], all, mail_words).filter(|range| range.start.is_multiple_of(arrays.unit_elems()));
    let wrong =
        || Error::resource("follow process 0", format!("there is no part {part} of the state with {elems} elements from {start} on"));
    arrays.part(part).zip(range).ok_or_else(wrong)
}

/// The range of `elems` elements from `start` on, if `all` elements have it and the mail buffer of `mail_words` words can carry it.
fn range_of([start, elems]: [u64; 2], all: usize, mail_words: usize) -> Option<Range<usize>> {
    let end = start.checked_add(elems).filter(|end| *end <= all as u64 && elems <= mail_words as u64)?;
    Some(start as usize..end as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::moments::Moments;

    /// Orders arrive over the network, so invalid numbers must not cause a panic or an allocation.
    #[test]
    fn an_order_for_a_missing_range_is_an_error() {
        let arrays = Moments::Float32.arrays();
        let of = |part, start, elems| piece_of([part, start, elems, 0, 0, 0], arrays, 100, 40).map_err(|e| e.to_string());
        assert_eq!(of(1, 60, 40), Ok((StatePart::M, 60..100)));
        let none = arrays.parts().len() as u64;
        for (part, start, elems) in
            [(none, 0, 1), (u64::MAX, 0, 1), (0, 61, 40), (0, 0, 41), (0, u64::MAX, 1), (0, 1, u64::MAX), (0, 1 << 63, 1 << 63)]
        {
            let refused = of(part, start, elems).unwrap_err();
            assert!(refused.starts_with("follow process 0: there is no part "), "{refused}");
        }
        let int8 = |start| piece_of([1, start, 40, 0, 0, 0], Moments::Int8.arrays(), 256, 40).map_err(|e| e.to_string());
        assert_eq!(int8(128), Ok((StatePart::M, 128..168)));
        assert!(int8(130).unwrap_err().contains("40 elements from 130 on"), "groups are stored whole");
        for number in [18, 255, 1 << 32, u64::MAX] {
            assert_eq!(Order::of(number), None);
        }
        assert_eq!((Order::of(0), Order::of(17)), (Some(Order::Step), Some(Order::PrepareSave)));
    }
}
