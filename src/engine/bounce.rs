//! A small pinned buffer through which driver and device pass fp32 values to each other, between steps.

use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::optim::PIECE_ELEMS;
use crate::planner::budget::BOUNCE_ELEMS;

/// Both sides of the link: the device, and the owner of the host's memory.
pub(super) type Sides<'a, D> = (&'a mut D, &'a mut HostMemory);

pub(super) struct Bounce {
    buffer: PinnedSlice,
    bounced: EventId,
}

impl Bounce {
    pub(super) fn new<D: Device>((dev, host): Sides<'_, D>) -> Result<Self> {
        let buffer = host.alloc("bounce buffer", BOUNCE_ELEMS * 4)?;
        dev.pin(buffer)?;
        Ok(Self { buffer, bounced: dev.event()? })
    }

    /// Copies values to the device.
    pub(super) fn upload<D: Device>(&self, (dev, host): Sides<'_, D>, source: &[f32], target: DeviceSlice) -> Result<()> {
        for (i, part) in source.chunks(BOUNCE_ELEMS).enumerate() {
            let buffer = self.buffer.slice(0, part.len() * 4);
            host.lend_mut(buffer).copy_from_slice(part);
            dev.copy_h2d(Stream::Compute, buffer, target.slice(i * BOUNCE_ELEMS, part.len()))?;
            self.settle(dev)?;
        }
        Ok(())
    }

    /// Copies values from the device.
    pub(super) fn download<D: Device>(&self, (dev, host): Sides<'_, D>, source: DeviceSlice, target: &mut [f32]) -> Result<()> {
        for (i, part) in target.chunks_mut(BOUNCE_ELEMS).enumerate() {
            let buffer = self.buffer.slice(0, part.len() * 4);
            dev.copy_d2h(Stream::Compute, source.slice(i * BOUNCE_ELEMS, part.len()), buffer)?;
            self.settle(dev)?;
            part.copy_from_slice(host.lend(buffer));
        }
        Ok(())
    }

    /// Copies as many values from the device to the host's state.
    pub(super) fn to_host<D: Device>(&self, (dev, host): Sides<'_, D>, source: DeviceSlice, target: PinnedSlice) -> Result<()> {
        let mut room = vec![0.0; PIECE_ELEMS.min(source.elems())];
        for start in (0..source.elems()).step_by(PIECE_ELEMS) {
            let piece = &mut room[..PIECE_ELEMS.min(source.elems() - start)];
            self.download((dev, host), source.slice(start, piece.len()), piece)?;
            host.lend_mut(target.slice(start * 4, piece.len() * 4)).copy_from_slice(piece);
        }
        Ok(())
    }

    /// Copies as many values from the host's state to the device.
    pub(super) fn to_device<D: Device>(&self, (dev, host): Sides<'_, D>, source: PinnedSlice, target: DeviceSlice) -> Result<()> {
        let mut room = vec![0.0; PIECE_ELEMS.min(target.elems())];
        for start in (0..target.elems()).step_by(PIECE_ELEMS) {
            let piece = &mut room[..PIECE_ELEMS.min(target.elems() - start)];
            piece.copy_from_slice(host.lend(source.slice(start * 4, piece.len() * 4)));
            self.upload((dev, host), piece, target.slice(start, piece.len()))?;
        }
        Ok(())
    }

    fn settle<D: Device>(&self, dev: &mut D) -> Result<()> {
        dev.record(self.bounced, Stream::Compute)?;
        dev.synchronize(self.bounced)
    }
}
