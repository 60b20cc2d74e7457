//! Several CPU devices of one process: a device waits for its peers' streams and copies from their memory.
#![allow(unsafe_code)]

use super::stream::{Op, OpQueue, Point};
use super::{CpuDevice, DeviceGroup, PeerHandle, Runner, StreamsShared, start_streams};
use crate::device::{Device, DeviceSlice, EventId, MatrixPart, Peers, Stream, Swap, no_rail, still_lent};
use crate::error::Result;
use crate::ranks::{NcclUniqueId, RankContext};
use crate::trace::Recorder;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Pending operations below which a stream accepts the operations of another bucket. The limit is low, as on a GPU, although the queue
/// holds more.
pub(crate) const QUEUED_OPS_MAX: usize = 64;

impl StreamsShared {
    /// Whether a stream of `peer` has reached `point`; false if the device of the peer is gone.
    pub(super) fn peer_has_passed(&self, peer: usize, point: Point) -> bool {
        let peer = self.peers.get().and_then(|peers| peers[peer].upgrade());
        peer.is_some_and(|peer| peer.has_passed(point))
    }

    /// Wakes the streams, of this device and of peers, that wait for the latest operation of `stream`.
    pub(super) fn wake(&self, stream: usize) {
        let reached = Point { stream, ops: self.queues[stream].done() };
        OpQueue::wake(reached, self.queues.iter());
        for peer in self.peers.get().into_iter().flatten().filter_map(Weak::upgrade) {
            OpQueue::wake(reached, peer.queues.iter());
        }
    }
}

#[cfg(test)]
impl CpuDevice {
    /// Pending operations of `stream`.
    pub(crate) fn ahead(&self, stream: Stream) -> usize {
        self.shared.queues[stream as usize].ahead()
    }
}

impl Peers for CpuDevice {
    type PeerHandle = PeerHandle;

    fn peer_handle(&mut self) -> PeerHandle {
        let memory = Arc::new(std::mem::take(&mut self.memory));
        let allocated = Arc::new(self.allocated.clone());
        PeerHandle { shared: Arc::downgrade(&self.shared), events: self.events.clone(), memory, allocated }
    }

    fn leave(&mut self) -> Result<()> {
        self.finish_streams()?;
        self.device_group.iter_mut().for_each(|device_group| device_group.peer_handles.clear());
        Ok(())
    }

    fn reclaim(&mut self) -> Result<()> {
        let Some(lent) = self.device_group.as_mut().and_then(|device_group| device_group.lent.take()) else { return Ok(()) };
        self.memory.take_over(Arc::into_inner(lent).ok_or_else(still_lent)?);
        Ok(())
    }

    fn admit(&mut self, context: RankContext, peer_handles: Vec<PeerHandle>) -> Result<()> {
        let (own, lent) = (context.rank, Some(peer_handles[context.rank].memory.clone()));
        if let Some(device_group) = &mut self.device_group {
            *device_group = DeviceGroup { context, lent, peer_handles };
            return Ok(());
        }
        let stranger = |(rank, peer_handle): (usize, &PeerHandle)| if rank == own { Weak::new() } else { peer_handle.shared.clone() };
        // Only this call sets the peers.
        let _ = self.shared.peers.set(peer_handles.iter().enumerate().map(stranger).collect());
        let more = Stream::WITH_PEERS[Stream::COUNT..].iter().map(|stream| Recorder::new(stream.name(), self.trace_spans));
        match &mut self.runner {
            Runner::Threads(handles) => {
                handles.extend(start_streams(&self.shared, Stream::COUNT, more)?);
            }
            Runner::Adversary(adversary) => adversary.recorders.extend(more),
        }
        self.device_group = Some(DeviceGroup { context, lent, peer_handles });
        Ok(())
    }

    fn waited_for_peers_ns(&self) -> u64 {
        self.shared.compute_waited_for_peers_ns.load(Ordering::Relaxed)
    }

    fn wait_for(&mut self, stream: Stream, peer: usize, event: EventId) -> Result<()> {
        let Some(device_group) = &self.device_group else { return Ok(()) };
        let point = Point::unpack(device_group.peer_handles[peer].events[event.0 as usize].load(Ordering::Acquire));
        if self.shared.peer_has_passed(peer, point) {
            return Ok(());
        }
        self.push(stream, Op::WaitForPeer { peer, point })
    }

    fn has_capacity(&mut self, stream: Stream) -> Result<bool> {
        Ok(self.shared.queues[stream as usize].ahead() < QUEUED_OPS_MAX)
    }

    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "pull");
        self.check_memory(dst)?;
        self.device_group.iter().try_for_each(|device_group| device_group.peer_handles[peer].allocated.check(src))?;
        self.enqueue(stream, "pull", move || {
            // SAFETY: sizes agree. The peer's memory lives as long as this device holds the peer's handle, and the streams of this device
            // end before that. The protocol between ranks prevents writes until the pull is published.
            unsafe { std::ptr::copy_nonoverlapping(src.addr() as *const u8, dst.addr() as *mut u8, dst.bytes()) }
        })
    }

    #[cfg(not(test))]
    fn connect(&mut self, _: &NcclUniqueId, _: &[PathBuf]) -> Result<()> {
        Err(no_rail())
    }

    #[cfg(not(test))]
    fn swap(&mut self, _: impl Iterator<Item = Swap>) -> Result<()> {
        Err(no_rail())
    }

    /// In tests the key names a `NcclStandInHub` of this process.
    #[cfg(test)]
    fn connect(&mut self, key: &NcclUniqueId, _: &[PathBuf]) -> Result<()> {
        let Some(device_group) = &self.device_group else { return Err(no_rail()) };
        self.nccl = Some(super::nccl_stand_in::NcclStandIn::open(key, &device_group.context));
        Ok(())
    }

    #[cfg(test)]
    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()> {
        let Some(nccl) = &mut self.nccl else { return Err(no_rail()) };
        nccl.swap(swaps).into_iter().try_for_each(|op| self.push(Stream::Compute, op))
    }

    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()> {
        assert!(src.fits(dst), "pull {src:?} to {dst:?}");
        self.check_memory(dst.memory)?;
        self.device_group.iter().try_for_each(|device_group| device_group.peer_handles[peer].allocated.check(src.memory))?;
        self.enqueue(stream, "pull", move || {
            for row in 0..src.count {
                let (from, to) =
                    (src.memory.addr() as usize + row * src.pitch_bytes(), dst.memory.addr() as usize + row * dst.pitch_bytes());
                // SAFETY: as for whole slices; every row lies between the first and the last element, which are inside.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, src.row_bytes()) }
            }
        })
    }
}
