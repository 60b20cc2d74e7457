//! Exchange between several ranks: each rank publishes its recorded events in the progress counters ([`Board`]), and its peers copy from
//! its memory. Gradients of ranks of other processes arrive by [`Sockets`] (TCP) or [`Rails`] (NCCL). So do weights: a rank exchanges them
//! with its *inter-node peers*, the ranks with the same local index in other processes, and *relays* them to the other local ranks, which
//! pull them from it.
//!
//! If the local ranks compute a whole group of shares in each round, its sum is computed within the process first: each rank pulls the
//! slices that it and its inter-node peers own, and the group's sum replaces its gradient there. Only the group's sum leaves the process,
//! to the inter-node peers.
//!
//! *Record, then publish, then wait*: waiting for an event that is not yet recorded has no effect. So a rank records an event before it
//! publishes it, and its peers enqueue a wait only afterwards.

use super::bounce::Sides;
use super::exchange::{Exchange, Order, Words};
use super::groups::Addition;
use super::hall::{Hall, Introduction, RankMemory, check_same_bits};
use super::handover::Handovers;
use super::rails::Rails;
use super::shards::Shards;
use super::sockets::Sockets;
use super::vitals::Vitals;
use super::watchdog::Watched;
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::data::batch;
use crate::device::{Device, DeviceSlice, EventId, Kernels, Lease, Peers, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::Handover;
use crate::optim::norm::{self, BLOCK};
use crate::planner::plan::Plan;
use crate::ranks::board::{Board, StepOutcome};
use crate::ranks::links::LanesByRank;
use crate::ranks::{RailKey, Seat};
use crate::trace::Recorder;
use crate::units::NormSq;
use std::ops::Range;
use std::sync::Arc;

mod gradients;
mod weights;

/// Partial sums of the norm that are folded at once.
const FOLDED_AT_ONCE: usize = 64;

/// The exchange of one of several ranks.
pub(crate) struct Pulls<C> {
    seat: Seat,
    hall: Arc<Hall<C>>,
    /// Connection to ranks of other processes, if there are any.
    far: Option<Far>,
    /// Number of meetings of all ranks between two steps.
    meetings: u64,
    slices: Slices,
    handovers: Handovers,
    /// Rendezvous entries of all ranks, once they are known.
    peers: Vec<Introduction<C>>,
    written: Vec<EventId>,
    /// By bucket: the peers' parts of the sum are pulled, and the sum is computed.
    pulled: Vec<EventId>,
    summed: Vec<EventId>,
    /// Event of the sum that was enqueued last.
    last_summed: EventId,
    /// By bucket: the peers' weights have arrived.
    gathered: Vec<EventId>,
    /// By bucket: the weights that this rank relays have arrived; empty with one process.
    carried: Vec<EventId>,
    /// Event after the pulls of the last fetch, number of started fetches, and whether the last fetch still awaits weights that this rank
    /// relays.
    fetched: EventId,
    fetches: u64,
    is_bringing: bool,
    /// The peers' parts of one slice.
    staging: DeviceSlice,
    own: SliceMemory,
    lease: Lease,
    /// fp32 sums so far of the elements that this rank owns, if a step has several rounds, and the number of sums of each element.
    sums: DeviceSlice,
    kept_sums: usize,
    addition: Addition,
    /// Groups are first summed within this process.
    is_grouped: bool,
    rounds: u64,
    /// Micro-batches of a share, ranks with a part of each micro-batch, and words of a part.
    per_share: usize,
    sequence_ranks: usize,
    batch_words: usize,
    room: Vec<i32>,
    /// Number of buckets, over all rounds, that were written; have their group's sum, if groups are summed here; were exchanged over NCCL;
    /// were summed; and have a sum that was reported to the driver.
    buckets_written: u64,
    buckets_grouped: u64,
    buckets_swapped: u64,
    buckets_summed: u64,
    buckets_told: u64,
    /// Steps with a known outcome.
    steps: u64,
    /// Partial sums of the norm received in this step.
    partials: usize,
    /// On rank 0: the norm folded so far in this step, and the bucket and rank of the next slice to fold.
    norm_sq: NormSq,
    folded: (usize, usize),
    /// Version of the weights; by bucket, the version that this rank has published; number of buckets not yet published in this version;
    /// and the bucket below which the relayed weights, and the peers' weights, have not arrived.
    version: u64,
    settled: Vec<u64>,
    unsettled: usize,
    uncarried: usize,
    ungathered: usize,
}

/// Transport of slices to and from ranks of other processes.
enum Far {
    Sockets(Box<Sockets>),
    Rails(Box<Rails>),
    /// Nothing is sent: slices of mirrored ranks are pulled like those of local ranks.
    Images,
}

/// Connection of a rank to its peers.
pub(crate) enum Reach {
    /// All ranks are local.
    Memory,
    /// TCP connections to each rank of another process, through host memory.
    Lanes(LanesByRank),
    /// NCCL, from device to device.
    Rail(RailKey),
    /// The peers are mirrored ranks; the simulated device stands for their memory.
    Images,
}

impl Far {
    fn new<D: Device>(dev: &mut D, plan: &Plan, slices: &Slices, mates: Range<usize>, reach: Reach) -> Result<Option<Self>> {
        Ok(match reach {
            Reach::Memory => None,
            Reach::Images => Some(Self::Images),
            Reach::Lanes(lanes) => Some(Self::Sockets(Box::new(Sockets::new(dev, plan, slices, lanes)?))),
            Reach::Rail(key) => {
                Some(Self::Rails(Box::new(Rails::new(dev, slices, (mates, plan.sums_within()), (key, plan.cuda_libraries.clone()))?)))
            }
        })
    }

    fn settle_down(&mut self, memory: &RankMemory) {
        match self {
            Self::Sockets(sockets) => sockets.settle_down(memory.clone()),
            Self::Rails(rails) => rails.settle_down(memory.clone()),
            Self::Images => {}
        }
    }
}

/// Memory that depends on the plan, and that holds nothing between two steps.
struct SliceMemory {
    shards: Shards,
    /// Flat addresses of weights below this element are a ring.
    ringed_elems: usize,
    /// Slices of the step's gradients that this rank keeps, because their flat addresses are overwritten before the verdict; and their
    /// first element in the local order.
    kept: DeviceSlice,
    kept_from: usize,
}

impl SliceMemory {
    fn take<D: Device>(lease: &mut Lease, dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let kept = slices.local_buckets(&plan.kept());
        Ok(Self {
            shards: Shards::take(lease, dev, plan, slices)?,
            ringed_elems: plan.weight_ring.map_or(0, |ring| ring.ringed_elems),
            kept: lease.alloc(dev, "gradient slices", kept.len(), plan.dtype)?,
            kept_from: kept.start,
        })
    }
}

impl<C> Pulls<C> {
    /// # Errors
    /// Errors of the device.
    pub(super) fn new<D: Kernels>(dev: &mut D, plan: &Plan, seat: Seat, hall: Arc<Hall<C>>, reach: Reach) -> Result<Self> {
        let (count, ranks) = (plan.layout.count(), seat.board.ranks());
        let slices = Slices::new(plan.layout.clone(), seat.rank, ranks);
        let mut events = |count| (0..count).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let [written, gathered, pulled, summed] = [events(count)?, events(count)?, events(count)?, events(count)?];
        let carried = events(if matches!(reach, Reach::Memory) { 0 } else { count })?;
        let kept_sums = plan.kept_sums();
        let whole_words = batch::arrays(plan.separates_documents) * plan.batch * plan.seq_length;
        let mut lease = Lease::default();
        Ok(Self {
            own: SliceMemory::take(&mut lease, dev, plan, &slices)?,
            far: Far::new(dev, plan, &slices, seat.board.mates(), reach)?,
            lease,
            written,
            gathered,
            carried,
            pulled,
            last_summed: summed[0],
            summed,
            fetched: dev.event()?,
            fetches: 0,
            is_bringing: false,
            staging: dev.alloc("peers' gradients", (ranks - 1) * slices.slice_elems(), plan.dtype)?,
            sums: dev.alloc("gradient sums", slices.elems() * kept_sums, Dtype::Float32)?,
            kept_sums,
            addition: Addition::of(plan),
            is_grouped: plan.sums_within(),
            rounds: (plan.shares / ranks) as u64,
            per_share: plan.micro_batches_of_share(),
            sequence_ranks: plan.sequence_ranks,
            batch_words: plan.batch_words(),
            room: if seat.rank == 0 { vec![0; whole_words] } else { Vec::new() },
            handovers: Handovers::new(dev, seat.rank, plan.sequence_ranks)?,
            peers: Vec::new(),
            buckets_written: 0,
            buckets_grouped: 0,
            buckets_swapped: 0,
            buckets_summed: 0,
            buckets_told: 0,
            steps: 0,
            partials: 0,
            norm_sq: NormSq(0.0),
            folded: (0, 0),
            version: 0,
            settled: vec![0; count],
            unsettled: 0,
            uncarried: 0,
            ungathered: 0,
            slices,
            seat,
            hall,
            meetings: 0,
        })
    }

    fn buckets(&self) -> u64 {
        self.written.len() as u64
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<C> {
        let own = self.seat.rank;
        (0..self.seat.board.ranks()).filter(move |rank| *rank != own)
    }

    /// The local rank that receives the weights of `owner` first.
    fn carrier(&self, owner: usize) -> usize {
        let mates = self.seat.board.mates();
        mates.start + owner % mates.len()
    }

    /// The rank that computes a part of a step's micro-batches, and the part's index on that rank. Shares of the same micro-batches are
    /// consecutive.
    fn share_out(&self, part: usize) -> (usize, usize) {
        let (micro_batch, place) = (part / self.sequence_ranks, part % self.sequence_ranks);
        let (share, within) = (micro_batch / self.per_share * self.sequence_ranks + place, micro_batch % self.per_share);
        let ranks = self.seat.board.ranks();
        (share % ranks, share / ranks * self.per_share + within)
    }

    /// The part at index `place` of this rank's memory.
    fn part_at(&self, place: usize) -> usize {
        let (round, within) = (place / self.per_share, place % self.per_share);
        let share = round * self.seat.board.ranks() + self.seat.rank;
        let micro_batch = share / self.sequence_ranks * self.per_share + within;
        micro_batch * self.sequence_ranks + share % self.sequence_ranks
    }

    /// Waits for progress counters outside of a step's event loop.
    fn wait_until(&self, ready: impl Fn() -> bool) -> Result<()> {
        while !ready() {
            self.seat.check()?;
            if !self.seat.pass_idle()? {
                self.seat.board.bell(self.seat.rank).wait_until(|| ready() || self.seat.board.has_failed());
            }
        }
        self.seat.check()
    }

    /// Like `wait_until`, but keeps sending and receiving slices for peers meanwhile.
    fn wait_serving<D: Device>(&mut self, dev: &mut D, ready: impl Fn(&Board) -> bool) -> Result<()> {
        let board = self.seat.board.clone();
        if self.far.is_none() {
            return self.wait_until(|| ready(&board));
        }
        let bell = board.bell(self.seat.rank);
        loop {
            let rung = bell.rings();
            self.sockets().map_or(Ok(()), |far| far.serve(dev))?;
            self.seat.check()?;
            if ready(&board) {
                return Ok(());
            }
            // The doorbell rings for everything that arrives from peers. Copies of this device do not ring it on every device, so it is
            // polled while they are pending.
            let is_quiet = match &self.far {
                Some(Far::Sockets(far)) => far.is_quiet(),
                Some(Far::Rails(rails)) => rails.is_quiet(dev)?,
                Some(Far::Images) | None => true,
            };
            if is_quiet || !dev.idle()? {
                bell.wait(rung);
            }
        }
    }

    fn sockets(&mut self) -> Option<&mut Sockets> {
        if let Some(Far::Sockets(sockets)) = &mut self.far { Some(sockets) } else { None }
    }

    /// Waits until all ranks have arrived, between two steps.
    pub(super) fn meet_others(&mut self) -> Result<()> {
        self.meetings += 1;
        self.seat.board.publish_met(self.seat.rank);
        self.wait_until(|| self.seat.board.all_met(self.meetings))
    }
}

impl<D: Kernels + Peers> Exchange<D> for Pulls<D::Card> {
    fn sums_on(&self) -> Stream {
        Stream::Reduce
    }

    fn slices(&self) -> &Slices {
        &self.slices
    }

    fn announce(&mut self, plan: &Plan) {
        if self.seat.rank == 0 {
            self.hall.announce(plan.clone());
        }
    }

    fn leave(&mut self, dev: &mut D) -> Result<()> {
        self.hall.leave(self.seat.rank);
        self.peers.clear();
        dev.leave()?;
        self.meet_others()?;
        dev.take_back()
    }

    fn rearrange(&mut self, (dev, _): Sides<'_, D>, layout: &BucketLayout) -> Result<()> {
        self.slices = Slices::new(layout.clone(), self.seat.rank, self.seat.board.ranks());
        self.lease.give_back_device(dev)
    }

    fn take(&mut self, (dev, _): Sides<'_, D>, plan: &Plan) -> Result<()> {
        self.own = SliceMemory::take(&mut self.lease, dev, plan, &self.slices)?;
        Ok(())
    }

    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        refusal.iter().for_each(|why| self.hall.refuse(self.seat.rank, why.to_string()));
        self.meet_others()?;
        Ok(self.hall.refusal().map(|(rank, why)| self.seat.board.error_of(rank, why)))
    }

    fn introduce(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, vitals: &Arc<Vitals>) {
        let memory = RankMemory { shards: self.own.shards.clone(), ..memory };
        self.far.iter_mut().for_each(|far| far.settle_down(&memory));
        let (card, products) = (dev.card(), dev.product_algorithms());
        let (written, pulled, vitals) = (self.written.clone(), self.pulled.clone(), vitals.clone());
        let (carried, fetched, handed) = (self.carried.clone(), self.fetched, self.handovers.events());
        self.hall
            .enter(self.seat.rank, Introduction { card, memory, written, pulled, stepped, carried, fetched, handed, vitals, products });
    }

    fn greet(&mut self, dev: &mut D) -> Result<()> {
        self.peers = self.hall.introductions(self.seat.board.ranks());
        check_same_bits(&self.peers[self.seat.rank].products, &self.peers[0].products)?;
        dev.admit(self.seat.clone(), self.peers.iter().map(|peer| peer.card.clone()).collect())
    }

    fn connect(&mut self, dev: &mut D) -> Result<()> {
        if self.far.is_none() {
            return Ok(());
        }
        self.meet_others()?;
        let Some(Far::Rails(rails)) = &mut self.far else { return Ok(()) };
        rails.connect(dev, self.staging)
    }

    fn meet_again(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, vitals: &Arc<Vitals>) -> Result<()> {
        Exchange::introduce(self, dev, memory, stepped, vitals);
        self.meet_others()?;
        Exchange::greet(self, dev)
    }

    fn hand_over(&mut self, dev: &mut D) -> Result<()> {
        self.handovers.publish(dev, &self.seat)
    }

    fn is_handed_over(&self) -> bool {
        self.handovers.is_there(&self.seat.board)
    }

    fn take_over(&mut self, dev: &mut D, model: &Model, what: (Handover, usize)) -> Result<()> {
        self.handovers.pull(dev, &self.peers, model, what)
    }

    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool> {
        let written = self.written[bucket];
        let round = self.buckets_written / self.buckets();
        dev.record(written, Stream::Compute)?;
        if let Some(far) = self.flat_sockets() {
            far.send_grads(dev, bucket, round, written)?;
        }
        self.buckets_written += 1;
        self.seat.board.publish_written(self.seat.rank);
        self.seat.pass()?;
        self.swap_written(dev, grads).map(|()| false)
    }

    fn poll(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<Option<usize>> {
        // A rank that waited here for a failed peer would wait forever.
        self.seat.check()?;
        self.group_written(dev, grads, self.buckets_written)?;
        loop {
            if self.buckets_told == self.buckets_summed {
                // Leaves the host free for other work while the device is far behind.
                let is_next = self.buckets_summed < self.buckets_written && self.has_parts(dev)? && dev.has_room(Stream::Reduce)?;
                if !is_next {
                    return Ok(None);
                }
                self.sum_next(dev, grads)?;
            }
            let (bucket, round) = self.place_of(self.buckets_told);
            self.buckets_told += 1;
            if round + 1 == self.rounds {
                return Ok(Some(bucket));
            }
        }
    }

    fn is_summed(&self) -> bool {
        self.buckets_told == self.buckets_written
    }

    fn may_overwrite(&mut self, dev: &mut D, bucket: usize) -> Result<bool> {
        let before_round = self.buckets_written.saturating_sub(1) / self.buckets() * self.buckets();
        let needed = before_round + bucket as u64 + 1;
        if self.buckets_summed < needed || !self.seat.board.all_pulled(needed) {
            return Ok(false);
        }
        // Exchanges over NCCL are already enqueued before any later work. Sockets are asked last, because they enqueue a wait once
        // everything has left.
        if !self.sockets().map_or(Ok(true), |far| far.may_overwrite(dev))? {
            return Ok(false);
        }
        // Waits for this bucket and those before it, but not for later sums.
        dev.wait(Stream::Compute, self.summed[bucket])?;
        let mut mates = self.seat.board.mates().filter(|mate| *mate != self.seat.rank);
        mates.try_for_each(|mate| dev.wait_for(Stream::Compute, mate, self.peers[mate].pulled[bucket]))?;
        Ok(true)
    }

    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, local: usize) -> DeviceSlice {
        match local.checked_sub(self.own.kept_from) {
            Some(kept) if kept < self.own.kept.elems() => self.own.kept.slice(kept, flat.len()),
            _ => grads.slice(flat.start, flat.len()),
        }
    }

    fn add_partials(&mut self, partials: &[f32]) {
        let local = self.partials * BLOCK..(self.partials + partials.len()) * BLOCK;
        let mut rest = partials;
        for (flat, _) in self.slices.pieces(local) {
            let (these, others) = rest.split_at(flat.len() / BLOCK);
            self.seat.board.write_partials(flat.start / BLOCK, these);
            rest = others;
        }
        self.partials += partials.len();
        self.seat.board.publish_partials(self.seat.rank, partials.len());
    }

    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as Exchange<D>>::tell_losses(self, losses);
        self.seat.board.publish_report(self.seat.rank, nonfinite, step);
    }

    fn tell_losses(&mut self, losses: &[f32]) {
        let (rank, ranks) = (self.seat.rank, self.seat.board.ranks());
        losses.iter().enumerate().for_each(|(round, &loss)| self.seat.board.write_loss(round * ranks + rank, loss));
    }

    fn losses(&self) -> f64 {
        self.seat.board.losses()
    }

    fn outcome(&mut self, step: u64) -> Option<StepOutcome> {
        if self.seat.rank == 0 && self.seat.board.outcome(step).is_none() {
            self.fold();
            let is_whole = self.folded.0 == self.slices.layout().count();
            if let Some((nonfinite, loss)) = self.seat.board.reports(step).filter(|_| is_whole) {
                self.seat.board.publish_outcome(step, StepOutcome { norm_sq: self.norm_sq.0, nonfinite, loss });
            }
        }
        let outcome = self.seat.board.outcome(step)?;
        (self.steps, self.partials, self.norm_sq, self.folded) = (self.steps + 1, 0, NormSq(0.0), (0, 0));
        Some(outcome)
    }

    fn next_version(&mut self) {
        assert_eq!(self.ungathered, 0, "the weights changed before the last ones had arrived");
        self.version += 1;
        let count = self.settled.len();
        (self.unsettled, self.uncarried, self.ungathered) = (count, count, count);
        self.sockets().into_iter().for_each(Sockets::next_version);
    }

    fn is_owing(&self) -> bool {
        self.unsettled > 0
    }

    fn is_owed(&self, bucket: usize) -> bool {
        self.settled[bucket] < self.version
    }

    fn settle(&mut self, bucket: usize) {
        self.settled[bucket] = self.version;
        self.unsettled -= 1;
        let stepped = self.peers[self.seat.rank].stepped[bucket];
        self.sockets().into_iter().for_each(|far| far.send_weights(bucket, stepped));
        self.seat.board.publish_settled(self.seat.rank, bucket, self.version);
    }

    fn gather(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        self.sockets().map_or(Ok(()), |far| far.serve(dev))?;
        self.take_in(dev)?;
        self.take_images(dev)?;
        self.pull_settled(dev, weights)
    }

    fn to_swap(&self, bucket: usize) -> Range<usize> {
        if matches!(self.far, Some(Far::Rails(_))) { bucket..self.uncarried.max(bucket) } else { 0..0 }
    }

    fn swap_weights(&mut self, dev: &mut D, bucket: usize) -> Result<()> {
        let (once, version) = (self.own.shards.passed_once(&self.slices), self.version);
        if once.start < self.slices.layout().range(bucket).end {
            self.swap_within(dev, (bucket, version), &once)?;
        }
        self.carry(bucket);
        Ok(())
    }

    fn swapped(&self) -> u64 {
        if let Some(Far::Rails(rails)) = &self.far { rails.passed() } else { 0 }
    }

    fn own_weights(&self, weights: DeviceSlice, flat: &Range<usize>, local: usize) -> DeviceSlice {
        self.own.shards.own(&self.slices, local, flat.len()).unwrap_or_else(|| weights.slice(flat.start, flat.len()))
    }

    fn fetches_ahead(&self) -> bool {
        self.own.shards.come_with_fetches() && matches!(self.far, Some(Far::Rails(_)))
    }

    fn bring(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        self.bring_weights(dev, flat)
    }

    fn is_brought(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        self.take_brought(dev, flat)
    }

    fn fetch(&mut self, dev: &mut D, weights: DeviceSlice, flat: Range<usize>) -> Result<()> {
        let (mut buckets, own) = (self.slices.layout().overlapping(flat.clone()), self.seat.rank);
        buckets.try_for_each(|bucket| self.pull_weights(dev, Stream::Gather, weights, (bucket, flat.clone()), |rank| rank != own))?;
        if self.own.shards.come_with_fetches() {
            dev.record(self.fetched, Stream::Gather)?;
            self.seat.board.publish_fetched(self.seat.rank);
        }
        Ok(())
    }

    fn place_own(&self, dev: &mut D, weights: DeviceSlice, flat: &Range<usize>) -> Result<()> {
        let (mut buckets, own) = (self.slices.layout().overlapping(flat.clone()), self.seat.rank);
        buckets.try_for_each(|bucket| self.pull_weights(dev, Stream::Compute, weights, (bucket, flat.clone()), |rank| rank == own))
    }

    fn is_gathered(&self, bucket: usize) -> bool {
        self.ungathered <= bucket
    }

    fn arrive(&self, dev: &mut D, bucket: usize) -> Result<()> {
        dev.wait(Stream::Compute, self.gathered[bucket])
    }

    fn check(&self) -> Result<()> {
        self.seat.check()
    }

    fn blame(&self, error: Error) -> Error {
        self.seat.blame(error)
    }

    fn watched(&self, _: Arc<Vitals>) -> Watched {
        // The driver state of ranks of other processes is not known here; their publications are in the progress counters.
        let known = self.peers.iter().take(self.seat.board.mates().len());
        Watched { ranks: known.map(|peer| peer.vitals.clone()).collect(), board: Some(self.seat.board.clone()) }
    }

    fn waited_ns(&self, dev: &D) -> u64 {
        dev.waited_for_peers_ns()
    }

    fn published_ns(&self) -> u64 {
        self.seat.board.published_ns(self.seat.rank)
    }

    fn publish_amounts(&self, amounts: &mut dyn Iterator<Item = u64>) {
        self.seat.board.write_amounts(self.seat.rank, amounts);
    }

    fn amounts_of(&self, rank: usize, amounts: &mut dyn Iterator<Item = &mut u64>) {
        amounts.zip(self.seat.board.amounts(rank)).for_each(|(place, amount)| *place = amount);
    }

    fn publish_expert_rows(&self, rows: &[u64]) {
        self.seat.board.write_expert_rows(self.seat.rank, rows);
    }

    fn add_expert_rows(&self, rank: usize, rows: &mut [u64]) {
        rows.iter_mut().zip(self.seat.board.expert_rows(rank)).for_each(|(rows, others)| *rows = rows.saturating_add(others));
    }

    fn publish_tracks(&self, tracks: Vec<Recorder>) {
        self.seat.board.publish_tracks(self.seat.rank, self.named(tracks));
    }

    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        let mut all = self.named(own);
        self.others().for_each(|rank| all.extend_from_slice(self.seat.board.tracks(rank)));
        all
    }

    fn pass(&self) -> Result<()> {
        self.seat.pass()
    }

    fn pass_idle(&self) -> Result<()> {
        self.seat.pass_idle().map(|_| ())
    }

    fn lead(&mut self, dev: &mut D, order: Order, words: Words) -> Result<()> {
        if self.seat.rank > 0 {
            return Ok(());
        }
        self.wait_serving(dev, Board::all_done)?;
        self.seat.board.give_order(order as u64, words);
        Ok(())
    }

    fn await_done(&mut self, dev: &mut D) -> Result<()> {
        if self.seat.rank > 0 { Ok(()) } else { self.wait_serving(dev, Board::all_done) }
    }

    fn next_order(&mut self, dev: &mut D, seen: u64) -> Result<(Order, Words)> {
        self.wait_serving(dev, |board| board.next_order(seen).is_some())?;
        let (number, words) = self.seat.board.next_order(seen).expect("just seen");
        let order = Order::of(number).ok_or_else(|| Error::resource("follow process 0", format!("there is no order {number}")))?;
        Ok((order, words))
    }

    fn obeyed(&self) {
        self.seat.board.publish_done(self.seat.rank);
    }

    fn announced(&self) -> Option<Plan> {
        self.hall.announced()
    }

    fn place(&self, part: usize) -> Option<usize> {
        let (rank, place) = self.share_out(part);
        (rank == self.seat.rank).then_some(place)
    }

    fn room(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.room)
    }

    fn keep_room(&mut self, room: Vec<i32>) {
        self.room = room;
    }

    fn send_part(&mut self, part: usize, words: &mut dyn Iterator<Item = &[i32]>) {
        self.seat.board.post(self.seat.rank, part * self.batch_words, words.flatten().map(|&word| word as u32));
    }

    fn sent_batch(&self, place: usize, memory: &mut [i32]) {
        let start = self.part_at(place) * self.batch_words;
        if self.seat.rank > 0 {
            memory.iter_mut().zip(self.seat.board.mail(start)).for_each(|(place, word)| *place = word as i32);
        }
    }

    fn post(&self, start: usize, words: &[f32]) {
        self.seat.board.post(self.seat.rank, start, words.iter().map(|word| word.to_bits()));
    }

    fn mail(&self, start: usize, words: &mut [f32]) {
        words.iter_mut().zip(self.seat.board.mail(start)).for_each(|(place, word)| *place = f32::from_bits(word));
    }

    fn mail_words(&self) -> usize {
        self.seat.board.mail_words()
    }
}

impl<C> Pulls<C> {
    /// Adds this rank's number to the names of its tracks.
    fn named(&self, mut tracks: Vec<Recorder>) -> Vec<Recorder> {
        tracks.iter_mut().for_each(|track| track.track.insert_str(0, &format!("rank {} ", self.seat.rank)));
        tracks
    }

    /// Folds the received partial sums of the norm in flat order: bucket by bucket, and within a bucket rank by rank.
    fn fold(&mut self) {
        let (buckets, ranks) = (self.slices.layout().count(), self.seat.board.ranks());
        while self.folded.0 < buckets {
            let (bucket, rank) = self.folded;
            let theirs = Slices::new(self.slices.layout().clone(), rank, ranks);
            let needed = self.steps * (theirs.elems() / BLOCK) as u64 + (theirs.local(bucket).end / BLOCK) as u64;
            let published = self.seat.board.published_partials(rank);
            if published.is_some_and(|published| published < needed) {
                return;
            }
            let flat = if published.is_some() { theirs.global(bucket) } else { 0..0 };
            for start in flat.clone().step_by(FOLDED_AT_ONCE * BLOCK) {
                let partials = &mut [0.0; FOLDED_AT_ONCE][..((flat.end - start) / BLOCK).min(FOLDED_AT_ONCE)];
                self.seat.board.read_partials(start / BLOCK, partials);
                self.norm_sq = norm::fold(self.norm_sq, partials);
            }
            self.folded = if rank + 1 == ranks { (bucket + 1, 0) } else { (bucket, rank + 1) };
        }
    }
}

#[cfg(test)]
#[path = "pulls_tests.rs"]
mod tests;
