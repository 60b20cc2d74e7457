//! Where the states, weights, gradients and activations of a run lie. A placement may change between any two steps; no bit of a result
//! depends on it.

use super::budget::Rings;
use crate::bucket::layout::BucketLayout;
use crate::model::policy::LayerPolicy;

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
    /// Host slots for copies of states that wait to be saved.
    pub save_copies: usize,
    /// Activations that each layer keeps for its backward pass.
    pub layer_policies: Vec<LayerPolicy>,
}
