//! Segments of layers: the order in which a step of several micro-batches goes through the model.
//!
//! The *turn* is the last segment. It includes the head, and each of its micro-batches runs forward and backward at once. Every other
//! segment takes all micro-batches forward before the turn, and all of them backward after it, when it computes its activations again. With
//! one segment of all layers, a step is the forward and the backward pass of one micro-batch after the other.

use super::sized_allocator::PART_ALIGN_ELEMS;
use super::tensors::{Module, TensorTable};
use std::ops::Range;

/// Device buffers in which inputs of segments arrive from the host: one arrives while the other is read.
pub(crate) const FETCH_BUFFERS: usize = 2;

/// A cut of the layers of a model into segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSegments {
    /// First layer of each segment. The first segment begins with layer 0.
    starts: Vec<usize>,
    layers: usize,
}

/// Direction in which a visit takes the layers of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VisitKind {
    /// Forward, without saved activations.
    Forward,
    /// Forward and backward, with the head in between.
    Turn,
    /// Forward a second time, with saved activations, and backward.
    Backward,
}

/// The work of one segment on one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Visit {
    pub(crate) kind: VisitKind,
    pub(crate) segment: usize,
    pub(crate) micro_batch: usize,
}

/// Memory of the residual stream between segments, in elements of the compute format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BoundarySizes {
    /// Elements of one micro-batch, with padding.
    pub(crate) stride_elems: usize,
    /// Micro-batches whose stream is on the device between two segments.
    pub(crate) carried: usize,
    /// Fetch buffers on the device.
    pub(crate) fetched: usize,
    /// Segments whose inputs are in host memory: all but the first, which begins with the embedding, and the turn.
    pub(crate) between: usize,
    /// Arrays of a micro-batch in host memory: inputs of segments, and hidden states of the head if its matrix is the embedding.
    pub(crate) kept: usize,
}

impl BoundarySizes {
    pub(crate) fn device_elems(self) -> usize {
        (self.carried + self.fetched) * self.stride_elems
    }

    pub(crate) fn host_elems(self) -> usize {
        self.kept * self.stride_elems
    }
}

impl LayerSegments {
    /// One segment of all `layers`.
    pub fn whole(layers: usize) -> Self {
        Self { starts: vec![0], layers }
    }

    /// Segments of `each` layers below a turn of the last `turn` layers. The first segment is shorter if `each` does not divide the layers
    /// below the turn.
    pub(crate) fn new(layers: usize, each: usize, turn: usize) -> Self {
        let below = layers.saturating_sub(turn);
        let mut starts: Vec<_> = (0..below).rev().step_by(each.max(1)).map(|last| (last + 1).saturating_sub(each.max(1))).collect();
        starts.reverse();
        starts.extend((turn > 0 || below == 0).then_some(below));
        Self { starts, layers }
    }

    /// First layer of each segment.
    pub(crate) fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Number of segments.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// Whether all layers are one segment.
    pub fn is_whole(&self) -> bool {
        self.count() == 1
    }

    /// The layers of `segment`.
    pub(crate) fn layers(&self, segment: usize) -> Range<usize> {
        self.starts[segment]..self.starts.get(segment + 1).copied().unwrap_or(self.layers)
    }

    /// The modules of `segment` that have gradients, in the order of the forward pass.
    pub(crate) fn modules(&self, segment: usize) -> impl DoubleEndedIterator<Item = Module> + use<> {
        let embed = (segment == 0).then_some(Module::Embed);
        let head = (segment + 1 == self.count()).then_some(Module::Head);
        embed.into_iter().chain(self.layers(segment).map(Module::Layer)).chain(head)
    }

    /// The flat range of the modules of `segment`.
    pub fn flat_range(&self, segment: usize, table: &TensorTable) -> Range<usize> {
        let ranges = self.modules(segment).map(|module| table.module_range(module));
        ranges.reduce(|below, above| above.start..below.end).unwrap_or(0..0)
    }

    /// Memory between segments for a step of `micro_batches` with `elems` elements of the residual stream each. `tied` says whether the
    /// output matrix is the embedding.
    pub(crate) fn boundaries(&self, micro_batches: usize, elems: usize, tied: bool) -> BoundarySizes {
        let between = self.count().saturating_sub(2);
        let kept = between + usize::from(tied && !self.is_whole());
        BoundarySizes {
            stride_elems: elems.next_multiple_of(PART_ALIGN_ELEMS),
            carried: if self.is_whole() { 0 } else { micro_batches },
            fetched: if kept > 0 { FETCH_BUFFERS } else { 0 },
            between,
            kept: kept * micro_batches,
        }
    }

    /// The visits of a step of `micro_batches`, in order. Micro-batches of a segment are taken in ascending order in both directions, because
    /// their gradients are added in this order.
    pub(crate) fn visits(&self, micro_batches: usize) -> impl Iterator<Item = Visit> + use<> {
        let turn = self.count() - 1;
        let forward = (0..turn).map(|segment| (VisitKind::Forward, segment));
        let backward = (0..turn).rev().map(|segment| (VisitKind::Backward, segment));
        let visit = move |(kind, segment)| (0..micro_batches).map(move |micro_batch| Visit { kind, segment, micro_batch });
        forward.chain([(VisitKind::Turn, turn)]).chain(backward).flat_map(visit)
    }
}

#[cfg(test)]
mod tests {
    use super::VisitKind::{Backward, Forward, Turn};
    use super::*;
    use proptest::prelude::*;

    fn ranges(segments: &LayerSegments) -> Vec<Range<usize>> {
        (0..segments.count()).map(|segment| segments.layers(segment)).collect()
    }

    #[test]
    fn the_turn_is_the_last_segment_and_the_first_may_be_shorter() {
        assert_eq!(ranges(&LayerSegments::new(9, 3, 2)), [0..1, 1..4, 4..7, 7..9]);
        assert_eq!(ranges(&LayerSegments::new(4, 2, 2)), [0..2, 2..4]);
        assert_eq!(ranges(&LayerSegments::new(4, 9, 1)), [0..3, 3..4]);
        assert_eq!(LayerSegments::new(4, 1, 4), LayerSegments::whole(4));
    }

    #[test]
    fn one_segment_is_one_micro_batch_after_the_other() {
        let visits: Vec<_> = LayerSegments::whole(5).visits(3).map(|visit| (visit.kind, visit.segment, visit.micro_batch)).collect();
        assert_eq!(visits, [(Turn, 0, 0), (Turn, 0, 1), (Turn, 0, 2)]);
    }

    #[test]
    fn a_segment_takes_all_micro_batches_before_the_next() {
        let visits: Vec<_> = LayerSegments::new(3, 1, 1).visits(2).map(|visit| (visit.kind, visit.segment, visit.micro_batch)).collect();
        let expected = [
            (Forward, 0, 0),
            (Forward, 0, 1),
            (Forward, 1, 0),
            (Forward, 1, 1),
            (Turn, 2, 0),
            (Turn, 2, 1),
            (Backward, 1, 0),
            (Backward, 1, 1),
            (Backward, 0, 0),
            (Backward, 0, 1),
        ];
        assert_eq!(visits, expected);
    }

    #[test]
    fn inputs_of_the_segments_between_the_first_and_the_turn_are_kept() {
        let sizes = |each, turn, tied| LayerSegments::new(6, each, turn).boundaries(5, 100, tied);
        let of = |between, fetched, kept| BoundarySizes { stride_elems: 128, carried: 5, fetched, between, kept };
        assert_eq!((sizes(2, 2, false), sizes(2, 2, true)), (of(1, 2, 5), of(1, 2, 10)));
        assert_eq!((sizes(4, 2, false), sizes(4, 2, true)), (of(0, 0, 0), of(0, 2, 5)));
        assert_eq!((sizes(1, 6, true).device_elems(), sizes(1, 6, true).host_elems()), (0, 0));
    }

    proptest! {
        #[test]
        fn segments_tile_the_layers_and_every_micro_batch_turns_once(layers in 1usize..40, each in 1usize..9, turn in 1usize..9, count in 1usize..5) {
            let turn = turn.min(layers);
            let segments = LayerSegments::new(layers, each, turn);
            let all: Vec<_> = ranges(&segments).into_iter().flatten().collect();
            prop_assert_eq!(all, (0..layers).collect::<Vec<_>>());
            prop_assert_eq!(segments.layers(segments.count() - 1).len(), turn);
            prop_assert!((1..segments.count() - 1).all(|segment| segments.layers(segment).len() == each));
            let modules: Vec<_> = (0..segments.count()).flat_map(|segment| segments.modules(segment)).collect();
            prop_assert_eq!(modules.len(), layers + 2);
            let backward = segments.visits(count).filter(|visit| visit.kind != Forward);
            let order: Vec<_> = backward.map(|visit| (segments.count() - visit.segment, visit.micro_batch)).collect();
            prop_assert!(order.is_sorted() && order.len() == segments.count() * count);
        }
    }
}
