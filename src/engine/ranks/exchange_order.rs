//! The order in which ranks exchange the gradients of a step: segment by segment, in each segment round by round, and in each round piece by
//! piece in flat order. A piece is a bucket, or the part of a bucket that lies in one segment of layers. In the usual order all layers are one
//! segment, and pieces are buckets.

use crate::bucket::layout::BucketLayout;
use crate::model::segments::LayerSegments;
use crate::model::tensors::TensorTable;
use crate::planner::plan::Plan;
use std::ops::Range;

/// A bucket, or the part of a bucket that lies in one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BucketPart {
    pub(super) bucket: usize,
    /// Flat range of the piece.
    pub(super) flat: Range<usize>,
}

/// Pieces of the gradients of a step, and the order of their exchanges. The *number* of an exchange counts all exchanges of a run.
#[derive(Clone, Debug)]
pub(super) struct ExchangeOrder {
    layout: BucketLayout,
    /// Pieces in flat order.
    pieces: Vec<BucketPart>,
    /// The pieces of each segment that has any, from the last segment to the first.
    segments: Vec<Range<usize>>,
    rounds: usize,
    /// Number of the first exchange of this order.
    first: u64,
}

impl ExchangeOrder {
    /// The order of the steps of `plan`, whose first exchange has the number `first`.
    pub(super) fn of(plan: &Plan, first: u64) -> Self {
        let (layout, segments) = (&plan.placement.layout, &plan.placement.segments);
        let ends = if segments.is_whole() { Vec::new() } else { segment_ends(segments, &TensorTable::new(&plan.recipe.model)) };
        Self::new(layout.clone(), &ends, plan.recipe.step.shares / plan.site.ranks, first)
    }

    /// Exchanges in `rounds` rounds. `ends` are the ascending flat ends of segments; all elements after the last end are one more segment.
    fn new(layout: BucketLayout, ends: &[usize], rounds: usize, first: u64) -> Self {
        let (mut pieces, mut segments, mut start) = (Vec::new(), Vec::new(), 0);
        for end in ends.iter().copied().chain([layout.flat_elems()]) {
            let from = pieces.len();
            for bucket in layout.overlapping(start..end) {
                let whole = layout.range(bucket);
                pieces.push(BucketPart { bucket, flat: whole.start.max(start)..whole.end.min(end) });
            }
            segments.extend((from < pieces.len()).then_some(from..pieces.len()));
            start = start.max(end);
        }
        Self { layout, pieces, segments, rounds, first }
    }

    /// Number of pieces.
    pub(super) fn count(&self) -> usize {
        self.pieces.len()
    }

    /// The piece, and its round within the step, of the exchange with this `number`.
    pub(super) fn place_of(&self, number: u64) -> (usize, usize) {
        let in_step = (number - self.first) as usize % self.exchanges_of_step();
        let pieces = &self.segments[self.segments.partition_point(|pieces| pieces.end * self.rounds <= in_step)];
        let in_segment = in_step - pieces.start * self.rounds;
        (pieces.start + in_segment % pieces.len(), in_segment / pieces.len())
    }

    pub(super) fn piece(&self, piece: usize) -> &BucketPart {
        &self.pieces[piece]
    }

    /// The bucket whose gradient of the step is complete with the exchange with this `number`.
    pub(super) fn completed_by(&self, number: u64) -> Option<usize> {
        let (piece, round) = self.place_of(number);
        let BucketPart { bucket, flat } = &self.pieces[piece];
        (round + 1 == self.rounds && flat.end == self.layout.range(*bucket).end).then_some(*bucket)
    }

    /// Number of pieces that end within the flat `range`.
    pub(super) fn ending_in(&self, range: &Range<usize>) -> usize {
        let until = |end: usize| self.pieces.partition_point(|piece| piece.flat.end <= end);
        until(range.end) - until(range.start)
    }

    /// The last piece of the gradients before the flat position `end`, and the number of exchanges up to its last one among the first `done`
    /// exchanges. `None` if those have no exchange of the piece in the current step.
    pub(super) fn last_exchange(&self, done: u64, end: usize) -> Option<(usize, u64)> {
        let piece = self.pieces.partition_point(|piece| piece.flat.start < end).checked_sub(1)?;
        let last = (done - self.first).checked_sub(1)?;
        let (steps, in_step) = (last / self.exchanges_of_step() as u64, last as usize % self.exchanges_of_step());
        let pieces = &self.segments[self.segments.partition_point(|pieces| pieces.end <= piece)];
        let first_of_piece = pieces.start * self.rounds + piece - pieces.start;
        let round = (in_step.checked_sub(first_of_piece)? / pieces.len()).min(self.rounds - 1);
        let number = self.first + steps * self.exchanges_of_step() as u64 + (first_of_piece + round * pieces.len()) as u64;
        Some((piece, number + 1))
    }

    fn exchanges_of_step(&self) -> usize {
        self.pieces.len() * self.rounds
    }
}

/// Flat ends of the segments, in flat order, without the end of the flat order.
fn segment_ends(segments: &LayerSegments, table: &TensorTable) -> Vec<usize> {
    let ends = (1..segments.count()).rev().map(|segment| segments.flat_range(segment, table));
    ends.filter(|range| !range.is_empty()).map(|range| range.end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::layout::Tier;
    use crate::optim::norm::BLOCK;
    use proptest::prelude::*;

    fn order(bucket: usize, ends: &[usize], rounds: usize, first: u64) -> ExchangeOrder {
        ExchangeOrder::new(BucketLayout::new(6 * BLOCK, bucket * BLOCK, Tier::Host), ends, rounds, first)
    }

    #[test]
    fn one_segment_exchanges_every_bucket_once_a_round() {
        let order = order(2, &[], 2, 0);
        let places: Vec<_> = (0..7).map(|number| order.place_of(number)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 0)]);
    }

    #[test]
    fn a_segment_ends_its_rounds_before_the_next_and_cuts_buckets() {
        let order = order(4, &[BLOCK + 128, 4 * BLOCK], 2, 10);
        let piece = |bucket, flat| BucketPart { bucket, flat };
        assert_eq!(order.pieces, [piece(0, 0..BLOCK + 128), piece(0, BLOCK + 128..4 * BLOCK), piece(1, 4 * BLOCK..6 * BLOCK)]);
        let places: Vec<_> = (10..17).map(|number| order.place_of(number)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 0)]);
        let completed: Vec<_> = (10..16).map(|number| order.completed_by(number)).collect();
        assert_eq!(completed, [None, None, None, Some(0), None, Some(1)]);
        assert_eq!(order.ending_in(&(0..4 * BLOCK)), 2);
    }

    proptest! {
        /// Compares with the list of all exchanges.
        #[test]
        fn the_last_exchange_of_a_piece_is_the_latest_of_its_step(
            bucket in 1usize..7, cuts in prop::collection::btree_set(1usize..48, 0..4), rounds in 1usize..4, first in 0u64..9, done in 0u64..90,
            end in 1usize..=48,
        ) {
            let ends: Vec<_> = cuts.into_iter().map(|cut| cut * BLOCK / 8).collect();
            let (order, end) = (order(bucket, &ends, rounds, first), end * BLOCK / 8);
            prop_assert_eq!((0..order.count()).map(|piece| order.piece(piece).flat.len()).sum::<usize>(), 6 * BLOCK);
            let step = (order.count() * rounds) as u64;
            let begun = first + done.saturating_sub(1) / step * step;
            let last = (begun..first + done).rev().find(|number| order.piece(order.place_of(*number).0).flat.contains(&(end - 1)));
            let expected = last.map(|number| (order.place_of(number).0, number + 1));
            prop_assert_eq!(order.last_exchange(first + done, end), expected);
        }
    }
}
