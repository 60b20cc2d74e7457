//! Several GPUs of one process: a GPU waits for its peers' events and copies from their memory.

use super::CudaDevice;
use super::backlog::Backlog;
use super::driver::{RawEvent, RawStream, priorities};
use super::error::check;
use super::lent::{Lent, PeerGpu, Peering, may_read, open_link};
use super::nccl::Rail;
use super::timeline::StreamWait;
use crate::device::{Device, DeviceSlice, EventId, MatrixPart, Peers, Stream, Swap, no_rail, still_lent};
use crate::error::Result;
use crate::ranks::{RailKey, Seat};
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
fn staged_rows_copy((src, there): (MatrixPart, sys::CUcontext), (dst, here): (MatrixPart, sys::CUcontext)) -> sys::CUDA_MEMCPY3D_PEER {
    sys::CUDA_MEMCPY3D_PEER {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: ptr::null(),
        srcDevice: src.memory.addr(),
        srcArray: ptr::null_mut(),
        srcContext: there,
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
        dstContext: here,
        dstPitch: dst.pitch_bytes(),
        dstHeight: dst.count,
        WidthInBytes: src.row_bytes(),
        Height: src.count,
        Depth: 1,
    }
}

impl Peers for CudaDevice {
    type Card = Arc<Lent>;

    fn card(&mut self) -> Arc<Lent> {
        Arc::new(Lent {
            events: self.events.clone(),
            allocations: std::mem::take(&mut self.allocations),
            rings: std::mem::take(&mut self.rings),
            allocated: self.allocated.clone(),
            gpu: self.gpu,
            context: self.context.clone(),
        })
    }

    fn leave(&mut self) -> Result<()> {
        self.finish_streams()?;
        self.peering.iter_mut().for_each(|peering| peering.gpus.clear());
        Ok(())
    }

    fn take_back(&mut self) -> Result<()> {
        let Some(mut lent) = self.peering.as_mut().and_then(|peering| peering.own.take()) else { return Ok(()) };
        let lent = Arc::get_mut(&mut lent).ok_or_else(still_lent)?;
        self.allocations.append(&mut lent.allocations);
        self.rings.append(&mut lent.rings);
        Ok(())
    }

    fn admit(&mut self, seat: Seat, cards: Vec<Arc<Lent>>) -> Result<()> {
        let own = seat.rank;
        let meet = |lent: Arc<Lent>| {
            // For peers in other processes `cards` holds this GPU's own handle.
            let is_own = lent.gpu == self.gpu;
            let is_direct = is_own || open_link(self.gpu, &lent)?;
            if !is_own && may_read(lent.gpu, self.gpu)? {
                cards[own].rings.iter().try_for_each(|(name, ring)| ring.allow(name, lent.gpu))?;
            }
            Ok(PeerGpu { lent, is_direct })
        };
        let gpus = cards.iter().cloned().map(meet).collect::<Result<_>>()?;
        let (_, most_urgent) = priorities()?;
        for &stream in &Stream::WITH_PEERS[self.streams.len()..] {
            self.streams.push(RawStream::new(most_urgent)?);
            self.timeline.add(stream);
        }
        let backlogs = self.streams.iter().map(|_| Backlog::new(|| RawEvent::new(false))).collect::<Result<_>>()?;
        self.peering = Some(Peering { own: Some(cards[own].clone()), seat, gpus, backlogs });
        Ok(())
    }

    fn wait_for(&mut self, stream: Stream, peer: usize, event: EventId) -> Result<()> {
        let Some(peering) = &self.peering else { return Ok(()) };
        let event = peering.gpus[peer].lent.events[event.0 as usize].clone();
        self.wait_until_passed(stream, &event, StreamWait::Peers)
    }

    fn waited_for_peers_ns(&self) -> u64 {
        self.timeline.waited_for_peers_ns()
    }

    fn has_room(&mut self, stream: Stream) -> Result<bool> {
        self.peering.as_ref().map_or(Ok(true), |peering| peering.backlogs[stream as usize].next().is_done())
    }

    /// With a direct link this is a copy between addresses, which was measured to run well beside matrix products. Otherwise it is a copy
    /// between contexts, which the driver stages through its own page-locked memory. Both run in stream order.
    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "pull");
        self.check_memory(dst)?;
        let Some(peering) = self.peering.as_ref().filter(|_| src.bytes() > 0) else { return Ok(()) };
        let PeerGpu { lent, is_direct } = &peering.gpus[peer];
        lent.allocated.check(src)?;
        let (here, there, is_direct) = (self.context.get_inner(), lent.context.get_inner(), *is_direct);
        let (from, to, bytes) = (src.addr(), dst.addr(), src.bytes());
        self.timed(stream, "pull", |raw| {
            // SAFETY: sizes agree. The peer's memory and context live as long as this device, whose streams end first. The protocol between
            // ranks prevents writes until the pull is published.
            let status = unsafe {
                if is_direct {
                    sys::cuMemcpyDtoDAsync_v2(to, from, bytes, raw.0)
                } else {
                    sys::cuMemcpyPeerAsync(to, here, from, there, bytes, raw.0)
                }
            };
            check(status, || format!("pull {} from rank {peer}", Bytes(bytes as u64)))
        })
    }

    fn connect(&mut self, key: &RailKey, libraries: &[PathBuf]) -> Result<()> {
        let Some(peering) = &self.peering else { return Err(no_rail()) };
        self.rail = Some(Rail::open(libraries, key, &peering.seat, self.context.get_inner())?);
        Ok(())
    }

    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()> {
        let swaps: Vec<Swap> = swaps.collect();
        swaps.iter().flat_map(|swap| [swap.out, swap.into]).try_for_each(|memory| self.check_memory(memory))?;
        let (Some(rail), Some(peering)) = (&self.rail, &self.peering) else { return Err(no_rail()) };
        let raw = &self.streams[Stream::Compute as usize];
        let span = self.timeline.begin(raw, Stream::Compute, "swap")?;
        rail.swap(raw, &swaps, &peering.seat)?;
        self.timeline.end(raw, span)
    }

    /// Uses the same two paths as `pull`. Both are one two-dimensional copy, which copy engines perform as fast as a contiguous copy of the
    /// same size.
    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()> {
        assert!(src.fits(dst), "pull {src:?} to {dst:?}");
        self.check_memory(dst.memory)?;
        let Some(peering) = self.peering.as_ref() else { return Ok(()) };
        let PeerGpu { lent, is_direct } = &peering.gpus[peer];
        lent.allocated.check(src.memory)?;
        let (here, there, is_direct) = (self.context.get_inner(), lent.context.get_inner(), *is_direct);
        self.timed(stream, "pull", |raw| {
            // SAFETY: as for whole slices; every row lies between the first and the last element, which are inside.
            let status = unsafe {
                if is_direct {
                    sys::cuMemcpy2DAsync_v2(&rows_copy(src, dst), raw.0)
                } else {
                    sys::cuMemcpy3DPeerAsync(&staged_rows_copy((src, there), (dst, here)), raw.0)
                }
            };
            check(status, || format!("pull {} in {} rows from rank {peer}", Bytes(src.bytes() as u64), src.count))
        })
    }
}
