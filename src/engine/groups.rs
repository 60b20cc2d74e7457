//! The sum of the gradients of a step's shares, as its definition says it: in fp32, in the order of shares, rounded once. With groups, the sum of
//! each group is made so and rounded, and then those of all groups are added so. Who adds, on how many devices and in how many rounds, decides
//! nothing: whatever comes later begins with what was kept in fp32.

use crate::device::{DeviceSlice, Kernels, PARTS_MAX, Stream, SumSlices};
use crate::error::Result;
use crate::planner::plan::Plan;

/// How the shares of a step are added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addition {
    /// Shares of a step.
    shares: usize,
    /// Consecutive ones whose sum is rounded.
    group: usize,
}

/// What is kept of a slice between two rounds, in fp32: the sum of whole groups, and that of the shares of a group that is not whole. Those that
/// are not needed are not there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeptSums {
    pub(super) total: Option<DeviceSlice>,
    pub(super) group: Option<DeviceSlice>,
}

impl KeptSums {
    /// Those that lie one behind the other in `memory`, of a slice of so many elements.
    pub(super) fn of(memory: DeviceSlice, elems: usize) -> Self {
        let nth = |nth: usize| (memory.elems() > nth * elems).then(|| memory.slice(nth * elems, elems));
        Self { total: nth(0), group: nth(1) }
    }
}

impl Addition {
    /// Of the shares of `plan`.
    pub(super) fn of(plan: &Plan) -> Self {
        Self { shares: plan.shares, group: plan.group }
    }

    /// Of the sums of its groups.
    pub(super) fn of_groups(self) -> Self {
        Self { shares: self.shares / self.group, group: 1 }
    }

    /// Of the shares of one group.
    pub(super) fn of_one_group(self) -> Self {
        Self { shares: self.group, group: 1 }
    }

    /// On `stream`, adds `parts`, the gradients of the shares from `first` on, which are overwritten. With those of the last share the step's
    /// gradient is in `out`.
    pub(super) fn add<D: Kernels>(
        self,
        dev: &mut D,
        stream: Stream,
        (first, parts): (usize, &[DeviceSlice]),
        kept: KeptSums,
        out: DeviceSlice,
    ) -> Result<()> {
        let (mut groups, mut whole) = ([out; PARTS_MAX], 0);
        let mut rest = parts;
        while let Some(&place) = rest.first() {
            let within = (first + parts.len() - rest.len()) % self.group;
            let (these, others) = rest.split_at((self.group - within).min(rest.len()));
            let is_whole = within + these.len() == self.group;
            let sum = if is_whole { place } else { kept.group.unwrap_or(place) };
            if self.group > 1 {
                dev.launch(SumSlices::new(stream, these, kept.group.filter(|_| within > 0), sum))?;
            }
            groups[whole] = sum;
            whole += usize::from(is_whole);
            rest = others;
        }
        if whole == 0 {
            return Ok(());
        }
        let is_last = first + parts.len() == self.shares;
        let sum = kept.total.filter(|_| !is_last).unwrap_or(out);
        dev.launch(SumSlices::new(stream, &groups[..whole], kept.total.filter(|_| first >= self.group), sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::cpu::{CpuDevice, Schedule};
    use crate::dtype::Dtype;
    use crate::host::doorbell::Doorbell;
    use crate::host::pinned::HostMemory;
    use crate::launch::open;
    use crate::planner::budget::kept_sums;
    use half::bf16;
    use proptest::prelude::*;
    use std::sync::Arc;

    const ELEMS: usize = 64;

    /// Magnitudes apart, so that every rounding and every order shows.
    fn gradient(share: usize, at: usize) -> bf16 {
        bf16::from_f32([1.0, 3e-3, 1.7, -0.99][(share * 3 + at) % 4] * (1.0 + (share + at) as f32 / 7.0))
    }

    /// The definition.
    fn expected(shares: usize, group: usize, at: usize) -> bf16 {
        let chain = |parts: &mut dyn Iterator<Item = bf16>| bf16::from_f32(parts.map(bf16::to_f32).reduce(|sum, part| sum + part).unwrap());
        chain(&mut (0..shares / group).map(|nth| chain(&mut (nth * group..(nth + 1) * group).map(|share| gradient(share, at)))))
    }

    struct Bench {
        dev: CpuDevice,
        host: HostMemory,
    }

    impl Bench {
        fn put(&mut self, place: DeviceSlice, values: &[bf16]) {
            let from = self.host.alloc("values", 2 * values.len()).unwrap();
            self.host.lend_mut::<bf16>(from).copy_from_slice(values);
            self.dev.copy_h2d(Stream::Compute, from, place).unwrap();
        }

        fn get(&mut self, place: DeviceSlice) -> Vec<bf16> {
            let (to, event) = (self.host.alloc("sum", 2 * place.elems()).unwrap(), self.dev.event().unwrap());
            self.dev.copy_d2h(Stream::Compute, place, to).unwrap();
            self.dev.record(event, Stream::Compute).unwrap();
            self.dev.synchronize(event).unwrap();
            self.host.lend::<bf16>(to).to_vec()
        }

        /// The sum of `shares` in groups of `group`, of which `ranks` parts come in each round.
        fn sum(&mut self, shares: usize, group: usize, ranks: usize) -> Vec<bf16> {
            let addition = Addition { shares, group };
            let memory = self.dev.alloc("kept", kept_sums((shares, group), ranks) * ELEMS, Dtype::Float32).unwrap();
            let parts: Vec<_> = (0..ranks).map(|_| self.dev.alloc("part", ELEMS, Dtype::Bfloat16).unwrap()).collect();
            let out = self.dev.alloc("out", ELEMS, Dtype::Bfloat16).unwrap();
            for first in (0..shares).step_by(ranks) {
                for (nth, part) in parts.iter().enumerate() {
                    self.put(*part, &std::array::from_fn::<_, ELEMS, _>(|at| gradient(first + nth, at)));
                }
                addition.add(&mut self.dev, Stream::Compute, (first, &parts), KeptSums::of(memory, ELEMS), out).unwrap();
            }
            self.get(out)
        }
    }

    proptest! {
        #[test]
        fn any_number_of_ranks_adds_as_the_definition_says(ranks in 1usize..=8, rounds in 1usize..5, nth in 0usize..16) {
            let shares = ranks * rounds;
            let groups: Vec<usize> = (1..=shares).filter(|group| shares.is_multiple_of(*group)).collect();
            let group = groups[nth % groups.len()];
            let dev = open::cpu(1, Schedule::Threads, Arc::new(Doorbell::default()), 0).unwrap();
            let sum = Bench { dev, host: HostMemory::default() }.sum(shares, group, ranks);
            let want: Vec<_> = (0..ELEMS).map(|at| expected(shares, group, at)).collect();
            prop_assert_eq!(sum, want, "{} shares in groups of {} on {} ranks", shares, group, ranks);
        }
    }

    #[test]
    fn groups_round_otherwise_than_none() {
        let of = |group| (0..ELEMS).map(|at| expected(8, group, at)).collect::<Vec<_>>();
        assert!(of(1) != of(2) && of(2) != of(4) && of(8) == of(1));
    }
}
