//! One NVIDIA GPU: streams, events, copies, the kernels of `ptx/`, cuBLASLt's matrix products, cuDNN's attention.
//!
//! All calls of CUDA are in this folder. Libraries are opened at run time (`libraries.rs`), so the same binary runs on a machine without a
//! driver, without this device.
#![allow(unsafe_code)]

mod backlog;
mod driver;
mod error;
mod gemm;
mod graph;
mod group_tables;
mod kernels;
mod launch;
mod libraries;
mod modules;
pub(crate) mod nccl;
mod open;
mod packed;
mod page_locks;
mod peers;
mod record;
mod ring;
mod sdpa;
mod shared_context;
mod timeline;
mod unified;

use super::documents::DocumentTable;
use super::footprint::gpu;
use super::slice::Allocated;
use super::{
    Attention, AttentionShape, AttentionWay, DeltaShape, Device, DeviceLibraries, DeviceSlice, Engines, EventId, ExpertProducts, FirstWay,
    LongSums, MatmulShape, PagesToCome, PinMemory, ProductAlgorithm, ProductRequest, Stream,
};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::hardware::gpu::{GpuFacts, GpuId};
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::memory::{Addressing, MemorySpace, RingShape};
use crate::trace::{Recorder, now_ns};
use crate::units::Bytes;
use backlog::LOOK_AGAIN;
use cust::CudaApiVersion;
use cust::context::Context;
use cust::device::Device as Gpu;
use cust::sys;
use driver::{RawEvent, RawStream, Registered, priorities};
use error::check;
use gemm::Gemm;
use graph::GraphExec;
use libraries::Libraries;
use modules::Modules;
use nccl::NcclCommunicator;
use open::{capability, count, generation, has_fp8, name, newest_cuda, open, pci_address, visible_gpu};
use packed::Packed;
use page_locks::PageLocks;
use ring::Ring;
use sdpa::Sdpa;
use shared_context::{Peering, free};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use timeline::{StreamWait, Timeline};

#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Folders to search for NVIDIA's libraries before the usual ones.
    pub libraries: Vec<PathBuf>,
    pub engines: Engines,
    /// Capacity of each stream's trace track, in spans; 0 records none.
    pub trace_spans: usize,
    /// Use only kernels for every GPU since Ampere, so that tests can run these kernels on a newer GPU.
    pub portable: bool,
    /// The first way that is tried for a product, so that tests can run later ones on a library that refuses no product.
    pub first_way: FirstWay,
}

/// A GPU. A `CudaDevice` belongs to the thread that made it.
pub struct CudaDevice {
    // Fields are dropped in this order: libraries before the streams that they use, shared memory after the streams, the context last.
    sdpa: Option<Sdpa>,
    attention: Attention,
    /// Workspace of attention by products.
    scores: DeviceSlice,
    packed: Packed,
    gemm: Gemm,
    graphs: Vec<GraphExec>,
    timeline: Timeline,
    /// Pages that are being locked beside steps.
    page_locks: Option<PageLocks>,
    registered: Vec<Registered>,
    allocations: Vec<(String, DeviceSlice)>,
    rings: Vec<(String, Ring)>,
    /// Slices of `allocations`, `rings` and `system`.
    allocated: Allocated,
    /// Host memory that kernels access by its host addresses.
    system: HostMemory,
    addressing: Addressing,
    events: Vec<Arc<RawEvent>>,
    /// For each event, the cause of a wait for it.
    awaited: Vec<StreamWait>,
    streams: Vec<RawStream>,
    /// Connections to the GPUs of other ranks, if there are any.
    peering: Option<Peering>,
    /// Connection to GPUs of other processes.
    communicator: Option<NcclCommunicator>,
    modules: Modules,
    /// Whether kernels for Hopper only can run.
    hopper: bool,
    /// Scratch memory for partial sums, shared by all kernels of the compute stream. Its content is undefined between kernels.
    scratch: DeviceSlice,
    name: String,
    gpu: Gpu,
    context: Context,
}

/// The GPUs visible to CUDA.
///
/// # Errors
/// `Resource` with the message of the driver or loader when there is no GPU.
pub fn visible_gpus() -> Result<Vec<GpuId>> {
    visible_gpu(0)?;
    let identify = |index| {
        let gpu = visible_gpu(index)?.as_raw();
        Ok(GpuId { index, pci: pci_address(gpu)?, model: name(gpu)? })
    };
    (0..count()?).map(identify).collect()
}

/// Whether kernels and copies of the visible GPU `ordinal` can access memory of GPU `other`.
///
/// # Errors
/// `Resource` when there is no such GPU.
pub(crate) fn has_direct_link(ordinal: usize, other: usize) -> Result<bool> {
    shared_context::may_read(visible_gpu(ordinal)?.as_raw(), visible_gpu(other)?.as_raw())
}

/// The driver's release; without NVML, the newest CUDA release that the driver supports.
fn driver_version() -> String {
    let release = GpuFacts::read().ok().and_then(|facts| facts.driver);
    let cuda = || CudaApiVersion::get().map_or("unknown".into(), |cuda| format!("of CUDA {}.{}", cuda.major(), cuda.minor()));
    release.unwrap_or_else(cuda)
}

/// Free bytes of memory on the visible GPU `ordinal`, counted from 0.
///
/// # Errors
/// `Resource` with the message of the driver or loader when there is no such GPU.
pub fn free_bytes(ordinal: usize) -> Result<u64> {
    let _context = open(visible_gpu(ordinal)?)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two numbers.
    check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "query free GPU memory".into())?;
    Ok(free as u64)
}

/// The ways in which the visible GPU `ordinal` can address host memory.
///
/// # Errors
/// The errors of [`free_bytes`].
pub fn probe(ordinal: usize) -> Result<Addressing> {
    free_bytes(ordinal)?;
    unified::addressing(visible_gpu(ordinal)?.as_raw())
}

/// NVIDIA's libraries that a run needs: name, and path or error. Opens the libraries.
pub(crate) fn libraries() -> Vec<(&'static str, Result<PathBuf>)> {
    newest_cuda().map_or(Vec::new(), |cuda| Libraries::new(&[], cuda).all())
}

/// The algorithms that cuBLASLt would choose for these products on the first visible GPU. Runs none of them.
///
/// # Errors
/// `Resource` when there is no GPU, cuBLASLt is missing, or has no algorithm.
pub(crate) fn product_algorithms(shapes: &[MatmulShape], dtype: Dtype) -> Result<Vec<ProductAlgorithm>> {
    let _context = open(visible_gpu(0)?)?;
    let mut gemm = Gemm::new(&Libraries::new(&[], newest_cuda()?), (LongSums::Slices, FirstWay::default()))?;
    shapes.iter().map(|&shape| gemm.algorithm_of(ProductRequest { shape, formats: [dtype; 3], bias: false })).collect()
}

/// The reason why cuBLASLt, searched in the folders `named` and the usual places, has no grouped expert products on the first visible GPU;
/// `None` if it has them.
///
/// # Errors
/// `Resource` when there is no GPU or no cuBLASLt.
pub(crate) fn grouped_obstacle(named: &[PathBuf]) -> Result<Option<String>> {
    gemm::grouped_obstacle(&Libraries::new(named, newest_cuda()?), generation(visible_gpu(0)?.as_raw())?)
}

impl CudaDevice {
    /// Opens the visible GPU `ordinal`, counted from 0, and loads the kernels.
    ///
    /// # Safety
    /// The conditions of [`CpuDevice::new`](super::cpu::CpuDevice::new). Tokens, positions and targets that kernels read lie inside their
    /// tables; they are not checked here.
    ///
    /// # Errors
    /// `Resource` when there is no driver, no such GPU, or a library is missing.
    pub unsafe fn new(ordinal: usize, options: &CudaOptions) -> Result<Self> {
        let gpu = visible_gpu(ordinal)?;
        let context = open(gpu)?;
        let name = name(gpu.as_raw())?;
        let modules = Modules::load(kernels::sources(), &kernels::LATER)?;
        let libraries = Libraries::new(&options.libraries, newest_cuda()?);
        let mut gemm = Gemm::new(&libraries, (options.engines.long_sums, options.first_way))?;
        if options.engines.expert_products == ExpertProducts::Cublaslt {
            gemm.open_groups(&libraries, generation(gpu.as_raw())?)?;
        }
        let (least, most) = priorities()?;
        let open = |stream: Stream| RawStream::new(if stream.is_urgent() { most } else { least });
        let streams = Stream::ALL.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let attention = options.engines.attention;
        let sdpa = match attention.cudnn() {
            Some(deterministic) => {
                let on = (streams[Stream::Compute as usize].0, generation(gpu.as_raw())?);
                Some(Sdpa::new(&libraries, on, deterministic)?)
            }
            None => None,
        };
        let timeline = Timeline::new(&streams, options.trace_spans)?;
        let mut dev = Self {
            sdpa,
            attention,
            scores: DeviceSlice::at(0, 0, Dtype::Float32),
            packed: Packed::new(),
            gemm,
            graphs: Vec::new(),
            timeline,
            page_locks: None,
            registered: Vec::new(),
            allocations: Vec::new(),
            rings: Vec::new(),
            allocated: Allocated::default(),
            system: HostMemory::default(),
            addressing: unified::addressing(gpu.as_raw())?,
            events: Vec::new(),
            awaited: Vec::new(),
            streams,
            peering: None,
            communicator: None,
            modules,
            hopper: !options.portable && open::generation(gpu.as_raw())? == open::HOPPER,
            scratch: DeviceSlice::at(0, 0, Dtype::Float32),
            name,
            gpu,
            context,
        };
        dev.scratch = dev.alloc("kernels' scratch", gpu::SCRATCH_BYTES / 4, Dtype::Float32)?;
        Ok(dev)
    }

    /// Whether a kernel performs this copy: see [`Stream::copies_words`].
    fn may_copy_words(&self, stream: Stream, device: DeviceSlice, host: PinnedSlice) -> bool {
        let words = || [device.addr(), host.addr() as u64, host.bytes() as u64].iter().all(|n| n.is_multiple_of(4));
        stream.copies_words() && words() && self.registered.iter().any(|registered| registered.memory().contains(host))
    }

    /// Waits for the compute stream, so that other streams may use its results at once.
    fn finish_compute(&self, operation: impl FnOnce() -> String) -> Result<()> {
        // SAFETY: the stream is live.
        check(unsafe { sys::cuStreamSynchronize(self.streams[Stream::Compute as usize].0) }, operation)
    }

    /// Waits for all streams.
    fn finish_streams(&self) -> Result<()> {
        // SAFETY: the streams are live.
        let finish = |stream: &RawStream| unsafe { sys::cuStreamSynchronize(stream.0) };
        self.streams.iter().try_for_each(|stream| check(finish(stream), || "run the enqueued kernels and copies".into()))
    }

    /// Fills with zero bytes, on the compute stream.
    fn fill_zero(&mut self, x: DeviceSlice) -> Result<()> {
        if x.bytes() == 0 {
            return Ok(());
        }
        self.timed(Stream::Compute, "zero", |raw| {
            // SAFETY: the memory belongs to the slice, and the operation runs in stream order.
            check(unsafe { sys::cuMemsetD8Async(x.addr(), 0, x.bytes(), raw.0) }, || format!("zero {} elements", x.elems()))
        })
    }

    /// Makes operations that are enqueued on `stream` from now on run after the last recorded point of `event`. The event may belong to
    /// another GPU: events can be queried and waited for across contexts.
    fn wait_until_passed(&mut self, stream: Stream, event: &RawEvent, awaited: StreamWait) -> Result<()> {
        if event.is_done()? {
            return Ok(());
        }
        self.await_capacity(stream)?;
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin_wait(raw, stream, awaited)?;
        // SAFETY: both are live.
        check(unsafe { sys::cuStreamWaitEvent(raw.0, event.0, 0) }, || "wait for a CUDA event".into())?;
        self.timeline.end(raw, span)
    }

    /// Calls `enqueue`, and records a span around it when tracing is on.
    fn timed(&mut self, stream: Stream, name: &'static str, enqueue: impl FnOnce(&RawStream) -> Result<()>) -> Result<()> {
        self.await_capacity(stream)?;
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin(raw, stream, name)?;
        let start_ns = now_ns();
        enqueue(raw)?;
        self.timeline.called(name, start_ns);
        self.timeline.end(raw, span)
    }

    /// Waits until the driver's launch queue of `stream` has room for one more operation. Without peers it does nothing.
    ///
    /// # Errors
    /// Errors of the GPU; the failure of another rank.
    fn await_capacity(&mut self, stream: Stream) -> Result<()> {
        let Some(peering) = &mut self.peering else { return Ok(()) };
        let Some(mark) = peering.backlogs[stream as usize].count() else { return Ok(()) };
        let start_ns = now_ns();
        while !mark.is_done()? {
            peering.rank_context.check()?;
            self.communicator.as_ref().map_or(Ok(()), NcclCommunicator::check)?;
            thread::sleep(LOOK_AGAIN);
        }
        self.timeline.called("wait for room", start_ns);
        mark.record(&self.streams[stream as usize])
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Dropping the connection ends operations that wait for another process.
        self.communicator = None;
        // Pending operations use the memory of this GPU and of its peers. Errors are ignored: they were reported where they arose, or the
        // process is ending.
        for stream in &self.streams {
            // SAFETY: the stream is live.
            unsafe { sys::cuStreamSynchronize(stream.0) };
        }
        free(&self.allocations);
    }
}

impl DeviceLibraries for CudaDevice {
    fn versions(&self) -> Vec<(&'static str, String)> {
        let cudnn = self.sdpa.as_ref().map(|sdpa| ("cuDNN", sdpa.version().to_string()));
        let own = [("GPU", self.name.clone()), ("driver", driver_version()), ("cuBLASLt", self.gemm.version().to_string())];
        own.into_iter().chain(cudnn).collect()
    }

    fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        self.gemm.algorithms()
    }

    fn choose_product(&mut self, request: ProductRequest) -> Result<Option<ProductAlgorithm>> {
        self.gemm.algorithm_of(request).map(Some)
    }

    fn learns_by_doing(&self) -> bool {
        true
    }
}

impl PinMemory for CudaDevice {
    fn pin(&mut self, memory: PinnedSlice) -> Result<()> {
        match self.page_locks.as_mut().filter(|locks| locks.memory() == memory) {
            Some(locks) => {
                let locked = locks.take();
                if locked.is_err() {
                    self.page_locks = None;
                }
                self.registered.extend(locked?);
            }
            None if memory.bytes() > 0 => self.registered.push(Registered::new(memory)?),
            None => {}
        }
        Ok(())
    }

    fn pin_beside_steps(&mut self, pages: PagesToCome) -> bool {
        self.page_locks = PageLocks::begin(self.gpu, pages).ok();
        self.page_locks.is_some()
    }

    fn unpin(&mut self, memory: PinnedSlice) -> Result<()> {
        drop(self.page_locks.take_if(|locks| locks.memory() == memory));
        self.finish_streams()?;
        self.registered.retain(|registered| !memory.contains(registered.memory()));
        Ok(())
    }
}

impl Device for CudaDevice {
    fn describe(&self) -> String {
        let own = if self.attention == Attention::Plain { "plain attention" } else { "attention by products" };
        let attention = self.sdpa.as_ref().map_or(own.into(), |sdpa| format!("cuDNN {}", sdpa.version()));
        format!("{} (cuBLASLt {}, {attention})", self.name, self.gemm.version())
    }

    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let bytes = elems * dtype.bytes();
        if bytes == 0 {
            // Never dereferenced. Not null, because null means an absent argument.
            return Ok(DeviceSlice::at(256, elems, dtype));
        }
        let operation = || format!("allocate {} of GPU memory for {name}", Bytes(bytes as u64));
        let mut addr = 0;
        // SAFETY: writes one address.
        check(unsafe { sys::cuMemAlloc_v2(&mut addr, bytes) }, operation)?;
        let slice = self.allocated.add(DeviceSlice::at(addr, elems, dtype));
        self.allocations.push((name.into(), slice));
        let raw = &self.streams[Stream::Compute as usize];
        // SAFETY: just allocated, of this size.
        check(unsafe { sys::cuMemsetD8Async(addr, 0, bytes, raw.0) }, operation)?;
        self.finish_compute(operation)?;
        Ok(slice)
    }

    fn allocations(&self) -> Vec<(&str, usize)> {
        let attention = self.sdpa.as_ref().map_or(0, Sdpa::workspace_bytes);
        let own = [("matrix workspace", gpu::MATMUL_WORKSPACE_BYTES), ("attention workspace", attention)];
        let slices = self.allocations.iter().map(|(name, slice)| (name.as_str(), slice.bytes()));
        let rings = self.rings.iter().map(|(name, ring)| (name.as_str(), ring.bytes()));
        let shared_context = self.peering.iter().filter_map(|peering| peering.own.as_ref()).flat_map(|own| own.allocations());
        own.into_iter().chain(shared_context).chain(slices).chain(rings).chain(self.system.allocations()).collect()
    }

    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, shape: RingShape) -> Result<DeviceSlice> {
        let [ringed, period] = [shape.ringed_elems, shape.period_elems].map(|elems| elems * dtype.bytes());
        let bytes = (elems * dtype.bytes()).next_multiple_of(gpu::RING_CHUNK_BYTES);
        let ring = Ring::new(name, bytes, ringed, period, self.gpu.as_raw())?;
        let slice = self.allocated.add(DeviceSlice::at(ring.addr, elems, dtype));
        self.rings.push((name.into(), ring));
        self.fill_zero(slice)?;
        self.finish_compute(|| format!("zero the ring for {name}"))?;
        Ok(slice)
    }

    fn free(&mut self, memory: DeviceSlice) -> Result<()> {
        if memory.elems() == 0 {
            return Ok(());
        }
        self.finish_streams()?;
        self.allocated.remove(memory);
        let given: Vec<_> = self.allocations.extract_if(.., |(_, slice)| slice.addr() == memory.addr()).collect();
        free(&given);
        if given.is_empty() && self.rings.extract_if(.., |(_, ring)| ring.addr == memory.addr()).count() == 0 {
            self.system.give_back(memory.addr() as usize, 0);
        }
        Ok(())
    }

    fn alloc_unified(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        unified::alloc(self, name, elems, dtype)
    }

    fn prefetch(&mut self, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()> {
        self.check_memory(memory)?;
        unified::prefetch(self, stream, memory, space)
    }

    fn check_memory(&self, memory: DeviceSlice) -> Result<()> {
        self.allocated.check(memory)
    }

    fn prepare_attention(&mut self, shape: AttentionShape, dtype: Dtype, separates_documents: bool) -> Result<()> {
        match (self.attention.way(&shape), &mut self.sdpa) {
            (AttentionWay::Plain, _) => Ok(()),
            _ if separates_documents => self.prepare_documents(&shape, dtype),
            (AttentionWay::Products, _) => self.reserve_scores(&[(shape, None)], dtype).map(drop),
            (AttentionWay::Fused, Some(sdpa)) => {
                let block = sdpa.block(&shape);
                sdpa.prepare(&[(shape, block)], dtype)
            }
            (AttentionWay::Fused, None) => Ok(()),
        }
    }

    fn prepare_delta(&mut self, shape: DeltaShape, dtype: Dtype) -> Result<()> {
        kernels::check_delta(&shape, dtype)?;
        let elems = gpu::scratch_bytes(Some(&shape)) / Dtype::Float32.bytes();
        if self.scratch.elems() < elems {
            self.free(self.scratch)?;
            self.scratch = self.alloc("kernels' scratch", elems, Dtype::Float32)?;
        }
        Ok(())
    }

    fn prepare_fp8(&mut self) -> Result<()> {
        has_fp8(capability(self.gpu.as_raw())?)?;
        self.gemm.check_fp8()
    }

    fn set_documents(&mut self, starts: &[i32], seq_length: usize) -> Result<()> {
        if self.attention == Attention::Plain { Ok(()) } else { self.send_documents(DocumentTable::new(starts, seq_length)) }
    }

    fn event(&mut self) -> Result<EventId> {
        self.events.push(Arc::new(RawEvent::new(false)?));
        self.awaited.push(StreamWait::Own);
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<()> {
        self.await_capacity(stream)?;
        self.awaited[event.0 as usize] = if (stream as usize) < Stream::COUNT { StreamWait::Own } else { StreamWait::Peers };
        self.events[event.0 as usize].record(&self.streams[stream as usize])
    }

    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()> {
        let (event, awaited) = (self.events[event.0 as usize].clone(), self.awaited[event.0 as usize]);
        self.wait_until_passed(stream, &event, awaited)
    }

    fn is_done(&mut self, event: EventId) -> Result<bool> {
        self.timeline.collect()?;
        self.events[event.0 as usize].is_done()
    }

    fn synchronize(&mut self, event: EventId) -> Result<()> {
        let event = &self.events[event.0 as usize];
        let Some(peering) = &self.peering else { return event.synchronize() };
        // A thread blocked in the driver would not notice that another rank has failed.
        while !event.is_done()? {
            peering.rank_context.check()?;
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<bool> {
        // The GPU rings no doorbell, so the driver thread polls.
        std::hint::spin_loop();
        self.communicator.as_ref().map_or(Ok(()), NcclCommunicator::check).map(|()| true)
    }

    fn waited_ns(&self) -> u64 {
        self.timeline.waited_ns()
    }

    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_d2h");
        self.check_memory(src)?;
        if self.may_copy_words(stream, src, dst) {
            return kernels::transfer::copy_words(self, stream, src.addr(), dst.addr() as u64, src.bytes());
        }
        self.timed(stream, "copy_d2h", |raw| {
            // SAFETY: sizes agree; the protocol reserves both sides for this copy until its event.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(dst.addr() as *mut _, src.addr(), src.bytes(), raw.0) };
            check(status, || format!("copy {} from the GPU", Bytes(src.bytes() as u64)))
        })
    }

    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_h2d");
        self.check_memory(dst)?;
        if self.may_copy_words(stream, dst, src) {
            return kernels::transfer::copy_words(self, stream, src.addr() as u64, dst.addr(), src.bytes());
        }
        self.timed(stream, "copy_h2d", |raw| {
            // SAFETY: as above.
            let status = unsafe { sys::cuMemcpyHtoDAsync_v2(dst.addr(), src.addr() as *const _, src.bytes(), raw.0) };
            check(status, || format!("copy {} to the GPU", Bytes(src.bytes() as u64)))
        })
    }

    fn finish(&mut self) -> Vec<Recorder> {
        self.timeline.finish()
    }
}
