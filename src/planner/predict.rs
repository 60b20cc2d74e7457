//! How long a step will take, from rates: good enough to compare plans of one run, not to promise a speed.

use super::budget::{Needs, STATE_BYTES};
use crate::bucket::layout::BucketLayout;
use crate::model::activations::ActivationPlan;
use crate::model::policy::LayerPolicy;
use std::fmt;

/// What a machine does in a second.
struct Rates {
    /// Model FLOPs of forward and backward: matrix products, attention and everything pointwise between them.
    device_flops: f64,
    /// Bytes of device memory read and written by pointwise kernels.
    device_bytes: f64,
    /// Bytes that cross the link each way, while both ways are busy.
    link_bytes: f64,
    /// Parameters stepped by one worker of the pool, with the deferred commit.
    worker_params: f64,
    /// Seconds, not a rate: from the last gradient to weights that the next forward can use.
    start_up_s: f64,
}

/// Assumptions about an H200-class GPU at its power limit, PCIe 5 x16, and 16 cores of its host: close to what was measured
/// on one such machine, to be replaced by measurements of this one.
const ASSUMED: Rates =
    Rates { device_flops: 620e12, device_bytes: 3.7e12, link_bytes: 50e9, worker_params: 5.9e9 / 16.0, start_up_s: 0.01 };

/// What a step does besides what [`Needs`] says.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Micro-batches.
    pub grad_accum_steps: usize,
    /// Optimizer workers.
    pub workers: usize,
}

/// Seconds of a step by what is busy, assuming that everything overlaps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The device: forward, backward, what is computed twice, and the resident optimizer.
    pub device_s: f64,
    /// The pool's optimizer.
    pub pool_s: f64,
    /// The link, one way.
    pub link_s: f64,
    /// The longest of them, and what cannot overlap.
    pub step_s: f64,
}

/// Predicts steps that differ in the planner's choice alone.
pub(super) struct Predictor<'a> {
    needs: &'a Needs<'a>,
    work: Work,
    /// Seconds of a micro-batch's forward and backward pass.
    model_s: f64,
    /// Seconds that one layer adds by computing its cheap parts again, and its whole forward pass.
    cheap_s: f64,
    block_s: f64,
}

impl<'a> Predictor<'a> {
    pub fn new(needs: &'a Needs<'a>, work: Work) -> Self {
        let (shape, tokens) = (needs.shape, (needs.batch * needs.seq_length) as f64);
        let flops = shape.flops_per_step(needs.batch, needs.seq_length);
        let head_flops = 6.0 * tokens * (shape.vocab * shape.channels) as f64;
        // Two norms read and write the residual stream; the activation reads the first matrix's output.
        let cheap_cols = 4 * shape.channels + shape.mlp_in_cols() + shape.ffn;
        Self {
            needs,
            work,
            model_s: flops / ASSUMED.device_flops,
            cheap_s: tokens * (cheap_cols * needs.dtype.bytes()) as f64 / ASSUMED.device_bytes,
            // A forward pass is a third of forward and backward.
            block_s: (flops - head_flops) / (3 * shape.layers) as f64 / ASSUMED.device_flops,
        }
    }

    pub fn predict(&self, layout: &BucketLayout, ring: bool, policies: &[LayerPolicy], activations: &ActivationPlan) -> Prediction {
        let (offloaded, accum) = (layout.offloaded_elems() as f64, self.work.grad_accum_steps as f64);
        let resident = layout.flat_elems() as f64 - offloaded;
        // State is read and written, a gradient read, a weight written.
        let adam_bytes = 2 * STATE_BYTES + 2 * self.needs.dtype.bytes();
        let layers_s: f64 = policies.iter().map(|policy| self.layer_s(*policy)).sum();
        let device_s = accum * (self.model_s + layers_s) + resident * adam_bytes as f64 / ASSUMED.device_bytes;
        let pool_s = offloaded / (ASSUMED.worker_params * self.work.workers as f64);
        let link_bytes = offloaded * self.needs.link_dtype.bytes() as f64 + accum * activations.host_bytes().0 as f64;
        let link_s = link_bytes / ASSUMED.link_bytes;
        let start_up_s = if offloaded > 0.0 { ASSUMED.start_up_s } else { 0.0 };
        // In a ring the backward pass, two thirds of the device's work, waits for the pool: nothing is left for the next forward.
        let stalled_s = if ring { (pool_s - 2.0 / 3.0 * device_s).max(0.0) } else { 0.0 };
        Prediction { device_s, pool_s, link_s, step_s: (device_s + stalled_s).max(pool_s).max(link_s) + start_up_s }
    }

    /// What a layer adds to the device's work on a micro-batch.
    fn layer_s(&self, policy: LayerPolicy) -> f64 {
        match policy {
            LayerPolicy::Keep => 0.0,
            LayerPolicy::RecomputeCheap => self.cheap_s,
            LayerPolicy::RecomputeBlock | LayerPolicy::Host => self.block_s,
        }
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |s: f64| s * 1e3;
        write!(
            f,
            "{:.0} ms a step at assumed rates: device {:.0}, optimizer pool {:.0}, link {:.0}",
            ms(self.step_s),
            ms(self.device_s),
            ms(self.pool_s),
            ms(self.link_s)
        )
    }
}
