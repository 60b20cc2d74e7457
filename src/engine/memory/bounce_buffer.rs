//! A small pinned buffer that copies values between driver and device outside of steps.

use crate::device::{Device, DeviceSlice, EventId, Sides, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::optim::PIECE_ELEMS;
use crate::planner::budget::BOUNCE_ELEMS;
use std::ops::Range;

/// Size of the buffer.
const BUFFER_BYTES: usize = BOUNCE_ELEMS * 4;

pub(in crate::engine) struct BounceBuffer {
    buffer: PinnedSlice,
    bounced: EventId,
}

impl BounceBuffer {
    pub(in crate::engine) fn new<D: Device>((dev, host): Sides<'_, D>) -> Result<Self> {
        let buffer = host.alloc("bounce buffer", BUFFER_BYTES)?;
        dev.pin(buffer)?;
        Ok(Self { buffer, bounced: dev.event()? })
    }

    /// Fills device memory: `write` receives a range of elements and a buffer for them in the format of `target`. A simulated device has no
    /// host memory, so `write` is not called.
    pub(in crate::engine) fn fill<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        target: DeviceSlice,
        mut write: impl FnMut(Range<usize>, &mut [u8]),
    ) -> Result<()> {
        let most = BUFFER_BYTES / target.dtype().bytes();
        for start in (0..target.elems()).step_by(most) {
            let part = target.slice(start, most.min(target.elems() - start));
            let buffer = self.buffer.slice(0, part.bytes());
            if host.is_backed() {
                write(start..start + part.elems(), host.lend_mut(buffer));
            }
            dev.copy_h2d(Stream::Compute, buffer, part)?;
            self.settle(dev)?;
        }
        Ok(())
    }

    /// Copies values from the device, in their format.
    pub(in crate::engine) fn download<D: Device>(&self, (dev, host): Sides<'_, D>, source: DeviceSlice, target: &mut [u8]) -> Result<()> {
        let width = source.dtype().bytes();
        for (i, part) in target.chunks_mut(BUFFER_BYTES).enumerate() {
            let buffer = self.buffer.slice(0, part.len());
            dev.copy_d2h(Stream::Compute, source.slice(i * BUFFER_BYTES / width, part.len() / width), buffer)?;
            self.settle(dev)?;
            part.copy_from_slice(host.lend(buffer));
        }
        Ok(())
    }

    /// Copies all of `source` from the device to the host's state.
    pub(in crate::engine) fn to_host<D: Device>(&self, (dev, host): Sides<'_, D>, source: DeviceSlice, target: PinnedSlice) -> Result<()> {
        let width = source.dtype().bytes();
        let mut buffer = vec![0; PIECE_ELEMS.min(source.elems()) * width];
        for start in (0..source.elems()).step_by(PIECE_ELEMS) {
            let elems = PIECE_ELEMS.min(source.elems() - start);
            let piece = &mut buffer[..elems * width];
            self.download((dev, host), source.slice(start, elems), piece)?;
            if host.is_backed() {
                host.lend_mut(target.slice(start * width, piece.len())).copy_from_slice(piece);
            }
        }
        Ok(())
    }

    /// Copies all of `target` from the host's state to the device.
    pub(in crate::engine) fn to_device<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        source: PinnedSlice,
        target: DeviceSlice,
    ) -> Result<()> {
        let width = target.dtype().bytes();
        let mut buffer = vec![0; PIECE_ELEMS.min(target.elems()) * width];
        for start in (0..target.elems()).step_by(PIECE_ELEMS) {
            let elems = PIECE_ELEMS.min(target.elems() - start);
            let piece = &mut buffer[..elems * width];
            if host.is_backed() {
                piece.copy_from_slice(host.lend(source.slice(start * width, piece.len())));
            }
            let part = |elems: Range<usize>| elems.start * width..elems.end * width;
            self.fill((dev, host), target.slice(start, elems), |elems, bytes| bytes.copy_from_slice(&piece[part(elems)]))?;
        }
        Ok(())
    }

    fn settle<D: Device>(&self, dev: &mut D) -> Result<()> {
        dev.record(self.bounced, Stream::Compute)?;
        dev.synchronize(self.bounced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::SimDevice;
    use crate::dtype::Dtype;
    use crate::hardware::profile::Profile;
    use crate::hardware::rates::Rates;
    use crate::host::memory_policy::MemoryPolicy;
    use crate::host::pinned::HostMemory;
    use crate::optim::moments::Moments;
    use crate::optim::simd::Isa;
    use crate::planner::machine::Machine;

    /// A rotary table of a million tokens takes seconds to compute, and a search would compute one for every candidate.
    #[test]
    fn a_simulation_makes_no_values() {
        let profile = Profile::load("h200-pcie5").unwrap();
        let machine = Machine::of(&profile);
        let on = (machine.kind, machine.device);
        let (mut dev, _pool) = SimDevice::new("h200", &Rates::of(&profile), on, (1, Isa::Scalar, Moments::Float32), 0);
        let mut host = HostMemory::new(MemoryPolicy::unbacked());
        let bounce_buffer = BounceBuffer::new((&mut dev, &mut host)).unwrap();
        let target = dev.alloc("table", 8, Dtype::Float32).unwrap();
        bounce_buffer.fill((&mut dev, &mut host), target, |elems, _| panic!("made elements {elems:?}")).unwrap();
    }
}
