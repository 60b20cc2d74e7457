//! Host memory that copies and worker threads share: mapped once before step 0, in huge pages where the kernel gives
//! them, alive until the end of the run.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::units::Bytes;
use bytemuck::Pod;
use std::os::fd::{AsRawFd, FromRawFd};

/// A view of host memory from [`HostMemory`]. Copying the view copies no data.
///
/// Who may touch the bytes at which time is decided by the step protocol (`engine::coordinator`): a slot belongs to a
/// copy, to the pool or to nobody. The methods here check bounds and alignment; the protocol's tests check the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedSlice {
    addr: usize,
    bytes: usize,
}

impl PinnedSlice {
    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    pub(crate) fn addr(self) -> usize {
        self.addr
    }

    /// The part of `len` bytes that starts at byte `start`.
    ///
    /// # Panics
    /// If the part reaches outside.
    pub fn slice(self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.bytes), "pinned slice {start}+{len} of {}", self.bytes);
        Self { addr: self.addr + start, bytes: len }
    }

    fn elems<T>(self) -> usize {
        assert!(self.addr.is_multiple_of(align_of::<T>()) && self.bytes.is_multiple_of(size_of::<T>()), "misaligned view");
        self.bytes / size_of::<T>()
    }

    /// The memory, to read.
    ///
    /// # Safety
    /// Nobody writes it while the slice lives, and the [`HostMemory`] outlives the slice.
    pub(crate) unsafe fn as_slice<T: Pod>(self) -> &'static [T] {
        let elems = self.elems::<T>();
        // SAFETY: in bounds and aligned (checked); the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.addr as *const T, elems) }
    }

    /// The memory, to write.
    ///
    /// # Safety
    /// As [`PinnedSlice::as_slice`], and nobody reads it either.
    pub(crate) unsafe fn as_mut_slice<T: Pod>(self) -> &'static mut [T] {
        let elems = self.elems::<T>();
        // SAFETY: in bounds and aligned (checked); the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.addr as *mut T, elems) }
    }

    /// Copies the content out, on the driver, while no copy and no job uses the memory.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn read<T: Pod>(self, out: &mut [T]) {
        // SAFETY: the driver calls this only when the protocol gives it the memory; the borrow ends here.
        out.copy_from_slice(unsafe { self.as_slice::<T>() });
    }

    /// Lends the content to `with`, on the driver, while no copy and no job uses the memory.
    pub fn with<T: Pod, R>(self, with: impl FnOnce(&mut [T]) -> R) -> R {
        // SAFETY: as `read`; the borrow cannot leave the closure.
        with(unsafe { self.as_mut_slice::<T>() })
    }
}

/// Every host allocation of a run, unmapped on drop.
#[derive(Default)]
pub struct HostMemory {
    blocks: Vec<PinnedSlice>,
}

/// Huge pages on x86-64 and most aarch64 kernels; blocks start on one.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What a ring's sizes are multiples of: the largest page of any kernel this runs on.
pub const RING_GRAIN_BYTES: usize = 64 << 10;

impl HostMemory {
    /// Zeroed memory, page-aligned, in huge pages when it is large and the kernel agrees.
    ///
    /// # Errors
    /// `Resource` naming `name` and the size when the kernel refuses.
    pub fn alloc(&mut self, name: &str, bytes: usize) -> Result<PinnedSlice> {
        if bytes == 0 {
            return Ok(PinnedSlice { addr: HUGE_PAGE_BYTES, bytes: 0 });
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping; no existing memory is named.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            let cause = std::io::Error::last_os_error();
            return Err(Error::resource(format!("map {} of host memory for {name}", Bytes(bytes as u64)), cause));
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: advice on our own mapping; a refusal only means small pages.
            unsafe { libc::madvise(addr, bytes, libc::MADV_HUGEPAGE) };
        }
        let block = PinnedSlice { addr: addr as usize, bytes };
        self.blocks.push(block);
        Ok(block)
    }

    /// `bytes` of zeroed memory; below `ringed_bytes` it repeats every `period_bytes`: the same pages, mapped again and
    /// again. Both are multiples of [`RING_GRAIN_BYTES`].
    ///
    /// # Errors
    /// As [`HostMemory::alloc`].
    ///
    /// # Panics
    /// If they are not, or the ring is longer than the memory.
    pub fn alloc_ring(&mut self, name: &str, bytes: usize, ringed_bytes: usize, period_bytes: usize) -> Result<PinnedSlice> {
        assert!([ringed_bytes, period_bytes].iter().all(|b| b.is_multiple_of(RING_GRAIN_BYTES)) && ringed_bytes <= bytes);
        let block = self.alloc(name, bytes)?;
        let refused = |operation: &str| Error::resource(format!("{operation} for {name}"), std::io::Error::last_os_error());
        // SAFETY: a name that ends in NUL.
        let file = unsafe { libc::memfd_create(c"ring".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(refused("make shared memory"));
        }
        // SAFETY: a descriptor that was just made and belongs to nobody else; closed at the end, the maps keep the memory.
        let file = unsafe { std::os::fd::OwnedFd::from_raw_fd(file) };
        // SAFETY: live descriptor.
        if unsafe { libc::ftruncate(file.as_raw_fd(), period_bytes as i64) } != 0 {
            return Err(refused("size shared memory"));
        }
        for start in (0..ringed_bytes).step_by(period_bytes.max(1)) {
            let len = period_bytes.min(ringed_bytes - start);
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
            // SAFETY: replaces pages of the block, which is ours and which nobody uses yet.
            let addr = unsafe { libc::mmap((block.addr + start) as *mut _, len, protection, flags, file.as_raw_fd(), 0) };
            if addr == libc::MAP_FAILED {
                return Err(refused("map shared memory"));
            }
        }
        Ok(block)
    }

    /// Bytes mapped so far.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|b| b.bytes).sum()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        for block in &self.blocks {
            // SAFETY: mapped by `alloc` with this address and size; views are not used after the engine is gone.
            unsafe { libc::munmap(block.addr as *mut libc::c_void, block.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_shared_between_views_and_bounded() {
        let mut host = HostMemory::default();
        let block = host.alloc("test", 3 << 20).unwrap();
        block.slice(8, 4).with(|x: &mut [f32]| {
            assert_eq!(x, [0.0]);
            x[0] = 2.5;
        });
        let mut all = vec![0f32; (3 << 20) / 4];
        block.read(&mut all);
        assert_eq!((all[1], all[2], all[3]), (0.0, 2.5, 0.0));
        assert_eq!(host.bytes(), 3 << 20);
        assert!(std::panic::catch_unwind(|| block.slice(1, 3 << 20)).is_err());
    }

    #[test]
    fn a_ring_repeats_up_to_its_end_and_no_further() {
        let mut host = HostMemory::default();
        let grain = RING_GRAIN_BYTES;
        let ring = host.alloc_ring("test", 6 * grain + 40, 5 * grain, 2 * grain).unwrap();
        ring.slice(grain + 8, 4).with(|x: &mut [f32]| x[0] = 2.5);
        let read = |at: usize| ring.slice(at, 4).with(|x: &mut [f32]| x[0]);
        assert_eq!([1, 3, 5].map(|i| read(i * grain + 8)), [2.5, 2.5, 0.0]);
        assert_eq!([0, 2, 4].map(|i| read(i * grain + 8)), [0.0; 3]);
    }

    #[test]
    fn an_impossible_size_is_an_error_that_names_the_memory() {
        let error = HostMemory::default().alloc("adam m", 1 << 60).unwrap_err().to_string();
        assert!(error.contains("adam m") && error.contains("TiB"), "{error}");
    }
}
