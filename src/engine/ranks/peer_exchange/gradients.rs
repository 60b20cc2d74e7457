//! Gradients: pulls between local ranks, transfers between processes, and sums of both, bucket by bucket and round by round.

use super::{InterNode, PeerExchange};
use crate::device::{Device, DeviceSlice, Kernels, PARTS_MAX, Peers, Stream};
use crate::engine::ranks::exchange::Exchange;
use crate::engine::ranks::gradient_groups::KeptSums;
use crate::engine::ranks::tcp_transport::TcpTransport;
use crate::error::Result;
use std::ops::Range;

impl<C> PeerExchange<C> {
    /// The bucket, and the round within its step, of the `nth` of all written buckets.
    pub(super) fn place_of(&self, nth: u64) -> (usize, u64) {
        ((nth % self.buckets()) as usize, nth / self.buckets() % self.rounds)
    }

    /// The TCP transport, if each share leaves separately.
    pub(super) fn flat_sockets(&mut self) -> Option<&mut TcpTransport> {
        if self.is_grouped { None } else { self.tcp() }
    }

    /// Whether all parts of the bucket that is summed next have arrived or are enqueued: every local rank has written it, and the parts
    /// from other processes have arrived.
    pub(super) fn has_parts<D: Device>(&mut self, dev: &mut D) -> Result<bool> {
        let next = self.buckets_summed;
        let (bucket, round) = ((next % self.buckets()) as usize, next / self.buckets());
        let is_here = if self.is_grouped { self.buckets_grouped > next } else { self.context.progress.all_written(next) };
        let has_come = match &mut self.inter_node {
            Some(InterNode::Tcp(inter_node)) => inter_node.serve(dev).and_then(|()| inter_node.has_grads(dev, bucket, round))?,
            Some(InterNode::Nccl(_)) => self.buckets_swapped > next,
            Some(InterNode::Images) | None => true,
        };
        Ok(is_here && has_come)
    }

    /// Enqueues the sums of groups that are summed within the process, up to bucket count `until`, as far as all local ranks have written
    /// them. The sums are then sent.
    pub(super) fn group_written<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, until: u64) -> Result<()> {
        while self.is_grouped && self.buckets_grouped < until && self.context.progress.all_written(self.buckets_grouped) {
            let (bucket, round) = ((self.buckets_grouped % self.buckets()) as usize, self.buckets_grouped / self.buckets());
            self.sum_group(dev, grads, bucket)?;
            self.buckets_grouped += 1;
            let grouped = self.summed[bucket];
            self.tcp().map_or(Ok(()), |inter_node| inter_node.send_grads(dev, bucket, round, grouped))?;
        }
        Ok(())
    }

    /// Enqueues the group's sum of the slices of `bucket` that this rank and its inter-node peers own. It replaces this rank's own
    /// gradient, which no other rank reads there.
    fn sum_group<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<()> {
        let (local_ranks, own) = (self.context.progress.local_ranks(), self.context.rank);
        dev.wait(Stream::Reduce, self.written[bucket])?;
        for owner in (0..self.peers.len()).filter(|owner| self.relay_of(*owner) == own) {
            let flat = self.slices.of(owner, bucket);
            let place = grads.slice(flat.start, flat.len());
            let mut parts = [place; PARTS_MAX];
            for mate in local_ranks.clone().filter(|mate| *mate != own) {
                parts[mate - local_ranks.start] = self.pull_grads(dev, mate, bucket, &flat)?;
            }
            self.addition.of_one_group().add(dev, Stream::Reduce, (0, &parts[..local_ranks.len()]), KeptSums::default(), place)?;
        }
        self.publish_pulled(dev, bucket)?;
        self.record_summed(dev, bucket)
    }

    /// Enqueues the pull of the gradient of `mate` within `flat`, a slice of `bucket`; returns its destination.
    fn pull_grads<D: Peers<PeerHandle = C>>(&self, dev: &mut D, mate: usize, bucket: usize, flat: &Range<usize>) -> Result<DeviceSlice> {
        let (theirs, place) = (&self.peers[mate], self.staged(mate, flat.len()));
        dev.wait_for(Stream::Reduce, mate, theirs.written[bucket])?;
        dev.pull(Stream::Reduce, mate, theirs.memory.grads.slice(flat.start, flat.len()), place)?;
        Ok(place)
    }

    fn publish_pulled<D: Device>(&self, dev: &mut D, bucket: usize) -> Result<()> {
        dev.record(self.pulled[bucket], Stream::Reduce)?;
        self.context.progress.publish_pulled(self.context.rank);
        Ok(())
    }

    fn record_summed<D: Device>(&mut self, dev: &mut D, bucket: usize) -> Result<()> {
        self.last_summed = self.summed[bucket];
        dev.record(self.last_summed, Stream::Reduce)
    }

    /// Staging buffer for the part of `peer` of a slice of `elems` elements. Local ranks use it from the front, ranks of other processes
    /// from the end.
    fn staged(&self, peer: usize, elems: usize) -> DeviceSlice {
        let local_ranks = self.context.progress.local_ranks();
        if local_ranks.contains(&peer) {
            let nth = peer - local_ranks.start - usize::from(peer > self.context.rank);
            return self.staging.slice(nth * elems, elems);
        }
        let nth = if peer < local_ranks.start { peer } else { peer - local_ranks.len() };
        let nth = if self.is_grouped { nth / local_ranks.len() } else { nth };
        self.staging.slice(self.staging.elems() - (nth + 1) * elems, elems)
    }

    /// Over NCCL, enqueues exchanges directly after a bucket is written, which is the same point on all ranks. It exchanges this bucket, or
    /// the one before if groups are summed here, so that the device computes while the group is summed. Sums that must come first wait for
    /// the other local ranks, and so does this function.
    pub(super) fn swap_written<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<()> {
        let is_last = self.buckets_written.is_multiple_of(self.buckets());
        let until = self.buckets_written - u64::from(self.is_grouped && !is_last);
        while matches!(self.inter_node, Some(InterNode::Nccl(_))) && self.buckets_swapped < until {
            let next = self.buckets_swapped;
            let needed = if self.is_grouped { Some(next) } else { next.checked_sub(1) };
            self.wait_serving(dev, |progress| needed.is_none_or(|needed| progress.all_written(needed)))?;
            self.group_written(dev, grads, next + 1)?;
            while self.buckets_summed < next {
                self.sum_next(dev, grads)?;
            }
            self.swap(dev, ((next % self.buckets()) as usize, next / self.buckets()))?;
            self.buckets_swapped += 1;
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
        nccl.swap_grads(dev, (bucket, round), into, self.last_summed)
    }

    /// Enqueues the next sum. All of its parts have arrived or are enqueued.
    pub(super) fn sum_next<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<()> {
        let (bucket, round) = self.place_of(self.buckets_summed);
        self.sum(dev, grads, bucket, round)?;
        self.buckets_summed += 1;
        Ok(())
    }

    /// Enqueues the sum of one round's parts of this rank's slice, in the order of ranks, which is the order of shares.
    fn sum<D: Kernels + Peers<PeerHandle = C>>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize, round: u64) -> Result<()> {
        let (flat, local) = (self.slices.global(bucket), self.slices.local(bucket));
        let (mut parts, mut count) = ([grads.slice(flat.start, flat.len()); PARTS_MAX], 0);
        let (local_ranks, own) = (self.context.progress.local_ranks(), self.context.rank);
        dev.wait(Stream::Reduce, self.written[bucket])?;
        for rank in 0..self.peers.len() {
            if self.is_grouped && self.relay_of(rank) != own {
                continue;
            }
            if rank != own && local_ranks.contains(&rank) {
                parts[count] = self.pull_grads(dev, rank, bucket, &flat)?;
            } else if rank != own {
                parts[count] = self.staged(rank, flat.len());
                match &mut self.inter_node {
                    Some(InterNode::Tcp(inter_node)) => inter_node.bring_grads(dev, rank, parts[count])?,
                    Some(InterNode::Images) => {
                        let theirs = self.peers[rank].memory.grads.slice(flat.start, flat.len());
                        dev.pull(Stream::Reduce, rank, theirs, parts[count])?;
                    }
                    Some(InterNode::Nccl(_)) | None => {}
                }
            }
            count += 1;
        }
        if !self.is_grouped {
            self.publish_pulled(dev, bucket)?;
        }
        if let Some(InterNode::Nccl(nccl)) = &self.inter_node {
            nccl.wait(dev, Stream::Reduce)?;
        }
        let sums = self.sums.slice(local.start * self.kept_sums, local.len() * self.kept_sums);
        let (addition, out) = (
            if self.is_grouped { self.addition.of_groups() } else { self.addition },
            Exchange::<D>::own_grads(self, grads, &flat, local.start),
        );
        addition.add(dev, Stream::Reduce, (round as usize * count, &parts[..count]), KeptSums::of(sums, local.len()), out)?;
        self.record_summed(dev, bucket)
    }
}
