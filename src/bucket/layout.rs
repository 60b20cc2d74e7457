//! Cuts the flat parameter order into buckets.
//!
//! The flat order is backward order: the gradients of bucket 0 are ready first, and the last bucket holds the first layers. The last
//! buckets keep their optimizer state on the device (paper 4.3), because the end of backward is needed first by the next forward.

use crate::optim::norm::BLOCK;
use std::ops::Range;

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

/// Bounds of each bucket, and the tier of its optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketLayout {
    flat_elems: usize,
    bucket_elems: usize,
    away: Tier,
    resident: usize,
    early: Range<usize>,
}

impl BucketLayout {
    /// Buckets of `bucket_elems`, rounded up to whole norm blocks. The last bucket may be shorter. All buckets are in the tier `away`.
    ///
    /// # Panics
    /// If `flat_elems` is not a positive multiple of [`BLOCK`].
    pub fn new(flat_elems: usize, bucket_elems: usize, away: Tier) -> Self {
        assert!(flat_elems > 0 && flat_elems.is_multiple_of(BLOCK));
        let bucket_elems = bucket_elems.max(1).next_multiple_of(BLOCK).min(flat_elems);
        Self { flat_elems, bucket_elems, away, resident: 0, early: 0..0 }
    }

    /// This layout with the last `resident` buckets (at most all) on the device.
    pub fn with_resident(&self, resident: usize) -> Self {
        Self { resident: resident.min(self.count()), ..self.clone() }
    }

    /// This layout with early buckets: the offloaded buckets in the flat range `table`. Nearly all of their gradient is final long before
    /// the rest.
    pub(crate) fn with_early(&self, table: Range<usize>) -> Self {
        let early = table.start.div_ceil(self.bucket_elems)..self.complete(table.end);
        Self { early, ..self.clone() }
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
        (start * self.bucket_elems).min(self.flat_elems)..(end * self.bucket_elems).min(self.flat_elems)
    }

    pub fn count(&self) -> usize {
        self.flat_elems.div_ceil(self.bucket_elems)
    }

    /// Buckets stepped by the pool: the first buckets of backward.
    pub fn offloaded(&self) -> usize {
        self.buckets_in(Tier::Host).len()
    }

    /// The flat range of `bucket`.
    pub fn range(&self, bucket: usize) -> Range<usize> {
        let start = bucket * self.bucket_elems;
        start..(start + self.bucket_elems).min(self.flat_elems)
    }

    /// Elements of the largest bucket.
    pub fn bucket_elems(&self) -> usize {
        self.bucket_elems
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
        range.start / self.bucket_elems..(range.end - 1) / self.bucket_elems + 1
    }

    /// Number of buckets that lie entirely within the first `elems` elements of the flat order.
    pub fn complete(&self, elems: usize) -> usize {
        if elems >= self.flat_elems { self.count() } else { elems / self.bucket_elems }
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
            prop_assert_eq!(end, flat);
            prop_assert_eq!(layout.offloaded_elems() > 0, away == Tier::Host && resident < layout.count());
            prop_assert_eq!(layout.overlapping(0..flat), 0..layout.count());
            let table = bucket.min(flat)..(bucket + resident * bucket).min(flat);
            let early = layout.with_early(table.clone()).early();
            for b in 0..layout.count() {
                let (range, leaves) = (layout.range(b), layout.tier(b).is_offloaded());
                prop_assert_eq!(early.contains(&b), leaves && table.start <= range.start && range.end <= table.end);
            }
        }
    }
}
