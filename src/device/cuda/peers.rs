//! Several GPUs of one process: a GPU waits for its peers' events and copies from their memory.

use super::CudaDevice;
use super::backlog::Backlog;
use super::driver::{RawEvent, RawStream, priorities};
use super::error::check;
use super::nccl::NcclCommunicator;
use super::shared_context::{PeerGpu, Peering, SharedContext, may_read, open_link};
use super::timeline::StreamWait;
use crate::device::{Device, DeviceSlice, EventId, MatrixPart, Peers, Stream, Swap, no_rail, still_lent};
use crate::error::Result;
use crate::ranks::{NcclUniqueId, RankContext};
use crate::units::Bytes;
use cust::context::ContextHandle;
use cust::sys;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

/// A copy of rows between addresses that this GPU can access.
fn rows_copy(src: MatrixPart, dst: MatrixPart) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: ptr::null(),
        srcDevice: src.memory.addr(),
        srcArray: ptr::null_mut(),
        srcPitch: src.pitch_bytes(),
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: ptr::null_mut(),
        dstDevice: dst.memory.addr(),
        dstArray: ptr::null_mut(),
        dstPitch: dst.pitch_bytes(),
        WidthInBytes: src.row_bytes(),
        Height: src.count,
    }
}

/// A copy of rows between two contexts.
fn staged_rows_copy((src, peer): (MatrixPart, sys::CUcontext), (dst, own): (MatrixPart, sys::CUcontext)) -> sys::CUDA_MEMCPY3D_PEER {
    sys::CUDA_MEMCPY3D_PEER {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: ptr::null(),
        srcDevice: src.memory.addr(),
        srcArray: ptr::null_mut(),
        srcContext: peer,
        srcPitch: src.pitch_bytes(),
        srcHeight: src.count,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: ptr::null_mut(),
        dstDevice: dst.memory.addr(),
        dstArray: ptr::null_mut(),
        dstContext: own,
        dstPitch: dst.pitch_bytes(),
        dstHeight: dst.count,
        WidthInBytes: src.row_bytes(),
        Height: src.count,
        Depth: 1,
    }
}

impl Peers for CudaDevice {
    type PeerHandle = Arc<SharedContext>;

    fn peer_handle(&mut self) -> Arc<SharedContext> {
        Arc::new(SharedContext {
            events: self.events.clone(),
            allocations: std::mem::take(&mut self.allocations),
            rings: std::mem::take(&mut self.rings),
            allocated: self.allocated.clone(),
            gpu: self.gpu.as_raw(),
            context: self.context.clone(),
        })
    }

    fn leave(&mut self) -> Result<()> {
        self.finish_streams()?;
        if let Some(peering) = &mut self.peering {
            peering.gpus.clear();
        }
        Ok(())
    }

    fn reclaim(&mut self) -> Result<()> {
        let Some(mut shared_context) = self.peering.as_mut().and_then(|peering| peering.own.take()) else { return Ok(()) };
        let shared_context = Arc::get_mut(&mut shared_context).ok_or_else(still_lent)?;
        self.allocations.append(&mut shared_context.allocations);
        self.rings.append(&mut shared_context.rings);
        Ok(())
    }

    fn admit(&mut self, rank_context: RankContext, peer_handles: Vec<Arc<SharedContext>>) -> Result<()> {
        let own = rank_context.rank;
        let meet = |shared_context: Arc<SharedContext>| {
            // For peers in other processes `peer_handles` holds this GPU's own handle.
            let is_own = shared_context.gpu == self.gpu.as_raw();
            let is_direct = is_own || open_link(self.gpu.as_raw(), &shared_context)?;
            if !is_own && may_read(shared_context.gpu, self.gpu.as_raw())? {
                peer_handles[own].rings.iter().try_for_each(|(name, ring)| ring.allow(name, shared_context.gpu))?;
            }
            Ok(PeerGpu { shared_context, is_direct })
        };
        let gpus = peer_handles.iter().cloned().map(meet).collect::<Result<_>>()?;
        let (_, most_urgent) = priorities()?;
        for &stream in &Stream::WITH_PEERS[self.streams.len()..] {
            self.streams.push(RawStream::new(most_urgent)?);
            self.timeline.add(stream);
        }
        let backlogs = self.streams.iter().map(|_| Backlog::new(|| RawEvent::new(false))).collect::<Result<_>>()?;
        self.peering = Some(Peering { own: Some(peer_handles[own].clone()), rank_context, gpus, backlogs });
        Ok(())
    }

    fn wait_for(&mut self, stream: Stream, peer: usize, event: EventId) -> Result<()> {
        let Some(peering) = &self.peering else { return Ok(()) };
        let event = peering.gpus[peer].shared_context.events[event.0 as usize].clone();
        self.wait_until_passed(stream, &event, StreamWait::Peers)
    }

    fn waited_for_peers_ns(&self) -> u64 {
        self.timeline.waited_for_peers_ns()
    }

    fn has_capacity(&mut self, stream: Stream) -> Result<bool> {
        self.peering.as_ref().map_or(Ok(true), |peering| peering.backlogs[stream as usize].next().is_done())
    }

    /// With a direct link this is a copy between addresses, which was measured to run well beside matrix products. Otherwise it is a copy
    /// between contexts, which the driver stages through its own page-locked memory. Both run in stream order.
    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "pull");
        self.check_memory(dst)?;
        let Some(peering) = self.peering.as_ref().filter(|_| src.bytes() > 0) else { return Ok(()) };
        let PeerGpu { shared_context, is_direct } = &peering.gpus[peer];
        shared_context.allocated.check(src)?;
        let (own, source, is_direct) = (self.context.get_inner(), shared_context.context.get_inner(), *is_direct);
        let (from, to, bytes) = (src.addr(), dst.addr(), src.bytes());
        self.timed(stream, "pull", |raw| {
            // SAFETY: sizes agree. The peer's memory and context live as long as this device, whose streams end first. The protocol between
            // ranks prevents writes until the pull is published.
            let status = unsafe {
                if is_direct {
                    sys::cuMemcpyDtoDAsync_v2(to, from, bytes, raw.0)
                } else {
                    sys::cuMemcpyPeerAsync(to, own, from, source, bytes, raw.0)
                }
            };
            check(status, || format!("pull {} from rank {peer}", Bytes(bytes as u64)))
        })
    }

    fn connect(&mut self, key: &NcclUniqueId, libraries: &[PathBuf]) -> Result<()> {
        let Some(peering) = &self.peering else { return Err(no_rail()) };
        self.communicator = Some(NcclCommunicator::open(libraries, key, &peering.rank_context, self.context.get_inner())?);
        Ok(())
    }

    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()> {
        let swaps: Vec<Swap> = swaps.collect();
        swaps.iter().flat_map(|swap| [swap.out, swap.into]).try_for_each(|memory| self.check_memory(memory))?;
        let (Some(communicator), Some(peering)) = (&self.communicator, &self.peering) else { return Err(no_rail()) };
        let raw = &self.streams[Stream::Compute as usize];
        let span = self.timeline.begin(raw, Stream::Compute, "swap")?;
        communicator.swap(raw, &swaps, &peering.rank_context)?;
        self.timeline.end(raw, span)
    }

    /// Uses the same two paths as `pull`. Both are one two-dimensional copy, which copy engines perform as fast as a contiguous copy of the
    /// same size.
    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()> {
        assert!(src.fits(dst), "pull {src:?} to {dst:?}");
        self.check_memory(dst.memory)?;
        let Some(peering) = self.peering.as_ref() else { return Ok(()) };
        let PeerGpu { shared_context, is_direct } = &peering.gpus[peer];
        shared_context.allocated.check(src.memory)?;
        let (own, source, is_direct) = (self.context.get_inner(), shared_context.context.get_inner(), *is_direct);
        self.timed(stream, "pull", |raw| {
            // SAFETY: as for whole slices; every row lies between the first and the last element, which are inside.
            let status = unsafe {
                if is_direct {
                    sys::cuMemcpy2DAsync_v2(&rows_copy(src, dst), raw.0)
                } else {
                    sys::cuMemcpy3DPeerAsync(&staged_rows_copy((src, source), (dst, own)), raw.0)
                }
            };
            check(status, || format!("pull {} in {} rows from rank {peer}", Bytes(src.bytes() as u64), src.count))
        })
    }
}
