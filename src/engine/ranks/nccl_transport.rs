//! Slices that devices of different processes exchange directly over NCCL, on the compute stream. Nothing is computed during an exchange,
//! because links between devices are fast only then.
//!
//! A rank blocks in an exchange until its peers enter it, so all ranks need the same order of exchanges. Only the plan determines it:
//! gradients are exchanged where they are written, and weights where the forward pass first needs them, or, if they cross with each fetch,
//! before the preceding module. The order in which a pool finishes has no influence. Gradients of partial sums go from each rank to each
//! rank of the other processes. Sums of groups and weights go to the inter-node peers only, from which the other local ranks pull weights.

use super::rendezvous::RankMemory;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, EventId, Peers, Stream, Swap};
use crate::error::Result;
use crate::ranks::NcclUniqueId;
use std::ops::Range;
use std::path::PathBuf;

/// Kind of an exchange, for the hash of exchanges.
#[derive(Clone, Copy)]
enum ExchangeKind {
    Gradients = 1,
    Weights = 2,
}

/// The NCCL transport of one rank.
pub(in crate::engine) struct NcclTransport {
    slices: Slices,
    /// The local ranks.
    local_ranks: Range<usize>,
    /// Gradients are sums of groups, and go to inter-node peers only.
    is_grouped: bool,
    /// Location of this rank's gradients and weights on the device.
    memory: Option<RankMemory>,
    /// Hash of all exchanges so far, equal on all ranks.
    passed: u64,
    /// End of the last exchange, on both sides.
    last: EventId,
    key: NcclUniqueId,
    /// Folders to search for the NCCL library.
    libraries: Vec<PathBuf>,
}

impl NcclTransport {
    /// A transport to the devices that connect with the same `key`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Device>(
        dev: &mut D,
        slices: &Slices,
        (local_ranks, is_grouped): (Range<usize>, bool),
        (key, libraries): (NcclUniqueId, Vec<PathBuf>),
    ) -> Result<Self> {
        Ok(Self { slices: slices.clone(), local_ranks, is_grouped, memory: None, passed: 0, last: dev.event()?, key, libraries })
    }

    /// Whether the last exchange that this rank has entered is complete.
    pub(in crate::engine) fn is_quiet<D: Device>(&self, dev: &mut D) -> Result<bool> {
        dev.is_done(self.last)
    }

    /// Connects to all peers once all ranks have arrived, and exchanges one element with each, so that no connection is set up within a
    /// step.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    pub(in crate::engine) fn connect<D: Peers>(&mut self, dev: &mut D, memory: DeviceSlice) -> Result<()> {
        dev.connect(&self.key, &self.libraries)?;
        let (out, into) = (memory.slice(0, 1), memory.slice(1, 1));
        dev.swap(self.remote_ranks().map(|peer| Swap { peer, out, into }))?;
        dev.record(self.last, Stream::Compute)?;
        dev.synchronize(self.last)
    }

    /// Sets the location of gradients and weights.
    pub(in crate::engine) fn settle_down(&mut self, memory: RankMemory) {
        self.memory = Some(memory);
    }

    /// Hash of all exchanges so far.
    pub(in crate::engine) fn passed(&self) -> u64 {
        self.passed
    }

    /// Exchanges the gradients of `bucket` of a round. The part of this rank's slice from each peer goes to `into(peer)`, after the event
    /// `free`, when these buffers are no longer in use.
    pub(in crate::engine) fn swap_grads<D: Peers>(
        &mut self,
        dev: &mut D,
        (bucket, round): (usize, u64),
        into: impl Fn(usize) -> DeviceSlice,
        free: EventId,
    ) -> Result<()> {
        let Some(grads) = self.memory.as_ref().map(|memory| memory.grads) else { return Ok(()) };
        self.note(ExchangeKind::Gradients, bucket, round);
        dev.wait(Stream::Compute, free)?;
        let swap = |peer: usize| {
            let slice = self.slices.of(peer, bucket);
            Swap { peer, out: grads.slice(slice.start, slice.len()), into: into(peer) }
        };
        dev.swap(self.remote_ranks().filter(|peer| !self.is_grouped || self.is_inter_node_peer(*peer)).map(swap))?;
        dev.record(self.last, Stream::Compute)
    }

    /// Makes later work on `stream` wait for the last exchange.
    pub(in crate::engine) fn wait<D: Device>(&self, dev: &mut D, stream: Stream) -> Result<()> {
        dev.wait(stream, self.last)
    }

    /// Exchanges the weights of `bucket` within `flat`, for a version or a fetch. This rank's weights are written after `stepped`;
    /// `relayed` is recorded after the inter-node peers' weights have arrived.
    pub(in crate::engine) fn swap_weights<D: Peers>(
        &mut self,
        dev: &mut D,
        (bucket, nth): (usize, u64),
        flat: &Range<usize>,
        [stepped, relayed]: [EventId; 2],
    ) -> Result<()> {
        self.note(ExchangeKind::Weights, bucket, nth);
        dev.wait(Stream::Compute, stepped)?;
        let (slices, Some(memory)) = (&self.slices, &self.memory) else { return Ok(()) };
        let of = |rank: usize| memory.weights_within(slices, rank, bucket, flat);
        let own = of(slices.rank());
        dev.swap(self.remote_ranks().filter(|peer| self.is_inter_node_peer(*peer)).map(|peer| Swap { peer, out: own, into: of(peer) }))?;
        dev.record(relayed, Stream::Compute)?;
        dev.record(self.last, Stream::Compute)
    }

    /// The ranks of other processes.
    fn remote_ranks(&self) -> impl Iterator<Item = usize> + use<> {
        let local_ranks = self.local_ranks.clone();
        (0..self.slices.ranks()).filter(move |rank| !local_ranks.contains(rank))
    }

    fn is_inter_node_peer(&self, rank: usize) -> bool {
        let place = |rank: usize| rank % self.local_ranks.len();
        place(rank) == place(self.slices.rank())
    }

    fn note(&mut self, kind: ExchangeKind, bucket: usize, nth: u64) {
        let elems = self.slices.layout().range(bucket).len() as u64;
        for word in [kind as u64, bucket as u64, nth, elems] {
            self.passed = (self.passed.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}

#[cfg(test)]
#[path = "nccl_transport_tests.rs"]
mod tests;
