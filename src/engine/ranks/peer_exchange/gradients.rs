//! Gradients: pulls between local ranks, transfers between processes, and sums of both, bucket by bucket and round by round. Activations
//! that ranks of a sequence group exchange during the passes.

use super::PeerExchange;
use super::inter_node::InterNode;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, EventId, Kernels, PARTS_MAX, Peers, Stream};
use crate::engine::ranks::exchange::GradientPort;
use crate::engine::ranks::exchange_order::{BucketPart, ExchangeOrder};
use crate::engine::ranks::gradient_groups::{KeptSums, PartialSumChain};
use crate::engine::ranks::tcp_transport::TcpTransport;
use crate::error::Result;
use crate::model::Model;
use crate::model::sequence::Handover;
use crate::planner::plan::Plan;
use std::ops::Range;

/// Events and sums of the gradients of one rank's slices.
pub(super) struct PeerGradients {
    order: ExchangeOrder,
    /// By piece: this rank's gradient is written.
    written: Vec<EventId>,
    /// By piece: the peers' parts of the sum are pulled, and the sum is computed.
    pulled: Vec<EventId>,
    summed: Vec<EventId>,
    /// Event of the sum that was enqueued last.
    last_summed: EventId,
    /// The peers' parts of one slice.
    staging: DeviceSlice,
    /// Number of fp32 sums of each element that are kept between two rounds.
    kept_sums: usize,
    addition: PartialSumChain,
    /// Groups are first summed within this process.
    is_grouped: bool,
    /// Number of pieces, over all rounds, that were written; have their group's sum, if groups are summed here; were exchanged over NCCL;
    /// were summed; and have a sum that was reported to the driver. With several processes pieces are buckets.
    pieces_written: u64,
    pieces_grouped: u64,
    pieces_swapped: u64,
    pieces_summed: u64,
    pieces_reported: u64,
}

impl PeerGradients {
    /// # Errors
    /// `Resource` when memory is not available; errors of the device.
    pub(super) fn new<D: Device>(dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let (order, ranks, kept_sums) = (ExchangeOrder::of(plan, 0), slices.ranks(), plan.kept_sums());
        let mut events = || (0..order.count()).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let (written, pulled, summed) = (events()?, events()?, events()?);
        Ok(Self {
            order,
            written,
            pulled,
            last_summed: summed[0],
            summed,
            staging: dev.alloc("peers' gradients", (ranks - 1) * slices.slice_elems(), plan.recipe.numerics.dtype)?,
            kept_sums,
            addition: PartialSumChain::of(plan),
            is_grouped: plan.sums_within(),
            pieces_written: 0,
            pieces_grouped: 0,
            pieces_swapped: 0,
            pieces_summed: 0,
            pieces_reported: 0,
        })
    }

    /// By piece, for the peers: the events after this rank's gradient is written, and after this rank has pulled theirs.
    pub(super) fn events(&self) -> (Vec<EventId>, Vec<EventId>) {
        (self.written.clone(), self.pulled.clone())
    }

    /// Changes to the order of `plan`, between two steps.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn reorder<D: Device>(&mut self, dev: &mut D, plan: &Plan) -> Result<()> {
        self.order = ExchangeOrder::of(plan, self.pieces_written);
        for events in [&mut self.written, &mut self.pulled, &mut self.summed] {
            while events.len() < self.order.count() {
                events.push(dev.event()?);
            }
        }
        Ok(())
    }

    /// The memory that the peers' parts arrive in.
    pub(super) fn staging(&self) -> DeviceSlice {
        self.staging
    }
}

impl<D: Kernels + Peers> GradientPort<D> for PeerExchange<D::PeerHandle> {
    fn sums_on(&self) -> Stream {
        Stream::Reduce
    }

    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool> {
        let written = self.gradients.written[bucket];
        let round = self.gradients.pieces_written / self.buckets();
        dev.record(written, Stream::Compute)?;
        if let Some(inter_node) = self.flat_sockets() {
            inter_node.send_grads(dev, bucket, round, written)?;
        }
        self.publish_piece()?;
        self.swap_written(dev, grads).map(|()| false)
    }

    fn sum_range(&mut self, dev: &mut D, _grads: DeviceSlice, range: &Range<usize>, _partial_sum: usize) -> Result<bool> {
        for _ in 0..self.gradients.order.ending_in(range) {
            let (piece, _) = self.gradients.order.place_of(self.gradients.pieces_written);
            dev.record(self.gradients.written[piece], Stream::Compute)?;
            self.publish_piece()?;
        }
        Ok(false)
    }

    fn poll(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<Option<usize>> {
        // A rank that waited here for a failed peer would wait forever.
        self.context.check()?;
        self.group_written(dev, grads, self.gradients.pieces_written)?;
        loop {
            if self.gradients.pieces_reported == self.gradients.pieces_summed {
                // Leaves the host free for other work while the device is far behind.
                let is_next = self.gradients.pieces_summed < self.gradients.pieces_written
                    && self.has_parts(dev)?
                    && dev.has_capacity(Stream::Reduce)?;
                if !is_next {
                    return Ok(None);
                }
                self.sum_next(dev, grads)?;
            }
            let whole = self.gradients.order.completed_by(self.gradients.pieces_reported);
            self.gradients.pieces_reported += 1;
            if whole.is_some() {
                return Ok(whole);
            }
        }
    }

    fn is_summed(&self) -> bool {
        self.gradients.pieces_reported == self.gradients.pieces_written
    }

    fn may_overwrite(&mut self, dev: &mut D, end: usize) -> Result<bool> {
        let Some((piece, needed)) = self.gradients.order.last_exchange(self.gradients.pieces_written, end) else { return Ok(true) };
        if self.gradients.pieces_summed < needed || !self.context.progress.all_pulled(needed) {
            return Ok(false);
        }
        // Exchanges over NCCL are already enqueued before any later work. Sockets are asked last, because they enqueue a wait once
        // everything has left.
        if !self.tcp().map_or(Ok(true), |inter_node| inter_node.may_overwrite(dev))? {
            return Ok(false);
        }
        // Waits for this piece and those before it, but not for later sums.
        dev.wait(Stream::Compute, self.gradients.summed[piece])?;
        let mut local_ranks = self.context.progress.local_ranks().filter(|mate| *mate != self.context.rank);
        local_ranks.try_for_each(|mate| dev.wait_for(Stream::Compute, mate, self.peers[mate].pulled[piece]))?;
        Ok(true)
    }

    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, local: usize) -> DeviceSlice {
        match local.checked_sub(self.own.kept_from) {
            Some(kept) if kept < self.own.kept.elems() => self.own.kept.slice(kept, flat.len()),
            _ => grads.slice(flat.start, flat.len()),
        }
    }

    fn hand_over(&mut self, dev: &mut D) -> Result<()> {
        self.handovers.publish(dev, &self.context)
    }

    fn is_handed_over(&self) -> bool {
        self.handovers.has_arrived(&self.context.progress)
    }

    fn take_over(&mut self, dev: &mut D, model: &Model, what: (Handover, usize)) -> Result<()> {
        self.handovers.pull(dev, &self.peers, model, what)
    }
}

impl<C> PeerExchange<C> {
    /// Publishes that the next piece is written. Its event is recorded.
    fn publish_piece(&mut self) -> Result<()> {
        self.gradients.pieces_written += 1;
        self.name_buckets(self.context.progress.pulled(self.context.rank));
        self.context.progress.publish_written(self.context.rank);
        self.context.pass()
    }

    /// Publishes which bucket is written, and which one is summed next when `pulled` pieces are pulled.
    fn name_buckets(&self, pulled: u64) {
        let bucket = |number| self.gradients.order.piece(self.gradients.order.place_of(number).0).bucket;
        self.context.progress.name_buckets(self.context.rank, [self.gradients.pieces_written - 1, pulled].map(bucket));
    }

    /// The TCP transport, if each partial sum leaves separately.
    fn flat_sockets(&mut self) -> Option<&mut TcpTransport> {
        if self.gradients.is_grouped { None } else { self.tcp() }
    }

    /// Whether all parts of the bucket that is summed next have arrived or are enqueued: every local rank has written it, and the parts
    /// from other processes have arrived.
    fn has_parts<D: Device>(&mut self, dev: &mut D) -> Result<bool> {
        let next = self.gradients.pieces_summed;
        let (bucket, round) = ((next % self.buckets()) as usize, next / self.buckets());
        let is_here =
            if self.gradients.is_grouped { self.gradients.pieces_grouped > next } else { self.context.progress.all_written(next) };
        let has_come = match &mut self.inter_node {
            Some(InterNode::Tcp(inter_node)) => inter_node.serve(dev).and_then(|()| inter_node.has_grads(dev, bucket, round))?,
            Some(InterNode::Nccl(_)) => self.gradients.pieces_swapped > next,
            Some(InterNode::Images) | None => true,
        };
        Ok(is_here && has_come)
    }

    /// Enqueues the sums of groups that are summed within the process, up to bucket count `until`, as far as all local ranks have written
    /// them. The sums are then sent.
    fn group_written<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, until: u64) -> Result<()> {
        while self.gradients.is_grouped
            && self.gradients.pieces_grouped < until
            && self.context.progress.all_written(self.gradients.pieces_grouped)
        {
            let (bucket, round) =
                ((self.gradients.pieces_grouped % self.buckets()) as usize, self.gradients.pieces_grouped / self.buckets());
            self.sum_group(dev, grads, bucket)?;
            self.gradients.pieces_grouped += 1;
            let grouped = self.gradients.summed[bucket];
            self.tcp().map_or(Ok(()), |inter_node| inter_node.send_grads(dev, bucket, round, grouped))?;
        }
        Ok(())
    }

    /// Enqueues the group's sum of the slices of `bucket` that this rank and its inter-node peers own. It replaces this rank's own
    /// gradient, which no other rank reads there.
    fn sum_group<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<()> {
        let (local_ranks, own) = (self.context.progress.local_ranks(), self.context.rank);
        dev.wait(Stream::Reduce, self.gradients.written[bucket])?;
        for owner in (0..self.peers.len()).filter(|owner| self.relay_of(*owner) == own) {
            let flat = self.slices.of(owner, bucket);
            let place = grads.slice(flat.start, flat.len());
            let mut parts = [place; PARTS_MAX];
            for mate in local_ranks.clone().filter(|mate| *mate != own) {
                parts[mate - local_ranks.start] = self.pull_grads(dev, mate, bucket, &flat)?;
            }
            self.gradients.addition.of_one_group().add(
                dev,
                Stream::Reduce,
                (0, &parts[..local_ranks.len()]),
                KeptSums::default(),
                place,
            )?;
        }
        self.publish_pulled(dev, bucket)?;
        self.record_summed(dev, bucket)
    }

    /// Enqueues the pull of the gradient of `mate` within `flat`, a slice of `piece`; returns its destination.
    fn pull_grads<D: Peers<PeerHandle = C>>(&self, dev: &mut D, mate: usize, piece: usize, flat: &Range<usize>) -> Result<DeviceSlice> {
        let (peer, place) = (&self.peers[mate], self.staged(mate, flat.len()));
        dev.wait_for(Stream::Reduce, mate, peer.written[piece])?;
        dev.pull(Stream::Reduce, mate, peer.memory.grads.slice(flat.start, flat.len()), place)?;
        Ok(place)
    }

    fn publish_pulled<D: Device>(&self, dev: &mut D, piece: usize) -> Result<()> {
        dev.record(self.gradients.pulled[piece], Stream::Reduce)?;
        self.name_buckets(self.context.progress.pulled(self.context.rank) + 1);
        self.context.progress.publish_pulled(self.context.rank);
        Ok(())
    }

    fn record_summed<D: Device>(&mut self, dev: &mut D, piece: usize) -> Result<()> {
        self.gradients.last_summed = self.gradients.summed[piece];
        dev.record(self.gradients.last_summed, Stream::Reduce)
    }

    /// Staging buffer for the part of `peer` of a slice of `elems` elements. Local ranks use it from the front, ranks of other processes
    /// from the end.
    fn staged(&self, peer: usize, elems: usize) -> DeviceSlice {
        let local_ranks = self.context.progress.local_ranks();
        if local_ranks.contains(&peer) {
            let nth = peer - local_ranks.start - usize::from(peer > self.context.rank);
            return self.gradients.staging.slice(nth * elems, elems);
        }
        let nth = if peer < local_ranks.start { peer } else { peer - local_ranks.len() };
        let nth = if self.gradients.is_grouped { nth / local_ranks.len() } else { nth };
        self.gradients.staging.slice(self.gradients.staging.elems() - (nth + 1) * elems, elems)
    }

    /// Over NCCL, enqueues exchanges directly after a bucket is written, which is the same point on all ranks. It exchanges this bucket, or
    /// the one before if groups are summed here, so that the device computes while the group is summed. Sums that must come first wait for
    /// the other local ranks, and so does this function.
    fn swap_written<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<()> {
        let is_last = self.gradients.pieces_written.is_multiple_of(self.buckets());
        let until = self.gradients.pieces_written - u64::from(self.gradients.is_grouped && !is_last);
        while matches!(self.inter_node, Some(InterNode::Nccl(_))) && self.gradients.pieces_swapped < until {
            let next = self.gradients.pieces_swapped;
            let needed = if self.gradients.is_grouped { Some(next) } else { next.checked_sub(1) };
            self.wait_serving(dev, |progress| needed.is_none_or(|needed| progress.all_written(needed)))?;
            self.group_written(dev, grads, next + 1)?;
            while self.gradients.pieces_summed < next {
                self.sum_next(dev, grads)?;
            }
            self.swap(dev, ((next % self.buckets()) as usize, next / self.buckets()))?;
            self.gradients.pieces_swapped += 1;
        }
        Ok(())
    }

    /// Enqueues the exchange of the gradients of `bucket`, after the last sum: then the staging buffers are free, and the group is summed.
    fn swap<D: Peers<PeerHandle = C>>(&mut self, dev: &mut D, (bucket, round): (usize, u64)) -> Result<()> {
        let places: Vec<_> = (0..self.peers.len())
            .map(|peer| (peer != self.context.rank).then(|| self.staged(peer, self.slices.global(bucket).len())))
            .collect();
        let Some(InterNode::Nccl(nccl)) = &mut self.inter_node else { return Ok(()) };
        let into = |peer: usize| places[peer].expect("another's place");
        nccl.swap_grads(dev, (bucket, round), into, self.gradients.last_summed)
    }

    /// Enqueues the next sum. All of its parts have arrived or are enqueued.
    fn sum_next<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<()> {
        let (piece, round) = self.gradients.order.place_of(self.gradients.pieces_summed);
        self.sum(dev, grads, piece, round)?;
        self.gradients.pieces_summed += 1;
        Ok(())
    }

    /// Enqueues the sum of one round's parts of this rank's slice, in the order of ranks, which is the order of partial sums.
    fn sum<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, piece: usize, round: usize) -> Result<()> {
        let (flat, local) = self.own_part(piece);
        let (mut parts, mut count) = ([grads.slice(flat.start, flat.len()); PARTS_MAX], 0);
        let (local_ranks, own) = (self.context.progress.local_ranks(), self.context.rank);
        dev.wait(Stream::Reduce, self.gradients.written[piece])?;
        for rank in 0..self.peers.len() {
            if self.gradients.is_grouped && self.relay_of(rank) != own {
                continue;
            }
            if rank != own && local_ranks.contains(&rank) {
                parts[count] = self.pull_grads(dev, rank, piece, &flat)?;
            } else if rank != own {
                parts[count] = self.staged(rank, flat.len());
                match &mut self.inter_node {
                    Some(InterNode::Tcp(inter_node)) => inter_node.bring_grads(dev, rank, parts[count])?,
                    Some(InterNode::Images) => {
                        let peer = self.peers[rank].memory.grads.slice(flat.start, flat.len());
                        dev.pull(Stream::Reduce, rank, peer, parts[count])?;
                    }
                    Some(InterNode::Nccl(_)) | None => {}
                }
            }
            count += 1;
        }
        if !self.gradients.is_grouped {
            self.publish_pulled(dev, piece)?;
        }
        if let Some(InterNode::Nccl(nccl)) = &self.inter_node {
            nccl.wait(dev, Stream::Reduce)?;
        }
        let sums = self.own.sums.slice(local * self.gradients.kept_sums, flat.len() * self.gradients.kept_sums);
        let (addition, out) = (
            if self.gradients.is_grouped { self.gradients.addition.of_groups() } else { self.gradients.addition },
            GradientPort::<D>::own_grads(self, grads, &flat, local),
        );
        addition.add(dev, Stream::Reduce, (round * count, &parts[..count]), KeptSums::of(sums, flat.len()), out)?;
        self.record_summed(dev, piece)
    }

    /// The part of `piece` that this rank owns, and its first element in the local order.
    fn own_part(&self, piece: usize) -> (Range<usize>, usize) {
        let BucketPart { bucket, flat } = self.gradients.order.piece(piece);
        let part = self.slices.within(self.context.rank, *bucket, flat);
        let local = self.slices.local(*bucket).start + part.start - self.slices.global(*bucket).start;
        (part, local)
    }
}
