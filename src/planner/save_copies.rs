//! Host memory for copies of states that wait to be saved, so that steps need not wait for the disk.

use super::budget::{Workload, balances};
use crate::bucket::layout::{BucketLayout, Tier};
use crate::device::footprint::MemoryClass;
use crate::memory::MemorySpace;
use crate::request::choices::SaveMemory;

impl Workload<'_> {
    /// Number of copies for which the request names a size. Each has the state of a bucket.
    pub(super) fn requested_copies(&self, layout: &BucketLayout) -> usize {
        match self.site.save_memory {
            SaveMemory::Off | SaveMemory::Auto => 0,
            SaveMemory::Size(bytes) => self.copies_in(layout, bytes.0),
        }
    }

    /// Number of copies of a run whose other memory is `classes`: as requested, or as many as fit the free memory of the host.
    pub(super) fn copies(&self, layout: &BucketLayout, classes: &[MemoryClass]) -> usize {
        match self.site.save_memory {
            SaveMemory::Auto => {
                let (ranks, processes) = (self.site.ranks, self.site.processes);
                let [_, host] = balances(&self.site.machine, classes, (ranks, processes), self.transient_bytes);
                self.copies_in(layout, host.free().unwrap_or(0))
            }
            SaveMemory::Off | SaveMemory::Size(_) => self.requested_copies(layout),
        }
    }

    /// The memory of `copies` copies.
    pub(super) fn copies_class(&self, layout: &BucketLayout, copies: usize) -> MemoryClass {
        MemoryClass { name: "checkpoint copies", space: MemorySpace::Host, bytes: copies * self.copy_bytes(layout) }
    }

    /// Copies that fit `bytes`: at most one of each bucket; none where a save stops training, as it does without copies of all states that
    /// the device has.
    fn copies_in(&self, layout: &BucketLayout, bytes: u64) -> usize {
        let stops = self.site.ranks > 1 || !layout.buckets_in(Tier::Unified).is_empty();
        let (fitting, resident) = ((bytes / self.copy_bytes(layout) as u64) as usize, layout.count() - layout.offloaded());
        if stops || fitting < resident { 0 } else { layout.count().min(fitting) }
    }

    fn copy_bytes(&self, layout: &BucketLayout) -> usize {
        self.recipe.optimizer().arrays().bytes(layout.bucket_elems())
    }
}
