//! Weights, once they are final: those that a rank relays to its process, and those that it pulls from its peers.

use super::{InterNode, PeerExchange};
use crate::device::{Device, DeviceSlice, Kernels, Peers, Stream};
use crate::error::Result;
use std::ops::Range;

impl<C> PeerExchange<C> {
    /// Publishes that the relayed weights of `bucket` have arrived or are enqueued.
    pub(super) fn carry(&mut self, bucket: usize) {
        self.unrelayed = bucket;
        self.context.progress.publish_relayed(self.context.rank);
    }

    /// Enqueues copies of the peers' final weights in forward order. Returns true if there were any.
    pub(super) fn pull_settled<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        let before = self.ungathered;
        while let Some(bucket) = self.ungathered.checked_sub(1)
            // This rank's own slice, too: a slice outside of its flat address is copied there like those of the peers.
            && self.context.progress.local_ranks().all(|rank| self.context.progress.settled(rank, bucket) >= self.version)
            && (self.inter_node.is_none() || self.context.progress.relayed_to_all() >= self.carried_up_to(bucket))
            // Leaves the host free for other work: the first modules are computed while later weights arrive.
            && dev.has_room(Stream::Gather)?
        {
            let whole = self.slices.layout().range(bucket);
            let beyond_the_ring = whole.start.max(self.own.ringed_elems)..whole.end;
            self.pull_weights(dev, Stream::Gather, weights, (bucket, beyond_the_ring), |_| true)?;
            dev.record(self.gathered[bucket], Stream::Gather)?;
            self.ungathered = bucket;
        }
        Ok(self.ungathered < before)
    }

    /// Number of buckets that a rank has relayed once it has those of `bucket` in this version.
    fn carried_up_to(&self, bucket: usize) -> u64 {
        self.version * self.buckets() - bucket as u64
    }

    /// Records the relayed weights that have arrived over TCP, in forward order.
    pub(super) fn take_in<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        while let Some(bucket) = self.unrelayed.checked_sub(1)
            && self.tcp().is_some_and(|inter_node| inter_node.has_weights(bucket))
        {
            dev.record(self.relayed[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    /// Like `take_in`, for mirrored ranks: their weights are copies of this rank's own.
    pub(super) fn take_images<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D) -> Result<()> {
        let own = self.context.rank;
        while let (Some(InterNode::Images), Some(bucket)) = (&self.inter_node, self.unrelayed.checked_sub(1))
            && self.settled[bucket] >= self.version
        {
            dev.wait(Stream::Gather, self.peers[own].stepped[bucket])?;
            self.copy_images(dev, bucket, &self.own.shards.passed_once(&self.slices))?;
            dev.record(self.relayed[bucket], Stream::Gather)?;
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
    pub(super) fn swap_within<D: Peers<PeerHandle = C>>(
        &mut self,
        dev: &mut D,
        (bucket, nth): (usize, u64),
        flat: &Range<usize>,
    ) -> Result<()> {
        let events = [self.peers[self.context.rank].stepped[bucket], self.relayed[bucket]];
        if let Some(InterNode::Nccl(nccl)) = &mut self.inter_node { nccl.swap_weights(dev, (bucket, nth), flat, events) } else { Ok(()) }
    }

    /// Starts to receive the inter-node peers' weights of `flat` at their flat addresses, once all local ranks have pulled the weights that
    /// they fetched before. Returns whether it has started.
    pub(super) fn bring_weights<D: Peers<PeerHandle = C>>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        if !self.context.progress.all_fetched(2 * self.fetches) {
            return Ok(false);
        }
        let (own, is_swapped) = (self.context.rank, matches!(self.inter_node, Some(InterNode::Nccl(_))));
        let stream = if is_swapped { Stream::Compute } else { Stream::Gather };
        // Waits for this rank's own pulls too, so that a rank that blocks in an exchange has completed its part for its peers.
        dev.wait(stream, self.fetched)?;
        for mate in self.context.progress.local_ranks().filter(|mate| *mate != own && self.fetches > 0) {
            dev.wait_for(stream, mate, self.peers[mate].fetched)?;
        }
        (self.fetches, self.is_bringing) = (self.fetches + 1, true);
        for bucket in self.slices.layout().overlapping(flat.clone()).rev() {
            self.swap_within(dev, (bucket, self.fetches), flat)?;
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
    pub(super) fn take_brought<D: Device>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        let has_come = self.tcp().is_none_or(|inter_node| inter_node.has_fetched());
        if self.is_bringing && has_come {
            if !matches!(self.inter_node, Some(InterNode::Nccl(_))) {
                let mut buckets = self.slices.layout().overlapping(flat.clone());
                buckets.try_for_each(|bucket| dev.record(self.relayed[bucket], Stream::Gather))?;
            }
            self.is_bringing = false;
            self.context.progress.publish_fetched(self.context.rank);
        }
        Ok(self.context.progress.all_fetched(2 * self.fetches - 1))
    }

    /// Enqueues copies of the part of `bucket` within `flat` from the local ranks that hold its slices and are `wanted`. This includes this
    /// rank itself, if its slice is not at its flat address.
    pub(super) fn pull_weights<D: Kernels + Peers<PeerHandle = C>>(
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
            let there = &self.peers[relay];
            let source = there.memory.weights_within(&self.slices, owner, bucket, &flat);
            let ready = if relay == owner { there.stepped[bucket] } else { there.relayed[bucket] };
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
