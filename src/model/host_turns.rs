//! Offload of activations to host memory between the forward and the backward pass: the input of layers with
//! [`LayerPolicy::Host`](super::policy::LayerPolicy::Host), and also attention's output with
//! [`LayerPolicy::HostAttention`](super::policy::LayerPolicy::HostAttention).
//!
//! These arrays alternate between two device buffers. In the forward pass each array is copied to the host once it is written, while later
//! layers run. The last two arrays stay in the buffers, because nothing overwrites them before their backward pass. In the backward pass a
//! free buffer prefetches the array of the layer after next, while the next layer computes.
//!
//! A buffer belongs either to the compute stream or to a copy; two events transfer it, one in each direction.

use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;

/// Number of device buffers for each kind of array.
pub(super) const BUFFERS: usize = 2;

/// Streams of the copies to and from the host.
const LEAVE: Stream = Stream::D2h;
const RETURN: Stream = Stream::H2d;

/// The offload of one layer's array.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostTurn {
    buffer: DeviceSlice,
    /// Recorded when the compute stream has finished with the buffer, so that a copy may begin.
    computed: EventId,
    /// Recorded when the copy is done, so that the compute stream may continue.
    copied: EventId,
    /// Host memory of the array; `None`: it stays in the buffer.
    slot: Option<PinnedSlice>,
    /// The array that the buffer holds next in the backward pass: its host memory, and its slice of the buffer.
    next: Option<(PinnedSlice, DeviceSlice)>,
}

impl HostTurn {
    /// Waits for the buffer's last copy; call this before the buffer is written or read.
    pub(crate) fn acquire<D: Device>(&self, dev: &mut D) -> Result<()> {
        dev.wait(Stream::Compute, self.copied)
    }

    /// Copies the array to the host; called in the forward pass, once the buffer is written.
    pub(super) fn send<D: Device>(&self, dev: &mut D) -> Result<()> {
        let Some(slot) = self.slot else { return Ok(()) };
        dev.record(self.computed, Stream::Compute)?;
        dev.wait(LEAVE, self.computed)?;
        dev.copy_d2h(LEAVE, self.buffer, slot)?;
        dev.record(self.copied, LEAVE)
    }

    /// Prefetches the buffer's next array; called after the layer's backward pass, which no longer needs the buffer.
    pub(crate) fn fetch_next<D: Device>(&self, dev: &mut D) -> Result<()> {
        let Some((next, buffer)) = self.next else { return Ok(()) };
        dev.record(self.computed, Stream::Compute)?;
        dev.wait(RETURN, self.computed)?;
        dev.copy_h2d(RETURN, next, buffer)?;
        dev.record(self.copied, RETURN)
    }
}

/// Number of arrays in host memory for `layers` layers with offload.
pub(super) fn host_slots(layers: usize) -> usize {
    layers.saturating_sub(BUFFERS)
}

/// Sets up the offload of all `arrays`; `memory` is their host memory.
pub(super) fn give_turns<'a, D: Device>(
    dev: &mut D,
    arrays: impl Iterator<Item = (DeviceSlice, &'a mut Option<HostTurn>)>,
    memory: PinnedSlice,
) -> Result<()> {
    let (buffers, places): (Vec<_>, Vec<_>) = arrays.unzip();
    for (place, turn) in places.into_iter().zip(host_turns(dev, &buffers, memory)?) {
        *place = Some(turn);
    }
    Ok(())
}

/// The offload of every layer. `buffers` are the arrays' device slices in forward order, alternating between the [`BUFFERS`]; `host` has
/// [`host_slots`] slots of the size of the longest array.
fn host_turns<D: Device>(dev: &mut D, buffers: &[DeviceSlice], host: PinnedSlice) -> Result<Vec<HostTurn>> {
    let mut handover = || -> Result<_> { Ok((dev.event()?, dev.event()?)) };
    let events: [_; BUFFERS] = [handover()?, handover()?];
    let slots = host_slots(buffers.len());
    let stride = buffers.iter().map(|buffer| buffer.bytes()).max().unwrap_or(0);
    let slot = |i: usize| (i < slots).then(|| host.slice(i * stride, buffers[i].bytes()));
    let turn = |(i, buffer): (usize, &DeviceSlice)| {
        let (computed, copied) = events[i % BUFFERS];
        let next = i.checked_sub(BUFFERS).and_then(|before| Some((slot(before)?, buffers[before])));
        HostTurn { buffer: *buffer, computed, copied, slot: slot(i), next }
    };
    Ok(buffers.iter().enumerate().map(turn).collect())
}
