//! Weights without a permanent flat location. The ranks of a process together hold every slice of them: each its own slices, and those of
//! its inter-node peers, which it relays. With full sharding each rank holds its own slices only, and the relayed slices arrive at their
//! flat addresses with each fetch.

use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Lease};
use crate::error::Result;
use crate::planner::plan::Plan;
use std::ops::Range;

/// The sharded slices that one rank holds.
#[derive(Clone, Default)]
pub(in crate::engine) struct Shards {
    /// By process: the slices of the rank's inter-node peer there, in that peer's local order. With full sharding, only the rank's own.
    by_process: Vec<DeviceSlice>,
    /// This rank, if it holds its own slices only.
    only: Option<usize>,
    /// End of the flat range of weights that cross between processes with each fetch.
    fetched_elems: usize,
    /// Number of sharded buckets; they are the first ones.
    buckets: usize,
}

impl Shards {
    /// # Errors
    /// `Resource` when memory is not available.
    pub(in crate::engine) fn take<D: Device>(lease: &mut Lease, dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let (sharded, kept) = (plan.sharded(), if plan.placement.rings.fully_sharded { 1 } else { plan.site.processes });
        // Equally long for each owner, so that the memory fits the longest slices.
        let elems = slices.most_in(&sharded);
        let memory = lease.alloc(dev, "weight slices", kept * elems, plan.recipe.numerics.dtype)?;
        Ok(Self {
            by_process: (0..kept).map(|process| memory.slice(process * elems, elems)).collect(),
            only: plan.placement.rings.fully_sharded.then(|| slices.rank()),
            fetched_elems: plan.placement.rings.weights.filter(|_| plan.placement.rings.fully_sharded).map_or(0, |ring| ring.ringed_elems),
            buckets: sharded.end,
        })
    }

    /// Whether this rank holds the slice of `bucket` of `owner`, which is this rank or an inter-node peer.
    pub(in crate::engine) fn has(&self, owner: usize, bucket: usize) -> bool {
        bucket < self.buckets && self.only.is_none_or(|only| only == owner)
    }

    /// Whether weights cross between processes with each fetch.
    pub(in crate::engine) fn come_with_fetches(&self) -> bool {
        self.only.is_some()
    }

    /// The flat range of weights that cross between processes once, when they are final.
    pub(in crate::engine) fn passed_once(&self, slices: &Slices) -> Range<usize> {
        self.fetched_elems..slices.layout().flat_elems()
    }

    /// Location of the slice of `bucket` of `owner`, if this rank holds it.
    pub(in crate::engine) fn of(&self, slices: &Slices, owner: usize, bucket: usize) -> Option<DeviceSlice> {
        let local = slices.local_of(owner, bucket);
        self.has(owner, bucket).then(|| self.of_owner(slices, owner).slice(local.start, local.len()))
    }

    /// Location of `elems` elements from `local` in the local order, if their bucket is sharded.
    pub(in crate::engine) fn own(&self, slices: &Slices, local: usize, elems: usize) -> Option<DeviceSlice> {
        let is_sharded = local < slices.local_buckets(&(0..self.buckets)).end;
        is_sharded.then(|| self.of_owner(slices, slices.rank()).slice(local, elems))
    }

    fn of_owner(&self, slices: &Slices, owner: usize) -> DeviceSlice {
        self.by_process[owner * self.by_process.len() / slices.ranks()]
    }
}
