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
        {
            let whole = self.slices.layout().range(bucket);
            self.pull_weights(dev, weights, bucket, whole.start.max(self.own.ringed_elems)..whole.end)?;
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
            for owner in self.others().filter(|owner| self.carrier(*owner) == own) {
                let [source, place] = [owner, own].map(|rank| self.peers[rank].memory.weights_of(&self.slices, owner, bucket));
                dev.pull(Stream::Gather, owner, source, place)?;
            }
            dev.record(self.carried[bucket], Stream::Gather)?;
            self.carry(bucket);
        }
        Ok(())
    }

    /// Enqueues copies of the part of `bucket` within `flat` from whoever of this process has each slice: from itself, too, where nobody has it in
    /// its place.
    pub(super) fn pull_weights<D: Kernels + Peers<Card = C>>(
        &self,
        dev: &mut D,
        weights: DeviceSlice,
        bucket: usize,
        flat: Range<usize>,
    ) -> Result<()> {
        let (is_sharded, own) = (self.own.shards.has(bucket), self.seat.rank);
        for (owner, carrier) in (0..self.peers.len()).map(|owner| (owner, self.carrier(owner))) {
            let slice = self.slices.of(owner, bucket);
            let part = slice.start.max(flat.start)..slice.end.min(flat.end);
            if part.is_empty() || carrier == own && !is_sharded {
                continue;
            }
            let there = &self.peers[carrier];
            let source = there.memory.weights_of(&self.slices, owner, bucket).slice(part.start - slice.start, part.len());
            let ready = if carrier == owner { there.stepped[bucket] } else { there.carried[bucket] };
            if carrier == own {
                dev.wait(Stream::Gather, ready)?
            } else {
                dev.wait_for(Stream::Gather, carrier, ready)?
            }
            dev.pull(Stream::Gather, carrier, source, weights.slice(part.start, part.len()))?;
        }
        Ok(())
    }
}
