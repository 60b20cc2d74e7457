//! What of layers waits in host memory between their forward and their backward pass: the input of some
//! ([`LayerPolicy::Host`](super::policy::LayerPolicy::Host)), and what attention made of it
//! ([`LayerPolicy::HostAttention`](super::policy::LayerPolicy::HostAttention)).
//!
//! Two device buffers hold such arrays by turns. In the forward pass each array leaves for the host once it is written, while layers go on; the
//! last two stay where they are, for nothing overwrites them before their backward. In the backward pass a buffer that is free again
//! fetches the array of the layer after next, while the next one computes.
//!
//! A buffer belongs to the compute stream or to a copy; two events hand it over, one in each direction.

use crate::device::{Device, DeviceSlice, EventId, Stream};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;

/// Device buffers that the arrays of all such layers share.
pub(super) const BUFFERS: usize = 2;

/// The streams on which arrays leave and return.
const LEAVE: Stream = Stream::D2h;
const RETURN: Stream = Stream::H2d;

/// One layer's turn with its buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostTurn {
    buffer: DeviceSlice,
    /// The compute stream is done with the buffer: a copy may begin.
    computed: EventId,
    /// The copy is done: the compute stream may go on.
    copied: EventId,
    /// Where the array waits for the backward pass; `None`: in the buffer.
    slot: Option<PinnedSlice>,
    /// What the buffer holds next in the backward pass: from where, and to where in it.
    next: Option<(PinnedSlice, DeviceSlice)>,
}

impl HostTurn {
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
        let Some((next, buffer)) = self.next else { return Ok(()) };
        dev.record(self.computed, Stream::Compute)?;
        dev.wait(RETURN, self.computed)?;
        dev.copy_h2d(RETURN, next, buffer)?;
        dev.record(self.copied, RETURN)
    }
}

/// How many of `layers` such layers wait in host memory.
pub(super) fn host_slots(layers: usize) -> usize {
    layers.saturating_sub(BUFFERS)
}

/// Gives every array that takes turns with the others its turn; `memory` is where they wait.
pub(super) fn give_turns<'a, D: Device>(
    dev: &mut D,
    arrays: impl Iterator<Item = (DeviceSlice, &'a mut Option<HostTurn>)>,
    memory: PinnedSlice,
) -> Result<()> {
    let (buffers, places): (Vec<_>, Vec<_>) = arrays.unzip();
    places.into_iter().zip(host_turns(dev, &buffers, memory)?).for_each(|(place, turn)| *place = Some(turn));
    Ok(())
}

/// Every such layer's turn: `buffers` as [`BUFFERS`] alternate over them in forward order; `host` has [`host_slots`] of the longest of them.
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
