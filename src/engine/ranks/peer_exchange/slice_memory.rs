//! Memory of a rank's slices that depends on the plan.

use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Lease};
use crate::dtype::Dtype;
use crate::engine::ranks::shards::Shards;
use crate::error::Result;
use crate::planner::plan::Plan;

/// Memory that depends on the plan, and that holds nothing between two steps.
pub(super) struct SliceMemory {
    pub(super) shards: Shards,
    /// Flat addresses of weights below this element are a ring.
    pub(super) ringed_elems: usize,
    /// Slices of the step's gradients that this rank keeps, because their flat addresses are overwritten before the verdict; and their
    /// first element in the local order.
    pub(super) kept: DeviceSlice,
    pub(super) kept_from: usize,
    /// fp32 sums so far of the elements that this rank owns, in its local order, if a step has several rounds.
    pub(super) sums: DeviceSlice,
}

impl SliceMemory {
    pub(super) fn take<D: Device>(lease: &mut Lease, dev: &mut D, plan: &Plan, slices: &Slices) -> Result<Self> {
        let kept = slices.local_buckets(&plan.kept());
        Ok(Self {
            shards: Shards::take(lease, dev, plan, slices)?,
            ringed_elems: plan.placement.rings.weights.map_or(0, |ring| ring.ringed_elems),
            kept: lease.alloc(dev, "gradient slices", kept.len(), plan.recipe.numerics.dtype)?,
            kept_from: kept.start,
            sums: lease.alloc_flat(dev, "gradient sums", slices.elems() * plan.kept_sums(), Dtype::Float32, plan.placement.rings.sums)?,
        })
    }
}
