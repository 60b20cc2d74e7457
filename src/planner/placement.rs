//! Where the states, weights, gradients and activations of a run lie. A placement may change between any two steps; no bit of a result
//! depends on it.

use super::budget::Rings;
use crate::bucket::layout::BucketLayout;
use crate::model::policy::LayerPolicy;
use crate::model::segments::LayerSegments;

/// Places of all arrays of a run.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Cut of the flat order into buckets, and the tier of each bucket.
    pub layout: BucketLayout,
    /// Rings and host locations that shorten the flat arrays of the device.
    pub rings: Rings,
    /// Host slots for gradients: one for each offloaded bucket, plus the reusable ones.
    pub grad_slots: usize,
    /// Host slots for working weights. With streamed weights each offloaded bucket has a permanent slot.
    pub param_slots: usize,
    /// Copies of states that wait to be saved.
    pub save_copies: SaveCopies,
    /// Activations that each layer keeps for its backward pass.
    pub layer_policies: Vec<LayerPolicy>,
    /// Segments of layers, which determine the order of a step's micro-batches.
    pub segments: LayerSegments,
}

/// Copies of states that wait to be saved, each of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveCopies {
    /// Slots of the host: those of the pool, then those for states that leave the device from their own memory.
    pub host: usize,
    /// Slots of the device, for the last buckets whose states are there. These leave the device while steps run.
    pub device: usize,
}

impl SaveCopies {
    /// Pinned slots of the host through which the copies of the device leave it.
    pub(crate) fn staged(self) -> usize {
        if self.device > 0 { STAGED_COPIES } else { 0 }
    }

    /// Buckets whose states leave the device from their own memory, if `resident` are there.
    pub(crate) fn direct(self, resident: usize) -> usize {
        resident - self.device
    }
}

/// Most copies that leave a device at once: one arrives while another is saved.
pub(crate) const STAGED_COPIES: usize = 2;
