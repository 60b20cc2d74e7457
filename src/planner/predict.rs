//! Step times predicted from a machine's rates, assuming that everything overlaps: fast enough to compare hundreds of plans. The simulated
//! device gives precise times.

use super::budget::{Rings, Workload, host_sums, kept_sums};
use super::passes::PassTimes;
use super::peer_traffic::PeerTraffic;
use super::rules::Policy;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::error::Result;
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::rates::HostFormats;
use crate::memory::{Addressing, DeviceMemory};
use crate::model::activations::ActivationPlan;
use crate::model::policy::LayerPolicy;
use crate::model::tensors::TensorTable;
use crate::optim::split::Masters;
use std::fmt;

/// Safety factor on the pool's time: hosts of one kind range from 3.1e9 to 5.2e9 parameters a second. A step hides most of the difference,
/// but not with a gradient ring.
const POOL_DOUBT: f64 = 1.5;

/// Fraction of steps without a successful speculation: the norm is clipped, or the coordinator waits for verdicts after clips. A guess
/// between a settled run, where it is a hundred times rarer, and the first hundreds of steps of a new model, where every step is clipped.
const VALIDATED_FRACTION: f64 = 0.1;

/// Predicted seconds of a step, by resource, assuming that everything overlaps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The device: forward, backward, recomputation, and the resident optimizer.
    pub(crate) device_s: f64,
    /// The pool's optimizer.
    pub(crate) pool_s: f64,
    /// The link, in the direction with more traffic.
    pub(crate) link_s: f64,
    /// Exchange with other ranks.
    pub(crate) peers_s: f64,
    /// A step with a successful speculation, or any step without speculation.
    pub(crate) step_s: f64,
    /// A step that waits for its verdict.
    pub(crate) validated_s: f64,
}

impl Prediction {
    /// The resource that takes longest.
    pub(crate) fn bottleneck(&self) -> &'static str {
        let times = [
            (self.device_s, "the device"),
            (self.pool_s, "the optimizer on the CPU"),
            (self.link_s, "copies between host and device"),
            (self.peers_s, "the exchange between ranks"),
        ];
        times.into_iter().fold((f64::MIN, ""), |most, time| if time.0 > most.0 { time } else { most }).1
    }

    /// The key by which plans are compared: the mean over both kinds of steps.
    pub(super) fn mean_s(&self) -> f64 {
        self.step_s + VALIDATED_FRACTION * (self.validated_s - self.step_s)
    }
}

/// Predicts steps of plans that differ only in the planner's choice.
pub(super) struct Predictor<'a> {
    workload: &'a Workload<'a>,
    table: &'a TensorTable,
    passes: PassTimes,
}

impl<'a> Predictor<'a> {
    pub(super) fn new(workload: &'a Workload<'a>, table: &'a TensorTable) -> Result<Self> {
        Ok(Self { workload, table, passes: PassTimes::of(workload, table)? })
    }

    /// Whether attention takes so long that copying its outputs to the host and back is faster than recomputing them.
    pub(super) fn attends_long(&self) -> bool {
        self.passes.attends_long()
    }

    pub(crate) fn predict(
        &self,
        layout: &BucketLayout,
        rings: Rings,
        policies: &[LayerPolicy],
        activations: &ActivationPlan,
    ) -> Prediction {
        // One rank stands for all: each owns a slice of every bucket, and all work at the same time.
        let (rates, ranks) = (&self.workload.site.machine.rates, self.workload.site.ranks as f64);
        let accum = self.workload.recipe.step.micro_batches_each(self.workload.site.ranks) as f64;
        let offloaded = layout.offloaded_elems() as f64 / ranks;
        let state_bytes = self.workload.recipe.numerics.moments.arrays().bytes_per_elem();
        let on_device = [Tier::Device, Tier::Unified].map(|tier| layout.elems_in(tier).len() as f64 / ranks * self.adam_bytes(tier));
        let policies = &policies[self.table.first_backward_layer()..];
        let passes_s = accum * (self.passes.micro_step_s(policies) + self.second_forward_s()) + self.sums_s(layout.flat_elems());
        let adam_s = on_device.iter().sum::<f64>() / rates.device_bytes_per_s;
        let kept_bytes = accum * activations.host_bytes().0 as f64 + self.boundary_bytes();
        let kept_s = kept_bytes / rates.both_ways_bytes_per_s;
        if layout.away() == Tier::Unified {
            // States are paged while the optimizer runs, when nothing else uses the link.
            let paged = layout.elems_in(Tier::Unified).len() as f64 / ranks;
            let paged_s = paged * state_bytes / self.paging_bytes_per_s();
            let step_s = passes_s.max(kept_s) + adam_s.max(paged_s);
            return Prediction {
                device_s: passes_s + adam_s,
                pool_s: 0.0,
                link_s: kept_s + paged_s,
                peers_s: 0.0,
                step_s,
                validated_s: step_s,
            };
        }
        // Both directions carry equally many bytes, unless weights are streamed in both passes of every micro-batch, or of a step of segments.
        let passes = if self.workload.segments.is_whole() { 2.0 * accum } else { 2.0 };
        let streamed = rings.weights.filter(|_| self.workload.site.ranks == 1).map_or(0.0, |ring| ring.ringed_elems as f64);
        let peer_traffic = PeerTraffic::of(self.workload, self.table, rings);
        let (near_s, far_s) = (peer_traffic.near_s(rates), peer_traffic.far_s(rates));
        let (swapped_s, over_hosts_s) = if peer_traffic.by_nccl { (far_s, 0.0) } else { (0.0, far_s) };
        let peers_s = near_s + over_hosts_s;
        let sums_s = self.passing_sums_s(layout, rings);
        let crossing_s =
            |elems: f64| kept_s + sums_s + elems * self.workload.protocol.link_dtype.bytes() as f64 / rates.both_ways_bytes_per_s;
        // Transfers through host memory are two consecutive hops.
        let hops_s = if peer_traffic.by_nccl { 0.0 } else { 2.0 * peer_traffic.inter_node as f64 / rates.both_ways_bytes_per_s };
        let beside_peers_s = hops_s + if rates.peer_route == PeerRoute::Own { 0.0 } else { near_s };
        let (out_s, link_s) = (crossing_s(offloaded), crossing_s(offloaded + (passes - 1.0) * streamed) + beside_peers_s);
        let pass_link_s = out_s.max(link_s / 2.0);
        // Copies in both directions slow down everything else.
        let beside_copies = |alone_s: f64, fraction: f64| alone_s + link_s.min(alone_s) * (1.0 / fraction - 1.0);
        let device_s = beside_copies(passes_s + adam_s, rates.matmul_under_copies) + swapped_s;
        let pool_s = |bytes: f64| beside_copies(offloaded * bytes / self.adam_bytes_per_s(rings), rates.adam_under_copies);
        let (stepped_s, deferred_s) = (pool_s(self.stepped_bytes()), pool_s(self.deferred_bytes()));
        let start_up_s = self.start_up_s(layout, rings);
        // The forward pass is a third of the device's work. With validation first, the pool starts after the verdict, so only the forward
        // pass hides it.
        let (forward_s, backward_s) = (device_s / 3.0, device_s / 1.5);
        let validated_s = (backward_s.max(pass_link_s) + forward_s.max(stepped_s).max(pass_link_s)).max(peers_s) + start_up_s;
        if self.workload.protocol.rules.policy == Policy::ValidateFirst || rings.split_masters {
            return Prediction { device_s, pool_s: stepped_s, link_s, peers_s, step_s: validated_s, validated_s };
        }
        // With a gradient ring the backward pass waits for the pool, so no pool work is left to overlap the next forward pass.
        let stalled_s = if rings.grads.is_some() { (POOL_DOUBT * deferred_s - backward_s).max(sums_s - backward_s).max(0.0) } else { 0.0 };
        let step_s = (device_s + stalled_s).max(deferred_s).max(link_s).max(peers_s) + start_up_s;
        Prediction { device_s, pool_s: deferred_s, link_s, peers_s, step_s, validated_s }
    }

    /// Seconds in which the layers below the turn run forward a second time for a micro-batch.
    fn second_forward_s(&self) -> f64 {
        let segments = self.workload.segments;
        let layers: usize = (0..segments.count() - 1).map(|segment| segments.layers(segment).len()).sum();
        layers as f64 * self.passes.block_s()
    }

    /// Bytes of the inputs of segments that go to the host and return, in each direction.
    fn boundary_bytes(&self) -> f64 {
        (self.workload.boundaries().host_elems() * self.workload.recipe.numerics.dtype.bytes()) as f64
    }

    /// Seconds from the last gradient to usable weights: one bucket is copied out, stepped and copied back.
    fn start_up_s(&self, layout: &BucketLayout, rings: Rings) -> f64 {
        let (rates, elems) = (&self.workload.site.machine.rates, layout.bucket_elems() / self.workload.site.ranks);
        if layout.offloaded() == 0 {
            return 0.0;
        }
        let copied = elems * self.workload.protocol.link_dtype.bytes();
        let stepped_s = elems as f64 * self.stepped_bytes() / self.adam_bytes_per_s(rings);
        rates.to_host_s(copied) + rates.wake_up_s + stepped_s + rates.to_device_s(copied)
    }

    /// Seconds that sums on the host take on the link in each direction: they cross it with every partial sum except one.
    fn passing_sums_s(&self, layout: &BucketLayout, rings: Rings) -> f64 {
        let [elems, _] = host_sums(layout, rings.sums_on_host);
        let bytes = 4 * kept_sums((self.workload.recipe.step.shares, self.workload.recipe.step.group), 1);
        (elems * bytes * (self.workload.recipe.step.shares - 1)) as f64 / self.workload.site.machine.rates.both_ways_bytes_per_s
    }

    /// Seconds to sum partial sums: each partial sum's gradient of the owned slice is read, and each round reads and writes an fp32 sum.
    fn sums_s(&self, elems: usize) -> f64 {
        let (partial_sums, ranks, dtype) =
            (self.workload.recipe.step.shares, self.workload.site.ranks, self.workload.recipe.numerics.dtype);
        let bytes = partial_sums * dtype.bytes() + partial_sums / ranks * 2 * 4;
        if partial_sums > 1 { (elems / ranks * bytes) as f64 / self.workload.site.machine.rates.device_bytes_per_s } else { 0.0 }
    }

    /// Bytes per parameter of a step on the device: state read and written, gradient read, weight written, and read if it is half of a
    /// split master.
    fn adam_bytes(&self, tier: Tier) -> f64 {
        let is_split = tier == Tier::Device && self.workload.protocol.masters == Masters::Split;
        let passes_over_weights = if is_split { 2 } else { 1 };
        let dtype_bytes = self.workload.recipe.numerics.dtype.bytes();
        2.0 * self.workload.device_arrays(tier).bytes_per_elem() + ((1 + passes_over_weights) * dtype_bytes) as f64
    }

    /// Bytes per parameter of an update after the verdict: state read and written, gradient read, weight written.
    fn stepped_bytes(&self) -> f64 {
        2.0 * self.workload.recipe.numerics.moments.arrays().bytes_per_elem() + (2 * self.workload.protocol.link_dtype.bytes()) as f64
    }

    /// Bytes per parameter of a pass that commits one update and speculates on the next, with two gradients.
    fn deferred_bytes(&self) -> f64 {
        self.stepped_bytes() + self.workload.protocol.link_dtype.bytes() as f64
    }

    fn adam_bytes_per_s(&self, rings: Rings) -> f64 {
        let masters = if rings.split_masters { Masters::Split } else { Masters::Float32 };
        let formats = HostFormats { moments: self.workload.recipe.numerics.moments, masters };
        self.workload.site.machine.rates.adam_bytes_per_s(self.workload.site.threads, self.workload.site.isa, formats)
    }

    /// Bytes of paged states per second in each direction.
    fn paging_bytes_per_s(&self) -> f64 {
        let rates = &self.workload.site.machine.rates;
        match self.workload.site.machine.device {
            DeviceMemory::Own { addressing: Addressing::Managed, .. } => rates.managed_bytes_per_s,
            _ => rates.both_ways_bytes_per_s,
        }
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |s: f64| s * 1e3;
        write!(
            f,
            "{:.0} ms a step ({:.0} validated first): device {:.0}, optimizer pool {:.0}, link {:.0}",
            ms(self.step_s),
            ms(self.validated_s),
            ms(self.device_s),
            ms(self.pool_s),
            ms(self.link_s)
        )
    }
}
