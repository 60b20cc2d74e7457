//! Host memory for copies of states that wait to be saved, so that steps need not wait for the disk.

use super::budget::{Workload, balances};
use super::plan::Plan;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::bucket::slices::Slices;
use crate::device::footprint::MemoryClass;
use crate::memory::MemorySpace;
use crate::optim::state_array::StateArrays;
use crate::request::choices::SaveMemory;
use crate::units::Bytes;

impl Workload<'_> {
    /// Number of copies for which the request names a size. Each has the state of a bucket, of which each rank has its slice.
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

    /// The memory of `copies` copies, and of the page lists of those that are pinned.
    pub(super) fn copies_classes(&self, layout: &BucketLayout, copies: usize) -> impl Iterator<Item = MemoryClass> + use<> {
        let class = |name, bytes| MemoryClass { name, space: MemorySpace::Host, bytes };
        let lists = if copies > 0 { self.copy_list_bytes(layout) } else { 0 };
        let classes = [class("checkpoint copies", copies * self.copy_bytes(layout)), class("lists of pinned copies", lists)];
        classes.into_iter().filter(|class| class.bytes > 0)
    }

    /// Bytes of the page lists of copies that are pinned: those of states on the device.
    fn copy_list_bytes(&self, layout: &BucketLayout) -> usize {
        self.site.ranks * self.site.machine.kind.page_list_bytes(resident(layout) * self.copy_bytes(layout))
    }

    /// Copies that fit `bytes`: at most one of each bucket; none where a save stops training.
    fn copies_in(&self, layout: &BucketLayout, bytes: u64) -> usize {
        let bytes = bytes.saturating_sub(self.copy_list_bytes(layout) as u64);
        let fitting = (bytes / self.copy_bytes(layout) as u64) as usize;
        let stops = obstacle(self.site.processes, layout).is_some() || fitting < resident(layout);
        if stops { 0 } else { layout.count().min(fitting) }
    }

    fn copy_bytes(&self, layout: &BucketLayout) -> usize {
        copy_bytes(self.recipe.optimizer().arrays(), layout, self.site.ranks)
    }
}

impl Plan {
    /// Why a save must stop training; `None` if it can run beside steps.
    pub(crate) fn save_obstacle(&self) -> Option<String> {
        let layout = &self.placement.layout;
        let is_short = self.placement.save_copies < resident(layout);
        let bytes = Bytes((self.copy_bytes() * resident(layout)) as u64);
        let too_little = is_short.then(|| format!("copies of the states on the device take {bytes} of --save-memory"));
        obstacle(self.site.processes, layout).or(too_little)
    }

    /// Bytes of states that copies can have while they wait to be saved.
    pub(crate) fn save_copy_bytes(&self) -> u64 {
        (self.placement.save_copies * self.copy_bytes()) as u64
    }

    fn copy_bytes(&self) -> usize {
        copy_bytes(self.optimizer().arrays(), &self.placement.layout, self.site.ranks)
    }
}

/// Bytes of a slot for the state of a bucket. Each rank has a slot for its slice.
fn copy_bytes(arrays: StateArrays, layout: &BucketLayout, ranks: usize) -> usize {
    (0..ranks).map(|rank| arrays.bytes(Slices::new(layout.clone(), rank, ranks).slice_elems())).sum()
}

/// Number of buckets whose states are on the device.
fn resident(layout: &BucketLayout) -> usize {
    layout.count() - layout.offloaded()
}

/// Why a save must stop training, however much memory there is.
fn obstacle(processes: usize, layout: &BucketLayout) -> Option<String> {
    if processes > 1 {
        return Some(format!("the state lies in {processes} processes"));
    }
    (!layout.buckets_in(Tier::Unified).is_empty()).then(|| "states are in unified memory".into())
}
