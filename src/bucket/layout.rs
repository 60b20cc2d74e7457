//! Cuts the flat parameter order into buckets.
//!
//! The flat order is backward order: the gradients of bucket 0 are ready first, and the last bucket holds the first layers. The last
//! buckets keep their optimizer state on the device (paper 4.3), because the end of backward is needed first by the next forward.

use crate::optim::norm::BLOCK;
use std::ops::Range;
use std::sync::Arc;

/// Location of a bucket's optimizer state, which determines the processor that steps the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Host memory, stepped by the CPU pool.
    Host,
    /// Host memory that the device addresses directly. It is moved to the device, stepped there, and moved back.
    Unified,
    /// Device memory, stepped by the device.
    Device,
}

impl Tier {
    /// Whether the CPU pool steps the bucket.
    pub(crate) fn is_offloaded(self) -> bool {
        self == Self::Host
    }
}

/// Where buckets may begin.
#[derive(Clone, Copy, Debug)]
pub enum BucketStarts<'a> {
    /// At every norm block: all buckets but the last have equal sizes.
    Blocks,
    /// At these tensors, so that no bucket holds a part of one. They are in order, and the first begins at 0.
    Tensors(&'a [usize]),
}

/// A request for a layout.
#[derive(Clone, Copy, Debug)]
pub struct LayoutRequest<'a> {
    /// Elements of the flat order.
    pub flat_elems: usize,
    /// Elements of a bucket. A single tensor may be longer.
    pub bucket_elems: usize,
    /// Tier of all buckets.
    pub away: Tier,
    pub starts: BucketStarts<'a>,
}

/// Bounds of each bucket, and the tier of its optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketLayout {
    flat_elems: usize,
    /// Elements of the largest bucket.
    bucket_elems: usize,
    /// First element of each bucket, if the sizes differ.
    starts: Option<Arc<[usize]>>,
    away: Tier,
    resident: usize,
    early: Range<usize>,
}

impl LayoutRequest<'_> {
    /// The layout, with all buckets in the tier `away`.
    ///
    /// # Panics
    /// As [`BucketLayout::new`].
    pub fn layout(self) -> BucketLayout {
        let Self { flat_elems, bucket_elems, away, starts } = self;
        let layout = BucketLayout::new(flat_elems, bucket_elems, away);
        let BucketStarts::Tensors(tensors) = starts else { return layout };
        let starts = whole_tensors(tensors, flat_elems, layout.bucket_elems);
        let ends = starts.iter().skip(1).chain([&flat_elems]);
        let longest = starts.iter().zip(ends).map(|(start, end)| end - start).max();
        BucketLayout { bucket_elems: longest.unwrap_or(flat_elems), starts: Some(starts.into()), ..layout }
    }
}

/// The starts of buckets of whole tensors, each of at most `bucket_elems` elements or of one tensor. A tensor that does not begin with a
/// norm block stays with the tensor before it.
fn whole_tensors(tensors: &[usize], flat_elems: usize, bucket_elems: usize) -> Vec<usize> {
    let possible: Vec<usize> = tensors.iter().copied().filter(|start| start.is_multiple_of(BLOCK) && *start < flat_elems).collect();
    let mut starts = vec![0];
    for (nth, &start) in possible.iter().enumerate() {
        let end = possible.get(nth + 1).copied().unwrap_or(flat_elems);
        let begun = starts[starts.len() - 1];
        if start > begun && end - begun > bucket_elems {
            starts.push(start);
        }
    }
    starts
}

impl BucketLayout {
    /// Buckets of `bucket_elems`, rounded up to whole norm blocks. The last bucket may be shorter. All buckets are in the tier `away`.
    ///
    /// # Panics
    /// If `flat_elems` is not a positive multiple of [`BLOCK`].
    pub fn new(flat_elems: usize, bucket_elems: usize, away: Tier) -> Self {
        assert!(flat_elems > 0 && flat_elems.is_multiple_of(BLOCK));
        let bucket_elems = bucket_elems.max(1).next_multiple_of(BLOCK).min(flat_elems);
        Self { flat_elems, bucket_elems, starts: None, away, resident: 0, early: 0..0 }
    }

    /// This layout with the last `resident` buckets (at most all) on the device.
    pub fn with_resident(&self, resident: usize) -> Self {
        Self { resident: resident.min(self.count()), ..self.clone() }
    }

    /// This layout with early buckets: the offloaded buckets in the flat range `table`. Nearly all of their gradient is final long before
    /// the rest.
    pub(crate) fn with_early(&self, table: Range<usize>) -> Self {
        let first = match table.start.checked_sub(1) {
            Some(before) => self.bucket_at(before) + 1,
            None => 0,
        };
        Self { early: first..self.complete(table.end), ..self.clone() }
    }

    /// The buckets that leave early.
    pub fn early(&self) -> Range<usize> {
        let end = self.early.end.min(self.offloaded());
        self.early.start.min(end)..end
    }

    /// The tier of the buckets that are not on the device.
    pub(crate) fn away(&self) -> Tier {
        self.away
    }

    /// The tier of the state of `bucket`.
    pub(crate) fn tier(&self, bucket: usize) -> Tier {
        if bucket < self.count() - self.resident { self.away } else { Tier::Device }
    }

    /// The buckets of `tier`.
    pub(crate) fn buckets_in(&self, tier: Tier) -> Range<usize> {
        let border = self.count() - self.resident;
        match tier {
            Tier::Device => border..self.count(),
            tier if tier == self.away => 0..border,
            _ => 0..0,
        }
    }

    /// The flat range of the buckets of `tier`.
    pub fn elems_in(&self, tier: Tier) -> Range<usize> {
        let Range { start, end } = self.buckets_in(tier);
        self.start_of(start)..self.start_of(end)
    }

    pub fn count(&self) -> usize {
        self.starts.as_ref().map_or_else(|| self.flat_elems.div_ceil(self.bucket_elems), |starts| starts.len())
    }

    /// Buckets stepped by the pool: the first buckets of backward.
    pub fn offloaded(&self) -> usize {
        self.buckets_in(Tier::Host).len()
    }

    /// The flat range of `bucket`.
    pub fn range(&self, bucket: usize) -> Range<usize> {
        self.start_of(bucket)..self.start_of(bucket + 1)
    }

    /// Elements of the largest bucket.
    pub fn bucket_elems(&self) -> usize {
        self.bucket_elems
    }

    /// Whether all buckets but the last have equal sizes.
    pub(crate) fn is_uniform(&self) -> bool {
        self.starts.is_none()
    }

    /// Buckets among which there is one of each size.
    pub(super) fn of_each_size(&self) -> impl Iterator<Item = usize> {
        let last = self.count() - 1;
        (0..=last).step_by(if self.is_uniform() { last.max(1) } else { 1 })
    }

    /// Elements of all buckets.
    pub fn flat_elems(&self) -> usize {
        self.flat_elems
    }

    /// Elements stepped by the pool: the flat range `0..offloaded_elems`.
    pub fn offloaded_elems(&self) -> usize {
        self.elems_in(Tier::Host).len()
    }

    /// Buckets that overlap the flat range.
    pub(crate) fn overlapping(&self, range: Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        self.bucket_at(range.start)..self.bucket_at(range.end - 1) + 1
    }

    /// Number of buckets that lie entirely within the first `elems` elements of the flat order.
    pub fn complete(&self, elems: usize) -> usize {
        if elems >= self.flat_elems { self.count() } else { self.bucket_at(elems) }
    }

    /// First element of `bucket`; the end of the flat order for all buckets beyond the last.
    fn start_of(&self, bucket: usize) -> usize {
        match &self.starts {
            None => (bucket * self.bucket_elems).min(self.flat_elems),
            Some(starts) => starts.get(bucket).copied().unwrap_or(self.flat_elems),
        }
    }

    /// The bucket of an element.
    fn bucket_at(&self, elem: usize) -> usize {
        match &self.starts {
            None => elem / self.bucket_elems,
            Some(starts) => starts.partition_point(|start| *start <= elem) - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buckets_tile_the_flat_order(blocks in 1usize..60, bucket in 1usize..100_000, resident in 0usize..80) {
            let flat = blocks * BLOCK;
            let away = [Tier::Host, Tier::Unified][resident % 2];
            let layout = BucketLayout::new(flat, bucket, away).with_resident(resident);
            expect_tiles(&layout, (away, resident), bucket.min(flat)..(bucket + resident * bucket).min(flat))?;
        }

        /// Tensors begin at any element; the first begins at 0.
        #[test]
        fn buckets_of_whole_tensors_tile_the_flat_order_and_cut_no_tensor(
            lengths in prop::collection::vec(1usize..40, 1..30), padding in 0usize..3, bucket in 1usize..20, resident in 0usize..12,
        ) {
            // Most tensors end within a block if they are not padded to one.
            let grain = [BLOCK, BLOCK / 2, 128][padding];
            let mut starts = vec![0];
            lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + length * grain));
            let flat = starts.pop().unwrap().next_multiple_of(BLOCK);
            let (flat_elems, bucket_elems, cuts) = (flat, bucket * BLOCK, BucketStarts::Tensors(&starts));
            let layout = LayoutRequest { flat_elems, bucket_elems, away: Tier::Host, starts: cuts }.layout().with_resident(resident);
            expect_tiles(&layout, (Tier::Host, resident), flat / 3..flat)?;
            let ends = starts.iter().skip(1).chain([&flat]);
            let tensors: Vec<_> = starts.iter().zip(ends).map(|(start, end)| *start..*end).collect();
            for b in 0..layout.count() {
                let range = layout.range(b);
                prop_assert!(starts.contains(&range.start) && range.len() <= layout.bucket_elems());
                prop_assert!(layout.of_each_size().any(|other| layout.range(other).len() == range.len()));
                // A bucket is longer than requested only where it could not be cut.
                let cuts = tensors.iter().filter(|tensor| tensor.start.is_multiple_of(BLOCK) && range.contains(&tensor.start)).count();
                prop_assert!(range.len() <= bucket * BLOCK || cuts == 1, "{range:?}");
            }
        }
    }

    fn expect_tiles(layout: &BucketLayout, (away, resident): (Tier, usize), table: Range<usize>) -> std::result::Result<(), TestCaseError> {
        let mut end = 0;
        for b in 0..layout.count() {
            let range = layout.range(b);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.start.is_multiple_of(BLOCK) && !range.is_empty());
            prop_assert_eq!(layout.tier(b), if b + resident < layout.count() { away } else { Tier::Device });
            for tier in [Tier::Host, Tier::Unified, Tier::Device] {
                let (buckets, elems) = (layout.buckets_in(tier), layout.elems_in(tier));
                prop_assert_eq!((buckets.contains(&b), elems.contains(&range.start)), (tier == layout.tier(b), tier == layout.tier(b)));
            }
            prop_assert_eq!(layout.overlapping(range.clone()), b..b + 1);
            prop_assert_eq!(layout.complete(range.end), b + 1);
            prop_assert_eq!(layout.complete(range.end - 1), b);
            end = range.end;
        }
        prop_assert_eq!(end, layout.flat_elems());
        prop_assert_eq!(layout.offloaded_elems() > 0, away == Tier::Host && resident < layout.count());
        prop_assert_eq!(layout.overlapping(0..layout.flat_elems()), 0..layout.count());
        let early = layout.with_early(table.clone()).early();
        for b in 0..layout.count() {
            let (range, leaves) = (layout.range(b), layout.tier(b).is_offloaded());
            prop_assert_eq!(early.contains(&b), leaves && table.start <= range.start && range.end <= table.end);
        }
        Ok(())
    }

    #[test]
    fn a_tensor_longer_than_a_bucket_stays_whole_and_short_tensors_share_buckets() {
        let starts = [0, 2, 3, 3, 10, 11, 12].map(|block| block * BLOCK);
        let request =
            LayoutRequest { flat_elems: 14 * BLOCK, bucket_elems: 3 * BLOCK, away: Tier::Host, starts: BucketStarts::Tensors(&starts) };
        let layout = request.layout();
        let ends: Vec<_> = (0..layout.count()).map(|bucket| layout.range(bucket).end / BLOCK).collect();
        assert_eq!((ends, layout.bucket_elems()), (vec![3, 10, 12, 14], 7 * BLOCK));
        let uniform = LayoutRequest { starts: BucketStarts::Blocks, ..request }.layout();
        assert_eq!(uniform, BucketLayout::new(14 * BLOCK, 3 * BLOCK, Tier::Host));
    }
}
