//! One NVIDIA GPU: streams, events, copies; the kernels of `ptx/`, cuBLASLt's matrix products, cuDNN's attention.
//!
//! Everything that calls CUDA is in this folder. Libraries are opened at run time (`libraries.rs`); a machine without a
//! driver runs the same binary without this device.
#![allow(unsafe_code)]

mod backlog;
mod driver;
mod error;
mod gemm;
mod graph;
mod group_tables;
mod kernels;
mod launch;
mod lent;
mod libraries;
mod modules;
pub(crate) mod nccl;
mod open;
mod packed;
mod peers;
mod record;
mod ring;
mod sdpa;
mod timeline;
mod unified;

use super::documents::DocumentTable;
use super::footprint::gpu;
use super::slice::Allocated;
use super::{Attention, AttentionShape, Device, DeviceSlice, Engines, EventId, ExpertProducts, MatmulShape, ProductAlgorithm, Stream};
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
use cust::sys;
use driver::{RawEvent, RawStream, Registered, priorities};
use error::check;
use gemm::Gemm;
use graph::GraphExec;
use lent::{Peering, free};
use libraries::Libraries;
use modules::Modules;
use nccl::Rail;
use open::{capability, count, generation, has_fp8, name, newest_cuda, open, pci_address, visible_gpu};
use packed::Packed;
use ring::Ring;
use sdpa::Sdpa;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use timeline::{StreamWait, Timeline};

#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Folders to search for NVIDIA's libraries before the usual ones.
    pub libraries: Vec<PathBuf>,
    pub engines: Engines,
    /// Room for spans on each stream's track; 0 records none.
    pub trace_spans: usize,
    /// Only kernels that every GPU since Ampere takes, so that these can be tested on a newer one.
    pub portable: bool,
}

/// A GPU. Belongs to the thread that made it.
pub struct CudaDevice {
    // Dropped in this order: libraries before the streams that they were given, what is lent and borrowed after them, the context last.
    sdpa: Option<Sdpa>,
    packed: Packed,
    gemm: Gemm,
    graphs: Vec<GraphExec>,
    timeline: Timeline,
    registered: Vec<Registered>,
    allocations: Vec<(String, DeviceSlice)>,
    rings: Vec<(String, Ring)>,
    /// All of both, and what lies in `system`.
    allocated: Allocated,
    /// Host memory that kernels use by its own addresses.
    system: HostMemory,
    addressing: Addressing,
    events: Vec<Arc<RawEvent>>,
    /// By event, what waits for it wait for.
    awaited: Vec<StreamWait>,
    streams: Vec<RawStream>,
    /// What it has to do with others, if it has.
    peering: Option<Peering>,
    /// The way to GPUs of other processes.
    rail: Option<Rail>,
    modules: Modules,
    /// Whether kernels for Hopper alone run on it.
    hopper: bool,
    /// Memory that the compute stream's kernels share for partial sums; each leaves in it what it likes.
    scratch: DeviceSlice,
    name: String,
    gpu: sys::CUdevice,
    context: Context,
}

/// The GPUs that CUDA shows.
///
/// # Errors
/// `Resource` with the driver's or the loader's words when there is none.
pub fn visible_gpus() -> Result<Vec<GpuId>> {
    visible_gpu(0)?;
    let identify = |index| {
        let gpu = visible_gpu(index)?.as_raw();
        Ok(GpuId { index, pci: pci_address(gpu)?, model: name(gpu)? })
    };
    (0..count()?).map(identify).collect()
}

/// Whether kernels and copies of the visible GPU `ordinal` can reach memory of the other.
///
/// # Errors
/// `Resource` when there is no such GPU.
pub(crate) fn has_direct_link(ordinal: usize, other: usize) -> Result<bool> {
    lent::may_read(visible_gpu(ordinal)?.as_raw(), visible_gpu(other)?.as_raw())
}

/// The driver's release, or the newest CUDA that it serves where no library tells.
fn driver_version() -> String {
    let release = GpuFacts::read().ok().and_then(|facts| facts.driver);
    let cuda = || CudaApiVersion::get().map_or("unknown".into(), |cuda| format!("of CUDA {}.{}", cuda.major(), cuda.minor()));
    release.unwrap_or_else(cuda)
}

/// Bytes of memory that are free on the visible GPU `ordinal`, counted from 0.
///
/// # Errors
/// `Resource` with the driver's or the loader's words when there is no such GPU.
pub fn free_bytes(ordinal: usize) -> Result<u64> {
    let _context = open(visible_gpu(ordinal)?)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two numbers.
    check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "ask for free GPU memory".into())?;
    Ok(free as u64)
}

/// What the visible GPU `ordinal` sees of the host's memory, if it can be opened.
///
/// # Errors
/// Those of [`free_bytes`].
pub fn probe(ordinal: usize) -> Result<Addressing> {
    free_bytes(ordinal)?;
    unified::addressing(visible_gpu(ordinal)?.as_raw())
}

/// NVIDIA's libraries that a run needs: name, and the path or why it cannot be opened. Opens them.
pub(crate) fn libraries() -> Vec<(&'static str, Result<PathBuf>)> {
    newest_cuda().map_or(Vec::new(), |cuda| Libraries::new(&[], cuda).all())
}

/// The algorithms that cuBLASLt would compute these products by, on the first visible GPU. Runs none of them.
///
/// # Errors
/// `Resource` when there is no GPU, cuBLASLt is missing, or has no algorithm.
pub(crate) fn product_algorithms(shapes: &[MatmulShape], dtype: Dtype) -> Result<Vec<ProductAlgorithm>> {
    let _context = open(visible_gpu(0)?)?;
    let mut gemm = Gemm::new(&Libraries::new(&[], newest_cuda()?))?;
    shapes.iter().map(|&shape| gemm.algorithm_of(shape, dtype)).collect()
}

/// Why cuBLASLt, found in the folders `named` or the usual places, does not multiply by experts on the first visible GPU, if it does not.
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
    /// As [`CpuDevice::new`](super::cpu::CpuDevice::new). Tokens, positions and targets that kernels read lie inside of their tables: nothing here
    /// looks at them.
    ///
    /// # Errors
    /// `Resource` when there is no driver, no such GPU, or a library is missing.
    pub unsafe fn new(ordinal: usize, options: &CudaOptions) -> Result<Self> {
        let gpu = visible_gpu(ordinal)?;
        let context = open(gpu)?;
        let name = name(gpu.as_raw())?;
        let modules = Modules::load(kernels::sources(), &kernels::LATER)?;
        let libraries = Libraries::new(&options.libraries, newest_cuda()?);
        let mut gemm = Gemm::new(&libraries)?;
        if options.engines.expert_products == ExpertProducts::Cublaslt {
            gemm.open_groups(&libraries, generation(gpu.as_raw())?)?;
        }
        let (least, most) = priorities()?;
        let open = |stream: Stream| RawStream::new(if stream.is_urgent() { most } else { least });
        let streams = Stream::ALL.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let sdpa = match options.engines.attention {
            Attention::Cudnn { deterministic } => {
                let on = (streams[Stream::Compute as usize].0, generation(gpu.as_raw())?);
                Some(Sdpa::new(&libraries, on, deterministic)?)
            }
            Attention::Plain => None,
        };
        let timeline = Timeline::new(&streams, options.trace_spans)?;
        let mut dev = Self {
            sdpa,
            packed: Packed::new(),
            gemm,
            graphs: Vec::new(),
            timeline,
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
            rail: None,
            modules,
            hopper: !options.portable && open::generation(gpu.as_raw())? == open::HOPPER,
            scratch: DeviceSlice::at(0, 0, Dtype::Float32),
            name,
            gpu: gpu.as_raw(),
            context,
        };
        dev.scratch = dev.alloc("kernels' scratch", gpu::SCRATCH_BYTES / 4, Dtype::Float32)?;
        Ok(dev)
    }

    /// Whether a kernel copies between the two: see [`Stream::copies_words`].
    fn may_copy_words(&self, stream: Stream, here: DeviceSlice, there: PinnedSlice) -> bool {
        let words = || [here.addr(), there.addr() as u64, there.bytes() as u64].iter().all(|n| n.is_multiple_of(4));
        stream.copies_words() && words() && self.registered.iter().any(|registered| registered.contains(there))
    }

    /// Waits for the compute stream: what it filled, other streams may use at once.
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
            // SAFETY: the slice's memory, in the order of the stream.
            check(unsafe { sys::cuMemsetD8Async(x.addr(), 0, x.bytes(), raw.0) }, || format!("zero {} elements", x.elems()))
        })
    }

    /// What is enqueued on `stream` from now on runs after the last recorded point of `event`, which may be another GPU's: events are asked, and
    /// waited for, across contexts.
    fn wait_until_passed(&mut self, stream: Stream, event: &RawEvent, awaited: StreamWait) -> Result<()> {
        if event.is_done()? {
            return Ok(());
        }
        self.make_room(stream)?;
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin_wait(raw, stream, awaited)?;
        // SAFETY: both are live.
        check(unsafe { sys::cuStreamWaitEvent(raw.0, event.0, 0) }, || "wait for a CUDA event".into())?;
        self.timeline.end(raw, span)
    }

    /// Enqueues by `enqueue`, and a span around it when spans are recorded.
    fn timed(&mut self, stream: Stream, name: &'static str, enqueue: impl FnOnce(&RawStream) -> Result<()>) -> Result<()> {
        self.make_room(stream)?;
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin(raw, stream, name)?;
        let start_ns = now_ns();
        enqueue(raw)?;
        self.timeline.called(name, start_ns);
        self.timeline.end(raw, span)
    }

    /// Waits until the driver's queue of `stream` cannot fill with one operation more, if others read this GPU.
    ///
    /// # Errors
    /// The GPU's; what ended another rank.
    fn make_room(&mut self, stream: Stream) -> Result<()> {
        let Some(peering) = &mut self.peering else { return Ok(()) };
        let Some(mark) = peering.backlogs[stream as usize].count() else { return Ok(()) };
        let start_ns = now_ns();
        while !mark.is_done()? {
            peering.seat.check()?;
            self.rail.as_ref().map_or(Ok(()), Rail::check)?;
            thread::sleep(LOOK_AGAIN);
        }
        self.timeline.called("wait for room", start_ns);
        mark.record(&self.streams[stream as usize])
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // What waits for another process ends with the way to it.
        self.rail = None;
        // What is enqueued uses the memory, and that of others. An error here has been reported where it arose, or the process is ending.
        for stream in &self.streams {
            // SAFETY: the stream is live.
            unsafe { sys::cuStreamSynchronize(stream.0) };
        }
        free(&self.allocations);
    }
}

impl Device for CudaDevice {
    fn describe(&self) -> String {
        let cudnn = self.sdpa.as_ref().map_or("plain attention".into(), |sdpa| format!("cuDNN {}", sdpa.version()));
        format!("{} (cuBLASLt {}, {cudnn})", self.name, self.gemm.version())
    }

    fn versions(&self) -> Vec<(&'static str, String)> {
        let cudnn = self.sdpa.as_ref().map(|sdpa| ("cuDNN", sdpa.version().to_string()));
        let own = [("GPU", self.name.clone()), ("driver", driver_version()), ("cuBLASLt", self.gemm.version().to_string())];
        own.into_iter().chain(cudnn).collect()
    }

    fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        self.gemm.algorithms()
    }

    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let bytes = elems * dtype.bytes();
        if bytes == 0 {
            // Never followed; not null, so that it is not taken for an argument that is left out.
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
        let lent = self.peering.iter().filter_map(|peering| peering.own.as_ref()).flat_map(|own| own.allocations());
        own.into_iter().chain(lent).chain(slices).chain(rings).chain(self.system.allocations()).collect()
    }

    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, shape: RingShape) -> Result<DeviceSlice> {
        let [ringed, period] = [shape.ringed_elems, shape.period_elems].map(|elems| elems * dtype.bytes());
        let bytes = (elems * dtype.bytes()).next_multiple_of(gpu::RING_CHUNK_BYTES);
        let ring = Ring::new(name, bytes, ringed, period, self.gpu)?;
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

    fn pin(&mut self, memory: PinnedSlice) -> Result<()> {
        if memory.bytes() > 0 {
            self.registered.push(Registered::new(memory)?);
        }
        Ok(())
    }

    fn unpin(&mut self, memory: PinnedSlice) -> Result<()> {
        self.finish_streams()?;
        self.registered.retain(|registered| !registered.contains(memory));
        Ok(())
    }

    fn check_memory(&self, memory: DeviceSlice) -> Result<()> {
        self.allocated.check(memory)
    }

    fn prepare_attention(&mut self, shape: AttentionShape, dtype: Dtype, separates_documents: bool) -> Result<()> {
        match &mut self.sdpa {
            Some(_) if separates_documents => self.prepare_documents(&shape, dtype),
            Some(sdpa) => {
                let block = sdpa.block(&shape);
                sdpa.prepare(&[(shape, block)], dtype)
            }
            None => Ok(()),
        }
    }

    fn prepare_fp8(&mut self) -> Result<()> {
        has_fp8(capability(self.gpu)?)?;
        self.gemm.check_fp8()
    }

    fn set_documents(&mut self, starts: &[i32], seq_length: usize) -> Result<()> {
        if self.sdpa.is_none() { Ok(()) } else { self.send_documents(DocumentTable::new(starts, seq_length)) }
    }

    fn learns_by_doing(&self) -> bool {
        true
    }

    fn event(&mut self) -> Result<EventId> {
        self.events.push(Arc::new(RawEvent::new(false)?));
        self.awaited.push(StreamWait::Own);
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<()> {
        self.make_room(stream)?;
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
        // Who slept in the driver would not hear that another rank has failed.
        while !event.is_done()? {
            peering.seat.check()?;
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<bool> {
        // The GPU rings no bell: the driver looks again.
        std::hint::spin_loop();
        self.rail.as_ref().map_or(Ok(()), Rail::check).map(|()| true)
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
            // SAFETY: sizes agree; the protocol gives both to this copy until its event.
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
