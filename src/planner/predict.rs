//! How long a step will take, from a machine's rates and as if everything overlapped: quick enough to compare hundreds of plans.
//! What a plan really does on such a machine is for the simulated device to say.

use super::budget::{Rings, Workload, host_sums, kept_sums, micro_batches_each};
use super::crossing::Crossing;
use super::passes::PassTimes;
use super::rules::Policy;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::error::Result;
use crate::hardware::peer_route::PeerRoute;
use crate::memory::{Addressing, DeviceMemory};
use crate::model::activations::ActivationPlan;
use crate::model::policy::LayerPolicy;
use crate::model::tensors::TensorTable;
use std::fmt;

/// How much longer than assumed the pool may take: hosts of one kind were seen between 3.1e9 and 5.2e9 parameters a second.
/// A step hides much of that, but not in a ring of gradients.
const POOL_DOUBT: f64 = 1.5;

/// Of so many steps, speculation does not help one: the norm is clipped, or the coordinator waits for verdicts after clips. A
/// guess between a settled run, a hundred times rarer, and the first hundreds of steps of a new model, where all are.
const VALIDATED_SHARE: f64 = 0.1;

/// Seconds of a step by what is busy, assuming that everything overlaps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The device: forward, backward, what is computed twice, and the resident optimizer.
    pub(crate) device_s: f64,
    /// The pool's optimizer.
    pub(crate) pool_s: f64,
    /// The link, the way on which more crosses.
    pub(crate) link_s: f64,
    /// A step whose speculation holds, or any where nothing is speculated.
    pub(crate) step_s: f64,
    /// A step that waits for its verdict.
    pub(crate) validated_s: f64,
}

impl Prediction {
    /// What plans are compared by: the mean over steps of both kinds.
    pub(super) fn mean_s(&self) -> f64 {
        self.step_s + VALIDATED_SHARE * (self.validated_s - self.step_s)
    }
}

/// Predicts steps that differ in the planner's choice alone.
pub(super) struct Predictor<'a> {
    workload: &'a Workload<'a>,
    table: &'a TensorTable,
    passes: PassTimes,
}

impl<'a> Predictor<'a> {
    pub(super) fn new(workload: &'a Workload<'a>, table: &'a TensorTable) -> Result<Self> {
        Ok(Self { workload, table, passes: PassTimes::of(workload)? })
    }

    /// Whether attention takes so long that what it made is worth its way to the host and back.
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
        // Of one rank, which owns a slice of every bucket; the others do the same at the same time.
        let (rates, ranks) = (&self.workload.machine.rates, self.workload.ranks as f64);
        let Workload { grad_accum_steps, sequence_ranks, .. } = *self.workload;
        let accum = micro_batches_each(grad_accum_steps, sequence_ranks, self.workload.ranks) as f64;
        let offloaded = layout.offloaded_elems() as f64 / ranks;
        let stepped_here = layout.flat_elems() as f64 / ranks - offloaded;
        // State is read and written, a gradient read, a weight written.
        let state_bytes = self.workload.moments.state_bytes();
        let adam_bytes = 2 * state_bytes + 2 * self.workload.dtype.bytes();
        let passes_s = accum * self.passes.micro_step_s(policies) + self.sums_s(layout.flat_elems());
        let adam_s = stepped_here * adam_bytes as f64 / rates.device_bytes_per_s;
        let kept_s = accum * activations.host_bytes().0 as f64 / rates.both_ways_bytes_per_s;
        if layout.away() == Tier::Unified {
            // States come and go while the optimizer runs, when nothing else does.
            let paged = layout.elems_in(Tier::Unified).len() as f64 / ranks;
            let paged_s = paged * state_bytes as f64 / self.paging_bytes_per_s();
            let step_s = passes_s.max(kept_s) + adam_s.max(paged_s);
            return Prediction { device_s: passes_s + adam_s, pool_s: 0.0, link_s: kept_s + paged_s, step_s, validated_s: step_s };
        }
        // As much returns as leaves, unless weights are streamed: in the forward and in the backward pass of every micro-batch.
        let streamed = rings.weights.filter(|_| self.workload.ranks == 1).map_or(0.0, |ring| ring.ringed_elems as f64);
        let crossing = Crossing::of(self.workload, self.table, rings);
        let (near_s, far_s) = (crossing.near_s(rates), crossing.far_s(rates));
        let (swapped_s, over_hosts_s) = if crossing.by_nccl { (far_s, 0.0) } else { (0.0, far_s) };
        let peers_s = near_s + over_hosts_s;
        let sums_s = self.passing_sums_s(layout, rings);
        let crossing_s = |elems: f64| kept_s + sums_s + elems * self.workload.link_dtype.bytes() as f64 / rates.both_ways_bytes_per_s;
        // Through host memory one hop follows the other.
        let hops_s = if crossing.by_nccl { 0.0 } else { 2.0 * crossing.far as f64 / rates.both_ways_bytes_per_s };
        let beside_peers_s = hops_s + if rates.peer_route == PeerRoute::Own { 0.0 } else { near_s };
        let (out_s, link_s) = (crossing_s(offloaded), crossing_s(offloaded + (2.0 * accum - 1.0) * streamed) + beside_peers_s);
        let pass_link_s = out_s.max(link_s / 2.0);
        // While copies run both ways, all else is slower.
        let beside_copies = |alone_s: f64, share: f64| alone_s + link_s.min(alone_s) * (1.0 / share - 1.0);
        let device_s = beside_copies(passes_s + adam_s, rates.matmul_under_copies) + swapped_s;
        let pool_s = |bytes: usize| beside_copies(offloaded * bytes as f64 / self.adam_bytes_per_s(), rates.adam_under_copies);
        let (stepped_s, deferred_s) = (pool_s(self.stepped_bytes()), pool_s(self.deferred_bytes()));
        let start_up_s = self.start_up_s(layout);
        // Forward is a third of the device's work. Before the verdict the pool rests, so that only forward hides it.
        let (forward_s, backward_s) = (device_s / 3.0, device_s / 1.5);
        let validated_s = (backward_s.max(pass_link_s) + forward_s.max(stepped_s).max(pass_link_s)).max(peers_s) + start_up_s;
        if self.workload.rules.policy == Policy::ValidateFirst {
            return Prediction { device_s, pool_s: stepped_s, link_s, step_s: validated_s, validated_s };
        }
        // In a ring the backward pass waits for the pool: nothing is left for the next forward.
        let stalled_s = if rings.grads.is_some() { (POOL_DOUBT * deferred_s - backward_s).max(sums_s - backward_s).max(0.0) } else { 0.0 };
        let step_s = (device_s + stalled_s).max(deferred_s).max(link_s).max(peers_s) + start_up_s;
        Prediction { device_s, pool_s: deferred_s, link_s, step_s, validated_s }
    }

    /// From the last gradient to weights that the next forward can use: one bucket goes, is stepped, and comes.
    fn start_up_s(&self, layout: &BucketLayout) -> f64 {
        let (rates, elems) = (&self.workload.machine.rates, layout.bucket_elems() / self.workload.ranks);
        if layout.offloaded() == 0 {
            return 0.0;
        }
        let copied = elems * self.workload.link_dtype.bytes();
        let stepped_s = (elems * self.stepped_bytes()) as f64 / self.adam_bytes_per_s();
        rates.to_host_s(copied) + rates.wake_up_s + stepped_s + rates.to_device_s(copied)
    }

    /// Each way, sums that lie on the host pass with every share but one.
    fn passing_sums_s(&self, layout: &BucketLayout, rings: Rings) -> f64 {
        let [elems, _] = host_sums(layout, rings.sums_on_host);
        let bytes = 4 * kept_sums((self.workload.shares, self.workload.group), 1);
        (elems * bytes * (self.workload.shares - 1)) as f64 / self.workload.machine.rates.both_ways_bytes_per_s
    }

    /// Each share's gradient of what a rank owns is read, and in each round a sum in fp32 read and written.
    fn sums_s(&self, elems: usize) -> f64 {
        let Workload { shares, ranks, dtype, .. } = *self.workload;
        let bytes = shares * dtype.bytes() + shares / ranks * 2 * 4;
        if shares > 1 { (elems / ranks * bytes) as f64 / self.workload.machine.rates.device_bytes_per_s } else { 0.0 }
    }

    /// Bytes of a parameter whose verdict is known: state read and written, gradient read, weight written.
    fn stepped_bytes(&self) -> usize {
        2 * self.workload.moments.state_bytes() + 2 * self.workload.link_dtype.bytes()
    }

    /// And of one that is committed and speculated on: two gradients.
    fn deferred_bytes(&self) -> usize {
        self.stepped_bytes() + self.workload.link_dtype.bytes()
    }

    fn adam_bytes_per_s(&self) -> f64 {
        self.workload.machine.rates.adam_bytes_per_s(self.workload.workers, self.workload.isa, self.workload.moments)
    }

    /// Bytes of paged states a second, each way.
    fn paging_bytes_per_s(&self) -> f64 {
        let rates = &self.workload.machine.rates;
        match self.workload.machine.device {
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
