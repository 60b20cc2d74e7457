//! Memory on both sides of the link that is taken together and given back together.

use super::{Device, DeviceSlice};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::memory::RingShape;

/// What was taken and not yet given back.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    device: Vec<DeviceSlice>,
    pinned: Vec<PinnedSlice>,
}

impl Lease {
    /// [`Device::alloc`].
    pub(crate) fn alloc<D: Device>(&mut self, dev: &mut D, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        Ok(self.keep(dev.alloc(name, elems, dtype)?))
    }

    /// [`Device::alloc_ring`] where there is a ring, else [`Device::alloc`].
    pub(crate) fn alloc_flat<D: Device>(
        &mut self,
        dev: &mut D,
        name: &str,
        elems: usize,
        dtype: Dtype,
        ring: Option<RingShape>,
    ) -> Result<DeviceSlice> {
        match ring {
            None => self.alloc(dev, name, elems, dtype),
            Some(ring) => Ok(self.keep(dev.alloc_ring(name, elems, dtype, ring)?)),
        }
    }

    fn keep(&mut self, memory: DeviceSlice) -> DeviceSlice {
        self.device.push(memory);
        memory
    }

    /// [`HostMemory::alloc_periodic`], prepared for copies.
    pub(crate) fn alloc_pinned<D: Device>(
        &mut self,
        (dev, host): (&mut D, &mut HostMemory),
        name: &str,
        bytes: usize,
        period_bytes: usize,
    ) -> Result<PinnedSlice> {
        let memory = host.alloc_periodic(name, bytes, period_bytes)?;
        dev.pin(memory).inspect_err(|_| host.give_back(memory.addr(), 0))?;
        self.pinned.push(memory);
        Ok(memory)
    }

    /// Gives back what lies on the device, once all that is enqueued has run.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn give_back_device<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        self.device.drain(..).try_for_each(|memory| dev.free(memory))
    }

    /// Gives all of it back, once all that is enqueued has run.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn give_back<D: Device>(&mut self, dev: &mut D, host: &mut HostMemory) -> Result<()> {
        self.give_back_device(dev)?;
        self.pinned.drain(..).try_for_each(|memory| {
            dev.unpin(memory)?;
            host.give_back(memory.addr(), 0);
            Ok(())
        })
    }
}
