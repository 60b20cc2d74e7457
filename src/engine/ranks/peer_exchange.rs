//! Exchange between several ranks: each rank publishes its recorded events in the progress counters ([`ProgressCounters`]), and its peers
//! copy from its memory. Gradients of ranks of other processes arrive by [`TcpTransport`] (TCP) or [`NcclTransport`] (NCCL). So do weights:
//! a rank exchanges them with its *inter-node peers*, the ranks with the same local index in other processes, and *relays* them to the
//! other local ranks, which pull them from it.
//!
//! If the local ranks compute a whole group of shares in each round, its sum is computed within the process first: each rank pulls the
//! slices that it and its inter-node peers own, and the group's sum replaces its gradient there. Only the group's sum leaves the process,
//! to the inter-node peers.
//!
//! *Record, then publish, then wait*: waiting for an event that is not yet recorded has no effect. So a rank records an event before it
//! publishes it, and its peers enqueue a wait only afterwards.

use super::exchange::{Exchange, Order, OrderWords};
use super::gradient_groups::PartialSumChain;
use super::handover::Handovers;
use super::nccl_transport::NcclTransport;
use super::rendezvous::{RankHandles, RankMemory, Rendezvous, check_same_bits};
use super::shards::Shards;
use super::tcp_transport::TcpTransport;
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::data::rows::batch;
use crate::device::{Device, DeviceSlice, EventId, Kernels, Lease, Peers, Sides, Stream};
use crate::dtype::Dtype;
use crate::engine::watch::driver_state::DriverState;
use crate::engine::watch::watchdog::Watched;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::Handover;
use crate::optim::norm::{self, BLOCK};
use crate::planner::plan::Plan;
use crate::ranks::links::ConnectionsByRank;
use crate::ranks::progress::{ProgressCounters, StepOutcome};
use crate::ranks::{NcclUniqueId, RankContext};
use crate::trace::Recorder;
use crate::units::NormSq;
use std::ops::Range;
use std::sync::Arc;

mod gradients;
mod weights;

/// Partial sums of the norm that are folded at once.
const FOLDED_AT_ONCE: usize = 64;

/// The exchange of one of several ranks.
pub(crate) struct PeerExchange<C> {
    context: RankContext,
    rendezvous: Arc<Rendezvous<C>>,
    /// Connection to ranks of other processes, if there are any.
    inter_node: Option<InterNode>,
    /// Number of meetings of all ranks between two steps.
    meetings: u64,
    slices: Slices,
    handovers: Handovers,
    /// Rendezvous entries of all ranks, once they are known.
    peers: Vec<RankHandles<C>>,
    written: Vec<EventId>,
    /// By bucket: the peers' parts of the sum are pulled, and the sum is computed.
    pulled: Vec<EventId>,
    summed: Vec<EventId>,
    /// Event of the sum that was enqueued last.
    last_summed: EventId,
    /// By bucket: the peers' weights have arrived.
    gathered: Vec<EventId>,
    /// By bucket: the weights that this rank relays have arrived; empty with one process.
    relayed: Vec<EventId>,
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
    addition: PartialSumChain,
    /// Groups are first summed within this process.
    is_grouped: bool,
    rounds: u64,
    /// Micro-batches of a share, ranks with a part of each micro-batch, and words of a part.
    per_partial_sum: usize,
    sequence_ranks: usize,
    batch_words: usize,
    room: Vec<i32>,
    /// Number of buckets, over all rounds, that were written; have their group's sum, if groups are summed here; were exchanged over NCCL;
    /// were summed; and have a sum that was reported to the driver.
    buckets_written: u64,
    buckets_grouped: u64,
    buckets_swapped: u64,
    buckets_summed: u64,
    buckets_reported: u64,
    /// Steps with a known outcome.
    steps: u64,
    /// Partial sums of the norm received in this step.
    norm_partials: usize,
    /// On rank 0: the norm folded so far in this step, and the bucket and rank of the next slice to fold.
    norm_sq: NormSq,
    folded: (usize, usize),
    /// Version of the weights; by bucket, the version that this rank has published; number of buckets not yet published in this version;
    /// and the bucket below which the relayed weights, and the peers' weights, have not arrived.
    version: u64,
    settled: Vec<u64>,
    unsettled: usize,
    unrelayed: usize,
    ungathered: usize,
}

/// Transport of slices to and from ranks of other processes.
enum InterNode {
    Tcp(Box<TcpTransport>),
    Nccl(Box<NcclTransport>),
    /// Nothing is sent: slices of mirrored ranks are pulled like those of local ranks.
    Images,
}

/// Connection of a rank to its peers.
pub(crate) enum PeerTransport {
    /// All ranks are local.
    Memory,
    /// TCP connections to each rank of another process, through host memory.
    Tcp(ConnectionsByRank),
    /// NCCL, from device to device.
    Nccl(NcclUniqueId),
    /// The peers are mirrored ranks; the simulated device stands for their memory.
    Images,
}

impl InterNode {
    fn new<D: Device>(
        dev: &mut D,
        plan: &Plan,
        slices: &Slices,
        local_ranks: Range<usize>,
        transport: PeerTransport,
    ) -> Result<Option<Self>> {
        Ok(match transport {
            PeerTransport::Memory => None,
            PeerTransport::Images => Some(Self::Images),
            PeerTransport::Tcp(connections) => Some(Self::Tcp(Box::new(TcpTransport::new(dev, plan, slices, connections)?))),
            PeerTransport::Nccl(key) => Some(Self::Nccl(Box::new(NcclTransport::new(
                dev,
                slices,
                (local_ranks, plan.sums_within()),
                (key, plan.site.cuda_libraries.clone()),
            )?))),
        })
    }

    fn settle_down(&mut self, memory: &RankMemory) {
        match self {
            Self::Tcp(tcp) => tcp.settle_down(memory.clone()),
            Self::Nccl(nccl) => nccl.settle_down(memory.clone()),
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
            ringed_elems: plan.placement.rings.weights.map_or(0, |ring| ring.ringed_elems),
            kept: lease.alloc(dev, "gradient slices", kept.len(), plan.recipe.numerics.dtype)?,
            kept_from: kept.start,
        })
    }
}

impl<C> PeerExchange<C> {
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Kernels>(
        dev: &mut D,
        plan: &Plan,
        context: RankContext,
        rendezvous: Arc<Rendezvous<C>>,
        transport: PeerTransport,
    ) -> Result<Self> {
        let (count, ranks) = (plan.placement.layout.count(), context.progress.ranks());
        let slices = Slices::new(plan.placement.layout.clone(), context.rank, ranks);
        let mut events = |count| (0..count).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let [written, gathered, pulled, summed] = [events(count)?, events(count)?, events(count)?, events(count)?];
        let relayed = events(if matches!(transport, PeerTransport::Memory) { 0 } else { count })?;
        let kept_sums = plan.kept_sums();
        let whole_words = batch::arrays(plan.recipe.separates_documents()) * plan.recipe.step.micro_batch * plan.recipe.step.seq_length;
        let mut lease = Lease::default();
        Ok(Self {
            own: SliceMemory::take(&mut lease, dev, plan, &slices)?,
            inter_node: InterNode::new(dev, plan, &slices, context.progress.local_ranks(), transport)?,
            lease,
            written,
            gathered,
            relayed,
            pulled,
            last_summed: summed[0],
            summed,
            fetched: dev.event()?,
            fetches: 0,
            is_bringing: false,
            staging: dev.alloc("peers' gradients", (ranks - 1) * slices.slice_elems(), plan.recipe.numerics.dtype)?,
            sums: dev.alloc("gradient sums", slices.elems() * kept_sums, Dtype::Float32)?,
            kept_sums,
            addition: PartialSumChain::of(plan),
            is_grouped: plan.sums_within(),
            rounds: (plan.recipe.step.shares / ranks) as u64,
            per_partial_sum: plan.micro_batches_per_partial_sum(),
            sequence_ranks: plan.recipe.step.sequence_ranks,
            batch_words: plan.batch_words(),
            room: if context.rank == 0 { vec![0; whole_words] } else { Vec::new() },
            handovers: Handovers::new(dev, context.rank, plan.recipe.step.sequence_ranks)?,
            peers: Vec::new(),
            buckets_written: 0,
            buckets_grouped: 0,
            buckets_swapped: 0,
            buckets_summed: 0,
            buckets_reported: 0,
            steps: 0,
            norm_partials: 0,
            norm_sq: NormSq(0.0),
            folded: (0, 0),
            version: 0,
            settled: vec![0; count],
            unsettled: 0,
            unrelayed: 0,
            ungathered: 0,
            slices,
            context,
            rendezvous,
            meetings: 0,
        })
    }

    fn buckets(&self) -> u64 {
        self.written.len() as u64
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<C> {
        let own = self.context.rank;
        (0..self.context.progress.ranks()).filter(move |rank| *rank != own)
    }

    /// The local rank that receives the weights of `owner` first.
    fn relay_of(&self, owner: usize) -> usize {
        let local_ranks = self.context.progress.local_ranks();
        local_ranks.start + owner % local_ranks.len()
    }

    /// The rank that computes a part of a step's micro-batches, and the part's index on that rank. Shares of the same micro-batches are
    /// consecutive.
    fn part_of_rank(&self, part: usize) -> (usize, usize) {
        let (micro_batch, place) = (part / self.sequence_ranks, part % self.sequence_ranks);
        let (partial_sum, within) = (micro_batch / self.per_partial_sum * self.sequence_ranks + place, micro_batch % self.per_partial_sum);
        let ranks = self.context.progress.ranks();
        (partial_sum % ranks, partial_sum / ranks * self.per_partial_sum + within)
    }

    /// The part at index `place` of this rank's memory.
    fn part_at(&self, place: usize) -> usize {
        let (round, within) = (place / self.per_partial_sum, place % self.per_partial_sum);
        let partial_sum = round * self.context.progress.ranks() + self.context.rank;
        let micro_batch = partial_sum / self.sequence_ranks * self.per_partial_sum + within;
        micro_batch * self.sequence_ranks + partial_sum % self.sequence_ranks
    }

    /// Waits for progress counters outside of a step's event loop.
    fn wait_until(&self, ready: impl Fn() -> bool) -> Result<()> {
        while !ready() {
            self.context.check()?;
            if !self.context.pass_idle()? {
                self.context.progress.bell(self.context.rank).wait_until(|| ready() || self.context.progress.has_failed());
            }
        }
        self.context.check()
    }

    /// Like `wait_until`, but keeps sending and receiving slices for peers meanwhile.
    fn wait_serving<D: Device>(&mut self, dev: &mut D, ready: impl Fn(&ProgressCounters) -> bool) -> Result<()> {
        let progress = self.context.progress.clone();
        if self.inter_node.is_none() {
            return self.wait_until(|| ready(&progress));
        }
        let bell = progress.bell(self.context.rank);
        loop {
            let rung = bell.rings();
            self.tcp().map_or(Ok(()), |inter_node| inter_node.serve(dev))?;
            self.context.check()?;
            if ready(&progress) {
                return Ok(());
            }
            // The doorbell rings for everything that arrives from peers. Copies of this device do not ring it on every device, so it is
            // polled while they are pending.
            let is_quiet = match &self.inter_node {
                Some(InterNode::Tcp(inter_node)) => inter_node.is_quiet(),
                Some(InterNode::Nccl(nccl)) => nccl.is_quiet(dev)?,
                Some(InterNode::Images) | None => true,
            };
            if is_quiet || !dev.idle()? {
                bell.wait(rung);
            }
        }
    }

    fn tcp(&mut self) -> Option<&mut TcpTransport> {
        if let Some(InterNode::Tcp(tcp)) = &mut self.inter_node { Some(tcp) } else { None }
    }

    /// Waits until all ranks have arrived, between two steps.
    pub(in crate::engine) fn meet_peers(&mut self) -> Result<()> {
        self.meetings += 1;
        self.context.progress.publish_met(self.context.rank);
        self.wait_until(|| self.context.progress.all_met(self.meetings))
    }
}

impl<D: Kernels + Peers> Exchange<D> for PeerExchange<D::PeerHandle> {
    fn sums_on(&self) -> Stream {
        Stream::Reduce
    }

    fn slices(&self) -> &Slices {
        &self.slices
    }

    fn announce(&mut self, plan: &Plan) {
        if self.context.rank == 0 {
            self.rendezvous.announce(plan.clone());
        }
    }

    fn leave(&mut self, dev: &mut D) -> Result<()> {
        self.rendezvous.leave(self.context.rank);
        self.peers.clear();
        dev.leave()?;
        self.meet_peers()?;
        dev.reclaim()
    }

    fn rearrange(&mut self, (dev, _): Sides<'_, D>, layout: &BucketLayout) -> Result<()> {
        self.slices = Slices::new(layout.clone(), self.context.rank, self.context.progress.ranks());
        self.lease.give_back_device(dev)
    }

    fn take(&mut self, (dev, _): Sides<'_, D>, plan: &Plan) -> Result<()> {
        self.own = SliceMemory::take(&mut self.lease, dev, plan, &self.slices)?;
        Ok(())
    }

    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        refusal.iter().for_each(|why| self.rendezvous.refuse(self.context.rank, why.to_string()));
        self.meet_peers()?;
        Ok(self.rendezvous.refusal().map(|(rank, why)| self.context.progress.error_of(rank, why)))
    }

    fn introduce(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, driver_state: &Arc<DriverState>) {
        let memory = RankMemory { shards: self.own.shards.clone(), ..memory };
        self.inter_node.iter_mut().for_each(|inter_node| inter_node.settle_down(&memory));
        let (peer_handle, products) = (dev.peer_handle(), dev.product_algorithms());
        let (written, pulled, driver_state) = (self.written.clone(), self.pulled.clone(), driver_state.clone());
        let (relayed, fetched, handed) = (self.relayed.clone(), self.fetched, self.handovers.events());
        self.rendezvous.enter(
            self.context.rank,
            RankHandles { device: peer_handle, memory, written, pulled, stepped, relayed, fetched, handed, driver: driver_state, products },
        );
    }

    fn exchange_handles(&mut self, dev: &mut D) -> Result<()> {
        self.peers = self.rendezvous.handles(self.context.progress.ranks());
        check_same_bits(&self.peers[self.context.rank].products, &self.peers[0].products)?;
        dev.admit(self.context.clone(), self.peers.iter().map(|peer| peer.device.clone()).collect())
    }

    fn connect(&mut self, dev: &mut D) -> Result<()> {
        if self.inter_node.is_none() {
            return Ok(());
        }
        self.meet_peers()?;
        let Some(InterNode::Nccl(nccl)) = &mut self.inter_node else { return Ok(()) };
        nccl.connect(dev, self.staging)
    }

    fn meet_again(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, driver_state: &Arc<DriverState>) -> Result<()> {
        Exchange::introduce(self, dev, memory, stepped, driver_state);
        self.meet_peers()?;
        Exchange::exchange_handles(self, dev)
    }

    fn hand_over(&mut self, dev: &mut D) -> Result<()> {
        self.handovers.publish(dev, &self.context)
    }

    fn is_handed_over(&self) -> bool {
        self.handovers.is_there(&self.context.progress)
    }

    fn take_over(&mut self, dev: &mut D, model: &Model, what: (Handover, usize)) -> Result<()> {
        self.handovers.pull(dev, &self.peers, model, what)
    }

    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool> {
        let written = self.written[bucket];
        let round = self.buckets_written / self.buckets();
        dev.record(written, Stream::Compute)?;
        if let Some(inter_node) = self.flat_sockets() {
            inter_node.send_grads(dev, bucket, round, written)?;
        }
        self.buckets_written += 1;
        self.context.progress.publish_written(self.context.rank);
        self.context.pass()?;
        self.swap_written(dev, grads).map(|()| false)
    }

    fn poll(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<Option<usize>> {
        // A rank that waited here for a failed peer would wait forever.
        self.context.check()?;
        self.group_written(dev, grads, self.buckets_written)?;
        loop {
            if self.buckets_reported == self.buckets_summed {
                // Leaves the host free for other work while the device is far behind.
                let is_next = self.buckets_summed < self.buckets_written && self.has_parts(dev)? && dev.has_room(Stream::Reduce)?;
                if !is_next {
                    return Ok(None);
                }
                self.sum_next(dev, grads)?;
            }
            let (bucket, round) = self.place_of(self.buckets_reported);
            self.buckets_reported += 1;
            if round + 1 == self.rounds {
                return Ok(Some(bucket));
            }
        }
    }

    fn is_summed(&self) -> bool {
        self.buckets_reported == self.buckets_written
    }

    fn may_overwrite(&mut self, dev: &mut D, bucket: usize) -> Result<bool> {
        let before_round = self.buckets_written.saturating_sub(1) / self.buckets() * self.buckets();
        let needed = before_round + bucket as u64 + 1;
        if self.buckets_summed < needed || !self.context.progress.all_pulled(needed) {
            return Ok(false);
        }
        // Exchanges over NCCL are already enqueued before any later work. Sockets are asked last, because they enqueue a wait once
        // everything has left.
        if !self.tcp().map_or(Ok(true), |inter_node| inter_node.may_overwrite(dev))? {
            return Ok(false);
        }
        // Waits for this bucket and those before it, but not for later sums.
        dev.wait(Stream::Compute, self.summed[bucket])?;
        let mut local_ranks = self.context.progress.local_ranks().filter(|mate| *mate != self.context.rank);
        local_ranks.try_for_each(|mate| dev.wait_for(Stream::Compute, mate, self.peers[mate].pulled[bucket]))?;
        Ok(true)
    }

    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, local: usize) -> DeviceSlice {
        match local.checked_sub(self.own.kept_from) {
            Some(kept) if kept < self.own.kept.elems() => self.own.kept.slice(kept, flat.len()),
            _ => grads.slice(flat.start, flat.len()),
        }
    }

    fn add_norm_partials(&mut self, norm_partials: &[f32]) {
        let local = self.norm_partials * BLOCK..(self.norm_partials + norm_partials.len()) * BLOCK;
        let mut rest = norm_partials;
        for (flat, _) in self.slices.pieces(local) {
            let (these, others) = rest.split_at(flat.len() / BLOCK);
            self.context.progress.write_norm_partials(flat.start / BLOCK, these);
            rest = others;
        }
        self.norm_partials += norm_partials.len();
        self.context.progress.publish_norm_partials(self.context.rank, norm_partials.len());
    }

    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as Exchange<D>>::publish_losses(self, losses);
        self.context.progress.publish_report(self.context.rank, nonfinite, step);
    }

    fn publish_losses(&mut self, losses: &[f32]) {
        let (rank, ranks) = (self.context.rank, self.context.progress.ranks());
        losses.iter().enumerate().for_each(|(round, &loss)| self.context.progress.write_loss(round * ranks + rank, loss));
    }

    fn losses(&self) -> f64 {
        self.context.progress.losses()
    }

    fn outcome(&mut self, step: u64) -> Option<StepOutcome> {
        if self.context.rank == 0 && self.context.progress.outcome(step).is_none() {
            self.fold();
            let is_whole = self.folded.0 == self.slices.layout().count();
            if let Some((nonfinite, loss)) = self.context.progress.reports(step).filter(|_| is_whole) {
                self.context.progress.publish_outcome(step, StepOutcome { norm_sq: self.norm_sq.0, nonfinite, loss });
            }
        }
        let outcome = self.context.progress.outcome(step)?;
        (self.steps, self.norm_partials, self.norm_sq, self.folded) = (self.steps + 1, 0, NormSq(0.0), (0, 0));
        Some(outcome)
    }

    fn next_version(&mut self) {
        assert_eq!(self.ungathered, 0, "the weights changed before the last ones had arrived");
        self.version += 1;
        let count = self.settled.len();
        (self.unsettled, self.unrelayed, self.ungathered) = (count, count, count);
        self.tcp().into_iter().for_each(TcpTransport::next_version);
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
        let stepped = self.peers[self.context.rank].stepped[bucket];
        self.tcp().into_iter().for_each(|inter_node| inter_node.send_weights(bucket, stepped));
        self.context.progress.publish_settled(self.context.rank, bucket, self.version);
    }

    fn gather(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        self.tcp().map_or(Ok(()), |inter_node| inter_node.serve(dev))?;
        self.take_in(dev)?;
        self.take_images(dev)?;
        self.pull_settled(dev, weights)
    }

    fn to_swap(&self, bucket: usize) -> Range<usize> {
        if matches!(self.inter_node, Some(InterNode::Nccl(_))) { bucket..self.unrelayed.max(bucket) } else { 0..0 }
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
        if let Some(InterNode::Nccl(nccl)) = &self.inter_node { nccl.passed() } else { 0 }
    }

    fn own_weights(&self, weights: DeviceSlice, flat: &Range<usize>, local: usize) -> DeviceSlice {
        self.own.shards.own(&self.slices, local, flat.len()).unwrap_or_else(|| weights.slice(flat.start, flat.len()))
    }

    fn fetches_ahead(&self) -> bool {
        self.own.shards.come_with_fetches() && matches!(self.inter_node, Some(InterNode::Nccl(_)))
    }

    fn bring(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        self.bring_weights(dev, flat)
    }

    fn is_brought(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        self.take_brought(dev, flat)
    }

    fn fetch(&mut self, dev: &mut D, weights: DeviceSlice, flat: Range<usize>) -> Result<()> {
        let (mut buckets, own) = (self.slices.layout().overlapping(flat.clone()), self.context.rank);
        buckets.try_for_each(|bucket| self.pull_weights(dev, Stream::Gather, weights, (bucket, flat.clone()), |rank| rank != own))?;
        if self.own.shards.come_with_fetches() {
            dev.record(self.fetched, Stream::Gather)?;
            self.context.progress.publish_fetched(self.context.rank);
        }
        Ok(())
    }

    fn place_own(&self, dev: &mut D, weights: DeviceSlice, flat: &Range<usize>) -> Result<()> {
        let (mut buckets, own) = (self.slices.layout().overlapping(flat.clone()), self.context.rank);
        buckets.try_for_each(|bucket| self.pull_weights(dev, Stream::Compute, weights, (bucket, flat.clone()), |rank| rank == own))
    }

    fn is_gathered(&self, bucket: usize) -> bool {
        self.ungathered <= bucket
    }

    fn arrive(&self, dev: &mut D, bucket: usize) -> Result<()> {
        dev.wait(Stream::Compute, self.gathered[bucket])
    }

    fn check(&self) -> Result<()> {
        self.context.check()
    }

    fn attribute(&self, error: Error) -> Error {
        self.context.attribute(error)
    }

    fn watched(&self, _: Arc<DriverState>) -> Watched {
        // The driver state of ranks of other processes is not known here; their publications are in the progress counters.
        let known = self.peers.iter().take(self.context.progress.local_ranks().len());
        Watched { ranks: known.map(|peer| peer.driver.clone()).collect(), progress: Some(self.context.progress.clone()) }
    }

    fn waited_ns(&self, dev: &D) -> u64 {
        dev.waited_for_peers_ns()
    }

    fn published_ns(&self) -> u64 {
        self.context.progress.published_ns(self.context.rank)
    }

    fn publish_amounts(&self, amounts: &mut dyn Iterator<Item = u64>) {
        self.context.progress.write_amounts(self.context.rank, amounts);
    }

    fn amounts_of(&self, rank: usize, amounts: &mut dyn Iterator<Item = &mut u64>) {
        amounts.zip(self.context.progress.amounts(rank)).for_each(|(place, amount)| *place = amount);
    }

    fn publish_expert_rows(&self, rows: &[u64]) {
        self.context.progress.write_expert_rows(self.context.rank, rows);
    }

    fn add_expert_rows(&self, rank: usize, rows: &mut [u64]) {
        rows.iter_mut().zip(self.context.progress.expert_rows(rank)).for_each(|(rows, others)| *rows = rows.saturating_add(others));
    }

    fn publish_tracks(&self, tracks: Vec<Recorder>) {
        self.context.progress.publish_tracks(self.context.rank, self.named(tracks));
    }

    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        let mut all = self.named(own);
        self.peers().for_each(|rank| all.extend_from_slice(self.context.progress.tracks(rank)));
        all
    }

    fn pass(&self) -> Result<()> {
        self.context.pass()
    }

    fn pass_idle(&self) -> Result<()> {
        self.context.pass_idle().map(|_| ())
    }

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

    fn announced(&self) -> Option<Plan> {
        self.rendezvous.announced()
    }

    fn place(&self, part: usize) -> Option<usize> {
        let (rank, place) = self.part_of_rank(part);
        (rank == self.context.rank).then_some(place)
    }

    fn room(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.room)
    }

    fn keep_room(&mut self, room: Vec<i32>) {
        self.room = room;
    }

    fn send_part(&mut self, part: usize, words: &mut dyn Iterator<Item = &[i32]>) {
        self.context.progress.post(self.context.rank, part * self.batch_words, words.flatten().map(|&word| word as u32));
    }

    fn sent_batch(&self, place: usize, memory: &mut [i32]) {
        let start = self.part_at(place) * self.batch_words;
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
    /// Adds this rank's number to the names of its tracks.
    fn named(&self, mut tracks: Vec<Recorder>) -> Vec<Recorder> {
        tracks.iter_mut().for_each(|track| track.track.insert_str(0, &format!("rank {} ", self.context.rank)));
        tracks
    }

    /// Folds the received partial sums of the norm in flat order: bucket by bucket, and within a bucket rank by rank.
    fn fold(&mut self) {
        let (buckets, ranks) = (self.slices.layout().count(), self.context.progress.ranks());
        while self.folded.0 < buckets {
            let (bucket, rank) = self.folded;
            let theirs = Slices::new(self.slices.layout().clone(), rank, ranks);
            let needed = self.steps * (theirs.elems() / BLOCK) as u64 + (theirs.local(bucket).end / BLOCK) as u64;
            let published = self.context.progress.published_norm_partials(rank);
            if published.is_some_and(|published| published < needed) {
                return;
            }
            let flat = if published.is_some() { theirs.global(bucket) } else { 0..0 };
            for start in flat.clone().step_by(FOLDED_AT_ONCE * BLOCK) {
                let norm_partials = &mut [0.0; FOLDED_AT_ONCE][..((flat.end - start) / BLOCK).min(FOLDED_AT_ONCE)];
                self.context.progress.read_norm_partials(start / BLOCK, norm_partials);
                self.norm_sq = norm::fold(self.norm_sq, norm_partials);
            }
            self.folded = if rank + 1 == ranks { (bucket + 1, 0) } else { (bucket, rank + 1) };
        }
    }
}

#[cfg(test)]
#[path = "peer_exchange_tests.rs"]
mod tests;
