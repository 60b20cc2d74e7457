//! The queues of a step, and the points in them that others wait for.

use crate::trace::Recorder;

/// The queues of a step. A device makes its streams, its lanes and its tracks of the timeline from [`Stream::ALL`]; those of
/// [`Stream::WITH_PEERS`] are there where it works beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Forward, backward, norms and the optimizer of resident buckets.
    Compute = 0,
    /// Gradients leave.
    D2h = 1,
    /// Parameters return.
    H2d = 2,
    /// Gradients are pulled from peers and summed.
    Reduce = 3,
    /// Weights are pulled from peers.
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

    /// Whether what it does goes before what others do: copies are short, and the step waits for them.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_urgent(self) -> bool {
        self != Self::Compute
    }

    /// Whether its small copies to and from the host are kernels: gradients' sums wait for them, and copy engines, which work in order of
    /// arrival, have whole buckets before them.
    #[cfg(feature = "cuda")]
    pub(crate) fn copies_words(self) -> bool {
        matches!(self, Self::Compute | Self::Reduce)
    }

    /// A recorder for each, with room for `trace_spans` spans.
    pub(super) fn recorders(trace_spans: usize) -> [Recorder; Self::COUNT] {
        Self::ALL.map(|stream| Recorder::new(stream.name(), trace_spans))
    }
}

/// A point in a stream that others can wait for; made by [`Device::event`](super::Device::event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId(pub u32);
