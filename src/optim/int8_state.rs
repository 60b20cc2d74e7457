//! AdamW on states with moments in 8 bits: the scalar specification.
//!
//! A block of 32 elements is decoded, stepped by the specification of [`adam`] with fp32 moments, and encoded. All passes are one function:
//! an update that is written into the state, an update that only gives working weights, or both. Parameters are taken from moments before
//! they are rounded, and are then [`settled`].

use crate::dtype::Element;
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::int8::{BLOCK, BlockCodec, GROUP, MomentGroup, PlainCodec, settled};
use crate::optim::moments::Rounding;
use std::ops::Range;

/// The state of a range of parameters.
#[derive(Debug)]
pub struct Int8State<'a> {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// Master weights.
    pub params: &'a mut [f32],
    /// First moments: the groups that have elements of the range.
    pub m: MomentGroups<'a>,
    /// Second moments, in as many groups.
    pub v: MomentGroups<'a>,
}

/// Groups of moments of a range.
#[derive(Debug)]
pub enum MomentGroups<'a> {
    /// Groups of this range alone.
    Own(&'a mut [MomentGroup]),
    /// Groups of a range that may begin or end within a group. Other threads may read them at the same time, and none writes them.
    Shared(&'a [MomentGroup]),
}

impl MomentGroups<'_> {
    #[inline(always)]
    pub(super) fn all(&self) -> &[MomentGroup] {
        match self {
            Self::Own(groups) => groups,
            Self::Shared(groups) => groups,
        }
    }

    /// # Panics
    /// If the groups are shared.
    #[inline(always)]
    fn own(&mut self) -> &mut [MomentGroup] {
        match self {
            Self::Own(groups) => groups,
            Self::Shared(_) => panic!("an update of shared groups of moments"),
        }
    }

    /// These groups, for a shorter time.
    fn reborrow(&mut self) -> MomentGroups<'_> {
        match self {
            Self::Own(groups) => MomentGroups::Own(groups),
            Self::Shared(groups) => MomentGroups::Shared(groups),
        }
    }
}

impl<'a> Int8State<'a> {
    /// The state in memory of its own.
    pub fn new(first: usize, params: &'a mut [f32], m: &'a mut [MomentGroup], v: &'a mut [MomentGroup]) -> Self {
        Self { first, params, m: MomentGroups::Own(m), v: MomentGroups::Own(v) }
    }
}

impl Int8State<'_> {
    /// Checks the lengths of the gradients of `commit` and `speculate` and of working weights, and the beginning of a state that is written:
    /// it must be that of a block.
    pub(super) fn check(&self, [commit, speculate]: [Option<usize>; 2], out: Option<usize>) {
        let elems = self.params.len();
        let groups = (self.first % GROUP + elems).div_ceil(GROUP);
        assert!(self.m.all().len() == groups && self.v.all().len() == groups, "m and v of {elems} elements must have {groups} groups");
        let lengths = [commit, speculate, out];
        assert!(lengths.into_iter().flatten().all(|len| len == elems), "gradients and working weights must have {elems} elements");
        assert!(commit.is_none() || self.first.is_multiple_of(BLOCK), "a state that is written from element {} on", self.first);
    }

    /// This state, for a shorter time.
    pub(super) fn reborrow(&mut self) -> Int8State<'_> {
        Int8State { first: self.first, params: self.params, m: self.m.reborrow(), v: self.v.reborrow() }
    }

    /// The block with the first of `lanes`: its group, and its number in the group.
    #[inline(always)]
    fn block(&self, lanes: Lanes) -> (usize, usize) {
        let nth = (self.first % GROUP + lanes.start) / BLOCK;
        (nth * BLOCK / GROUP, nth % (GROUP / BLOCK))
    }
}

/// The elements of a state in one block.
#[derive(Clone, Copy)]
pub(crate) struct Lanes {
    /// The first element.
    start: usize,
    /// Its lane in the block.
    lane: usize,
    /// Number of elements.
    len: usize,
}

impl Lanes {
    /// A whole block from element `start` on.
    #[inline(always)]
    pub(super) const fn whole(start: usize) -> Self {
        Self { start, lane: 0, len: BLOCK }
    }

    /// Elements of a state that begins with element `first`: those from `at.start` to the end of the block, or to `at.end`.
    #[inline(always)]
    fn first_part(first: usize, at: Range<usize>) -> Self {
        let lane = (first + at.start) % BLOCK;
        Self { start: at.start, lane, len: at.len().min(BLOCK - lane) }
    }

    /// The elements of an array.
    #[inline(always)]
    fn of<T>(self, values: &[T]) -> &[T] {
        &values[self.start..][..self.len]
    }

    /// `values` of these elements in fp32; other lanes are zero.
    #[inline(always)]
    fn widened<T: Element>(self, values: &[T]) -> [f32; BLOCK] {
        let (mut all, values) = ([0.0; BLOCK], &values[..self.len]);
        for i in 0..self.len {
            all[self.lane + i] = values[i].to_f32();
        }
        all
    }
}

/// The elements of a block in fp32. Lanes outside of the state are zero.
#[repr(align(64))]
pub(super) struct Int8Block {
    pub params: [f32; BLOCK],
    m: [f32; BLOCK],
    v: [f32; BLOCK],
}

impl Int8Block {
    #[inline(always)]
    fn load(codec: impl BlockCodec, state: &Int8State<'_>, lanes: Lanes) -> Self {
        let (group, block) = state.block(lanes);
        let [m, v] = codec.decode([&state.m.all()[group], &state.v.all()[group]], block);
        let mut loaded = Self { params: lanes.widened(lanes.of(state.params)), m, v };
        if lanes.len < BLOCK {
            loaded.m = lanes.widened(&loaded.m[lanes.lane..]);
            loaded.v = lanes.widened(&loaded.v[lanes.lane..]);
        }
        loaded
    }

    /// Takes an update by `stepped`, and settles the parameters. Returns whether the block had small numbers.
    #[inline(always)]
    fn step(&mut self, step: AdamStep, grads: &[f32; BLOCK], stepped: impl BlockStep) -> bool {
        let Self { params, m, v } = self;
        let small = stepped.step(step, &mut AdamState { first: 0, params, m, v }, grads);
        for param in params {
            *param = settled(*param);
        }
        small
    }

    /// Stores settled parameters and the moments after `step`, rounded. The block continues with the stored values.
    #[inline(always)]
    fn store(&mut self, codec: impl BlockCodec, state: &mut Int8State<'_>, lanes: Lanes, step: AdamStep) {
        state.params[lanes.start..][..lanes.len].copy_from_slice(&self.params[..lanes.len]);
        let rounding = Rounding { key: step.consts.rounding, first: state.first.wrapping_add(lanes.start) };
        let (group, block) = state.block(lanes);
        codec.encode([&mut self.m, &mut self.v], rounding, [&mut state.m.own()[group], &mut state.v.own()[group]], block);
    }

    /// Writes the working weights of the elements `lanes`.
    #[inline(always)]
    fn emit<O: Element>(&self, lanes: Lanes, out: &mut [O]) {
        adam::emit(&self.params[lanes.lane..][..lanes.len], &mut out[lanes.start..][..lanes.len]);
    }
}

/// Takes an update's step on a block, and returns whether the block had small numbers.
pub(super) trait BlockStep: Copy {
    fn step(self, step: AdamStep, block: &mut AdamState<'_>, grads: &[f32; BLOCK]) -> bool;
}

/// The step of the specification.
#[derive(Clone, Copy)]
struct PlainStep;

impl BlockStep for PlainStep {
    #[inline(always)]
    fn step(self, step: AdamStep, block: &mut AdamState<'_>, grads: &[f32; BLOCK]) -> bool {
        adam::commit(step, block, grads);
        false
    }
}

/// Gradients of a pass.
pub(crate) trait BlockGrads: Copy {
    /// Number of gradients.
    fn len(self) -> usize;

    /// The gradients of `lanes` in fp32; other lanes are zero.
    fn widened(self, lanes: Lanes) -> [f32; BLOCK];
}

impl<G: Element> BlockGrads for &[G] {
    #[inline(always)]
    fn len(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn widened(self, lanes: Lanes) -> [f32; BLOCK] {
        lanes.widened(lanes.of(self))
    }
}

/// A pass on blocks: the updates `commit` and `speculate`, and the implementations of their parts.
#[derive(Clone, Copy)]
pub(super) struct BlockPass<C, S, R> {
    pub codec: C,
    pub updates: [Option<(AdamStep, R)>; 2],
    /// How the step of each update is taken.
    pub stepped: [S; 2],
}

impl<C: BlockCodec, S: BlockStep, R: BlockGrads> BlockPass<C, S, R> {
    /// Writes the update `commit` of the elements `lanes` into the state, then takes the update `speculate`. Returns the block with settled
    /// parameters, and whether it had small numbers.
    #[inline(always)]
    pub(super) fn run(&self, state: &mut Int8State<'_>, lanes: Lanes) -> (Int8Block, bool) {
        let (mut block, mut small) = (Int8Block::load(self.codec, state, lanes), false);
        if let Some((step, grads)) = self.updates[0] {
            small |= block.step(step, &grads.widened(lanes), self.stepped[0]);
            block.store(self.codec, state, lanes, step);
        }
        if let Some((step, grads)) = self.updates[1] {
            small |= block.step(step, &grads.widened(lanes), self.stepped[1]);
        }
        (block, small)
    }
}

/// The passes of a state with 8-bit moments. Writes the update `commit` into the state: [`adam::step`] or [`adam::commit`]. With
/// `speculate` the working weights in `out` are those of that further update: [`adam::speculate`] or [`adam::commit_then_speculate`].
/// Blocks that the state begins or ends within hold zeros outside of a state that is written.
///
/// # Panics
/// If lengths differ, or a state that is written does not begin with a block.
#[inline(always)]
pub(crate) fn run<R: BlockGrads, O: Element>(updates: [Option<(AdamStep, R)>; 2], state: &mut Int8State<'_>, out: Option<&mut [O]>) {
    let elems = state.params.len();
    state.check(updates.map(|update| update.map(|(_, grads)| grads.len())), out.as_ref().map(|out| out.len()));
    run_part(updates, state, out, 0..elems);
}

/// [`run`] for the elements `at`, without the checks.
#[inline(always)]
pub(super) fn run_part<R: BlockGrads, O: Element>(
    updates: [Option<(AdamStep, R)>; 2],
    state: &mut Int8State<'_>,
    mut out: Option<&mut [O]>,
    mut at: Range<usize>,
) {
    let pass = BlockPass { codec: PlainCodec, updates, stepped: [PlainStep; 2] };
    while !at.is_empty() {
        let lanes = Lanes::first_part(state.first, at.clone());
        let (block, _) = pass.run(state, lanes);
        if let Some(out) = &mut out {
            block.emit(lanes, out);
        }
        at.start += lanes.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{AdamConsts, AdamHyper};
    use crate::optim::int8::MomentKind;
    use crate::optim::samples::{assert_same, even, ordinary, split_masters};
    use bytemuck::Zeroable;
    use half::{bf16, f16};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    const HYPER: AdamHyper = AdamHyper { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    #[derive(Clone)]
    struct Owned {
        params: Vec<f32>,
        m: Vec<MomentGroup>,
        v: Vec<MomentGroup>,
    }

    impl Owned {
        fn new(params: Vec<f32>) -> Self {
            let zeros = vec![MomentGroup::zeroed(); params.len().div_ceil(GROUP)];
            Self { params, m: zeros.clone(), v: zeros }
        }

        fn state(&mut self, first: usize) -> Int8State<'_> {
            Int8State::new(first, &mut self.params, &mut self.m, &mut self.v)
        }

        /// The elements `at`, with the groups that have them.
        fn part(&mut self, first: usize, at: Range<usize>) -> Int8State<'_> {
            let groups = at.start / GROUP..at.end.div_ceil(GROUP);
            Int8State::new(first + at.start, &mut self.params[at], &mut self.m[groups.clone()], &mut self.v[groups])
        }

        fn assert_equals(&self, other: &Self) {
            assert_same(&self.params, &other.params, "params");
            assert!(self.m == other.m && self.v == other.v, "moments");
        }
    }

    fn at(hyper: &AdamHyper, step: u64, scale: f32) -> AdamStep {
        AdamStep { consts: AdamConsts::new(hyper, step, true), scale }
    }

    fn commit<G: Element>(step: AdamStep, state: &mut Int8State<'_>, grads: &[G]) {
        run::<&[G], f32>([Some((step, grads)), None], state, None);
    }

    /// One run of 40 steps in both ways; some steps are clipped, some skipped. State and working weights must agree after each step.
    fn deferred_equals_synchronous<G: Element, O: Element>() {
        let n = 333;
        let params: Vec<f32> = split_masters(1, n).into_iter().map(settled).collect();
        let (mut sync, mut deferred) = (Owned::new(params.clone()), Owned::new(params));
        let (mut sync_out, mut out) = (vec![O::from_f32(0.0); n], vec![O::from_f32(0.0); n]);
        let mut pending: Option<(AdamStep, Vec<G>)> = None;
        let mut taken = 0;
        for t in 0..40u64 {
            let grads: Vec<G> = ordinary(100 + t, n);
            let final_scale = if t % 3 == 0 { 1.0 } else { ordinary::<f32>(200 + t, 1)[0].abs() };
            let guess = at(&HYPER, taken + 1, 1.0);
            let commit = pending.take();
            let commit = commit.as_ref().map(|(step, grads)| (*step, &grads[..]));
            run([commit, Some((guess, &grads))], &mut deferred.state(0), Some(&mut out));
            if t % 7 == 5 {
                adam::emit(&sync.params, &mut sync_out);
                adam::emit(&deferred.params, &mut out);
            } else {
                let last = at(&HYPER, taken + 1, final_scale);
                run([Some((last, &grads[..])), None], &mut sync.state(0), Some(&mut sync_out));
                if final_scale != 1.0 {
                    run([None, Some((last, &grads[..]))], &mut deferred.state(0), Some(&mut out));
                }
                pending = Some((last, grads));
                taken += 1;
            }
            assert_same(&out, &sync_out, "working weights");
        }
        let (step, grads) = pending.expect("the last step is not skipped");
        commit(step, &mut deferred.state(0), &grads);
        deferred.assert_equals(&sync);
        assert!(sync.params.iter().all(|p| settled(*p).to_bits() == p.to_bits()), "masters are settled");
    }

    #[test]
    fn deferred_commit_gives_the_bits_of_the_synchronous_step() {
        deferred_equals_synchronous::<bf16, bf16>();
        deferred_equals_synchronous::<f32, f32>();
        deferred_equals_synchronous::<f16, f16>();
    }

    #[test]
    fn the_first_step_is_that_of_float32_moments() {
        let (n, step) = (1000, at(&HYPER, 1, 0.7));
        let (params, grads): (Vec<f32>, Vec<f32>) = (ordinary(1, n), ordinary(2, n));
        let (mut int8, mut wide, zeros) = (Owned::new(params.clone()), params, vec![0.0f32; n]);
        commit(step, &mut int8.state(0), &grads);
        adam::commit(step, &mut AdamState { first: 0, params: &mut wide, m: &mut zeros.clone(), v: &mut zeros.clone() }, &grads);
        assert_same(&int8.params, &wide.into_iter().map(settled).collect::<Vec<_>>(), "params");
    }

    /// A learning rate of 0 leaves masters where they are, ties among them.
    #[test]
    fn masters_in_the_middle_of_two_weights_are_settled_by_a_step() {
        let (masters, hyper) = (split_masters(1, 256), AdamHyper { lr: 0.0, ..HYPER });
        let (want, grads) = (masters.iter().map(|master| settled(*master)).collect::<Vec<_>>(), vec![0.5f32; 256]);
        assert!(want != masters);
        for updates in [[true, false], [false, true], [true, true]] {
            let (mut owned, mut out) = (Owned::new(masters.clone()), vec![0.0f32; 256]);
            run(updates.map(|takes| takes.then_some((at(&hyper, 1, 1.0), &grads[..]))), &mut owned.state(0), Some(&mut out));
            assert_same(&out, &want, "working weights");
            assert_same(&owned.params, if updates[0] { &want } else { &masters }, "masters");
        }
    }

    /// The state ends within a block, whose lanes outside of the state have larger numbers.
    #[test]
    fn lanes_outside_of_a_state_change_no_bit_and_become_zero() {
        let (n, grads) = (BLOCK + 5, vec![1e-3f32; BLOCK + 5]);
        let with = |outside: f32| {
            let moments: Vec<f32> = (0..2 * BLOCK).map(|i| if i < n { 1.0 } else { outside }).collect();
            Owned { m: MomentKind::First.groups(&moments), v: MomentKind::Second.groups(&moments), ..Owned::new(ordinary(1, n)) }
        };
        let [mut got, mut want] = [1024.0, 0.0].map(with);
        for t in 1..3 {
            commit(at(&HYPER, t, 1.0), &mut got.state(0), &grads);
            commit(at(&HYPER, t, 1.0), &mut want.state(0), &grads);
            got.assert_equals(&want);
        }
        assert_eq!(MomentKind::First.values(&got.m)[n..], [0.0; GROUP - BLOCK - 5]);
    }

    /// A bucket may be cut at blocks for a step, and anywhere for a speculation.
    #[test]
    fn bits_do_not_depend_on_cuts() {
        let (n, first) = (20 * BLOCK, 3 * GROUP);
        let (grads, mut whole): (Vec<bf16>, Owned) = (ordinary(2, n), Owned::new(ordinary(1, n)));
        commit(at(&HYPER, 1, 1.0), &mut whole.state(first), &grads);
        let (mut parts, step, mut out) = (whole.clone(), at(&HYPER, 2, 0.5), vec![bf16::ZERO; n]);
        let shared = Int8State { first, params: &mut whole.params, m: MomentGroups::Shared(&whole.m), v: MomentGroups::Shared(&whole.v) };
        run([None, Some((step, &grads[..]))], &mut { shared }, Some(&mut out));
        let mut cut_out = vec![bf16::ZERO; n];
        for cut in [0..1, 1..31, 31..32, 32..96, 96..97, 97..130, 130..400, 400..511, 511..n] {
            run([None, Some((step, &grads[cut.clone()]))], &mut parts.part(first, cut.clone()), Some(&mut cut_out[cut]));
        }
        assert_same(&cut_out, &out, "weights");
        parts.assert_equals(&whole);
        commit(step, &mut whole.state(first), &grads);
        for cut in [0..32, 32..96, 96..256, 256..512, 512..n] {
            commit(step, &mut parts.part(first, cut.clone()), &grads[cut]);
        }
        parts.assert_equals(&whole);
    }

    #[test]
    #[should_panic(expected = "an update of shared groups of moments")]
    fn shared_groups_are_not_written() {
        let Owned { mut params, m, v } = Owned::new(vec![0.0; 32]);
        let state = &mut Int8State { first: 0, params: &mut params, m: MomentGroups::Shared(&m), v: MomentGroups::Shared(&v) };
        commit(at(&HYPER, 1, 1.0), state, &[0.0f32; 32]);
    }

    #[test]
    #[should_panic(expected = "a state that is written from element 16 on")]
    fn a_written_state_begins_with_a_block() {
        let mut owned = Owned::new(vec![0.0; 16]);
        commit(at(&HYPER, 1, 1.0), &mut owned.state(16), &[0.0f32; 16]);
    }

    /// Takes `steps` with gradients `grad(step, element)` in both formats; `each` receives the update of fp32 moments, that of 8-bit
    /// moments, and both second moments.
    fn compare(
        hyper: &AdamHyper,
        elems: usize,
        steps: u64,
        grad: impl Fn(u64, &[f32]) -> Vec<f32>,
        mut each: impl FnMut(u64, [&[f32]; 4]),
    ) {
        let (mut exact, mut m, mut v) = (vec![0.0f32; elems], vec![0.0f32; elems], vec![0.0f32; elems]);
        let mut int8 = Owned::new(vec![0.0; elems]);
        for t in 1..=steps {
            let (grads, step) = (grad(t, &ordinary(t, elems)), at(hyper, t, 1.0));
            exact.fill(0.0);
            int8.params.fill(0.0);
            adam::commit(step, &mut AdamState { first: 0, params: &mut exact, m: &mut m, v: &mut v }, &grads);
            commit(step, &mut int8.state(0), &grads);
            each(t, [&exact, &int8.params, &v, &MomentKind::Second.values(&int8.v)]);
        }
    }

    #[test]
    fn second_moments_follow_falling_gradients_as_in_float32() {
        const ELEMS: usize = 512;
        // Either all gradients fall, or half of those in a block.
        for (beta2, falling) in [(0.999, 1), (0.95, 1), (0.999, 2)] {
            let hyper = AdamHyper { lr: 0.0, beta2, ..HYPER };
            let grad = |t, noise: &[f32]| -> Vec<f32> {
                noise.iter().enumerate().map(|(i, g)| if t > 1500 && i % falling == 0 { 0.1 * g } else { *g }).collect()
            };
            let mut ratios = vec![];
            compare(&hyper, ELEMS, 3000, grad, |t, [_, _, exact, stored]| {
                if t == 3000 {
                    ratios = (0..ELEMS).step_by(falling).map(|i| f64::from(stored[i].sqrt()) / f64::from(exact[i].sqrt())).collect();
                }
            });
            let mean = |of: &dyn Fn(f64) -> f64| ratios.iter().map(|ratio| of(*ratio)).sum::<f64>() / ratios.len() as f64;
            let (ratio, rms) = (mean(&|ratio| ratio), mean(&|ratio| (ratio - 1.0).powi(2)).sqrt());
            assert!((ratio - 1.0).abs() < 0.03 && rms < 0.2, "beta2 {beta2}, 1 in {falling} falls: {ratio} of fp32, {rms} apart");
        }
    }

    /// Formats in which a second moment reads zero beside large ones have updates that are thousands of times larger.
    #[test]
    fn loud_elements_do_not_enlarge_the_updates_of_quiet_ones() {
        const ELEMS: usize = 1024;
        let hyper = AdamHyper { lr: 1.0, beta2: 0.999, weight_decay: 0.0, ..HYPER };
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        let sizes: Vec<f32> = (0..ELEMS).map(|_| libm::expf(2.0 * (0..12).map(|_| even(rng)).sum::<f32>() / 2.0)).collect();
        let loud: Vec<f32> = (0..ELEMS).map(|i| if i % BLOCK == 7 { 1000.0 } else { 1.0 }).collect();
        for sizes in [sizes, loud] {
            let (mut largest, mut distance, mut count) = ([0.0f32; 2], 0.0, 0.0);
            let grad = |_, noise: &[f32]| -> Vec<f32> { noise.iter().zip(&sizes).map(|(g, size)| g * size).collect() };
            compare(&hyper, ELEMS, 1000, grad, |t, [exact, stored, ..]| {
                for (exact, stored) in exact.iter().zip(stored) {
                    largest = [largest[0].max(exact.abs()), largest[1].max(stored.abs())];
                    if t > 100 {
                        distance += f64::from(exact - stored).powi(2);
                        count += f64::from(*exact).powi(2);
                    }
                }
            });
            let rms = (distance / count).sqrt();
            assert!(largest[1] <= 2.0 * largest[0] && rms <= 0.2, "largest updates {largest:?}, {rms} apart");
        }
    }
}
