//! The weights of ranks, as they become final: what a rank carries for its process, and what each pulls of the others.

use super::{Far, Pulls};
use crate::device::{Device, DeviceSlice, Kernels, Peers, Stream};
use crate::error::Result;
use std::ops::Range;

impl<C> Pulls<C> {
    /// The weights of `bucket` that this rank carries are there, as far as that is enqueued.
    pub(super) fn carry(&mut self, bucket: usize) {
        self.uncarried = bucket;
        self.seat.board.publish_carried(self.seat.rank);
    }

    /// Enqueues copies of the others' weights that are final, in forward order; true when there were any.
    pub(super) fn pull_settled<D: Kernels + Peers<Card = C>>(&mut self, dev: &mut D, weights: DeviceSlice) -> Result<bool> {
        let before = self.ungathered;
        while let Some(bucket) = self.ungathered.checked_sub(1)
            // Its own, too: a slice that it keeps alone is copied to its place like the others'.
            && self.seat.board.mates().all(|rank| self.seat.board.settled(rank, bucket) >= self.version)
            && (self.far.is_none() || self.seat.board.carried_by_all() >= self.carried_up_to(bucket))
            // The first modules are computed while later weights come: the host has other things to do than to wait for them.
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

    /// Of how many buckets a rank has carried the weights when it has those of `bucket` in this version.
    fn carried_up_to(&self, bucket: usize) -> u64 {
        self.version * self.buckets() - bucket as u64
    }

    /// Records what has come by sockets of the weights that this rank carries, in forward order.
    pub(super) fn take_in<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        while let Some(bucket) = self.uncarried.checked_sub(1)
            && self.sockets().is_some_and(|far| far.has_weights(bucket))
        {
            dev.record(self.carried[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    /// The same of mirror images, which have settled what this rank has: copies of it.
    pub(super) fn take_images<D: Kernels + Peers<Card = C>>(&mut self, dev: &mut D) -> Result<()> {
        let own = self.seat.rank;
        while let (Some(Far::Images), Some(bucket)) = (&self.far, self.uncarried.checked_sub(1))
            && self.settled[bucket] >= self.version
        {
            dev.wait(Stream::Gather, self.peers[own].stepped[bucket])?;
            self.copy_images(dev, bucket, &self.own.shards.passed_once(&self.slices))?;
            dev.record(self.carried[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    fn copy_images<D: Peers<Card = C>>(&self, dev: &mut D, bucket: usize, flat: &Range<usize>) -> Result<()> {
        let own = self.seat.rank;
        for owner in self.others().filter(|owner| self.carrier(*owner) == own) {
            let [source, place] = [owner, own].map(|rank| self.peers[rank].memory.weights_within(&self.slices, owner, bucket, flat));
            if place.elems() > 0 {
                dev.pull(Stream::Gather, owner, source, place)?;
            }
        }
        Ok(())
    }

    /// Enqueues, on rails, the exchange of the weights of `bucket` within `flat`, in a version or with a fetch.
    pub(super) fn swap_within<D: Peers<Card = C>>(&mut self, dev: &mut D, (bucket, nth): (usize, u64), flat: &Range<usize>) -> Result<()> {
        let events = [self.peers[self.seat.rank].stepped[bucket], self.carried[bucket]];
        if let Some(Far::Rails(rails)) = &mut self.far { rails.swap_weights(dev, (bucket, nth), flat, events) } else { Ok(()) }
    }

    /// Has the namesakes' weights of `flat` come to their flat places here, as soon as all ranks of this process have pulled what they fetched
    /// before; whether that is so.
    pub(super) fn bring_weights<D: Peers<Card = C>>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        if !self.seat.board.all_fetched(2 * self.fetches) {
            return Ok(false);
        }
        let (own, is_swapped) = (self.seat.rank, matches!(self.far, Some(Far::Rails(_))));
        let stream = if is_swapped { Stream::Compute } else { Stream::Gather };
        // Its own, too: whoever waits in a swap has done what others wait for.
        dev.wait(stream, self.fetched)?;
        for mate in self.seat.board.mates().filter(|mate| *mate != own && self.fetches > 0) {
            dev.wait_for(stream, mate, self.peers[mate].fetched)?;
        }
        (self.fetches, self.is_bringing) = (self.fetches + 1, true);
        for bucket in self.slices.layout().overlapping(flat.clone()).rev() {
            self.swap_within(dev, (bucket, self.fetches), flat)?;
            if let Some(Far::Images) = &self.far {
                dev.wait(Stream::Gather, self.peers[own].stepped[bucket])?;
                self.copy_images(dev, bucket, flat)?;
            }
        }
        let stepped = &self.peers[own].stepped;
        if let Some(Far::Sockets(far)) = &mut self.far {
            far.fetch(flat, stepped);
        }
        Ok(true)
    }

    /// Publishes what has come of that; whether all ranks of this process have what they carry.
    pub(super) fn take_brought<D: Device>(&mut self, dev: &mut D, flat: &Range<usize>) -> Result<bool> {
        let has_come = self.sockets().is_none_or(|far| far.has_fetched());
        if self.is_bringing && has_come {
            if !matches!(self.far, Some(Far::Rails(_))) {
                let mut buckets = self.slices.layout().overlapping(flat.clone());
                buckets.try_for_each(|bucket| dev.record(self.carried[bucket], Stream::Gather))?;
            }
            self.is_bringing = false;
            self.seat.board.publish_fetched(self.seat.rank);
        }
        Ok(self.seat.board.all_fetched(2 * self.fetches - 1))
    }

    /// Enqueues copies of the part of `bucket` within `flat` from those of this process that have its slices and are `wanted`: from itself, too,
    /// where nobody has its slice in its place.
    pub(super) fn pull_weights<D: Kernels + Peers<Card = C>>(
        &self,
        dev: &mut D,
        stream: Stream,
        weights: DeviceSlice,
        (bucket, flat): (usize, Range<usize>),
        wanted: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let own = self.seat.rank;
        let carriers = (0..self.peers.len()).map(|owner| (owner, self.carrier(owner)));
        for (owner, carrier) in carriers.filter(|(_, carrier)| wanted(*carrier)) {
            let part = self.slices.within(owner, bucket, &flat);
            if part.is_empty() || carrier == own && !self.own.shards.has(owner, bucket) {
                continue;
            }
            let there = &self.peers[carrier];
            let source = there.memory.weights_within(&self.slices, owner, bucket, &flat);
            let ready = if carrier == owner { there.stepped[bucket] } else { there.carried[bucket] };
            if carrier == own {
                dev.wait(stream, ready)?
            } else {
                dev.wait_for(stream, carrier, ready)?
            }
            dev.pull(stream, carrier, source, weights.slice(part.start, part.len()))?;
        }
        Ok(())
    }
}
