//! GPU memory with a periodic mapping: the same physical chunks are mapped once in every period.

use super::error::check;
use crate::device::footprint::gpu::RING_CHUNK_BYTES as CHUNK_BYTES;
use crate::error::Result;
use crate::units::Bytes;
use cust::sys;

/// A range of addresses and its physical chunks.
pub(super) struct Ring {
    pub(super) addr: u64,
    bytes: usize,
    mapped: usize,
    chunks: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Ring {
    /// Bytes of physical memory.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK_BYTES
    }

    /// Reserves and maps `bytes` of addresses. Below `ringed_bytes`, addresses that are `period_bytes` apart share a physical chunk. All
    /// three sizes are whole chunks.
    pub(super) fn new(name: &str, bytes: usize, ringed_bytes: usize, period_bytes: usize, gpu: sys::CUdevice) -> Result<Self> {
        assert!([bytes, ringed_bytes, period_bytes].iter().all(|b| b.is_multiple_of(CHUNK_BYTES)), "a ring of whole chunks");
        let mut ring = Self { addr: 0, bytes, mapped: 0, chunks: Vec::new() };
        // SAFETY: writes one address.
        let status = unsafe { sys::cuMemAddressReserve(&mut ring.addr, bytes, 0, 0, 0) };
        check(status, || format!("reserve {} of GPU addresses for {name}", Bytes(bytes as u64)))?;
        let (period, ringed) = (period_bytes / CHUNK_BYTES, ringed_bytes / CHUNK_BYTES);
        for i in 0..bytes / CHUNK_BYTES {
            let chunk = match i {
                _ if i >= period && i < ringed => ring.chunks[i % period],
                _ => ring.create(name, gpu)?,
            };
            ring.map(name, chunk)?;
        }
        ring.allow(name, gpu)?;
        Ok(ring)
    }

    fn create(&mut self, name: &str, gpu: sys::CUdevice) -> Result<sys::CUmemGenericAllocationHandle> {
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
            location: location(gpu),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: Default::default(),
        };
        let mut chunk = 0;
        // SAFETY: writes one handle.
        let status = unsafe { sys::cuMemCreate(&mut chunk, CHUNK_BYTES, &properties, 0) };
        check(status, || {
            let have = Bytes((self.chunks.len() * CHUNK_BYTES) as u64);
            format!("allocate GPU memory for {name} after {have}")
        })?;
        self.chunks.push(chunk);
        Ok(chunk)
    }

    fn map(&mut self, name: &str, chunk: sys::CUmemGenericAllocationHandle) -> Result<()> {
        // SAFETY: inside the reserved range, at an address that is not mapped yet.
        let status = unsafe { sys::cuMemMap(self.addr + self.mapped as u64, CHUNK_BYTES, 0, chunk, 0) };
        check(status, || format!("map GPU memory for {name}"))?;
        self.mapped += CHUNK_BYTES;
        Ok(())
    }

    /// Allows `gpu`, the owner of this memory or a GPU with a link to it, to read and write the memory.
    pub(super) fn allow(&self, name: &str, gpu: sys::CUdevice) -> Result<()> {
        let access =
            sys::CUmemAccessDesc { location: location(gpu), flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the whole range is mapped.
        check(unsafe { sys::cuMemSetAccess(self.addr, self.bytes, &access, 1) }, || format!("allow access to {name}"))
    }
}

fn location(gpu: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped, created and reserved by `new`; the device's streams are idle.
        unsafe {
            for offset in (0..self.mapped).step_by(CHUNK_BYTES) {
                sys::cuMemUnmap(self.addr + offset as u64, CHUNK_BYTES);
            }
            self.chunks.iter().for_each(|&chunk| {
                sys::cuMemRelease(chunk);
            });
            sys::cuMemAddressFree(self.addr, self.bytes);
        }
    }
}
