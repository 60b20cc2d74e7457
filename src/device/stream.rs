//! The streams of a step, and events in them.

use crate::trace::Recorder;

/// The streams of a step. A device makes its streams, lanes and trace tracks from [`Stream::ALL`]; a device with peers also has the others
/// of [`Stream::WITH_PEERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Forward, backward, norms and the optimizer of resident buckets.
    Compute = 0,
    /// Copies of gradients to the host.
    D2h = 1,
    /// Copies of parameters to the device.
    H2d = 2,
    /// Pulls of gradients from peers, and their sums.
    Reduce = 3,
    /// Pulls of weights from peers.
    Gather = 4,
}

impl Stream {
    /// The streams of every device, in the order of their indices.
    pub const ALL: [Self; 3] = [Self::Compute, Self::D2h, Self::H2d];
    pub(crate) const COUNT: usize = Self::ALL.len();

    /// The streams of a device that has peers, in the order of their indices.
    pub(crate) const WITH_PEERS: [Self; 5] = [Self::Compute, Self::D2h, Self::H2d, Self::Reduce, Self::Gather];

    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::D2h => "d2h",
            Self::H2d => "h2d",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
        }
    }

    /// Whether the stream has priority: copies are short, and the step waits for them.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_urgent(self) -> bool {
        self != Self::Compute
    }

    /// Whether small copies to and from the host are kernels on this stream. Sums of gradients wait for them, and copy engines, which work
    /// in order of arrival, may have whole buckets queued.
    #[cfg(feature = "cuda")]
    pub(crate) fn copies_words(self) -> bool {
        matches!(self, Self::Compute | Self::Reduce)
    }

    /// A recorder for each stream, with room for `trace_spans` spans.
    pub(super) fn recorders(trace_spans: usize) -> [Recorder; Self::COUNT] {
        Self::ALL.map(|stream| Recorder::new(stream.name(), trace_spans))
    }
}

/// A recorded point in a stream, for which other streams can wait; made by [`Device::event`](super::Device::event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId(pub u32);
