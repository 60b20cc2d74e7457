//! System calls on mapped memory: page sizes, memory nodes, faulting in.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Zeroed private memory, unmapped on drop. Ranges are in bytes from its beginning.
#[derive(Debug)]
pub(super) struct Mapping {
    addr: usize,
    bytes: usize,
}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Capacity of a node mask; kernels are built for up to 1024 nodes.
const NODES_MAX: usize = 1024;
const MASK_WORDS: usize = NODES_MAX / WORD_BITS;
const WORD_BITS: usize = usize::BITS as usize;

/// Size of a base page: 4, 16 or 64 KiB.
pub(super) fn base_page_bytes() -> usize {
    // SAFETY: no memory is involved.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Makes all threads allocate from one heap. Otherwise glibc reserves 64 MiB of addresses for each of the first threads, which leaves
/// little where the address space is limited.
pub(crate) fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a parameter of the allocator, under the allocator's own lock. A refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Faults in the pages of mapped memory at `addresses`, whose content stays. Does nothing on kernels before 5.14, which have no system call
/// for it: there, whatever needs the pages faults them in.
pub(crate) fn fault_in(addresses: Range<usize>) -> io::Result<()> {
    let start = addresses.start / base_page_bytes() * base_page_bytes();
    // SAFETY: this advice keeps the content of pages.
    match check(unsafe { libc::madvise(start as *mut _, addresses.end - start, libc::MADV_POPULATE_WRITE) }.into()) {
        Err(e) if is_unknown(&e) => Ok(()),
        other => other,
    }
}

/// Whether the kernel does not know a system call or its advice.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS))
}

fn check(status: i64) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn map(bytes: usize, flags: i32) -> io::Result<Mapping> {
    // SAFETY: a new anonymous mapping; it does not refer to existing memory.
    let addr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, READ_WRITE, ANONYMOUS | flags, -1, 0) };
    if addr == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Mapping { addr: addr as usize, bytes }) }
}

impl Mapping {
    /// Maps `bytes`, rounded up to whole base pages, at a multiple of `align`, a power of two.
    pub(super) fn anonymous(bytes: usize, align: usize) -> io::Result<Self> {
        let page = base_page_bytes();
        let (bytes, align) = (bytes.checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?, align.max(page));
        let mut block = map(bytes.checked_add(align - page).ok_or(io::ErrorKind::OutOfMemory)?, 0)?;
        let start = block.addr.next_multiple_of(align);
        let (before, end) = (start - block.addr, start + bytes);
        drop(Self { addr: block.addr, bytes: before });
        drop(Self { addr: end, bytes: block.addr + block.bytes - end });
        (block.addr, block.bytes) = (start, bytes);
        Ok(block)
    }

    /// Reserves `bytes` of addresses. Memory is allocated page by page on first access, and may then be unavailable.
    pub(super) fn unbacked(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(base_page_bytes()).ok_or(io::ErrorKind::OutOfMemory)?;
        map(bytes, libc::MAP_NORESERVE)
    }

    /// Maps `bytes`, rounded up to whole pages of `page_bytes`, from the kernel's pool of such pages.
    pub(super) fn of_reserved_pages(bytes: usize, page_bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(page_bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        map(bytes, libc::MAP_HUGETLB | ((page_bytes.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT))
    }

    /// Unmaps everything after the first `bytes`, which are whole pages of this mapping.
    pub(super) fn truncate(&mut self, bytes: usize) {
        let (addr, rest) = self.part(bytes..self.bytes);
        drop(Self { addr, bytes: rest });
        self.bytes = bytes;
    }

    /// Address of the first byte.
    pub(super) fn addr(&self) -> usize {
        self.addr
    }

    /// Range of addresses.
    pub(super) fn addresses(&self) -> Range<usize> {
        self.addr..self.addr + self.bytes
    }

    /// Advises the kernel to use transparent huge pages, or not to.
    pub(super) fn advise_huge(&self, wanted: bool) -> io::Result<()> {
        self.advise(0..self.bytes, if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
    }

    /// Collapses resident small pages into huge pages.
    pub(super) fn collapse(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_COLLAPSE)
    }

    /// Binds pages to `nodes`. Must be called before the pages are touched.
    pub(super) fn bind(&self, range: Range<usize>, nodes: &[usize]) -> io::Result<()> {
        let mut mask = [0usize; MASK_WORDS];
        for &node in nodes.iter().filter(|&&node| node < NODES_MAX) {
            mask[node / WORD_BITS] |= 1 << (node % WORD_BITS);
        }
        let (addr, bytes) = self.part(range);
        // The kernel reads one bit fewer than stated. SAFETY: a policy for pages of this mapping; the mask is read during the call.
        check(unsafe { libc::syscall(libc::SYS_mbind, addr, bytes, libc::MPOL_BIND, mask.as_ptr(), NODES_MAX + 1, 0) })
    }

    /// Faults pages in. Kernels before 5.14 have no system call for it; there, each page is written.
    pub(super) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        match self.advise(range.clone(), libc::MADV_POPULATE_WRITE) {
            Err(e) if is_unknown(&e) => {
                self.touch(range);
                Ok(())
            }
            other => other,
        }
    }

    fn touch(&self, range: Range<usize>) {
        let (addr, bytes) = self.part(range);
        for at in (addr..addr + bytes).step_by(base_page_bytes()) {
            // SAFETY: inside this mapping, which is zero and not in use yet.
            unsafe { (at as *mut u8).write_volatile(0) };
        }
    }

    /// Replaces `range` by shared memory; it must not be in use.
    pub(super) fn overlay(&self, range: Range<usize>, file: BorrowedFd) -> io::Result<()> {
        let (addr, bytes) = self.part(range);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: replaces pages of this mapping that are not in use yet.
        let placed = unsafe { libc::mmap(addr as *mut _, bytes, READ_WRITE, flags, file.as_raw_fd(), 0) };
        if placed == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn advise(&self, range: Range<usize>, advice: i32) -> io::Result<()> {
        let (addr, bytes) = self.part(range);
        // SAFETY: the advice applies to this mapping, and no caller passes advice that drops its content.
        check(unsafe { libc::madvise(addr as *mut _, bytes, advice) }.into())
    }

    fn part(&self, range: Range<usize>) -> (usize, usize) {
        assert!(range.start <= range.end && range.end <= self.bytes, "bytes {range:?} of a mapping of {}", self.bytes);
        (self.addr + range.start, range.len())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: mapped with this address and size, by this file alone. `HostMemory` lends references only for its own lifetime, and
            // its owner guarantees that it outlives jobs and copies.
            unsafe { libc::munmap(self.addr as *mut libc::c_void, self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_mapping_begins_where_it_should_and_ends_with_its_last_page() {
        let (page, align) = (base_page_bytes(), 2 << 20);
        let mapping = Mapping::anonymous(3 * align + 1, align).unwrap();
        assert!(mapping.addr().is_multiple_of(align));
        assert_eq!(mapping.addresses().len(), 3 * align + page);
        mapping.populate(0..3 * align + page).unwrap();
        mapping.touch(0..3 * align + page);
        assert!(Mapping::anonymous(usize::MAX, align).is_err());
    }

    #[test]
    fn pages_are_granted_and_those_in_use_keep_their_content() {
        let page = base_page_bytes();
        let mapping = Mapping::anonymous(4 * page, 1).unwrap();
        // Without huge pages, of which a first write would be granted all.
        mapping.advise_huge(false).unwrap();
        // SAFETY: the mapping's own memory, to which this test has the only reference.
        unsafe { (mapping.addr() as *mut u8).write(0xa7) };
        fault_in(mapping.addr() + 3..mapping.addr() + 2 * page + 3).unwrap();
        let mut granted = [0u8; 4];
        // SAFETY: writes a byte for each of four mapped pages.
        check(unsafe { libc::mincore(mapping.addr() as *mut _, 4 * page, granted.as_mut_ptr()) }.into()).unwrap();
        assert_eq!(granted.map(|page| page & 1), [1, 1, 1, 0]);
        assert_eq!(page_read_by_the_kernel(mapping.addr()).unwrap()[..2], [0xa7, 0]);
    }

    /// A page's bytes, read by the kernel so that an unmapped page is an error instead of a fault.
    fn page_read_by_the_kernel(addr: usize) -> io::Result<Vec<u8>> {
        let (mut reader, writer) = io::pipe()?;
        // SAFETY: the kernel checks the address and answers EFAULT where no page is mapped.
        let written = unsafe { libc::write(writer.as_raw_fd(), addr as *const libc::c_void, base_page_bytes()) };
        let mut bytes = vec![0; usize::try_from(written).map_err(|_| io::Error::last_os_error())?];
        reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Another thread may map the returned addresses at once, but its pages do not have the mark that this test writes.
    #[test]
    fn returned_pages_are_unmapped_and_the_rest_is_unchanged() {
        const MARK: u8 = 0xa7;
        let page = base_page_bytes();
        let mut mapping = Mapping::anonymous(4 * page, 1).unwrap();
        // SAFETY: the mapping's own memory, to which this test has the only reference.
        unsafe { std::slice::from_raw_parts_mut(mapping.addr() as *mut u8, 4 * page).fill(MARK) };
        mapping.truncate(page);
        assert_eq!(mapping.addresses().len(), page);
        assert_eq!(page_read_by_the_kernel(mapping.addr()).unwrap(), vec![MARK; page]);
        for at in 1..4 {
            let read = page_read_by_the_kernel(mapping.addr() + at * page);
            assert!(read.is_err() || read.unwrap() != vec![MARK; page], "page {at} is still mapped");
        }
    }

    #[test]
    fn memory_on_a_node_that_is_not_there_is_refused_not_ignored() {
        let mapping = Mapping::anonymous(1 << 20, 1).unwrap();
        if mapping.bind(0..1 << 20, &[0]).is_ok() {
            assert!(mapping.bind(0..1 << 20, &[NODES_MAX - 1]).is_err());
        }
    }
}
