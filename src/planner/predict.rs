//! How long a step will take, from rates: good enough to compare plans of one run, not to promise a speed.

use super::budget::{Needs, Rings, STATE_BYTES};
use super::machine::DeviceMemory;
use crate::bucket::layout::BucketLayout;
use crate::device::Addressing;
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
    /// Bytes of managed memory that come and go each way, when both happen at once.
    managed_bytes: f64,
    /// Parameters that one worker of the pool commits and speculates on in one pass; and steps, once the verdict is known.
    worker_deferred: f64,
    worker_stepped: f64,
    /// Seconds, not a rate: from the last gradient to weights that the next forward can use.
    start_up_s: f64,
}

/// Assumptions about an H200-class GPU at its power limit, PCIe 5 x16, and 16 cores of its host: close to what was measured
/// on one such machine, to be replaced by measurements of this one.
const ASSUMED: Rates = Rates {
    device_flops: 620e12,
    device_bytes: 3.7e12,
    link_bytes: 50e9,
    managed_bytes: 12.8e9,
    worker_deferred: 5.0e9 / 15.0,
    worker_stepped: 5.6e9 / 15.0,
    start_up_s: 0.01,
};

/// How much longer than assumed the pool may take: hosts of one kind were seen between 3.1e9 and 5.2e9 parameters a second.
/// A step hides much of that, but not in a ring of gradients.
const POOL_DOUBT: f64 = 1.5;

/// Of so many steps, speculation does not help one: the norm is clipped, or the coordinator waits for verdicts after clips. A
/// guess between a settled run, a hundred times rarer, and the first hundreds of steps of a new model, where all are.
const VALIDATED_SHARE: f64 = 0.1;

/// What a step does besides what [`Needs`] says.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Micro-batches.
    pub grad_accum_steps: usize,
    /// Optimizer workers.
    pub workers: usize,
    /// Buckets are stepped before the verdict.
    pub speculates: bool,
}

/// Seconds of a step by what is busy, assuming that everything overlaps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The device: forward, backward, what is computed twice, and the resident optimizer.
    pub device_s: f64,
    /// The pool's optimizer.
    pub pool_s: f64,
    /// The link, the way on which more crosses.
    pub link_s: f64,
    /// A step whose speculation holds, or any where nothing is speculated.
    pub step_s: f64,
    /// A step that waits for its verdict.
    pub validated_s: f64,
}

impl Prediction {
    /// What plans are compared by: the mean over steps of both kinds.
    pub(super) fn mean_s(&self) -> f64 {
        self.step_s + VALIDATED_SHARE * (self.validated_s - self.step_s)
    }
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

    pub fn predict(&self, layout: &BucketLayout, rings: Rings, policies: &[LayerPolicy], activations: &ActivationPlan) -> Prediction {
        let (offloaded, accum) = (layout.offloaded_elems() as f64, self.work.grad_accum_steps as f64);
        let stepped_here = layout.flat_elems() as f64 - if self.needs.paged { 0.0 } else { offloaded };
        // State is read and written, a gradient read, a weight written.
        let adam_bytes = 2 * STATE_BYTES + 2 * self.needs.dtype.bytes();
        let layers_s: f64 = policies.iter().map(|policy| self.layer_s(*policy)).sum();
        let (passes_s, adam_s) = (accum * (self.model_s + layers_s), stepped_here * adam_bytes as f64 / ASSUMED.device_bytes);
        let device_s = passes_s + adam_s;
        let kept_bytes = accum * activations.host_bytes().0 as f64;
        if self.needs.paged {
            // States come and go while the optimizer runs, when nothing else does.
            let (kept_s, paged_s) = (kept_bytes / ASSUMED.link_bytes, offloaded * STATE_BYTES as f64 / self.paging_bytes());
            let step_s = passes_s.max(kept_s) + adam_s.max(paged_s);
            return Prediction { device_s, pool_s: 0.0, link_s: kept_s + paged_s, step_s, validated_s: step_s };
        }
        let pool_s = |worker_params: f64| offloaded / (worker_params * self.work.workers as f64);
        // As much returns as leaves, unless weights are streamed: in the forward and in the backward pass of every micro-batch.
        let streamed = rings.weights.map_or(0.0, |ring| ring.ringed_elems as f64);
        let crossing_s = |elems: f64| (elems * self.needs.link_dtype.bytes() as f64 + kept_bytes) / ASSUMED.link_bytes;
        let (out_s, link_s) = (crossing_s(offloaded), crossing_s(offloaded + (2.0 * accum - 1.0) * streamed));
        let pass_link_s = out_s.max(link_s / 2.0);
        let start_up_s = if offloaded > 0.0 { ASSUMED.start_up_s } else { 0.0 };
        // Forward is a third of the device's work. Before the verdict the pool rests, so that only forward hides it.
        let (forward_s, backward_s) = (device_s / 3.0, device_s / 1.5);
        let validated_s = backward_s.max(pass_link_s) + forward_s.max(pool_s(ASSUMED.worker_stepped)).max(pass_link_s) + start_up_s;
        if !self.work.speculates {
            return Prediction { device_s, pool_s: pool_s(ASSUMED.worker_stepped), link_s, step_s: validated_s, validated_s };
        }
        let pool_s = pool_s(ASSUMED.worker_deferred);
        // In a ring the backward pass waits for the pool: nothing is left for the next forward.
        let stalled_s = if rings.grads.is_some() { (POOL_DOUBT * pool_s - backward_s).max(0.0) } else { 0.0 };
        let step_s = (device_s + stalled_s).max(pool_s).max(link_s) + start_up_s;
        Prediction { device_s, pool_s, link_s, step_s, validated_s }
    }

    /// Bytes of paged states a second, each way.
    fn paging_bytes(&self) -> f64 {
        match self.needs.machine.device {
            DeviceMemory::Own { addressing: Addressing::Managed, .. } => ASSUMED.managed_bytes,
            _ => ASSUMED.link_bytes,
        }
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
            "{:.0} ms a step at assumed rates ({:.0} validated first): device {:.0}, optimizer pool {:.0}, link {:.0}",
            ms(self.step_s),
            ms(self.validated_s),
            ms(self.device_s),
            ms(self.pool_s),
            ms(self.link_s)
        )
    }
}
