//! Device and host memory that is allocated together and freed together.

use super::{Device, DeviceSlice};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::memory::RingShape;

/// Both sides of the link: the device, and the owner of host memory.
pub(crate) type Sides<'a, D> = (&'a mut D, &'a mut HostMemory);

/// Memory that has been allocated and not yet freed.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    device: Vec<DeviceSlice>,
    pinned: Vec<PinnedSlice>,
    host: Vec<PinnedSlice>,
}

impl Lease {
    /// [`Device::alloc`].
    pub(crate) fn alloc<D: Device>(&mut self, dev: &mut D, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        Ok(self.keep(dev.alloc(name, elems, dtype)?))
    }

    /// [`Device::alloc_ring`] if there is a ring, else [`Device::alloc`].
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

    /// [`HostMemory::alloc_periodic`], pinned for copies.
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

    /// As [`Lease::alloc_pinned`], but memory that the system refuses to lock is not pinned. Returns whether it is.
    pub(crate) fn alloc_pinned_or_not<D: Device>(
        &mut self,
        (dev, host): (&mut D, &mut HostMemory),
        name: &str,
        bytes: usize,
        period_bytes: usize,
    ) -> Result<(PinnedSlice, bool)> {
        let memory = host.alloc_periodic(name, bytes, period_bytes)?;
        let is_pinned = dev.pin(memory).is_ok();
        (if is_pinned { &mut self.pinned } else { &mut self.host }).push(memory);
        Ok((memory, is_pinned))
    }

    /// [`HostMemory::alloc_untouched`], for worker threads alone.
    pub(crate) fn alloc_untouched(&mut self, host: &mut HostMemory, name: &str, bytes: usize) -> Result<PinnedSlice> {
        let memory = host.alloc_untouched(name, bytes)?;
        self.host.push(memory);
        Ok(memory)
    }

    /// Frees the device memory, once all enqueued operations have run.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn give_back_device<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        self.device.drain(..).try_for_each(|memory| dev.free(memory))
    }

    /// Frees all memory, once all enqueued operations have run.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn give_back<D: Device>(&mut self, dev: &mut D, host: &mut HostMemory) -> Result<()> {
        self.give_back_device(dev)?;
        self.host.drain(..).for_each(|memory| host.give_back(memory.addr(), 0));
        self.pinned.drain(..).try_for_each(|memory| {
            dev.unpin(memory)?;
            host.give_back(memory.addr(), 0);
            Ok(())
        })
    }
}
