//! Orders of rank 0, and the data that it deals, over the progress counters.

use super::PeerExchange;
use crate::device::{Kernels, Peers};
use crate::engine::protocol::order::Order;
use crate::engine::ranks::exchange::{OrderPort, OrderWords};
use crate::engine::save::frozen_state::FrozenState;
use crate::error::{Error, Result};
use crate::planner::plan::Plan;
use crate::ranks::progress::ProgressCounters;

/// Division of a step's micro-batches into parts of ranks.
pub(super) struct PeerBatches {
    /// Micro-batches of a partial sum, ranks with a part of each micro-batch, and words of a part.
    per_partial_sum: usize,
    sequence_ranks: usize,
    batch_words: usize,
    /// Numbers that a partial sum reports.
    pub(super) report_words: usize,
    /// On rank 0, memory of a micro-batch of other ranks.
    word_buffer: Vec<i32>,
}

impl PeerBatches {
    /// The parts of `plan`, as `rank` handles them.
    pub(super) fn new(plan: &Plan, rank: usize) -> Self {
        Self {
            per_partial_sum: plan.micro_batches_per_partial_sum(),
            sequence_ranks: plan.recipe.step.sequence_ranks,
            batch_words: plan.batch_words(),
            report_words: plan.recipe.report_words(),
            word_buffer: if rank == 0 { vec![0; plan.recipe.batch_words(1)] } else { Vec::new() },
        }
    }
}

impl<D: Kernels + Peers> OrderPort<D> for PeerExchange<D::PeerHandle> {
    fn give_order(&mut self, dev: &mut D, order: Order, words: OrderWords) -> Result<()> {
        if self.context.rank > 0 {
            return Ok(());
        }
        self.wait_serving(dev, ProgressCounters::all_done)?;
        self.context.progress.give_order(order as u64, words);
        Ok(())
    }

    fn await_done(&mut self, dev: &mut D) -> Result<()> {
        if self.context.rank > 0 { Ok(()) } else { self.wait_serving(dev, ProgressCounters::all_done) }
    }

    fn next_order(&mut self, dev: &mut D, seen: u64) -> Result<(Order, OrderWords)> {
        self.wait_serving(dev, |progress| progress.next_order(seen).is_some())?;
        let (number, words) = self.context.progress.next_order(seen).expect("just seen");
        let order = Order::of(number).ok_or_else(|| Error::resource("follow process 0", format!("there is no order {number}")))?;
        Ok((order, words))
    }

    fn publish_done(&self) {
        self.context.progress.publish_done(self.context.rank);
    }

    fn announce(&mut self, plan: &Plan) {
        if self.context.rank == 0 {
            self.meetings.rendezvous.announce(plan.clone());
        }
    }

    fn announced(&self) -> Option<Plan> {
        self.meetings.rendezvous.announced()
    }

    fn publish_frozen(&mut self, state: FrozenState) {
        self.meetings.rendezvous.add_frozen(state);
    }

    fn take_frozen(&mut self) -> Vec<FrozenState> {
        self.meetings.rendezvous.take_frozen()
    }

    fn place(&self, part: usize) -> Option<usize> {
        let (rank, place) = self.part_of_rank(part);
        (rank == self.context.rank).then_some(place)
    }

    fn part(&self, place: usize) -> usize {
        self.part_at(place)
    }

    fn word_buffer(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.batches.word_buffer)
    }

    fn return_word_buffer(&mut self, word_buffer: Vec<i32>) {
        self.batches.word_buffer = word_buffer;
    }

    fn send_part(&mut self, part: usize, words: &mut dyn Iterator<Item = &[i32]>) {
        self.context.progress.post(self.context.rank, part * self.batches.batch_words, words.flatten().map(|&word| word as u32));
    }

    fn sent_batch(&self, place: usize, memory: &mut [i32]) {
        let start = self.part_at(place) * self.batches.batch_words;
        if self.context.rank > 0 {
            memory.iter_mut().zip(self.context.progress.mail(start)).for_each(|(place, word)| *place = word as i32);
        }
    }

    fn post(&self, start: usize, words: &[f32]) {
        self.context.progress.post(self.context.rank, start, words.iter().map(|word| word.to_bits()));
    }

    fn mail(&self, start: usize, words: &mut [f32]) {
        words.iter_mut().zip(self.context.progress.mail(start)).for_each(|(place, word)| *place = f32::from_bits(word));
    }

    fn mail_words(&self) -> usize {
        self.context.progress.mail_words()
    }
}

impl<C> PeerExchange<C> {
    /// The rank that computes a part of a step's micro-batches, and the part's index on that rank. Shares of the same micro-batches are
    /// consecutive.
    fn part_of_rank(&self, part: usize) -> (usize, usize) {
        let (micro_batch, place) = (part / self.batches.sequence_ranks, part % self.batches.sequence_ranks);
        let (partial_sum, within) =
            (micro_batch / self.batches.per_partial_sum * self.batches.sequence_ranks + place, micro_batch % self.batches.per_partial_sum);
        let ranks = self.context.progress.ranks();
        (partial_sum % ranks, partial_sum / ranks * self.batches.per_partial_sum + within)
    }

    /// The part at index `place` of this rank's memory.
    fn part_at(&self, place: usize) -> usize {
        let (round, within) = (place / self.batches.per_partial_sum, place % self.batches.per_partial_sum);
        let partial_sum = round * self.context.progress.ranks() + self.context.rank;
        let micro_batch = partial_sum / self.batches.sequence_ranks * self.batches.per_partial_sum + within;
        micro_batch * self.batches.sequence_ranks + partial_sum % self.batches.sequence_ranks
    }
}
