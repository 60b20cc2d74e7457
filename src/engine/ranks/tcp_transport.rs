//! Slices exchanged with ranks of other processes over TCP, through host memory and [`slice_connections`](crate::ranks::slice_connections).
//! It replaces the pulls between ranks of one process. Gradients of partial sums go from each rank to each rank of the other processes.
//! Sums of groups and weights go to the inter-node peers only, from which the other local ranks pull weights. Nothing here blocks; every
//! wait calls [`TcpTransport::serve`] meanwhile.
//!
//! Gradients arrive in the order of buckets and rounds; any other order is an error. New weights are sent as they become final and accepted
//! in any order, so no slice blocks another one. Weights that cross with each fetch arrive in the order of fetches, which the plan
//! determines. All weights of a version arrive after the verdict, which every rank awaited after its last kernel, so no rank still computes
//! with the weights that they overwrite.

use super::rendezvous::RankMemory;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::error::{Error, Result};
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::planner::plan::Plan;
use crate::ranks::links::ConnectionsByRank;
use crate::ranks::slice_connections::{PLACES, RankConnections, SliceBuffers, SliceConnection, SliceKind, SliceMessage};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;

/// A staging buffer in host memory, and the end of the last copy through it.
#[derive(Clone, Copy, Debug)]
struct StagingBuffer {
    memory: PinnedSlice,
    copied: EventId,
}

/// Staging buffers for copies of one kind and direction.
struct StagingBuffers {
    free: Vec<StagingBuffer>,
    /// In the order of their copies.
    busy: VecDeque<StagingBuffer>,
}

/// A slice to send: its location on the device, the event after which it is written, and its destinations.
struct OutgoingSlice {
    message: (u32, u64),
    source: DeviceSlice,
    after: EventId,
    to: Vec<usize>,
}

/// Slices of one kind that are being sent.
struct OutgoingSlices {
    stream: Stream,
    staging: StagingBuffers,
    waiting: VecDeque<OutgoingSlice>,
    /// Slices that are being copied to the host, in the order of `way.busy`.
    copying: VecDeque<OutgoingSlice>,
    /// A slice on the host, and the destinations that still lack room in their connection.
    leaving: Option<(SliceMessage, Vec<usize>)>,
    buffers: SliceBuffers,
}

/// The TCP transport of one rank.
pub(in crate::engine) struct TcpTransport {
    host: HostMemory,
    /// Connections by rank; `None` for local ranks.
    connections: ConnectionsByRank,
    /// The ranks that gradients are exchanged with.
    grads_with: Vec<usize>,
    slices: Slices,
    grads: OutgoingSlices,
    weights: OutgoingSlices,
    grads_in: StagingBuffers,
    weights_in: StagingBuffers,
    /// All copies of outgoing gradients that were enqueued so far.
    grads_copied: EventId,
    /// Location of this rank's weights and gradients on the device.
    memory: Option<RankMemory>,
    /// By bucket, the number of slices of weights that have not arrived in this version.
    missing: Vec<usize>,
    /// Round of this version, and the last round. Each version and each fetch is a round.
    version: u64,
    round: u64,
    /// Flat range of the last fetch, and the number of slices that have not arrived.
    fetching: (Range<usize>, usize),
}

impl StagingBuffers {
    fn new<D: Device>((dev, host): (&mut D, &mut HostMemory), name: &str, places: usize, bytes: usize) -> Result<Self> {
        let memory = host.alloc_periodic(name, places * bytes, bytes)?;
        dev.pin(memory)?;
        let place = |nth| Ok(StagingBuffer { memory: memory.slice(nth * bytes, bytes), copied: dev.event()? });
        Ok(Self { free: (0..places).map(place).collect::<Result<_>>()?, busy: VecDeque::new() })
    }

    /// Frees the buffers of complete copies.
    fn clear<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        while let Some(place) = self.busy.front()
            && dev.is_done(place.copied)?
        {
            self.free.extend(self.busy.pop_front());
        }
        Ok(())
    }

    /// Copies `bytes` to the device through a free buffer.
    fn copy_to_device<D: Device>(
        &mut self,
        (dev, host): (&mut D, &mut HostMemory),
        stream: Stream,
        bytes: &[u8],
        target: DeviceSlice,
    ) -> Result<()> {
        let place = self.free.pop().expect("the sender has seen a free place");
        let memory = place.memory.slice(0, bytes.len());
        host.lend_mut::<u8>(memory).copy_from_slice(bytes);
        dev.copy_h2d(stream, memory, target)?;
        dev.record(place.copied, stream)?;
        self.busy.push_back(place);
        Ok(())
    }
}

impl OutgoingSlices {
    fn new(stream: Stream, way: StagingBuffers) -> Self {
        Self { stream, staging: way, waiting: VecDeque::new(), copying: VecDeque::new(), leaving: None, buffers: SliceBuffers::default() }
    }

    /// Enqueues copies to the host, and passes completed copies to the connections. Returns the number of enqueued copies.
    fn poll<D: Device>(
        &mut self,
        (dev, host): (&mut D, &HostMemory),
        connections: &[Option<RankConnections>],
        kind: SliceKind,
    ) -> Result<usize> {
        let mut enqueued = 0;
        loop {
            while !self.waiting.is_empty()
                && let Some(place) = self.staging.free.pop()
            {
                self.copy(dev, place)?;
                enqueued += 1;
            }
            if self.leaving.is_none() {
                self.leaving = self.arrived(dev, host)?;
            }
            let Some((message, to)) = &mut self.leaving else { return Ok(enqueued) };
            to.retain(|rank| !connection(&connections[*rank], kind).is_some_and(|connection| connection.try_send(message)));
            if !to.is_empty() {
                return Ok(enqueued);
            }
            self.leaving = None;
        }
    }

    fn copy<D: Device>(&mut self, dev: &mut D, place: StagingBuffer) -> Result<()> {
        let Some(departure) = self.waiting.pop_front() else { return Ok(()) };
        dev.wait(self.stream, departure.after)?;
        dev.copy_d2h(self.stream, departure.source, place.memory.slice(0, departure.source.bytes()))?;
        dev.record(place.copied, self.stream)?;
        self.staging.busy.push_back(place);
        self.copying.push_back(departure);
        Ok(())
    }

    /// The next slice that has arrived on the host.
    fn arrived<D: Device>(&mut self, dev: &mut D, host: &HostMemory) -> Result<Option<(SliceMessage, Vec<usize>)>> {
        let Some(place) = self.staging.busy.front().copied() else { return Ok(None) };
        if !dev.is_done(place.copied)? {
            return Ok(None);
        }
        let OutgoingSlice { message: (bucket, round), source, to, .. } = self.copying.pop_front().expect("each place has its departure");
        let slice = host.lend::<u8>(place.memory.slice(0, source.bytes()));
        let copy = |bytes: &mut [u8]| {
            bytes.copy_from_slice(slice);
            Ok::<(), Infallible>(())
        };
        let Ok(bytes) = self.buffers.fill(slice.len(), copy);
        self.staging.free.extend(self.staging.busy.pop_front());
        Ok(Some((SliceMessage { bucket, round, bytes }, to)))
    }
}

fn connection(connections: &Option<RankConnections>, kind: SliceKind) -> Option<&SliceConnection> {
    let connections = connections.as_ref()?;
    if kind == SliceKind::Gradients { Some(&connections.grads) } else { connections.weights.as_ref() }
}

impl TcpTransport {
    /// # Errors
    /// `Resource` when host memory is not available.
    pub(in crate::engine) fn new<D: Device>(dev: &mut D, plan: &Plan, slices: &Slices, connections: ConnectionsByRank) -> Result<Self> {
        let mut host = HostMemory::new(plan.site.host_memory.clone());
        let grads_with: Vec<usize> =
            if plan.sums_within() { inter_node_peers(&connections).collect() } else { remote_ranks(&connections).collect() };
        let [others, inter_node_peers] = [grads_with.len(), inter_node_peers(&connections).count()];
        let bytes = slices.longest() * plan.recipe.numerics.dtype.bytes();
        let mut way = |name, connections| StagingBuffers::new((&mut *dev, &mut host), name, connections * PLACES, bytes);
        let [grads, grads_in] = [way("leaving gradients", others)?, way("coming gradients", others)?];
        let [weights, weights_in] = [way("leaving weights", inter_node_peers)?, way("coming weights", inter_node_peers)?];
        Ok(Self {
            grads: OutgoingSlices::new(Stream::Reduce, grads),
            weights: OutgoingSlices::new(Stream::Gather, weights),
            grads_in,
            weights_in,
            grads_copied: dev.event()?,
            missing: vec![0; slices.layout().count()],
            slices: slices.clone(),
            connections,
            grads_with,
            host,
            memory: None,
            version: 0,
            round: 0,
            fetching: (0..0, 0),
        })
    }

    /// Sets the location of gradients and weights.
    pub(in crate::engine) fn settle_down(&mut self, memory: RankMemory) {
        self.memory = Some(memory);
    }

    /// Sends the peers' slices of this rank's gradient of `bucket`, or of its group's sum, after the event `written`.
    pub(in crate::engine) fn send_grads<D: Device>(&mut self, dev: &mut D, bucket: usize, round: u64, written: EventId) -> Result<()> {
        let Some(grads) = self.memory.as_ref().map(|memory| memory.grads) else { return Ok(()) };
        for &rank in &self.grads_with {
            let slice = self.slices.of(rank, bucket);
            let source = grads.slice(slice.start, slice.len());
            let departure = OutgoingSlice { message: (bucket as u32, round), source, after: written, to: vec![rank] };
            self.grads.waiting.extend((!slice.is_empty()).then_some(departure));
        }
        self.serve(dev)
    }

    /// Sends this rank's weights of `bucket`, which are final after the event `stepped`.
    pub(in crate::engine) fn send_weights(&mut self, bucket: usize, stepped: EventId) {
        let Some(memory) = &self.memory else { return };
        let once = memory.shards.passed_once(&self.slices);
        self.send_within((bucket, self.version), &once, stepped);
    }

    fn send_within(&mut self, (bucket, round): (usize, u64), flat: &Range<usize>, stepped: EventId) {
        let Some(memory) = &self.memory else { return };
        let source = memory.weights_within(&self.slices, self.slices.rank(), bucket, flat);
        if source.elems() > 0 {
            let departure = OutgoingSlice {
                message: (bucket as u32, round),
                source,
                after: stepped,
                to: inter_node_peers(&self.connections).collect(),
            };
            self.weights.waiting.push_back(departure);
        }
    }

    /// Starts a fetch: sends this rank's weights of `flat`, each bucket after its event in `stepped`, and accepts those of the inter-node
    /// peers.
    pub(in crate::engine) fn fetch(&mut self, flat: &Range<usize>, stepped: &[EventId]) {
        self.round += 1;
        let buckets = self.slices.layout().overlapping(flat.clone());
        for bucket in buckets.clone() {
            self.send_within((bucket, self.round), flat, stepped[bucket]);
        }
        let coming = buckets.map(|bucket| self.coming(bucket, flat)).sum();
        self.fetching = (flat.clone(), coming);
    }

    /// Whether copies of all weights of the last fetch are enqueued.
    pub(in crate::engine) fn has_fetched(&self) -> bool {
        self.fetching.1 == 0
    }

    /// Number of inter-node peers that own a part of `bucket` within `flat`.
    fn coming(&self, bucket: usize, flat: &Range<usize>) -> usize {
        inter_node_peers(&self.connections).filter(|rank| !self.slices.within(*rank, bucket, flat).is_empty()).count()
    }

    /// Sends and receives everything that is possible now. Weights are accepted for this version and fetch only.
    pub(in crate::engine) fn serve<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        if self.grads.poll((dev, &self.host), &self.connections, SliceKind::Gradients)? > 0 {
            dev.record(self.grads_copied, Stream::Reduce)?;
        }
        self.weights.poll((dev, &self.host), &self.connections, SliceKind::Weights)?;
        self.take_weights(dev)
    }

    /// Whether no outgoing slice is pending, and no incoming weights are being copied to the device.
    pub(in crate::engine) fn is_quiet(&self) -> bool {
        let leave = [&self.grads, &self.weights].iter().any(|kind| !kind.copying.is_empty() || !kind.waiting.is_empty());
        !leave && self.weights_in.busy.is_empty()
    }

    /// Whether all gradients written so far may be overwritten. If so, later work on the compute stream waits for their copies to the host.
    pub(in crate::engine) fn may_overwrite<D: Device>(&mut self, dev: &mut D) -> Result<bool> {
        self.serve(dev)?;
        let all_leave = self.grads.waiting.is_empty();
        if all_leave {
            dev.wait(Stream::Compute, self.grads_copied)?;
        }
        Ok(all_leave)
    }

    /// Whether the peers' gradients of this rank's slice of `bucket` have arrived in `round`, and there are buffers to copy them to the
    /// device.
    ///
    /// # Errors
    /// `Resource` when a gradient arrives in another order.
    pub(in crate::engine) fn has_grads<D: Device>(&mut self, dev: &mut D, bucket: usize, round: u64) -> Result<bool> {
        if self.slices.global(bucket).is_empty() {
            return Ok(true);
        }
        self.grads_in.clear(dev)?;
        let mut there = 0;
        let bytes = self.slices.global(bucket).len() * self.bytes_of_one();
        for (rank, connections) in self.connections.iter_mut().enumerate() {
            let Some(connections) = connections else { continue };
            if let Some(message) = connections.grads.first() {
                check(rank, message, (bucket as u32, round), bytes)?;
                there += 1;
            }
        }
        let others = self.grads_with.len();
        Ok(there == others && self.grads_in.free.len() >= others)
    }

    /// Enqueues the copy of the gradient that arrived from `rank` to the device.
    pub(in crate::engine) fn bring_grads<D: Device>(&mut self, dev: &mut D, rank: usize, target: DeviceSlice) -> Result<()> {
        match self.connections[rank].as_mut().filter(|_| target.elems() > 0).and_then(|connections| connections.grads.take()) {
            Some(message) => self.grads_in.copy_to_device((dev, &mut self.host), Stream::Reduce, &message.bytes, target),
            None => Ok(()),
        }
    }

    /// Begins the next version of the weights: the weights of every bucket will change.
    pub(in crate::engine) fn next_version(&mut self) {
        self.round += 1;
        self.version = self.round;
        let once = self.memory.as_ref().map_or(0..0, |memory| memory.shards.passed_once(&self.slices));
        self.missing = (0..self.missing.len()).map(|bucket| self.coming(bucket, &once)).collect();
    }

    /// Whether copies of the inter-node peers' weights of `bucket` are enqueued in this version.
    pub(in crate::engine) fn has_weights(&self, bucket: usize) -> bool {
        self.missing[bucket] == 0
    }

    fn take_weights<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        self.weights_in.clear(dev)?;
        let (width, Some(memory)) = (self.bytes_of_one(), &self.memory) else { return Ok(()) };
        let once = memory.shards.passed_once(&self.slices);
        for (rank, connections) in self.connections.iter_mut().enumerate() {
            let Some(connection) = connections.as_mut().and_then(|connections| connections.weights.as_mut()) else { continue };
            // Slices of a later round wait until this rank, too, has the verdict or starts the fetch.
            while !self.weights_in.free.is_empty()
                && connection.first().is_some_and(|message| message.round <= self.round)
                && let Some(message) = connection.take()
            {
                let bucket = message.bucket as usize;
                let is_known = bucket < self.missing.len();
                let (flat, round, missing) = match self.missing.get_mut(bucket) {
                    Some(missing) if message.round == self.version => (&once, self.version, missing),
                    _ => (&self.fetching.0, self.round, &mut self.fetching.1),
                };
                let part = if is_known { self.slices.within(rank, bucket, flat) } else { 0..0 };
                check(rank, &message, (message.bucket, round), part.len() * width)?;
                *missing = missing.checked_sub(1).ok_or_else(|| unexpected_slice(rank, &message))?;
                let place = memory.weights_within(&self.slices, rank, bucket, flat);
                self.weights_in.copy_to_device((dev, &mut self.host), Stream::Gather, &message.bytes, place)?;
            }
        }
        Ok(())
    }

    fn bytes_of_one(&self) -> usize {
        self.memory.as_ref().map_or(1, |memory| memory.grads.dtype().bytes())
    }
}

/// The ranks of other processes.
fn remote_ranks(connections: &ConnectionsByRank) -> impl Iterator<Item = usize> {
    connections.iter().enumerate().filter_map(|(rank, connections)| connections.as_ref().map(|_| rank))
}

/// The inter-node peers, with which weights are exchanged.
fn inter_node_peers(connections: &ConnectionsByRank) -> impl Iterator<Item = usize> {
    remote_ranks(connections).filter(|rank| connections[*rank].as_ref().is_some_and(|connections| connections.weights.is_some()))
}

/// Checks that a slice from `rank` has the expected bucket, round and length.
fn check(rank: usize, message: &SliceMessage, expected: (u32, u64), bytes: usize) -> Result<()> {
    let is_next = (message.bucket, message.round) == expected && message.bytes.len() == bytes && bytes > 0;
    if is_next { Ok(()) } else { Err(unexpected_slice(rank, message)) }
}

fn unexpected_slice(rank: usize, message: &SliceMessage) -> Error {
    let SliceMessage { bucket, round, bytes } = message;
    let cause = format!("bucket {bucket} of round {round} with {} bytes came out of order", bytes.len());
    Error::resource(format!("take a slice of rank {rank}"), cause)
}

#[cfg(test)]
#[path = "tcp_transport_tests.rs"]
mod tests;
