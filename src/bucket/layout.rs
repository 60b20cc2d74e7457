//! Cuts the flat parameter order into buckets.
//!
//! The flat order is backward order: bucket 0 has its gradients first, the last bucket holds the first layers. The last
//! `resident` buckets keep their optimizer on the device (paper 4.3: the tail of backward, the first needed again).

use crate::optim::norm::BLOCK;
use std::ops::Range;

/// Where each bucket begins and ends, and which of them stay on the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketLayout {
    flat_elems: usize,
    bucket_elems: usize,
    resident: usize,
}

impl BucketLayout {
    /// Buckets of `bucket_elems` (rounded up to whole norm blocks; the last bucket may be shorter), the last `resident`
    /// of them (at most all) on the device.
    ///
    /// # Panics
    /// If `flat_elems` is not a positive multiple of [`BLOCK`].
    pub fn new(flat_elems: usize, bucket_elems: usize, resident: usize) -> Self {
        assert!(flat_elems > 0 && flat_elems.is_multiple_of(BLOCK));
        let bucket_elems = bucket_elems.max(1).next_multiple_of(BLOCK).min(flat_elems);
        let resident = resident.min(flat_elems.div_ceil(bucket_elems));
        Self { flat_elems, bucket_elems, resident }
    }

    /// The same buckets with the last `resident` of them on the device.
    pub fn with_resident(&self, resident: usize) -> Self {
        Self::new(self.flat_elems, self.bucket_elems, resident)
    }

    /// All buckets.
    pub fn count(&self) -> usize {
        self.flat_elems.div_ceil(self.bucket_elems)
    }

    /// Buckets stepped by the pool: the first ones of backward.
    pub fn offloaded(&self) -> usize {
        self.count() - self.resident
    }

    /// Whether the optimizer of `bucket` runs on the device.
    pub fn is_resident(&self, bucket: usize) -> bool {
        bucket >= self.offloaded()
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

    /// Elements whose optimizer state is in host memory: the flat range `0..offloaded_elems`.
    pub fn offloaded_elems(&self) -> usize {
        if self.resident == 0 { self.flat_elems } else { self.range(self.offloaded()).start }
    }

    /// Buckets that overlap the flat range.
    pub fn overlapping(&self, range: Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        range.start / self.bucket_elems..(range.end - 1) / self.bucket_elems + 1
    }

    /// Buckets that are complete when the first `elems` elements of the flat order are.
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
            let layout = BucketLayout::new(flat, bucket, resident);
            let mut end = 0;
            for b in 0..layout.count() {
                let range = layout.range(b);
                prop_assert_eq!(range.start, end);
                prop_assert!(range.start.is_multiple_of(BLOCK) && !range.is_empty());
                prop_assert_eq!(layout.is_resident(b), range.start >= layout.offloaded_elems());
                prop_assert_eq!(layout.overlapping(range.clone()), b..b + 1);
                prop_assert_eq!(layout.complete(range.end), b + 1);
                prop_assert_eq!(layout.complete(range.end - 1), b);
                end = range.end;
            }
            prop_assert_eq!(end, flat);
            prop_assert_eq!(layout.overlapping(0..flat), 0..layout.count());
        }
    }
}
