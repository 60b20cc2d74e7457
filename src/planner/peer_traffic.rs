//! Bytes that ranks exchange in a step, within a process and between processes.

use super::budget::{Rings, Workload, sums_within};
use super::site::Site;
use crate::hardware::rates::Rates;
use crate::memory::RingShape;
use crate::model::tensors::TensorTable;
use crate::recipe::{Numerics, StepShape};

/// Bytes of gradients and weights that one rank receives in a step. It sends equally many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerTraffic {
    /// Bytes from ranks of the same process.
    pub(crate) intra_node: usize,
    /// Bytes from ranks of other processes.
    pub(crate) inter_node: usize,
    /// Whether NCCL exchanges data between processes, during which devices compute nothing. Otherwise the data passes through host memory
    /// while devices compute.
    pub(crate) by_nccl: bool,
}

impl PeerTraffic {
    /// The exchange of a step of `workload` with the tensors of `table`. In each round a rank receives the gradients of its slice from all
    /// other ranks, or only from its inter-node peers if groups are summed within processes. New weights of a slice come from the
    /// inter-node peers. All other weights come from ranks of the same process, once, or again with each fetch.
    pub(super) fn of(workload: &Workload, table: &TensorTable, rings: Rings) -> Self {
        let Site { ranks, processes, by_nccl, .. } = *workload.site;
        let (StepShape { shares: partial_sums, group, .. }, Numerics { dtype, .. }) = (workload.recipe.step, workload.recipe.numerics);
        let (rounds, local_ranks, slice_bytes) = (partial_sums / ranks, ranks / processes, table.flat_elems() / ranks * dtype.bytes());
        let again = rings.weights.map_or(0, |ring| {
            let (segments, micro_batches) = (workload.segments, workload.recipe.step.micro_batches_each(ranks));
            // Weights of segments are fetched twice a step, those of the last segment once.
            let of_segments = || ring.ringed_elems - segments.flat_range(segments.count() - 1, table).end.min(ring.ringed_elems);
            if segments.is_whole() { fetched_elems(table, ring, micro_batches) - ring.ringed_elems } else { of_segments() }
        });
        let again_bytes = again / ranks * dtype.bytes();
        // For gradients: the slices that a rank pulls (its own, or also those of its inter-node peers), and the senders in each other
        // process.
        let (slices, senders) = if sums_within(group, (ranks, processes)) { (processes, 1) } else { (1, local_ranks) };
        // A slice of weights enters each process once and is then copied between its ranks.
        let near = (local_ranks - 1) * (rounds * slices * slice_bytes + processes * (slice_bytes + again_bytes));
        let inter_node = (processes - 1) * ((rounds * senders + 1) * slice_bytes + if rings.fully_sharded { again_bytes } else { 0 });
        Self { intra_node: near, inter_node, by_nccl }
    }

    /// Seconds to receive data from ranks of the same process.
    pub(super) fn near_s(self, rates: &Rates) -> f64 {
        self.intra_node as f64 / rates.peer_bytes_per_s
    }

    /// Seconds to receive data from other processes.
    pub(crate) fn far_s(self, rates: &Rates) -> f64 {
        self.inter_node as f64 / self.far_bytes_per_s(rates)
    }

    fn far_bytes_per_s(self, rates: &Rates) -> f64 {
        if self.by_nccl { rates.between_processes() } else { rates.between_hosts() }.bytes_per_s
    }

    /// A description of the exchange between processes.
    pub(super) fn describe_far(self, rates: &Rates) -> String {
        let (how, when) =
            if self.by_nccl { ("by NCCL", "not overlapped with computation") } else { ("over TCP", "overlapped with matrix products") };
        format!(
            "{:.2} GB a step to and from each GPU {how}, {:.0} ms at {:.1} GB/s, {when}",
            self.inter_node as f64 / 1e9,
            self.far_s(rates) * 1e3,
            self.far_bytes_per_s(rates) / 1e9
        )
    }
}

/// Elements fetched into the ring by `micro_batches` micro-batches: the whole ringed range in each pass, minus the part that the ring still
/// holds from the previous pass.
fn fetched_elems(table: &TensorTable, ring: RingShape, micro_batches: usize) -> usize {
    let ends = table.modules().map(|module| table.module_range(module).end.min(ring.ringed_elems));
    let ends: Vec<usize> = [0].into_iter().chain(ends).collect();
    // After a forward pass the ring holds the first modules in flat order, after a backward pass the last ones.
    let fits = |elems: &usize| *elems <= ring.period_elems;
    let first = ends.iter().copied().filter(fits).max().unwrap_or(0);
    let last = ends.iter().map(|end| ring.ringed_elems - end).filter(fits).max().unwrap_or(0);
    2 * micro_batches * ring.ringed_elems - micro_batches * first - (micro_batches - 1) * last
}
