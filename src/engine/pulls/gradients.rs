//! The gradients of ranks: what each pulls, what passes between processes, and the sums of both, bucket by bucket and round by round.

use super::{Far, Pulls};
use crate::device::{Device, DeviceSlice, Kernels, PARTS_MAX, Peers, Stream, SumSlices};
use crate::engine::exchange::Exchange;
use crate::engine::sockets::Sockets;
use crate::error::Result;

impl<C> Pulls<C> {
    /// The bucket and the round of a step that the `nth` of all that are written is of.
    pub(super) fn place_of(&self, nth: u64) -> (usize, u64) {
        ((nth % self.buckets()) as usize, nth / self.buckets() % self.rounds)
    }

    /// Whether every rank has written the bucket that is summed next, as far as this one reads it, and what comes from other processes is there.
    pub(super) fn has_parts<D: Device>(&mut self, dev: &mut D) -> Result<bool> {
        let (bucket, round) = (self.buckets_summed % self.buckets(), self.buckets_summed / self.buckets());
        let have_come = |far: &mut Sockets| far.serve(dev).and_then(|()| far.has_grads(dev, bucket as usize, round));
        Ok(self.sockets().map_or(Ok(true), have_come)? && self.seat.board.all_written(self.buckets_summed))
    }

    /// On rails, enqueues the exchange of the bucket that was written last, right behind it: all ranks have it there. What was exchanged before is
    /// summed first, for which this waits until the other ranks of its process have written that.
    pub(super) fn swap_written<D: Kernels + Peers<Card = C>>(
        &mut self,
        dev: &mut D,
        grads: DeviceSlice,
        (bucket, round): (usize, u64),
    ) -> Result<()> {
        while matches!(self.far, Some(Far::Rails(_))) && self.buckets_summed + 1 < self.buckets_written {
            let next = self.buckets_summed;
            self.wait_serving(dev, |board| board.all_written(next))?;
            self.sum_next(dev, grads)?;
        }
        let (staging, own, slice) = (self.staging, self.seat.rank, self.slices.global(bucket).len());
        let Some(Far::Rails(rails)) = &mut self.far else { return Ok(()) };
        rails.swap_grads(dev, (bucket, round), |peer| staged(staging, own, peer, slice), self.summed)
    }

    /// Enqueues the next sum, of which all parts are there or on their way.
    pub(super) fn sum_next<D: Kernels + Peers<Card = C>>(&mut self, dev: &mut D, grads: DeviceSlice) -> Result<()> {
        let (bucket, round) = self.place_of(self.buckets_summed);
        self.sum(dev, grads, bucket, round)?;
        self.buckets_summed += 1;
        Ok(())
    }

    /// Enqueues the sum of one round's parts of this rank's slice: in the order of ranks, which is that of shares.
    fn sum<D: Kernels + Peers<Card = C>>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize, round: u64) -> Result<()> {
        let (flat, local) = (self.slices.global(bucket), self.slices.local(bucket));
        let own = grads.slice(flat.start, flat.len());
        let mut parts = [own; PARTS_MAX];
        dev.wait(Stream::Reduce, self.written[bucket])?;
        let mates = self.seat.board.mates();
        for peer in self.others() {
            let theirs = &self.peers[peer];
            parts[peer] = staged(self.staging, self.seat.rank, peer, flat.len());
            if mates.contains(&peer) {
                dev.wait_for(Stream::Reduce, peer, theirs.written[bucket])?;
                dev.pull(Stream::Reduce, peer, theirs.memory.grads.slice(flat.start, flat.len()), parts[peer])?;
            } else if let Some(Far::Sockets(far)) = &mut self.far {
                far.bring_grads(dev, peer, parts[peer])?;
            }
        }
        dev.record(self.pulled, Stream::Reduce)?;
        self.seat.board.publish_pulled(self.seat.rank);
        if let Some(Far::Rails(rails)) = &self.far {
            rails.wait(dev, Stream::Reduce)?;
        }
        let sum = self.sums.map(|sums| sums.slice(local.start, local.len()));
        let (before, last) = (sum.filter(|_| round > 0), round + 1 == self.rounds);
        let out = sum.filter(|_| !last).unwrap_or_else(|| Exchange::<D>::own_grads(self, grads, &flat, local.start));
        dev.launch(SumSlices::new(Stream::Reduce, &parts[..self.peers.len()], before, out))?;
        dev.record(self.summed, Stream::Reduce)
    }
}

/// Where in `staging` the part of `peer` of a slice of so many elements lies, which `own` does not pull from itself.
fn staged(staging: DeviceSlice, own: usize, peer: usize, elems: usize) -> DeviceSlice {
    staging.slice((peer - usize::from(peer > own)) * elems, elems)
}
