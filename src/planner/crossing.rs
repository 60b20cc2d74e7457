//! What the ranks of a step send each other, as bytes: within a process, and between processes.

use super::budget::{Rings, Workload, micro_batches_each, sums_within};
use crate::hardware::rates::Rates;
use crate::memory::RingShape;
use crate::model::tensors::TensorTable;

/// Gradients and weights of a step that come to one rank; as many leave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossing {
    /// From ranks of its process, bytes.
    pub(crate) near: usize,
    /// From ranks of others, bytes.
    pub(crate) far: usize,
    /// Devices swap what passes between processes, and compute nothing meanwhile; else it passes through host memory, beside what they compute.
    pub(crate) by_nccl: bool,
}

impl Crossing {
    /// That of a step of `workload` with the tensors of `table`: each round's gradients of a rank's slice come from all others, or
    /// where groups are summed within processes from its namesakes; the weights of these from them, and all other weights from ranks of its
    /// process, once, or with each fetch what is fetched.
    pub(super) fn of(workload: &Workload, table: &TensorTable, rings: Rings) -> Self {
        let Workload { shares, group, ranks, processes, dtype, by_nccl, .. } = *workload;
        let (rounds, mates, slice_bytes) = (shares / ranks, ranks / processes, table.flat_elems() / ranks * dtype.bytes());
        let again = rings.weights.map_or(0, |ring| {
            let micro_batches = micro_batches_each(workload.grad_accum_steps, workload.sequence_ranks, ranks);
            fetched_elems(table, ring, micro_batches) - ring.ringed_elems
        });
        let again_bytes = again / ranks * dtype.bytes();
        // Of gradients, what a rank pulls: of its own slice, or of its namesakes', too; and from how many of each other process.
        let (slices, senders) = if sums_within(group, (ranks, processes)) { (processes, 1) } else { (1, mates) };
        // A slice of weights comes into each process once, and passes from rank to rank there.
        let near = (mates - 1) * (rounds * slices * slice_bytes + processes * (slice_bytes + again_bytes));
        let far = (processes - 1) * ((rounds * senders + 1) * slice_bytes + if rings.fully_sharded { again_bytes } else { 0 });
        Self { near, far, by_nccl }
    }

    /// Seconds of what comes from ranks of the same process.
    pub(super) fn near_s(self, rates: &Rates) -> f64 {
        self.near as f64 / rates.peer_bytes_per_s
    }

    /// Seconds of what comes from other processes.
    pub(crate) fn far_s(self, rates: &Rates) -> f64 {
        self.far as f64 / self.far_bytes_per_s(rates)
    }

    fn far_bytes_per_s(self, rates: &Rates) -> f64 {
        if self.by_nccl { rates.between_processes() } else { rates.between_hosts() }.bytes_per_s
    }

    /// What passes between processes, in words.
    pub(super) fn describe_far(self, rates: &Rates) -> String {
        let (how, when) = if self.by_nccl { ("by NCCL", "while nothing is computed") } else { ("over TCP", "beside products") };
        format!(
            "{:.2} GB a step to and from each GPU {how}, {:.0} ms at {:.1} GB/s, {when}",
            self.far as f64 / 1e9,
            self.far_s(rates) * 1e3,
            self.far_bytes_per_s(rates) / 1e9
        )
    }
}

/// Elements that so many micro-batches have come to the ring: all of it in each pass, but what it holds where one pass follows another.
fn fetched_elems(table: &TensorTable, ring: RingShape, micro_batches: usize) -> usize {
    let ends = table.modules().map(|module| table.module_range(module).end.min(ring.ringed_elems));
    let ends: Vec<usize> = [0].into_iter().chain(ends).collect();
    // Behind a forward pass these are the first modules in flat order, behind a backward pass the last.
    let fits = |elems: &usize| *elems <= ring.period_elems;
    let first = ends.iter().copied().filter(fits).max().unwrap_or(0);
    let last = ends.iter().map(|end| ring.ringed_elems - end).filter(fits).max().unwrap_or(0);
    2 * micro_batches * ring.ringed_elems - micro_batches * first - (micro_batches - 1) * last
}
