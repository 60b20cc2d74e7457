//! Weights, once they are final: those that a rank relays to its process, and those that it pulls from its peers.

use super::PeerExchange;
use super::inter_node::InterNode;
use crate::device::{Device, DeviceSlice, EventId, Kernels, Peers, Stream};
use crate::engine::ranks::exchange::WeightPort;
use crate::engine::ranks::tcp_transport::TcpTransport;
use crate::error::Result;
use std::ops::Range;

/// Events and progress of the weights that one rank publishes, relays and pulls.
pub(super) struct PeerWeights {
    /// By bucket: the peers' weights have arrived.
    gathered: Vec<EventId>,
    /// By bucket: the weights that this rank relays have arrived; empty with one process.
    relayed: Vec<EventId>,
    /// Event after the pulls of the last fetch, number of started fetches, and whether the last fetch still awaits weights that this rank
    /// relays.
    fetched: EventId,
    fetches: u64,
    is_bringing: bool,
    /// Version of the weights; by bucket, the version that this rank has published; number of buckets not yet published in this version;
    /// and the bucket below which the relayed weights, and the peers' weights, have not arrived.
    version: u64,
    settled: Vec<u64>,
    unsettled: usize,
    unrelayed: usize,
    ungathered: usize,
}

impl PeerWeights {
    /// The weights of `count` buckets, of which this rank relays some if there are several processes.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn new<D: Device>(dev: &mut D, count: usize, relays: bool) -> Result<Self> {
        let mut events = |count| (0..count).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let (gathered, relayed) = (events(count)?, events(if relays { count } else { 0 })?);
        Ok(Self {
            gathered,
            relayed,
            fetched: dev.event()?,
            fetches: 0,
            is_bringing: false,
            version: 0,
            settled: vec![0; count],
            unsettled: 0,
            unrelayed: 0,
            ungathered: 0,
        })
    }

    /// For the peers: by bucket, the events after the weights that this rank relays have arrived, and the event after its last fetch.
    pub(super) fn events(&self) -> (Vec<EventId>, EventId) {
        (self.relayed.clone(), self.fetched)
    }
}

impl<D: Kernels + Peers> WeightPort<D> for PeerExchange<D::PeerHandle> {
    fn next_version(&mut self) {
        assert_eq!(self.weights.ungathered, 0, "the weights changed before the last ones had arrived");
        self.weights.version += 1;
        let count = self.weights.settled.len();
        (self.weights.unsettled, self.weights.unrelayed, self.weights.ungathered) = (count, count, count);
        self.tcp().into_iter().for_each(TcpTransport::next_version);
    }

    fn is_owing(&self) -> bool {
        self.weights.unsettled > 0
    }

    fn is_owed(&self, bucket: usize) -> bool {
        self.weights.settled[bucket] < self.weights.version
    }

    fn settle(&mut self, bucket: usize) {
        self.weights.settled[bucket] = self.weights.version;
        self.weights.unsettled -= 1;
        let stepped = self.peers[self.context.rank].stepped[bucket];
        self.tcp().into_iter().for_each(|inter_node| inter_node.send_weights(bucket, stepped));
        self.context.progress.publish_settled(self.context.rank, bucket, self.weights.version);
    }

    fn gather(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        self.tcp().map_or(Ok(()), |inter_node| inter_node.serve(dev))?;
        self.take_in(dev)?;
        self.take_images(dev)?;
        self.pull_settled(dev, weights)
    }

    fn is_gathered(&self, bucket: usize) -> bool {
        self.weights.ungathered <= bucket
    }

    fn to_swap(&self, bucket: usize) -> Range<usize> {
        if matches!(self.inter_node, Some(InterNode::Nccl(_))) { bucket..self.weights.unrelayed.max(bucket) } else { 0..0 }
    }

    fn swap_weights(&mut self, dev: &mut D, bucket: usize) -> Result<()> {
        let (once, version) = (self.own.shards.passed_once(&self.slices), self.weights.version);
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
            dev.record(self.weights.fetched, Stream::Gather)?;
            self.context.progress.publish_fetched(self.context.rank);
        }
        Ok(())
    }

    fn place_own(&self, dev: &mut D, weights: DeviceSlice, flat: &Range<usize>) -> Result<()> {
        let (mut buckets, own) = (self.slices.layout().overlapping(flat.clone()), self.context.rank);
        buckets.try_for_each(|bucket| self.pull_weights(dev, Stream::Compute, weights, (bucket, flat.clone()), |rank| rank == own))
    }

    fn arrive(&self, dev: &mut D, bucket: usize) -> Result<()> {
        dev.wait(Stream::Compute, self.weights.gathered[bucket])
    }
}

impl<C> PeerExchange<C> {
    /// Publishes that the relayed weights of `bucket` have arrived or are enqueued.
    fn carry(&mut self, bucket: usize) {
        self.weights.unrelayed = bucket;
        self.context.progress.publish_relayed(self.context.rank);
    }

    /// Enqueues copies of the peers' final weights in forward order. Returns true if there were any.
    fn pull_settled<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        let before = self.weights.ungathered;
        while let Some(bucket) = self.weights.ungathered.checked_sub(1)
            // This rank's own slice, too: a slice outside of its flat address is copied there like those of the peers.
            && self.context.progress.local_ranks().all(|rank| self.context.progress.settled(rank, bucket) >= self.weights.version)
            && (self.inter_node.is_none() || self.context.progress.relayed_to_all() >= self.carried_up_to(bucket))
            // Leaves the host free for other work: the first modules are computed while later weights arrive.
            && dev.has_capacity(Stream::Gather)?
        {
            let whole = self.slices.layout().range(bucket);
            let beyond_the_ring = whole.start.max(self.own.ringed_elems)..whole.end;
            self.pull_weights(dev, Stream::Gather, weights, (bucket, beyond_the_ring), |_| true)?;
            dev.record(self.weights.gathered[bucket], Stream::Gather)?;
            self.weights.ungathered = bucket;
        }
        Ok(self.weights.ungathered < before)
    }

    /// Number of buckets that a rank has relayed once it has those of `bucket` in this version.
    fn carried_up_to(&self, bucket: usize) -> u64 {
        self.weights.version * self.buckets() - bucket as u64
    }

    /// Records the relayed weights that have arrived over TCP, in forward order.
    fn take_in<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        while let Some(bucket) = self.weights.unrelayed.checked_sub(1)
            && self.tcp().is_some_and(|inter_node| inter_node.has_weights(bucket))
        {
            dev.record(self.weights.relayed[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    /// Like `take_in`, for mirrored ranks: their weights are copies of this rank's own.
    fn take_images<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D) -> Result<()> {
        let own = self.context.rank;
        while let (Some(InterNode::Images), Some(bucket)) = (&self.inter_node, self.weights.unrelayed.checked_sub(1))
            && self.weights.settled[bucket] >= self.weights.version
        {
            dev.wait(Stream::Gather, self.peers[own].stepped[bucket])?;
            self.copy_images(dev, bucket, &self.own.shards.passed_once(&self.slices))?;
            dev.record(self.weights.relayed[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    fn copy_images<D: Peers<PeerHandle = C>>(&self, dev: &mut D, bucket: usize, flat: &Range<usize>) -> Result<()> {
        let own = self.context.rank;
        for owner in self.peers().filter(|owner| self.relay_of(*owner) == own) {
            let [source, place] = [owner, own].map(|rank| self.peers[rank].memory.weights_within(&self.slices, owner, bucket, flat));
            if place.elems() > 0 {
                dev.pull(Stream::Gather, owner, source, place)?;
            }
        }
        Ok(())
    }

    /// Over NCCL, enqueues the exchange of the weights of `bucket` within `flat`, for a version or a fetch.
    fn swap_within<D: Peers<PeerHandle = C>>(&mut self, dev: &mut D, (bucket, nth): (usize, u64), flat: &Range<usize>) -> Result<()> {
        let events = [self.peers[self.context.rank].stepped[bucket], self.weights.relayed[bucket]];
        if let Some(InterNode::Nccl(nccl)) = &mut self.inter_node { nccl.swap_weights(dev, (bucket, nth), flat, events) } else { Ok(()) }
    }

    /// Starts to receive the inter-node peers' weights of `flat` at their flat addresses, once all local ranks have pulled the weights that
    /// they fetched before. Returns whether it has started.
    fn bring_weights<D: Peers<PeerHandle = C>>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        if !self.context.progress.all_fetched(2 * self.weights.fetches) {
            return Ok(false);
        }
        let (own, is_swapped) = (self.context.rank, matches!(self.inter_node, Some(InterNode::Nccl(_))));
        let stream = if is_swapped { Stream::Compute } else { Stream::Gather };
        // Waits for this rank's own pulls too, so that a rank that blocks in an exchange has completed its part for its peers.
        dev.wait(stream, self.weights.fetched)?;
        for mate in self.context.progress.local_ranks().filter(|mate| *mate != own && self.weights.fetches > 0) {
            dev.wait_for(stream, mate, self.peers[mate].fetched)?;
        }
        (self.weights.fetches, self.weights.is_bringing) = (self.weights.fetches + 1, true);
        for bucket in self.slices.layout().overlapping(flat.clone()).rev() {
            self.swap_within(dev, (bucket, self.weights.fetches), flat)?;
            if let Some(InterNode::Images) = &self.inter_node {
                dev.wait(Stream::Gather, self.peers[own].stepped[bucket])?;
                self.copy_images(dev, bucket, flat)?;
            }
        }
        let stepped = &self.peers[own].stepped;
        if let Some(InterNode::Tcp(inter_node)) = &mut self.inter_node {
            inter_node.fetch(flat, stepped);
        }
        Ok(true)
    }

    /// Publishes the arrived weights of the last fetch. Returns whether all local ranks have the weights that they relay.
    fn take_brought<D: Device>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        let has_come = self.tcp().is_none_or(|inter_node| inter_node.has_fetched());
        if self.weights.is_bringing && has_come {
            if !matches!(self.inter_node, Some(InterNode::Nccl(_))) {
                let mut buckets = self.slices.layout().overlapping(flat.clone());
                buckets.try_for_each(|bucket| dev.record(self.weights.relayed[bucket], Stream::Gather))?;
            }
            self.weights.is_bringing = false;
            self.context.progress.publish_fetched(self.context.rank);
        }
        Ok(self.context.progress.all_fetched(2 * self.weights.fetches - 1))
    }

    /// Enqueues copies of the part of `bucket` within `flat` from the local ranks that hold its slices and are `wanted`. This includes this
    /// rank itself, if its slice is not at its flat address.
    fn pull_weights<D: Kernels + Peers<PeerHandle = C>>(
        &self,
        dev: &mut D,
        stream: Stream,
        weights: DeviceSlice,
        (bucket, flat): (usize, Range<usize>),
        wanted: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let own = self.context.rank;
        let carriers = (0..self.peers.len()).map(|owner| (owner, self.relay_of(owner)));
        for (owner, relay) in carriers.filter(|(_, relay)| wanted(*relay)) {
            let part = self.slices.within(owner, bucket, &flat);
            if part.is_empty() || relay == own && !self.own.shards.has(owner, bucket) {
                continue;
            }
            let peer = &self.peers[relay];
            let source = peer.memory.weights_within(&self.slices, owner, bucket, &flat);
            let ready = if relay == owner { peer.stepped[bucket] } else { peer.relayed[bucket] };
            if relay == own {
                dev.wait(stream, ready)?
            } else {
                dev.wait_for(stream, relay, ready)?
            }
            dev.pull(stream, relay, source, weights.slice(part.start, part.len()))?;
        }
        Ok(())
    }
}
