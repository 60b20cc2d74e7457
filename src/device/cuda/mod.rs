//! One NVIDIA GPU: three streams, events, copies; the kernels of `ptx/`, cuBLASLt's matrix products, cuDNN's attention.
//!
//! Everything that calls CUDA is in this folder. Libraries are opened at run time ([`libraries`]); a machine without a
//! driver runs the same binary without this device.
#![allow(unsafe_code)]

mod driver;
mod error;
mod kernels;
mod launch;
mod libraries;
mod modules;
mod timeline;

use super::{Device, DeviceSlice, EventId, Stream};
use crate::dtype::Dtype;
use crate::engine::trace::Recorder;
use crate::error::{Error, Result};
use crate::host::pinned::PinnedSlice;
use crate::units::Bytes;
use cust::context::Context;
use cust::sys;
use driver::{RawEvent, RawStream, Registered, priorities};
use error::check;
use modules::Modules;
use timeline::Timeline;

/// The first visible GPU. Belongs to the thread that made it.
pub struct CudaDevice {
    // Dropped in this order: the context last.
    timeline: Timeline,
    registered: Vec<Registered>,
    allocations: Vec<DeviceSlice>,
    events: Vec<RawEvent>,
    streams: [RawStream; 3],
    modules: Modules,
    name: String,
    _context: Context,
}

/// Whether there is a driver and a GPU, and if not, why.
///
/// # Errors
/// `Resource` with the driver's or the loader's words.
pub fn probe() -> Result<()> {
    first_gpu().map(drop)
}

fn first_gpu() -> Result<cust::device::Device> {
    let none = |cause: String| Error::resource("find an NVIDIA GPU", cause);
    cuda_driver_shim::load().map_err(none)?;
    let number = |e: cust::error::CudaError| none(format!("CUDA error {}", e as u32));
    cust::init(cust::CudaFlags::empty()).map_err(number)?;
    cust::device::Device::get_device(0).map_err(number)
}

impl CudaDevice {
    /// Opens the first GPU and loads the kernels. `trace_spans`: room for spans on each stream's track; 0 records none.
    ///
    /// # Errors
    /// `Resource` when there is no driver, no GPU, or a library is missing.
    pub fn new(trace_spans: usize) -> Result<Self> {
        let gpu = first_gpu()?;
        let number = |e: cust::error::CudaError| Error::resource("open the GPU", format!("CUDA error {}", e as u32));
        let context = Context::new(gpu).map_err(number)?;
        let name = gpu.name().map_err(number)?;
        let modules = Modules::load(&[])?;
        // Copies are short and the step waits for them: they go first.
        let (least, most) = priorities()?;
        let streams = [RawStream::new(least)?, RawStream::new(most)?, RawStream::new(most)?];
        let timeline = Timeline::new(&streams, trace_spans)?;
        Ok(Self {
            timeline,
            registered: Vec::new(),
            allocations: Vec::new(),
            events: Vec::new(),
            streams,
            modules,
            name,
            _context: context,
        })
    }

    /// Enqueues by `enqueue`, and a span around it when spans are recorded.
    fn timed(&mut self, stream: Stream, name: &'static str, enqueue: impl FnOnce(&RawStream) -> Result<()>) -> Result<()> {
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin(raw, stream, name)?;
        enqueue(raw)?;
        self.timeline.end(raw, span)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // What is enqueued uses the memory. An error here has been reported where it arose, or the process is ending.
        // SAFETY: the streams are live; addresses came from cuMemAlloc and are freed once.
        unsafe {
            self.streams.iter().for_each(|s| drop(sys::cuStreamSynchronize(s.0) as u32));
            self.allocations.iter().for_each(|a| drop(sys::cuMemFree_v2(a.addr) as u32));
        }
    }
}

impl Device for CudaDevice {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let bytes = elems * dtype.bytes();
        if bytes == 0 {
            // Never followed; not null, so that it is not taken for an argument that is left out.
            return Ok(DeviceSlice { addr: 256, elems, dtype });
        }
        let operation = || format!("allocate {} of GPU memory for {name}", Bytes(bytes as u64));
        let mut addr = 0;
        // SAFETY: writes one address.
        check(unsafe { sys::cuMemAlloc_v2(&mut addr, bytes) }, operation)?;
        let slice = DeviceSlice { addr, elems, dtype };
        self.allocations.push(slice);
        let raw = &self.streams[Stream::Compute as usize];
        // SAFETY: just allocated, of this size.
        check(unsafe { sys::cuMemsetD8Async(addr, 0, bytes, raw.0) }, operation)?;
        // Other streams may use it at once.
        // SAFETY: the stream is live.
        check(unsafe { sys::cuStreamSynchronize(raw.0) }, operation)?;
        Ok(slice)
    }

    fn pin(&mut self, memory: PinnedSlice) -> Result<()> {
        if memory.bytes() > 0 {
            self.registered.push(Registered::new(memory)?);
        }
        Ok(())
    }

    fn event(&mut self) -> Result<EventId> {
        self.events.push(RawEvent::new(false)?);
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<()> {
        self.events[event.0 as usize].record(&self.streams[stream as usize])
    }

    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()> {
        let event = &self.events[event.0 as usize];
        if event.is_done()? {
            return Ok(());
        }
        let raw = &self.streams[stream as usize];
        let span = self.timeline.begin_wait(raw, stream)?;
        // SAFETY: both are live.
        check(unsafe { sys::cuStreamWaitEvent(raw.0, event.0, 0) }, || "wait for a CUDA event".into())?;
        self.timeline.end(raw, span)
    }

    fn is_done(&mut self, event: EventId) -> Result<bool> {
        self.timeline.collect()?;
        self.events[event.0 as usize].is_done()
    }

    fn synchronize(&mut self, event: EventId) -> Result<()> {
        self.events[event.0 as usize].synchronize()
    }

    fn idle(&mut self) -> Result<bool> {
        // The GPU rings no bell: the driver looks again.
        std::hint::spin_loop();
        Ok(true)
    }

    fn waited_ns(&self) -> u64 {
        self.timeline.waited_ns()
    }

    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_d2h");
        self.timed(stream, "copy_d2h", |raw| {
            // SAFETY: sizes agree; the protocol gives both to this copy until its event.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(dst.addr() as *mut _, src.addr, src.bytes(), raw.0) };
            check(status, || format!("copy {} from the GPU", Bytes(src.bytes() as u64)))
        })
    }

    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_h2d");
        self.timed(stream, "copy_h2d", |raw| {
            // SAFETY: as above.
            let status = unsafe { sys::cuMemcpyHtoDAsync_v2(dst.addr, src.addr() as *const _, src.bytes(), raw.0) };
            check(status, || format!("copy {} to the GPU", Bytes(src.bytes() as u64)))
        })
    }

    fn finish(&mut self) -> Vec<Recorder> {
        self.timeline.finish(&self.streams)
    }
}
