//! Memory with the same address on host and GPU: managed memory, or the system's own memory if the GPU uses the host's page tables.

use super::CudaDevice;
use super::error::check;
use crate::device::{Device, DeviceSlice, Stream, prefetch_span};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::memory::{Addressing, MemorySpace};
use crate::units::Bytes;
use cust::sys;

/// The host as a location in advice and prefetches.
const HOST: sys::CUdevice = -1;

/// The GPU's kind of unified addressing, from its attributes.
pub(super) fn addressing(gpu: sys::CUdevice) -> Result<Addressing> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as CONCURRENT_MANAGED_ACCESS,
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES as USES_HOST_PAGE_TABLES,
    };
    let has = |attribute| super::open::attribute(gpu, attribute).map(|value| value != 0);
    Ok(match (has(USES_HOST_PAGE_TABLES)?, has(CONCURRENT_MANAGED_ACCESS)?) {
        (true, _) => Addressing::Coherent,
        (false, true) => Addressing::Managed,
        (false, false) => Addressing::Separate,
    })
}

/// See [`Device::alloc_unified`].
pub(super) fn alloc(dev: &mut CudaDevice, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
    match dev.addressing {
        _ if elems == 0 => dev.alloc(name, elems, dtype),
        Addressing::Separate => {
            Err(Error::Unsupported(format!("unified memory for {name}: this GPU has no memory that host and GPU can both use")))
        }
        Addressing::Managed => alloc_managed(dev, name, elems, dtype),
        Addressing::Coherent => {
            let block = dev.system.alloc(name, elems * dtype.bytes())?;
            // Touching the pages first here places them on the host.
            dev.system.lend_mut::<u8>(block).fill(0);
            Ok(dev.allocated.add(DeviceSlice::at(block.addr() as u64, elems, dtype)))
        }
    }
}

/// Managed memory that stays on the host until it is prefetched. It is also mapped for the GPU, so an access over the link moves no page.
fn alloc_managed(dev: &mut CudaDevice, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
    use sys::CUmem_advise::{CU_MEM_ADVISE_SET_ACCESSED_BY as ACCESSED_BY, CU_MEM_ADVISE_SET_PREFERRED_LOCATION as PREFERRED_LOCATION};
    const ATTACH_GLOBAL: u32 = 1;
    let bytes = elems * dtype.bytes();
    let operation = || format!("allocate {} of managed memory for {name}", Bytes(bytes as u64));
    let mut addr = 0;
    // SAFETY: writes one address.
    check(unsafe { sys::cuMemAllocManaged(&mut addr, bytes, ATTACH_GLOBAL) }, operation)?;
    let slice = dev.allocated.add(DeviceSlice::at(addr, elems, dtype));
    dev.allocations.push((name.into(), slice));
    for (advice, processor) in [(PREFERRED_LOCATION, HOST), (ACCESSED_BY, dev.gpu.as_raw())] {
        // SAFETY: just allocated, of this size.
        check(unsafe { sys::cuMemAdvise(addr, bytes, advice, processor) }, operation)?;
    }
    // The prefetch creates the pages, so a host without room for them fails here.
    prefetch(dev, Stream::Compute, slice, MemorySpace::Host)?;
    dev.fill_zero(slice)?;
    dev.finish_compute(operation)?;
    Ok(slice)
}

/// See [`Device::prefetch`].
pub(super) fn prefetch(dev: &mut CudaDevice, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()> {
    if dev.addressing != Addressing::Managed || memory.elems() == 0 {
        return Ok(());
    }
    let target = match space {
        MemorySpace::Device => dev.gpu.as_raw(),
        MemorySpace::Host => HOST,
    };
    dev.timed(stream, prefetch_span(space), |raw| {
        // SAFETY: a part of managed memory; only its location changes.
        let status = unsafe { sys::cuMemPrefetchAsync(memory.addr(), memory.bytes(), target, raw.0) };
        check(status, || format!("move {} of managed memory to the {space:?}", Bytes(memory.bytes() as u64)))
    })
}
