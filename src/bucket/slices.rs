//! The slice of every bucket that a rank owns, cut at whole norm blocks.
//!
//! Of a bucket of B blocks, rank r of N owns blocks `B*r/N .. B*(r+1)/N`. The slices of a rank, concatenated in bucket order, form its
//! *local* order, which its optimizer state and the partial sums of its norm use.

use super::layout::{BucketLayout, Tier};
use crate::optim::norm::BLOCK;
use std::ops::Range;

/// The elements that a rank owns, in the flat order and in its local order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slices {
    layout: BucketLayout,
    rank: usize,
    ranks: usize,
}

impl Slices {
    /// The slices that `rank` of `ranks` owns of the buckets of `layout`.
    ///
    /// # Panics
    /// If `rank` is not below `ranks`.
    pub(crate) fn new(layout: BucketLayout, rank: usize, ranks: usize) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        Self { layout, rank, ranks }
    }

    /// The layout of the whole buckets.
    pub(crate) fn layout(&self) -> &BucketLayout {
        &self.layout
    }

    /// Number of ranks that share every bucket.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The rank that owns these slices.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The flat range of `bucket` that `rank` owns; empty if the bucket has fewer blocks than there are ranks.
    pub(crate) fn of(&self, rank: usize, bucket: usize) -> Range<usize> {
        let bucket = self.layout.range(bucket);
        let cut = |rank: usize| bucket.start + bucket.len() / BLOCK * rank / self.ranks * BLOCK;
        cut(rank)..cut(rank + 1)
    }

    /// The part of [`Slices::of`] that lies within `flat`.
    pub(crate) fn within(&self, rank: usize, bucket: usize, flat: &Range<usize>) -> Range<usize> {
        let whole = self.of(rank, bucket);
        let start = flat.start.clamp(whole.start, whole.end);
        start..flat.end.clamp(start, whole.end)
    }

    /// The flat range of `bucket` that this rank owns.
    pub(crate) fn global(&self, bucket: usize) -> Range<usize> {
        self.of(self.rank, bucket)
    }

    /// The local range of `bucket` on this rank.
    pub(crate) fn local(&self, bucket: usize) -> Range<usize> {
        self.local_of(self.rank, bucket)
    }

    /// The local range of `bucket` on `rank`, in that rank's own order.
    pub(crate) fn local_of(&self, rank: usize, bucket: usize) -> Range<usize> {
        let start = match self.ranks {
            1 => self.layout.range(bucket).start,
            _ if self.layout.is_uniform() => bucket * self.of(rank, 0).len(),
            _ => (0..bucket).map(|before| self.of(rank, before).len()).sum(),
        };
        start..start + self.of(rank, bucket).len()
    }

    /// The local range of consecutive buckets.
    pub(crate) fn local_buckets(&self, buckets: &Range<usize>) -> Range<usize> {
        let end = |buckets: usize| buckets.checked_sub(1).map_or(0, |last| self.local(last).end);
        end(buckets.start)..end(buckets.end)
    }

    /// Largest number of elements that any rank owns of consecutive buckets.
    pub(crate) fn most_in(&self, buckets: &Range<usize>) -> usize {
        let of = |rank| Self { rank, ..self.clone() }.local_buckets(buckets).len();
        (0..self.ranks).map(of).max().unwrap_or(0)
    }

    /// Number of elements that this rank owns before the flat position `end`.
    pub(crate) fn owned_before(&self, end: usize) -> usize {
        let last = self.layout.overlapping(0..end).last();
        last.map_or(0, |bucket| self.local(bucket).start + self.within(self.rank, bucket, &(0..end)).len())
    }

    /// Number of elements that this rank owns.
    pub(crate) fn elems(&self) -> usize {
        self.local(self.layout.count() - 1).end
    }

    /// Elements of the longest slice that this rank owns.
    pub(crate) fn slice_elems(&self) -> usize {
        self.layout.of_each_size().map(|bucket| self.global(bucket).len()).max().unwrap_or(0)
    }

    /// Elements of the longest slice of any rank.
    pub(crate) fn longest(&self) -> usize {
        let of = |bucket| (0..self.ranks).map(move |rank| self.of(rank, bucket).len());
        self.layout.of_each_size().flat_map(of).max().unwrap_or(0)
    }

    /// The local range of the buckets of `tier`.
    pub(crate) fn elems_in(&self, tier: Tier) -> Range<usize> {
        self.local_buckets(&self.layout.buckets_in(tier))
    }

    /// The parts of the flat range `flat` that this rank owns, each with its first local element.
    pub(crate) fn owned(&self, flat: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        self.layout.overlapping(flat.clone()).filter_map(move |bucket| {
            let (global, local) = (self.global(bucket), self.local(bucket));
            let part = flat.start.max(global.start)..flat.end.min(global.end);
            (!part.is_empty()).then(|| (part.clone(), local.start + part.start - global.start))
        })
    }

    /// The flat ranges of the local range `local`, in order, each with its first local element.
    pub(crate) fn pieces(&self, local: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        // A single rank owns everything in one piece.
        let all = (self.ranks == 1 && !local.is_empty()).then(|| (local.clone(), local.start));
        let buckets = if self.ranks == 1 { 0 } else { self.layout.count() };
        let pieces = (0..buckets).filter_map(move |bucket| {
            let (global, own) = (self.global(bucket), self.local(bucket));
            let part = local.start.max(own.start)..local.end.min(own.end);
            (!part.is_empty()).then(|| (global.start + part.start - own.start..global.start + part.end - own.start, part.start))
        });
        all.into_iter().chain(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::layout::{BucketStarts, LayoutRequest};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_tile_every_bucket_and_the_local_order(
            blocks in 1usize..60, bucket in 1usize..12, resident in 0usize..9, ranks in 1usize..6, from in 0usize..60, len in 0usize..60,
            whole_tensors: bool,
        ) {
            let tensors: Vec<usize> = (0..blocks).filter(|block| block * block % 7 < 3).map(|block| block * BLOCK).collect();
            let starts = if whole_tensors { BucketStarts::Tensors(&tensors) } else { BucketStarts::Blocks };
            let (flat_elems, bucket_elems) = (blocks * BLOCK, bucket * BLOCK);
            let layout = LayoutRequest { flat_elems, bucket_elems, away: Tier::Host, starts }.layout().with_resident(resident);
            let all: Vec<_> = (0..ranks).map(|rank| Slices::new(layout.clone(), rank, ranks)).collect();
            for b in 0..layout.count() {
                let mut end = layout.range(b).start;
                for slices in &all {
                    prop_assert_eq!(slices.global(b).start, end);
                    prop_assert!(slices.global(b).start.is_multiple_of(BLOCK));
                    prop_assert_eq!(all[0].of(slices.rank(), b), slices.global(b));
                    end = slices.global(b).end;
                }
                prop_assert_eq!(end, layout.range(b).end);
            }
            prop_assert_eq!(all.iter().map(Slices::elems).sum::<usize>(), layout.flat_elems());
            let flat = (from.min(blocks) * BLOCK + 5).min(layout.flat_elems())..((from + len).min(blocks) * BLOCK).max(5);
            let mut covered = 0;
            for slices in &all {
                let mut end = 0;
                for b in 0..layout.count() {
                    let local = slices.local(b);
                    prop_assert_eq!(local.start, end, "behind each other");
                    prop_assert!(slices.global(b).len() <= slices.slice_elems() && slices.slice_elems() <= slices.longest());
                    let tier = slices.elems_in(layout.tier(b));
                    prop_assert!(tier.start <= local.start && local.end <= tier.end);
                    end = local.end;
                }
                let tiers = [Tier::Host, Tier::Device].map(|tier| slices.elems_in(tier));
                prop_assert_eq!((tiers[0].start, tiers[0].end, tiers[1].end), (0, tiers[1].start, slices.elems()));
                for (part, local) in slices.owned(flat.clone()) {
                    covered += part.len();
                    prop_assert!(slices.pieces(local..local + part.len()).eq([(part, local)]));
                }
                prop_assert_eq!(slices.pieces(0..slices.elems()).map(|(part, _)| part.len()).sum::<usize>(), slices.elems());
            }
            prop_assert_eq!(covered, flat.len());
            let (ranks, buckets) = (0..ranks, 0..layout.count());
            let within = ranks.flat_map(|rank| buckets.clone().map(move |b| (rank, b))).map(|(rank, b)| all[0].within(rank, b, &flat).len());
            prop_assert_eq!(within.sum::<usize>(), flat.len());
        }
    }
}
