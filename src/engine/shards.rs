//! The weights that nobody has in their flat places for good: the ranks of a process together keep every slice of them, each its own and those
//! that it carries, of its namesakes in other processes. Or each keeps its own alone, and what it carries comes to its flat place with each fetch.

use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Lease};
use crate::error::Result;
use crate::planner::plan::Plan;
use std::ops::Range;

/// What one rank keeps of the buckets that are sharded.
#[derive(Clone, Default)]
pub(super) struct Shards {
    /// By process: the slices of the rank's namesake there, in its own order; or its own alone.
    by_process: Vec<DeviceSlice>,
    /// This rank, if it keeps nobody else's.
    only: Option<usize>,
    /// Flat places whose weights come of other processes with each fetch: up to here.
    fetched_elems: usize,
    /// How many buckets are sharded, the first ones.
    buckets: usize,
}

impl Shards {
    /// # Errors
    /// `Resource` when there is no memory.
    pub(super) fn take<D: Device>(lease: &mut Lease, dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let (sharded, kept) = (plan.sharded(), if plan.fully_sharded { 1 } else { plan.processes });
        // As long for each: whoever stands for others has room for the longest.
        let elems = slices.most_in(&sharded);
        let memory = lease.alloc(dev, "weight slices", kept * elems, plan.dtype)?;
        Ok(Self {
            by_process: (0..kept).map(|process| memory.slice(process * elems, elems)).collect(),
            only: plan.fully_sharded.then(|| slices.rank()),
            fetched_elems: plan.weight_ring.filter(|_| plan.fully_sharded).map_or(0, |ring| ring.ringed_elems),
            buckets: sharded.end,
        })
    }

    /// Whether the slice of `owner`, this rank or a namesake, of `bucket` is kept here.
    pub(super) fn has(&self, owner: usize, bucket: usize) -> bool {
        bucket < self.buckets && self.only.is_none_or(|only| only == owner)
    }

    /// Whether weights come of other processes with each fetch.
    pub(super) fn come_with_fetches(&self) -> bool {
        self.only.is_some()
    }

    /// The flat places whose weights pass between processes once, when they are final.
    pub(super) fn passed_once(&self, slices: &Slices) -> Range<usize> {
        self.fetched_elems..slices.layout().flat_elems()
    }

    /// Where that slice lies, if it is kept here.
    pub(super) fn of(&self, slices: &Slices, owner: usize, bucket: usize) -> Option<DeviceSlice> {
        let local = slices.local_of(owner, bucket);
        self.has(owner, bucket).then(|| self.of_owner(slices, owner).slice(local.start, local.len()))
    }

    /// Where `elems` elements of this rank's own order lie from `local` on, if their bucket is sharded.
    pub(super) fn own(&self, slices: &Slices, local: usize, elems: usize) -> Option<DeviceSlice> {
        let is_sharded = local < slices.local_buckets(&(0..self.buckets)).end;
        is_sharded.then(|| self.of_owner(slices, slices.rank()).slice(local, elems))
    }

    fn of_owner(&self, slices: &Slices, owner: usize) -> DeviceSlice {
        self.by_process[owner * self.by_process.len() / slices.ranks()]
    }
}
