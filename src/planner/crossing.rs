//! What the ranks of a step send each other, as bytes: within a process, and between processes.

use super::budget::{Workload, sums_within};
use crate::hardware::rates::Rates;

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
    /// That of a step of `workload` with so many elements of flat memory: each round's gradients of a rank's slice come from all others, or
    /// where groups are summed within processes from its namesakes; the weights of these from them, and all other weights from ranks of its process.
    pub(super) fn of(workload: &Workload, flat_elems: usize) -> Self {
        let Workload { shares, group, ranks, processes, dtype, by_nccl, .. } = *workload;
        let (rounds, mates, slice_bytes) = (shares / ranks, ranks / processes, flat_elems / ranks * dtype.bytes());
        // Of gradients, what a rank pulls: of its own slice, or of its namesakes', too; and from how many of each other process.
        let (slices, senders) = if sums_within(group, (ranks, processes)) { (processes, 1) } else { (1, mates) };
        // A slice of weights comes into each process once, and passes from rank to rank there.
        let near = (mates - 1) * (rounds * slices + processes) * slice_bytes;
        let far = (processes - 1) * (rounds * senders + 1) * slice_bytes;
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
