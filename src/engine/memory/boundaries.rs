//! The residual stream between segments of layers. The stream of every micro-batch is on the device between two segments; in the backward
//! pass its gradient takes its place. Inputs of the segments that run forward a second time are also kept in host memory, and so are hidden
//! states of the head if its matrix is the embedding, for the first segment.

use crate::device::{Cast, Device, DeviceSlice, EventId, Kernels, Lease, Sides, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::model::segments::{BoundarySizes, FETCH_BUFFERS};
use crate::planner::plan::Plan;

/// Memory between segments, and the events that order its copies and kernels.
#[derive(Debug)]
pub(in crate::engine) struct Boundaries {
    sizes: BoundarySizes,
    /// Elements of one micro-batch, without padding.
    elems: usize,
    device: DeviceSlice,
    host: PinnedSlice,
    /// Recorded when the compute stream has written the stream that is sent next.
    written: EventId,
    /// By micro-batch, the end of the last copy of its stream to the host.
    sent: Vec<EventId>,
    /// By fetch buffer, the end of the last copy into it, and its last use by the compute stream.
    fetched: [EventId; FETCH_BUFFERS],
    read: [EventId; FETCH_BUFFERS],
    /// Number of inputs that were fetched, and of those that were read.
    fetches: usize,
    reads: usize,
}

impl Boundaries {
    /// # Errors
    /// `Resource` when memory is not available.
    pub(in crate::engine) fn new<D: Device>(plan: &Plan, (dev, host): Sides<'_, D>, lease: &mut Lease) -> Result<Self> {
        let (sizes, dtype) = (plan.boundaries(), plan.recipe.numerics.dtype);
        let (all_bytes, slot_bytes) = (sizes.host_elems() * dtype.bytes(), sizes.stride_elems * dtype.bytes());
        let device = lease.alloc(dev, "segment boundaries", sizes.device_elems(), dtype)?;
        let host = lease.alloc_pinned((dev, host), "kept boundaries", all_bytes, slot_bytes.min(all_bytes))?;
        let sent = (0..sizes.carried).map(|_| dev.event()).collect::<Result<_>>()?;
        let [fetched, read] = [[dev.event()?, dev.event()?], [dev.event()?, dev.event()?]];
        let elems = plan.recipe.step.tokens_of_rank() * plan.recipe.model.channels;
        Ok(Self { sizes, elems, device, host, written: dev.event()?, sent, fetched, read, fetches: 0, reads: 0 })
    }

    /// Copies `stream`, the residual stream of `micro_batch` or its gradient, to its place between two segments.
    pub(in crate::engine) fn carry<D: Kernels>(&self, dev: &mut D, micro_batch: usize, stream: DeviceSlice) -> Result<()> {
        dev.wait(Stream::Compute, self.sent[micro_batch])?;
        dev.launch(Cast { stream: Stream::Compute, src: stream, dst: self.carried(micro_batch) })
    }

    /// Copies what was carried last for `micro_batch` to `stream`.
    pub(in crate::engine) fn take<D: Kernels>(&self, dev: &mut D, micro_batch: usize, stream: DeviceSlice) -> Result<()> {
        dev.launch(Cast { stream: Stream::Compute, src: self.carried(micro_batch), dst: stream })
    }

    /// Copies what was carried last for `micro_batch`, the input of `segment` or the hidden states for the first one, to host memory.
    pub(in crate::engine) fn send<D: Device>(&self, dev: &mut D, (segment, micro_batch): (usize, usize)) -> Result<()> {
        dev.record(self.written, Stream::Compute)?;
        dev.wait(Stream::D2h, self.written)?;
        dev.copy_d2h(Stream::D2h, self.carried(micro_batch), self.kept(segment, micro_batch))?;
        dev.record(self.sent[micro_batch], Stream::D2h)
    }

    /// Copies the input of `segment` for `micro_batch` from host memory into the next fetch buffer.
    pub(in crate::engine) fn fetch<D: Device>(&mut self, dev: &mut D, (segment, micro_batch): (usize, usize)) -> Result<()> {
        let buffer = self.fetches % FETCH_BUFFERS;
        self.fetches += 1;
        // The copies of this micro-batch follow each other on one stream, so the last one is after that of this input.
        dev.wait(Stream::H2d, self.sent[micro_batch])?;
        dev.wait(Stream::H2d, self.read[buffer])?;
        dev.copy_h2d(Stream::H2d, self.kept(segment, micro_batch), self.buffer(buffer))?;
        dev.record(self.fetched[buffer], Stream::H2d)
    }

    /// Copies the input that was fetched first, of those that were not read, to `stream`.
    pub(in crate::engine) fn read<D: Kernels>(&mut self, dev: &mut D, stream: DeviceSlice) -> Result<()> {
        let buffer = self.reads % FETCH_BUFFERS;
        self.reads += 1;
        dev.wait(Stream::Compute, self.fetched[buffer])?;
        dev.launch(Cast { stream: Stream::Compute, src: self.buffer(buffer), dst: stream })?;
        dev.record(self.read[buffer], Stream::Compute)
    }

    fn carried(&self, micro_batch: usize) -> DeviceSlice {
        self.device.slice(micro_batch * self.sizes.stride_elems, self.elems)
    }

    fn buffer(&self, buffer: usize) -> DeviceSlice {
        self.carried(self.sizes.carried + buffer)
    }

    fn kept(&self, segment: usize, micro_batch: usize) -> PinnedSlice {
        // The first segment begins with the embedding, so its array is that of the hidden states.
        let array = segment.checked_sub(1).unwrap_or(self.sizes.between);
        let (slot, width) = (array * self.sizes.carried + micro_batch, self.device.dtype().bytes());
        self.host.slice(slot * self.sizes.stride_elems * width, self.elems * width)
    }
}
