//! Layers whose input waits in host memory ([`LayerPolicy::Host`](super::policy::LayerPolicy::Host)).
//!
//! Two device buffers hold these inputs by turns. In the forward pass each input leaves for the host while its layer computes; the
//! last two stay where they are, for nothing overwrites them before their backward. In the backward pass a buffer that is free
//! again fetches the input of the layer after next, while the next one computes.
//!
//! A buffer belongs to the compute stream or to a copy; two events hand it over, one in each direction.

use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;

/// Device buffers that the inputs of all such layers share.
pub(super) const BUFFERS: usize = 2;

/// The streams on which inputs leave and return.
const LEAVE: Stream = Stream::D2h;
const RETURN: Stream = Stream::H2d;

/// One layer's turn with its buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostInput {
    buffer: DeviceSlice,
    /// The compute stream is done with the buffer: a copy may begin.
    computed: EventId,
    /// The copy is done: the compute stream may go on.
    copied: EventId,
    /// Where the input waits for the backward pass; `None`: in the buffer.
    slot: Option<PinnedSlice>,
    /// Whose input the buffer holds next in the backward pass.
    next: Option<PinnedSlice>,
}

impl HostInput {
    /// Before the buffer is written or read anew: waits for its last copy.
    pub(crate) fn acquire<D: Device>(&self, dev: &mut D) -> Result<()> {
        dev.wait(Stream::Compute, self.copied)
    }

    /// In the forward pass, once the buffer is written.
    pub(super) fn send<D: Device>(&self, dev: &mut D) -> Result<()> {
        let Some(slot) = self.slot else { return Ok(()) };
        dev.record(self.computed, Stream::Compute)?;
        dev.wait(LEAVE, self.computed)?;
        dev.copy_d2h(LEAVE, self.buffer, slot)?;
        dev.record(self.copied, LEAVE)
    }

    /// After the layer's backward pass, which needs the buffer no more.
    pub(crate) fn fetch_next<D: Device>(&self, dev: &mut D) -> Result<()> {
        let Some(next) = self.next else { return Ok(()) };
        dev.record(self.computed, Stream::Compute)?;
        dev.wait(RETURN, self.computed)?;
        dev.copy_h2d(RETURN, next, self.buffer)?;
        dev.record(self.copied, RETURN)
    }
}

/// How many of `layers` such layers wait in host memory.
pub(super) fn host_slots(layers: usize) -> usize {
    layers.saturating_sub(BUFFERS)
}

/// Every such layer's turn: `buffers` as [`BUFFERS`] alternate over them in forward order, `host` [`host_slots`] inputs long.
pub(super) fn host_inputs<D: Device>(dev: &mut D, buffers: &[DeviceSlice], host: PinnedSlice) -> Result<Vec<HostInput>> {
    let mut handover = || -> Result<_> { Ok((dev.event()?, dev.event()?)) };
    let events: [_; BUFFERS] = [handover()?, handover()?];
    let slots = host_slots(buffers.len());
    let turn = |(i, buffer): (usize, &DeviceSlice)| {
        let (computed, copied) = events[i % BUFFERS];
        let slot = |i: usize| (i < slots).then(|| host.slice(i * buffer.bytes(), buffer.bytes()));
        HostInput { buffer: *buffer, computed, copied, slot: slot(i), next: i.checked_sub(BUFFERS).and_then(slot) }
    };
    Ok(buffers.iter().enumerate().map(turn).collect())
}
