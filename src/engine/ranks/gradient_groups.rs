//! The sum of the gradients of a step's partial sums, exactly as defined: in fp32, in the order of partial sums, rounded once. With groups,
//! the sum of each group is computed and rounded this way, and then the sums of the groups are added this way. The bits do not depend on
//! the number of devices or rounds, because every later round continues from the fp32 sum.

use crate::device::{DeviceSlice, Kernels, PARTS_MAX, Stream, SumSlices};
use crate::error::Result;
use crate::planner::plan::Plan;

/// Order in which the partial sums of a step are added.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct PartialSumChain {
    /// Shares of a step.
    partial_sums: usize,
    /// Number of consecutive partial sums in a group. The sum of a group is rounded.
    gradient_group: usize,
}

/// fp32 sums of a slice that are stored between two rounds: the sum of whole groups, and the sum of the partial sums of an incomplete
/// group. Sums that are not needed are `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct KeptSums {
    pub(in crate::engine) total: Option<DeviceSlice>,
    pub(in crate::engine) group: Option<DeviceSlice>,
}

impl KeptSums {
    /// The sums that are stored consecutively in `memory`, `elems` elements each.
    pub(in crate::engine) fn of(memory: DeviceSlice, elems: usize) -> Self {
        let nth = |nth: usize| (memory.elems() > nth * elems).then(|| memory.slice(nth * elems, elems));
        Self { total: nth(0), group: nth(1) }
    }
}

impl PartialSumChain {
    /// The addition of the partial sums of `plan`.
    pub(in crate::engine) fn of(plan: &Plan) -> Self {
        Self { partial_sums: plan.recipe.step.shares, gradient_group: plan.recipe.step.group }
    }

    /// The addition of the sums of its groups.
    pub(in crate::engine) fn of_groups(self) -> Self {
        Self { partial_sums: self.partial_sums / self.gradient_group, gradient_group: 1 }
    }

    /// The addition of the partial sums of one group.
    pub(in crate::engine) fn of_one_group(self) -> Self {
        Self { partial_sums: self.gradient_group, gradient_group: 1 }
    }

    /// On `stream`, adds `parts`, the gradients of the partial sums from `first` on. The parts are overwritten. After the last partial sum, `out`
    /// contains the step's gradient.
    pub(in crate::engine) fn add<D: Kernels>(
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
            let within = (first + parts.len() - rest.len()) % self.gradient_group;
            let (these, others) = rest.split_at((self.gradient_group - within).min(rest.len()));
            let is_whole = within + these.len() == self.gradient_group;
            let sum = if is_whole { place } else { kept.group.unwrap_or(place) };
            if self.gradient_group > 1 {
                dev.launch(SumSlices::new(stream, these, kept.group.filter(|_| within > 0), sum))?;
            }
            groups[whole] = sum;
            whole += usize::from(is_whole);
            rest = others;
        }
        if whole == 0 {
            return Ok(());
        }
        let is_last = first + parts.len() == self.partial_sums;
        let sum = kept.total.filter(|_| !is_last).unwrap_or(out);
        dev.launch(SumSlices::new(stream, &groups[..whole], kept.total.filter(|_| first >= self.gradient_group), sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::cpu::{CpuDevice, StreamOrder};
    use crate::dtype::Dtype;
    use crate::host::doorbell::Doorbell;
    use crate::host::pinned::HostMemory;
    use crate::launch::open;
    use crate::planner::budget::kept_sums;
    use half::bf16;
    use proptest::prelude::*;
    use std::sync::Arc;

    const ELEMS: usize = 64;

    /// Values of different magnitudes, so that every rounding and every change of order is visible.
    fn gradient(partial_sum: usize, at: usize) -> bf16 {
        bf16::from_f32([1.0, 3e-3, 1.7, -0.99][(partial_sum * 3 + at) % 4] * (1.0 + (partial_sum + at) as f32 / 7.0))
    }

    /// The sum according to the definition.
    fn expected(partial_sums: usize, group: usize, at: usize) -> bf16 {
        let chain = |parts: &mut dyn Iterator<Item = bf16>| bf16::from_f32(parts.map(bf16::to_f32).reduce(|sum, part| sum + part).unwrap());
        chain(
            &mut (0..partial_sums / group)
                .map(|nth| chain(&mut (nth * group..(nth + 1) * group).map(|partial_sum| gradient(partial_sum, at)))),
        )
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

        /// The sum of `partial_sums` in groups of `group`, with `ranks` parts in each round.
        fn sum(&mut self, partial_sums: usize, group: usize, ranks: usize) -> Vec<bf16> {
            let addition = PartialSumChain { partial_sums, gradient_group: group };
            let memory = self.dev.alloc("kept", kept_sums((partial_sums, group), ranks) * ELEMS, Dtype::Float32).unwrap();
            let parts: Vec<_> = (0..ranks).map(|_| self.dev.alloc("part", ELEMS, Dtype::Bfloat16).unwrap()).collect();
            let out = self.dev.alloc("out", ELEMS, Dtype::Bfloat16).unwrap();
            for first in (0..partial_sums).step_by(ranks) {
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
        fn any_number_of_ranks_adds_by_the_definition(ranks in 1usize..=8, rounds in 1usize..5, nth in 0usize..16) {
            let partial_sums = ranks * rounds;
            let groups: Vec<usize> = (1..=partial_sums).filter(|group| partial_sums.is_multiple_of(*group)).collect();
            let group = groups[nth % groups.len()];
            let dev = open::cpu(1, StreamOrder::Threads, Arc::new(Doorbell::default()), 0).unwrap();
            let sum = Bench { dev, host: HostMemory::default() }.sum(partial_sums, group, ranks);
            let want: Vec<_> = (0..ELEMS).map(|at| expected(partial_sums, group, at)).collect();
            prop_assert_eq!(sum, want, "{} shares in groups of {} on {} ranks", partial_sums, group, ranks);
        }
    }

    #[test]
    fn groups_round_otherwise_than_none() {
        let of = |group| (0..ELEMS).map(|at| expected(8, group, at)).collect::<Vec<_>>();
        assert!(of(1) != of(2) && of(2) != of(4) && of(8) == of(1));
    }
}
