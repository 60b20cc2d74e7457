//! Split masters of a state on the device: their parts cross the link in pieces, through buffers that all pieces share.

use super::bounce_buffer::BounceBuffer;
use crate::device::{Device, DeviceSlice, Sides};
use crate::error::Result;
use crate::optim::split;
use crate::optim::state_array::StateArray;
use half::bf16;

/// Elements whose second moments are written again if a tie changes. One master in 131,072 has a tie.
const TIE_ELEMS: usize = 1 << 12;

/// Host memory for the parts of a piece of split masters.
#[derive(Default)]
pub(super) struct SplitBuffers {
    upper: Vec<bf16>,
    lower: Vec<u16>,
    v: Vec<u8>,
}

/// The places of split masters on the device.
#[derive(Clone, Copy)]
pub(super) struct SplitPlaces {
    pub(super) weights: DeviceSlice,
    pub(super) lower: DeviceSlice,
    /// Second moments.
    pub(super) v: DeviceSlice,
    /// Whether the signs of second moments have the ties.
    pub(super) has_ties: bool,
}

impl SplitPlaces {
    /// Writes `masters`, as `array` stores them: working weights, lower halves, and signs of second moments.
    pub(super) fn write_masters<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        (array, masters): (&StateArray, &[f32]),
        buffers: &mut SplitBuffers,
    ) -> Result<()> {
        buffers.upper.resize(masters.len(), bf16::ZERO);
        buffers.lower.resize(masters.len(), 0);
        split::split(array, masters, &mut buffers.upper, &mut buffers.lower);
        let places: [(_, &[u8]); 2] =
            [(self.weights, bytemuck::cast_slice(&buffers.upper)), (self.lower, bytemuck::cast_slice(&buffers.lower))];
        for (memory, bytes) in places {
            bounce_buffer.fill((dev, host), memory, |_, to| to.copy_from_slice(bytes))?;
        }
        if self.has_ties { self.write_ties((dev, host), bounce_buffer, masters, buffers) } else { Ok(()) }
    }

    /// Writes the ties of masters into the signs of second moments, where they change.
    fn write_ties<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        masters: &[f32],
        buffers: &mut SplitBuffers,
    ) -> Result<()> {
        self.read_seconds((dev, host), bounce_buffer, &mut buffers.v)?;
        let parts = masters.chunks(TIE_ELEMS).zip(buffers.v.chunks_mut(TIE_ELEMS * self.v.dtype().bytes()));
        for (nth, (masters, v)) in parts.enumerate() {
            if split::set_ties(masters, v) {
                let part = self.v.slice(nth * TIE_ELEMS, masters.len());
                bounce_buffer.fill((dev, host), part, |_, to| to.copy_from_slice(v))?;
            }
        }
        Ok(())
    }

    /// Reads split masters from their places.
    pub(super) fn read_masters<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        masters: &mut [f32],
        buffers: &mut SplitBuffers,
    ) -> Result<()> {
        let SplitBuffers { upper, lower, v, .. } = buffers;
        upper.resize(masters.len(), bf16::ZERO);
        lower.resize(masters.len(), 0);
        bounce_buffer.download((dev, host), self.weights, bytemuck::cast_slice_mut(upper))?;
        bounce_buffer.download((dev, host), self.lower, bytemuck::cast_slice_mut(lower))?;
        if self.has_ties {
            self.read_seconds((dev, host), bounce_buffer, v)?;
        }
        split::join(upper, lower, self.has_ties.then_some(&v[..]), masters);
        Ok(())
    }

    /// Writes second moments, which `store` makes in their stored form, and leaves their signs as they are.
    pub(super) fn write_magnitudes<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        store: impl Fn(&mut [u8]),
        buffers: &mut SplitBuffers,
    ) -> Result<()> {
        self.read_seconds((dev, host), bounce_buffer, &mut buffers.v)?;
        bounce_buffer.fill((dev, host), self.v, |_, to| {
            store(to);
            split::copy_signs(&buffers.v, to, self.v.elems());
        })
    }

    /// Reads the second moments in their stored form, with the signs that are ties.
    fn read_seconds<D: Device>(&self, sides: Sides<'_, D>, bounce_buffer: &BounceBuffer, v: &mut Vec<u8>) -> Result<()> {
        v.resize(self.v.bytes(), 0);
        bounce_buffer.download(sides, self.v, v)
    }
}
