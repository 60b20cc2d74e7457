//! The weights that nobody has in their flat places for good: the ranks of a process together keep every slice of them, each its own and those
//! that it carries, of its namesakes in other processes.

use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Lease};
use crate::error::Result;
use crate::planner::plan::Plan;

/// What one rank keeps of the buckets that are sharded.
#[derive(Clone, Default)]
pub(super) struct Shards {
    /// By process: the slices of the rank's namesake there, in its own order.
    by_process: Vec<DeviceSlice>,
    /// How many buckets are sharded, the first ones.
    buckets: usize,
}

impl Shards {
    /// # Errors
    /// `Resource` when there is no memory.
    pub(super) fn take<D: Device>(lease: &mut Lease, dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let (sharded, processes) = (plan.sharded(), plan.processes);
        // As long for each: whoever stands for others has room for the longest.
        let elems = slices.most_in(&sharded);
        let memory = lease.alloc(dev, "weight slices", processes * elems, plan.dtype)?;
        let by_process = (0..processes).map(|process| memory.slice(process * elems, elems)).collect();
        Ok(Self { by_process, buckets: sharded.end })
    }

    /// Whether `bucket` is sharded.
    pub(super) fn has(&self, bucket: usize) -> bool {
        bucket < self.buckets
    }

    /// Where the slice of `owner`, this rank or a namesake, of `bucket` lies, if that is sharded.
    pub(super) fn of(&self, slices: &Slices, owner: usize, bucket: usize) -> Option<DeviceSlice> {
        let local = slices.local_of(owner, bucket);
        self.has(bucket).then(|| self.of_owner(slices, owner).slice(local.start, local.len()))
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
