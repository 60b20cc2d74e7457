//! Host memory shared by copies and worker threads. It is mapped between steps, nearly all of it before step 0, with the nodes and page
//! sizes of the policy, and faulted in. It lives until it is freed or the run ends.
#![allow(unsafe_code)]

use super::affinity::pin_current;
use super::free_memory::{self, Pages};
use super::memory_policy::{MemoryPolicy, PageSizes};
use super::memory_report::MemoryReport;
use super::pages::{Mapping, base_page_bytes};
use crate::error::{Error, Result};
use crate::hardware::cpu_list::CpuList;
use crate::units::Bytes;
use bytemuck::Pod;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The address range of bytes in a [`HostMemory`]; it does not keep them alive.
///
/// The owner lends references ([`HostMemory::lend`]), which borrow the owner. Jobs and copies access the bytes without a borrow. The maker
/// of a job, or the device that copies, guarantees (`unsafe`) that the owner outlives the job or copy, and that the bytes have no other
/// user until it is done. The step protocol (`engine::coordinator`) ensures this: a slot belongs to a copy, to the pool, or is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedSlice {
    addr: usize,
    bytes: usize,
}

impl PinnedSlice {
    const EMPTY: Self = Self { addr: EMPTY_ADDR, bytes: 0 };

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    pub(crate) fn addr(self) -> usize {
        self.addr
    }

    /// Whether `part` lies completely in this memory.
    pub(crate) fn contains(self, part: Self) -> bool {
        self.addr <= part.addr && part.addr + part.bytes <= self.addr + self.bytes
    }

    /// The part of `len` bytes from byte `start` on.
    ///
    /// # Panics
    /// If the part exceeds the slice.
    pub fn slice(self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.bytes), "pinned slice {start}+{len} of {}", self.bytes);
        Self { addr: self.addr + start, bytes: len }
    }

    fn elems<T>(self) -> usize {
        assert!(self.addr.is_multiple_of(align_of::<T>()) && self.bytes.is_multiple_of(size_of::<T>()), "misaligned view");
        self.bytes / size_of::<T>()
    }

    /// The memory for reading, in a job.
    ///
    /// # Safety
    /// While the result lives, the [`HostMemory`] lives, and the bytes are not written.
    pub unsafe fn as_slice<'a, T: Pod>(self) -> &'a [T] {
        let elems = self.elems::<T>();
        // SAFETY: aligned (checked) and in bounds (like every slice); the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.addr as *const T, elems) }
    }

    /// The memory for writing, in a job.
    ///
    /// # Safety
    /// While the result lives, the [`HostMemory`] lives, and the bytes are not read or written through another reference.
    pub unsafe fn as_mut_slice<'a, T: Pod>(self) -> &'a mut [T] {
        let elems = self.elems::<T>();
        // SAFETY: aligned (checked) and in bounds (like every slice); the caller guarantees that this is the only view.
        unsafe { std::slice::from_raw_parts_mut(self.addr as *mut T, elems) }
    }
}

/// Every host allocation of a run, unmapped on drop.
///
/// ```
/// let mut host = superoffload::internals::host::HostMemory::default();
/// let slice = host.alloc("x", 4096).unwrap();
/// host.lend_mut::<u8>(slice)[0] = 1;
/// ```
/// References cannot outlive the owner:
/// ```compile_fail,E0505
/// let mut host = superoffload::internals::host::HostMemory::default();
/// let slice = host.alloc("x", 4096).unwrap();
/// let bytes = host.lend_mut::<u8>(slice);
/// drop(host);
/// bytes[0] = 1;
/// ```
#[derive(Default)]
pub struct HostMemory {
    policy: MemoryPolicy,
    /// Directory of the `sys` file system that reports the free memory of nodes.
    root: PathBuf,
    blocks: Vec<Block>,
    /// Refusals of the kernel, each kind once.
    refusals: Vec<String>,
}

/// One allocation: its name, and its requested bytes, or for a ring its bytes of physical memory.
struct Block {
    mapping: Mapping,
    name: String,
    bytes: usize,
    /// Size of its smallest pages.
    page_bytes: usize,
    /// Whether pages are mapped at several addresses, so that two references to different addresses could alias.
    is_ring: bool,
}

/// Address of empty memory: aligned, and never mapped.
const EMPTY_ADDR: usize = 64 << 10;

/// Granularity of the sizes of a ring: the largest base page of any supported kernel.
pub const RING_GRAIN_BYTES: usize = 64 << 10;

impl HostMemory {
    /// Without memory yet; allocations follow `policy`.
    pub fn new(policy: MemoryPolicy) -> Self {
        Self { policy, root: "/".into(), ..Self::default() }
    }

    /// Whether all addresses are backed by pages. In a simulation they are not, and saving states would be pointless.
    pub(crate) fn is_backed(&self) -> bool {
        self.policy.is_backed()
    }

    /// Zeroed memory, page-aligned.
    ///
    /// # Errors
    /// `Resource` with `name` and the size, when the kernel refuses or the memory nodes have too little free memory.
    pub fn alloc(&mut self, name: &str, bytes: usize) -> Result<PinnedSlice> {
        self.alloc_periodic(name, bytes, bytes)
    }

    /// As [`HostMemory::alloc`], for buckets or slots of `period_bytes` each. With several memory nodes each bucket is spread over all of
    /// them, its first part on the first node.
    pub fn alloc_periodic(&mut self, name: &str, bytes: usize, period_bytes: usize) -> Result<PinnedSlice> {
        if bytes == 0 {
            return Ok(PinnedSlice::EMPTY);
        }
        let (block, page_bytes) = self.map(name, bytes)?;
        let whole = block.addresses().len();
        let parts = self.policy.parts(whole, period_bytes, page_bytes);
        if self.bind(&block, &parts) {
            self.check_free_bytes(name, &parts, page_bytes)?;
        }
        self.fault_in(name, &block, &parts, page_bytes)?;
        Ok(self.keep(block, name, bytes, page_bytes, None))
    }

    /// Zeroed memory, page-aligned. The kernel grants each page when it is first written, from the node of the thread that writes it.
    ///
    /// # Errors
    /// `Resource` with `name` and the size, when the kernel refuses the addresses.
    pub(crate) fn alloc_untouched(&mut self, name: &str, bytes: usize) -> Result<PinnedSlice> {
        if bytes == 0 {
            return Ok(PinnedSlice::EMPTY);
        }
        let block = self.map_anonymous(name, bytes)?;
        Ok(self.keep(block, name, bytes, base_page_bytes(), None))
    }

    /// Faults the pages of `part` of untouched memory in, in parallel. Nothing may use memory on these pages.
    ///
    /// # Errors
    /// `Resource` when the kernel refuses.
    ///
    /// # Panics
    /// If the memory is not this owner's.
    pub(crate) fn fault_in_part(&self, part: PinnedSlice) -> Result<()> {
        self.expect_mine(part);
        let holds = |block: &&Block| block.mapping.addresses().contains(&part.addr);
        let Some(block) = self.blocks.iter().find(holds).filter(|_| part.bytes > 0) else { return Ok(()) };
        let (start, whole) = (part.addr - block.mapping.addr(), block.mapping.addresses().len());
        let pages = start / block.page_bytes * block.page_bytes..(start + part.bytes).next_multiple_of(block.page_bytes).min(whole);
        self.fault_in(&block.name, &block.mapping, &[(pages, 0)], block.page_bytes)
    }

    /// Frees the allocation at `addr`, except its first `kept` bytes, rounded up to a page. No job or copy may use the freed part.
    ///
    /// # Panics
    /// If there is no allocation at this address.
    pub(crate) fn give_back(&mut self, addr: usize, kept: usize) {
        if addr == EMPTY_ADDR {
            return;
        }
        let at = self.blocks.iter().position(|block| block.mapping.addr() == addr).expect("an allocation of this owner");
        if kept == 0 {
            self.blocks.remove(at);
            return;
        }
        let block = &mut self.blocks[at];
        block.mapping.truncate(kept.next_multiple_of(block.page_bytes).min(block.mapping.addresses().len()));
        block.bytes = kept;
    }

    /// Takes over all allocations of `other`.
    pub(crate) fn take_over(&mut self, other: Self) {
        self.blocks.extend(other.blocks);
    }

    /// Zeroed memory of `bytes`, with a periodic mapping below `ringed_bytes`: addresses that are `period_bytes` apart share a page. Both
    /// sizes are multiples of [`RING_GRAIN_BYTES`].
    ///
    /// # Panics
    /// If they are not multiples, or if the ring is longer than the memory.
    pub(crate) fn alloc_ring(&mut self, name: &str, bytes: usize, ringed_bytes: usize, period_bytes: usize) -> Result<PinnedSlice> {
        assert!([ringed_bytes, period_bytes].iter().all(|b| b.is_multiple_of(RING_GRAIN_BYTES)) && ringed_bytes <= bytes);
        let refused = |operation: &str, cause: io::Error| Error::resource(format!("{operation} for {name}"), cause);
        let (block, page_bytes) = self.map(name, bytes)?;
        let file = shared_memory(period_bytes).map_err(|e| refused("make shared memory", e))?;
        for start in (0..ringed_bytes).step_by(period_bytes.max(1)) {
            let end = ringed_bytes.min(start + period_bytes);
            block.overlay(start..end, file.as_fd()).map_err(|e| refused("map shared memory", e))?;
        }
        Ok(self.keep(block, name, bytes, page_bytes, Some(bytes - ringed_bytes + period_bytes.min(ringed_bytes))))
    }

    /// The bytes of `slice` for reading. No job or copy may write them meanwhile: see [`PinnedSlice`].
    ///
    /// # Panics
    /// If the bytes are not in this owner's memory, lie in a ring, or are not whole, aligned elements.
    pub fn lend<T: Pod>(&self, slice: PinnedSlice) -> &[T] {
        self.expect_mine(slice);
        // SAFETY: mapped while `self` is borrowed, which is a shared borrow; the maker of each job or device guarantees that it does not
        // write lent bytes.
        unsafe { slice.as_slice() }
    }

    /// The bytes of `slice` for writing. No job or copy may use them meanwhile: see [`PinnedSlice`].
    ///
    /// # Panics
    /// As [`HostMemory::lend`].
    pub fn lend_mut<T: Pod>(&mut self, slice: PinnedSlice) -> &mut [T] {
        self.expect_mine(slice);
        // SAFETY: mapped while `self` is borrowed exclusively; the maker of each job or device guarantees that it does not access lent
        // bytes.
        unsafe { slice.as_mut_slice() }
    }

    /// The bytes of several slices for writing. No job or copy may use them meanwhile: see [`PinnedSlice`].
    ///
    /// # Panics
    /// As [`HostMemory::lend`], and if slices overlap.
    pub(crate) fn lend_each_mut<const N: usize>(&mut self, slices: [PinnedSlice; N]) -> [&mut [u8]; N] {
        for (nth, &slice) in slices.iter().enumerate() {
            self.expect_mine(slice);
            let overlaps = |other: &PinnedSlice| other.addr < slice.addr + slice.bytes && slice.addr < other.addr + other.bytes;
            assert!(!slices[..nth].iter().any(overlaps), "slices of the host's memory overlap");
        }
        // SAFETY: mapped while `self` is borrowed exclusively, and no two slices overlap; the maker of each job or device guarantees that
        // it does not access lent bytes.
        slices.map(|slice| unsafe { slice.as_mut_slice() })
    }

    fn expect_mine(&self, slice: PinnedSlice) {
        let holds = |range: Range<usize>| range.start <= slice.addr && slice.addr + slice.bytes <= range.end;
        let is_mine = self.blocks.iter().any(|block| !block.is_ring && holds(block.mapping.addresses()));
        assert!(is_mine || slice.bytes == 0, "{} at {:#x} are not this owner's to lend", Bytes(slice.bytes as u64), slice.addr);
    }

    /// Names and bytes of all allocations.
    pub fn allocations(&self) -> impl Iterator<Item = (&str, usize)> {
        self.blocks.iter().map(|block| (block.name.as_str(), block.bytes))
    }

    /// Pages and nodes that the kernel granted, from the `proc` file system below `root` (normally `/`).
    pub fn report(&self, root: &Path) -> MemoryReport {
        let addresses: Vec<_> = self.blocks.iter().map(|block| block.mapping.addresses()).collect();
        let notes = self.policy.notes.iter().chain(&self.refusals).cloned().collect();
        MemoryReport { bound_to: self.policy.nodes.clone(), notes, ..MemoryReport::read(root, &addresses) }
    }

    /// Records an allocation; `ring_bytes` is the physical memory of a ring.
    fn keep(&mut self, mapping: Mapping, name: &str, bytes: usize, page_bytes: usize, ring_bytes: Option<usize>) -> PinnedSlice {
        let slice = PinnedSlice { addr: mapping.addr(), bytes };
        let (name, is_ring) = (name.into(), ring_bytes.is_some());
        self.blocks.push(Block { mapping, name, bytes: ring_bytes.unwrap_or(bytes), page_bytes, is_ring });
        slice
    }

    /// Maps address space with the page sizes of the policy, and returns the smallest page size.
    fn map(&self, name: &str, bytes: usize) -> Result<(Mapping, usize)> {
        let mut refusal = None;
        for page_bytes in self.policy.reserved(bytes) {
            match Mapping::of_reserved_pages(bytes, page_bytes) {
                Ok(block) => return Ok((block, page_bytes)),
                Err(e) => refusal = Some(format!("too few huge pages of {} are free: {e}", Bytes(page_bytes as u64))),
            }
        }
        match refusal {
            Some(refusal) => Err(unmapped(name, bytes, refusal)),
            None => Ok((self.map_anonymous(name, bytes)?, base_page_bytes())),
        }
    }

    /// Maps address space with pages of the base size, or with huge pages where the policy asks for transparent ones.
    fn map_anonymous(&self, name: &str, bytes: usize) -> Result<Mapping> {
        let block = match self.policy.pages {
            PageSizes::Unbacked => Mapping::unbacked(bytes),
            _ => Mapping::anonymous(bytes, self.policy.align(bytes)),
        };
        let block = block.map_err(|e| unmapped(name, bytes, e))?;
        // Huge pages are advice. A kernel that ignores it grants small pages, which are reported.
        match self.policy.pages {
            PageSizes::Smallest => _ = block.advise_huge(false),
            PageSizes::Transparent { bytes: huge } if bytes >= huge => _ = block.advise_huge(true),
            _ => {}
        }
        Ok(block)
    }

    /// Binds the memory to its nodes. If the kernel refuses, notes it and returns false.
    fn bind(&mut self, block: &Mapping, parts: &[(Range<usize>, usize)]) -> bool {
        if self.policy.nodes.is_empty() {
            return false;
        }
        let bind = |(range, node): &(Range<usize>, usize)| block.bind(range.clone(), self.nodes_of(parts, *node));
        let bound = parts.iter().try_for_each(bind);
        if let Err(cause) = &bound {
            self.refuse(format!("memory cannot be bound to its nodes (mbind: {cause}); it is allocated where it is first touched"));
        }
        bound.is_ok()
    }

    /// Memory that is not divided may come from any of the nodes.
    fn nodes_of(&self, parts: &[(Range<usize>, usize)], node: usize) -> &[usize] {
        let nodes = &self.policy.nodes;
        if parts.len() == 1 { nodes } else { &nodes[node..=node] }
    }

    fn check_free_bytes(&self, name: &str, parts: &[(Range<usize>, usize)], page_bytes: usize) -> Result<()> {
        let mut needs: BTreeMap<&[usize], u64> = BTreeMap::new();
        for (range, node) in parts {
            *needs.entry(self.nodes_of(parts, *node)).or_default() += range.len() as u64;
        }
        let pages = if page_bytes == base_page_bytes() { Pages::Any } else { Pages::Reserved(page_bytes) };
        let bytes = parts.iter().map(|(range, _)| range.len() as u64).sum();
        let failed = |cause: String| Error::resource(format!("bind {} of host memory for {name}", Bytes(bytes)), cause);
        needs.into_iter().try_for_each(|(nodes, bytes)| free_memory::check(&self.root, nodes, pages, bytes)).map_err(failed)
    }

    fn refuse(&mut self, refusal: String) {
        if !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    /// Faults pages in now, in parallel and each on its node, so that the first steps have no page faults.
    fn fault_in(&self, name: &str, block: &Mapping, parts: &[(Range<usize>, usize)], page_bytes: usize) -> Result<()> {
        let bytes = block.addresses().len();
        let align = self.policy.align(bytes);
        let populate = |range: Range<usize>| -> Result<()> {
            block
                .populate(range.clone())
                .map_err(|e| Error::resource(format!("fault in {} of host memory for {name}", Bytes(bytes as u64)), e))?;
            if align > 1 {
                // Collapsing is advice as well; the granted pages are reported.
                let _ = block.collapse(range);
            }
            Ok(())
        };
        let ranges_by_thread = self.policy.ranges_by_thread(parts, align.max(page_bytes));
        let busy: Vec<_> = ranges_by_thread.into_iter().zip(&self.policy.touchers).filter(|(ranges, _)| !ranges.is_empty()).collect();
        in_threads(busy, |(ranges, toucher)| {
            if let Some(cpu) = toucher.cpu {
                pin_current("touch", &CpuList::from_iter([cpu]))?;
            }
            ranges.into_iter().try_for_each(populate)
        })
    }
}

fn unmapped(name: &str, bytes: usize, cause: impl Display) -> Error {
    Error::resource(format!("map {} of host memory for {name}", Bytes(bytes as u64)), cause)
}

/// Runs each item of `work` on a separate thread.
fn in_threads<T: Send>(work: Vec<T>, body: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let start = |e: io::Error| Error::resource("start a thread that faults memory in", e);
    let panicked = || Error::resource("fault memory in", "a thread panicked");
    std::thread::scope(|scope| {
        let body = &body;
        let named = || std::thread::Builder::new().name("touch".into());
        let spawn = |item| named().spawn_scoped(scope, move || body(item)).map_err(start);
        let threads = work.into_iter().map(spawn).collect::<Result<Vec<_>>>()?;
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| panicked())?)
    })
}

/// Memory of `bytes` that can be mapped several times.
fn shared_memory(bytes: usize) -> io::Result<OwnedFd> {
    // A direct system call, because C libraries have this function only since 2.27, and the wheel supports 2.17. SAFETY: a name that ends
    // in NUL.
    let file = unsafe { libc::syscall(libc::SYS_memfd_create, c"ring".as_ptr(), libc::MFD_CLOEXEC) } as i32;
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor without another owner. It is closed at the end, and the mappings keep the memory.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    nix::unistd::ftruncate(&file, bytes as i64)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::{Topology, tests::tree};
    use crate::host::memory_policy::{HugePagesChoice, Toucher};

    #[test]
    fn memory_is_zeroed_shared_between_views_and_bounded() {
        let mut host = HostMemory::default();
        let block = host.alloc("test", 3 << 20).unwrap();
        assert_eq!(host.lend::<f32>(block.slice(8, 4)), [0.0]);
        host.lend_mut::<f32>(block.slice(8, 4))[0] = 2.5;
        assert_eq!(host.lend::<f32>(block)[1..4], [0.0, 2.5, 0.0]);
        assert!(host.lend::<f32>(block.slice(3 << 20, 0)).is_empty());
        assert_eq!(host.allocations().collect::<Vec<_>>(), [("test", 3 << 20)]);
        assert!(std::panic::catch_unwind(|| block.slice(1, 3 << 20)).is_err());
    }

    #[test]
    fn threads_fault_in_a_part_of_untouched_memory_and_no_more() {
        let touchers = vec![Toucher { cpu: None, node: 0 }; 2];
        let mut host = HostMemory::new(MemoryPolicy { pages: PageSizes::Smallest, touchers, ..MemoryPolicy::default() });
        let block = host.alloc_untouched("test", 8 << 20).unwrap();
        // The kernel may join the mapping with a neighbour, such as a thread's stack, in what it says of mappings.
        let resident = || {
            let mut pages = vec![0u8; (8 << 20) / base_page_bytes()];
            // SAFETY: the block is mapped, and there is a byte for each of its pages.
            let rc = unsafe { libc::mincore(block.addr() as *mut _, 8 << 20, pages.as_mut_ptr()) };
            assert_eq!(rc, 0);
            (0..pages.len()).filter(|page| pages[*page] & 1 == 1).collect::<Vec<_>>()
        };
        assert_eq!(resident(), [0usize; 0]);
        let part = block.slice((5 << 20) + 8, (2 << 20) + 8);
        host.lend_mut::<u8>(block.slice(part.addr() - block.addr() - 4, 4)).fill(7);
        host.fault_in_part(part).unwrap();
        assert_eq!(resident(), ((5 << 20) / base_page_bytes()..=(7 << 20) / base_page_bytes()).collect::<Vec<_>>());
        assert_eq!(host.lend::<u8>(block.slice((5 << 20) + 2, 8)), [0, 0, 7, 7, 7, 7, 0, 0]);
        host.fault_in_part(block.slice(0, 0)).unwrap();
    }

    #[test]
    fn returned_memory_has_no_user_and_the_rest_is_unchanged() {
        let mut host = HostMemory::default();
        let [first, second] = ["first", "second"].map(|name| host.alloc(name, 1 << 20).unwrap());
        host.lend_mut::<u8>(second).fill(7);
        host.give_back(first.addr, 0);
        host.give_back(second.addr, 100);
        assert_eq!(host.allocations().collect::<Vec<_>>(), [("second", 100)]);
        assert!(host.lend::<u8>(second.slice(0, 100)).iter().all(|&byte| byte == 7));
        for gone in [first, second.slice(1 << 19, 1)] {
            assert!(std::panic::catch_unwind(|| host.lend::<u8>(gone)[0]).is_err(), "{gone:?}");
        }
        host.give_back(second.addr, 0);
        assert_eq!(host.allocations().count(), 0);
    }

    #[test]
    fn only_the_owner_lends() {
        let (mut host, mut other) = (HostMemory::default(), HostMemory::default());
        let (block, end) = (host.alloc("test", 4096).unwrap(), PinnedSlice { addr: usize::MAX - 4096, bytes: 4096 });
        let gone = HostMemory::default().alloc("test", 4 << 20).unwrap();
        let ring = other.alloc_ring("test", 2 * RING_GRAIN_BYTES, 2 * RING_GRAIN_BYTES, RING_GRAIN_BYTES).unwrap();
        let beyond = PinnedSlice { bytes: block.bytes + 1, ..block };
        host.lend_mut::<u8>(block)[4095] = 1;
        for (owner, slice) in [(&other, block), (&host, end), (&host, gone), (&host, beyond), (&other, ring)] {
            assert!(std::panic::catch_unwind(|| owner.lend::<u8>(slice)[0]).is_err(), "{slice:?}");
        }
    }

    #[test]
    fn slices_are_lent_together_unless_they_overlap() {
        let mut host = HostMemory::default();
        let block = host.alloc("test", 4096).unwrap();
        let [first, second] = host.lend_each_mut([block.slice(0, 100), block.slice(100, 50)]);
        (first[99], second[0]) = (1, 2);
        assert_eq!(host.lend::<u8>(block)[98..102], [0, 1, 2, 0]);
        for (start, len) in [(99, 1), (0, 100), (50, 200), (20, 3)] {
            let mut lend = || host.lend_each_mut([block.slice(0, 100), block.slice(start, len)]).len();
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut lend)).is_err(), "{len} bytes from byte {start} on");
        }
    }

    #[test]
    fn a_ring_repeats_up_to_its_end_and_no_further() {
        let mut host = HostMemory::default();
        let grain = RING_GRAIN_BYTES;
        let ring = host.alloc_ring("test", 6 * grain + 40, 5 * grain, 2 * grain).unwrap();
        // SAFETY: mapped until the end of the test, and there is no other reference.
        unsafe { ring.slice(grain + 8, 4).as_mut_slice::<f32>()[0] = 2.5 };
        // SAFETY: mapped until the end of the test, and no longer written.
        let read = |at: usize| unsafe { ring.slice(at, 4).as_slice::<f32>()[0] };
        assert_eq!([1, 3, 5].map(|i| read(i * grain + 8)), [2.5, 2.5, 0.0]);
        assert_eq!([0, 2, 4].map(|i| read(i * grain + 8)), [0.0; 3]);
        assert_eq!(host.allocations().collect::<Vec<_>>(), [("test", 3 * grain + 40)]);
    }

    /// Allocates as a run would on this machine: one node, huge pages, faulted in by two threads.
    #[test]
    fn memory_is_faulted_in_and_reported_as_the_kernel_gave_it() {
        let topology = Topology::this_machine();
        let policy = MemoryPolicy::new(&topology, HugePagesChoice::Auto, &[], 2).unwrap();
        let mut host = HostMemory::new(policy.clone());
        let block = host.alloc_periodic("test", (6 << 20) + 100, 2 << 20).unwrap();
        let report = host.report(Path::new("/"));
        assert!(report.bytes >= 6 << 20 && report.bytes < (7 << 20), "{report}");
        let there: u64 = report.pages.iter().map(|pages| pages.bytes).sum();
        assert!(report.pages.is_empty() || there >= report.bytes, "not faulted in: {report}");
        if let (PageSizes::Transparent { bytes: huge }, Some(pages)) = (&policy.pages, report.pages.first())
            && topology.thp.as_deref() != Some("never")
        {
            assert_eq!(pages.page_bytes, *huge as u64, "{report}");
        }
        assert!(host.lend::<u8>(block).iter().all(|&byte| byte == 0));
    }

    /// On one node this test proves little; two sockets, or a GPU's memory as a node, are better.
    #[test]
    fn memory_lies_on_every_node_beside_the_cpus_and_nowhere_else() {
        let topology = Topology::this_machine();
        let policy = MemoryPolicy::new(&topology, HugePagesChoice::Auto, &[], 2).unwrap();
        // The kernel may merge this memory with another test's and report both. Then the test allocates again, at another address.
        let mut tries = Vec::new();
        let report = loop {
            let mut host = HostMemory::new(policy.clone());
            host.alloc_periodic("test", 64 << 20, 32 << 20).unwrap();
            let report = host.report(Path::new("/"));
            tries.push(host);
            if tries.len() == 5 || report.nodes.iter().map(|on| on.bytes).sum::<u64>() == 64 << 20 {
                break report;
            }
        };
        let near = topology.nodes_beside(&topology.usable_cpus().unwrap().affinity);
        if report.notes == policy.notes && !near.is_empty() {
            assert!(report.nodes.iter().all(|on| near.contains(&on.node)), "{report}");
            assert!(report.nodes.iter().all(|on| on.bytes == (64 << 20) / report.nodes.len() as u64), "{report}");
        }
        if policy.nodes.len() > 1 && report.notes == policy.notes {
            assert_eq!(report.nodes.len(), policy.nodes.len(), "{report}");
        }
    }

    /// Touching the memory would make the kernel end the process.
    #[test]
    fn memory_is_not_bound_to_a_node_that_has_less_left() {
        let dir = tree(&[("sys/devices/system/node/node0/meminfo", "Node 0 MemFree: 1024 kB\n")]);
        let policy = MemoryPolicy { nodes: vec![0], ..MemoryPolicy::new(&Topology::this_machine(), HugePagesChoice::Off, &[], 1).unwrap() };
        let mut host = HostMemory { root: dir.path().into(), ..HostMemory::new(policy) };
        let refused = host.alloc("adam m", 2 << 20);
        // Without binding, the kernel takes memory from any node.
        if host.refusals.is_empty() {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("of host memory for adam m: 1.0 MiB are left on node 0"), "{error}");
        }
    }

    #[test]
    fn small_pages_are_small_also_where_huge_ones_are_the_rule() {
        let policy = MemoryPolicy::new(&Topology::this_machine(), HugePagesChoice::Off, &[], 1).unwrap();
        let mut host = HostMemory::new(policy);
        host.alloc("test", 8 << 20).unwrap();
        let report = host.report(Path::new("/"));
        assert!(report.pages.iter().all(|pages| pages.page_bytes == base_page_bytes() as u64), "{report}");
    }

    #[test]
    fn reserved_pages_that_do_not_suffice_are_an_error_with_their_size() {
        let pages = PageSizes::Reserved { bytes: vec![1 << 30, 2 << 20] };
        let mut host = HostMemory::new(MemoryPolicy { pages, ..MemoryPolicy::default() });
        host.alloc("small", 1 << 20).unwrap();
        let error = host.alloc("adam v", 1 << 46).unwrap_err().to_string();
        assert!(error.contains("adam v: too few huge pages of 2.0 MiB are free"), "{error}");
    }

    #[test]
    fn an_impossible_size_is_an_error_that_names_the_memory() {
        let error = HostMemory::default().alloc("adam m", 1 << 60).unwrap_err().to_string();
        assert!(error.contains("adam m") && error.contains("TiB"), "{error}");
    }
}
