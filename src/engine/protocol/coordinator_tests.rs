//! Tests the protocol with an adversary that completes copies, jobs and verdicts in any order. A model tracks the expected state of every
//! bucket and the expected weights on the device. There is no arithmetic: an "update" is a name.

use super::*;
use crate::bucket::layout::Tier;
use crate::optim::norm::BLOCK;
use crate::units::ClipScale;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The updates that a state or a set of weights has received.
type Seen = Vec<(u64, u32)>;

/// Executes the coordinator's commands, with delays and interleavings drawn from a seed.
struct World {
    rng: ChaCha8Rng,
    coordinator: Coordinator,
    streamed_weights: bool,
    /// By gradient slot: the bucket, and the steps of the gradient of its late rows and of all other rows.
    grads: Vec<Option<(usize, [u64; 2])>>,
    state: Vec<Seen>,
    /// By parameter slot: the history of late rows and of all other rows. Both are equal for buckets that do not leave early.
    params: Vec<[Seen; 2]>,
    device: Vec<[Seen; 2]>,
    /// By bucket: the steps of the last computed gradients, for late rows and all other rows.
    computed: Vec<[u64; 2]>,
    /// Hops enqueued on the device, in order.
    computing: VecDeque<(Hop, usize)>,
    copying: VecDeque<(Hop, usize, Slot)>,
    returning: VecDeque<(Hop, usize, Slot)>,
    job: Option<(usize, Work, Option<Slot>)>,
    step: u64,
    /// Whether the disk does something only while nothing else does.
    slow_disk: bool,
    /// The state that the running save must find, and by bucket whether its memory is read.
    saved: Seen,
    held: Vec<bool>,
    /// By slot for copies: the bucket and its state; and the copies that are being saved.
    copies: Vec<Option<(usize, Seen)>>,
    leaving: Vec<(usize, Slot)>,
    /// Buckets saved so far, from memory and from copies.
    saves: [usize; 2],
}

impl World {
    /// Weights are streamed if the seed is even and the build has the feature.
    fn new(seed: u64, rules: Rules, buckets: usize, resident: usize, slots: usize) -> Self {
        // No bucket leaves early, or one or two thirds of them, or all.
        let early = if rules.policy == Policy::Deferred { buckets * (seed / 6 % 4) as usize / 3 } else { 0 };
        let layout = BucketLayout::new(buckets * BLOCK, BLOCK, Tier::Host).with_resident(resident);
        let layout = layout.with_early((buckets - early) * BLOCK..buckets * BLOCK);
        let offloaded = layout.offloaded();
        let grad_slots = if rules.policy == Policy::Deferred { offloaded + slots } else { slots };
        let streamed_weights = cfg!(feature = "weight-flow") && seed.is_multiple_of(2);
        let param_slots = if streamed_weights { offloaded } else { slots };
        let split_masters = streamed_weights && rules.policy == Policy::Deferred && seed & 1 << 21 != 0;
        let staging = Staging { ringed_grads: seed.is_multiple_of(3), grad_slots, param_slots, streamed_weights, split_masters };
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            coordinator: Coordinator::new(layout, rules, staging),
            slow_disk: seed & 1 << 22 != 0,
            saved: Seen::new(),
            held: vec![false; offloaded],
            copies: vec![None; seed as usize / 24 % 3],
            leaving: vec![],
            saves: [0; 2],
            streamed_weights,
            grads: vec![None; grad_slots],
            state: vec![vec![]; offloaded],
            params: vec![[vec![], vec![]]; param_slots],
            device: vec![[vec![], vec![]]; buckets],
            computed: vec![[0; 2]; buckets],
            computing: VecDeque::new(),
            copying: VecDeque::new(),
            returning: VecDeque::new(),
            job: None,
            step: 0,
        }
    }

    fn run_commands(&mut self) {
        while let Some(command) = self.coordinator.next_command() {
            let Command::Start { hop, bucket, load } = command;
            match (hop, load) {
                (Hop::GradsOut | Hop::RowsOut, Load::Slot(slot)) => self.copying.push_back((hop, bucket, slot)),
                (Hop::Optimize, Load::Job(work, params)) => assert!(self.job.replace((bucket, work, params)).is_none()),
                (Hop::ParamsIn | Hop::RowsIn, Load::Slot(slot)) => self.returning.push_back((hop, bucket, slot)),
                (Hop::StepOnDevice, Load::Update(update)) => {
                    self.device[bucket].iter_mut().for_each(|seen| seen.push((update.optimizer_step, update.scale.to_bits())));
                }
                (Hop::Save, Load::State) => {
                    assert_eq!(self.state[bucket], self.saved, "bucket {bucket} is saved");
                    self.held[bucket] = true;
                }
                (Hop::SaveCopy, Load::Slot(slot)) => self.leaving.push((bucket, slot)),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Begins a save of `expected`, the state after the last step, unless one runs.
    fn begin_save(&mut self, expected: &Seen) {
        if self.coordinator.is_saving() {
            return;
        }
        self.saved.clone_from(expected);
        self.coordinator.set_copy_slots(self.copies.len());
        self.coordinator.begin_save();
        self.run_commands();
    }

    /// The writer is done with the memory of a bucket, or with a copy. A bucket without a copy of its own was read from its memory.
    fn save_one(&mut self, is_copy: bool) {
        if is_copy {
            let nth = self.rng.next_u32() as usize % self.leaving.len();
            let (bucket, slot) = self.leaving[nth];
            if self.held[bucket] {
                return self.leave(bucket);
            }
            self.leaving.swap_remove(nth);
            assert_eq!(self.copies[slot.0].take(), Some((bucket, self.saved.clone())), "what is saved from a copy");
            self.saves[1] += 1;
            return self.done(Hop::SaveCopy, bucket);
        }
        let held: Vec<usize> = (0..self.held.len()).filter(|&bucket| self.held[bucket]).collect();
        let nth = self.rng.next_u32() as usize % held.len();
        self.leave(held[nth]);
    }

    fn leave(&mut self, bucket: usize) {
        assert_eq!(self.state[bucket], self.saved, "bucket {bucket} was written while it was held");
        self.held[bucket] = false;
        self.saves[0] += 1;
        self.done(Hop::Save, bucket);
    }

    /// Ends the running save without another step.
    fn end_save(&mut self) {
        while !self.coordinator.all_settled() {
            assert!(self.advance(), "stuck before the end of the save");
        }
        self.coordinator.commit_due();
        self.run_commands();
        while self.coordinator.is_saving() {
            assert!(self.advance(), "the save never ends");
        }
    }

    fn done(&mut self, hop: Hop, bucket: usize) {
        self.coordinator.handle(Event::Done { hop, bucket });
    }

    /// Completes one pending operation; false when there is none.
    fn advance(&mut self) -> bool {
        // A copy waits for the kernels that were enqueued before it.
        let can_copy = self.copying.front().is_some_and(|(hop, bucket, _)| {
            let waits_for = |enqueued: &(Hop, usize)| enqueued.1 == *bucket && (*hop == Hop::GradsOut || enqueued.0 == Hop::Backward);
            !self.computing.iter().any(waits_for)
        });
        let others = [can_copy, self.job.is_some(), !self.returning.is_empty(), !self.computing.is_empty()];
        let may_save = !(self.slow_disk && others.contains(&true));
        let [reads, copies] = [self.held.contains(&true), !self.leaving.is_empty()].map(|waits| waits && may_save);
        let choices = [others[0], others[1], others[2], others[3], reads, copies];
        let (first, count) = (self.rng.next_u32() as usize, choices.len());
        let Some(choice) = (0..count).map(|i| (first % count + i) % count).find(|&c| choices[c]) else { return false };
        match choice {
            0 => {
                let (hop, bucket, slot) = self.copying.pop_front().unwrap();
                match hop {
                    Hop::RowsOut => self.params[slot.0] = [vec![(self.computed[bucket][0], 0)], vec![]],
                    _ => self.grads[slot.0] = Some((bucket, self.computed[bucket])),
                }
                self.done(hop, bucket);
            }
            1 => {
                let (bucket, work, params) = self.job.take().unwrap();
                self.work(bucket, work, params);
                self.done(Hop::Optimize, bucket);
            }
            2 => {
                let (hop, bucket, slot) = self.returning.pop_front().unwrap();
                let weights = self.params[slot.0].clone();
                match hop {
                    Hop::RowsIn => self.device[bucket][0].clone_from(&weights[0]),
                    _ => self.device[bucket] = weights,
                }
                self.done(hop, bucket);
            }
            4 | 5 => self.save_one(choice == 5),
            _ => {
                let (hop, bucket) = self.computing.pop_front().unwrap();
                match hop {
                    Hop::HeadBackward => self.computed[bucket][1] = self.step,
                    _ => self.computed[bucket] = [self.step; 2],
                }
                self.done(hop, bucket);
            }
        }
        self.run_commands();
        true
    }

    fn work(&mut self, bucket: usize, work: Work, params: Option<Slot>) {
        let grads = self.grads.clone();
        let held = |g: GradUpdate| grads[g.grads.0].filter(|held| held.0 == bucket).expect("the slot holds another gradient").1;
        let apply = |seen: &mut Seen, g: GradUpdate| {
            assert_eq!(held(g), [g.update.optimizer_step; 2], "the slot holds another gradient");
            seen.push((g.update.optimizer_step, g.update.scale.to_bits()));
        };
        let state = &mut self.state[bucket];
        let undo = |state: &mut Seen, undo: Option<GradUpdate>| {
            if let Some(g) = undo {
                assert_eq!(state.pop(), Some((g.update.optimizer_step, g.update.scale.to_bits())));
            }
        };
        let mut weights = None;
        match work {
            Work::CommitThenSpeculate { pending, next } => {
                pending.into_iter().for_each(|p| apply(state, p));
                // A speculation needs no complete gradient, so late rows may be missing.
                weights = Some(held(next).map(|step| [&state[..], &[(step, next.update.scale.to_bits())]].concat()));
            }
            Work::Step { undo: u, next } => {
                undo(state, u);
                apply(state, next);
                weights = Some([state.clone(), state.clone()]);
            }
            Work::Restore { undo: u } => {
                undo(state, u);
                weights = Some([state.clone(), state.clone()]);
            }
            Work::SpeculateRows(next) => {
                let [gradient, _] = &self.params[params.expect("rows come through a slot").0];
                assert_eq!(gradient[..], [(next.update.optimizer_step, 0)], "the slot holds other rows");
                self.grads[next.grads.0] = Some((bucket, [gradient[0].0, held(next)[1]]));
                weights = Some([[&state[..], &[(gradient[0].0, next.update.scale.to_bits())]].concat(), vec![]]);
            }
            Work::Commit(g) => apply(state, g),
            Work::Copy(slot) => assert!(self.copies[slot.0].replace((bucket, state.clone())).is_none(), "the slot has another copy"),
        }
        assert_eq!(weights.is_some(), params.is_some());
        if let (Some(weights), Some(slot)) = (weights, params) {
            assert!(self.returning.iter().all(|(.., copied)| *copied != slot), "a slot is written while it is copied");
            self.params[slot.0] = weights;
        }
    }

    fn delay_randomly(&mut self) {
        while !self.rng.next_u32().is_multiple_of(3) && self.advance() {}
    }

    /// One step with the given verdict; `expected` is the device's history before it.
    fn step(&mut self, verdict: Verdict, expected: &Seen) {
        let buckets = self.device.len();
        for bucket in (0..buckets).rev() {
            while !self.coordinator.is_settled(bucket) {
                assert!(self.advance(), "stuck: bucket {bucket} never settles");
            }
            // The forward pass waits for the copies in order. Then it must see exactly the decided history.
            while self.returning.iter().any(|(_, b, _)| *b == bucket) {
                assert!(self.advance());
            }
            let want = [expected.clone(), expected.clone()];
            assert_eq!(self.device[bucket], want, "bucket {bucket} before step {}", self.step + 1);
            // Embeddings are not streamed.
            if self.streamed_weights && bucket < self.params.len() && !self.coordinator.layout.early().contains(&bucket) {
                assert_eq!(self.params[bucket], want, "what is streamed of bucket {bucket} before step {}", self.step + 1);
            }
            self.delay_randomly();
        }
        self.step = expected.len() as u64 + 1;
        self.coordinator.begin_step(Update { optimizer_step: self.step, learning_rate: 0.1, scale: 1.0 });
        let early = if self.coordinator.is_speculating() { self.coordinator.layout.early() } else { 0..0 };
        for bucket in early.clone().rev() {
            self.computing.push_back((Hop::HeadBackward, bucket));
            self.handle(Event::HeadGradReady(bucket));
        }
        for bucket in 0..buckets {
            if bucket == early.start {
                early.clone().for_each(|bucket| self.handle(Event::RowsBegin(bucket)));
            }
            if self.coordinator.is_offloaded(bucket) {
                self.computing.push_back((Hop::Backward, bucket));
            }
            self.handle(Event::GradReady(bucket));
        }
        self.coordinator.handle(Event::Validated(verdict));
        self.run_commands();
        self.delay_randomly();
    }

    fn handle(&mut self, event: Event) {
        self.coordinator.handle(event);
        self.run_commands();
        self.delay_randomly();
    }

    fn flush(&mut self) {
        while !self.coordinator.all_settled() {
            assert!(self.advance(), "stuck before the flush");
        }
        self.coordinator.flush();
        self.run_commands();
        while self.advance() {}
        assert!(self.coordinator.all_settled());
        assert_eq!((self.coordinator.grad_slots.lent(), self.coordinator.param_slots.lent()), (0, 0), "a slot leaked");
    }
}

fn verdicts(seed: u64, clip_percent: u32, skip_percent: u32, steps: usize) -> Vec<Verdict> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let one = |rng: &mut ChaCha8Rng| match rng.next_u32() % 100 {
        x if x < clip_percent => Verdict::Clip(ClipScale(1.0 / (2.0 + (x % 7) as f32))),
        x if x < clip_percent + skip_percent => Verdict::SkipNonFinite,
        _ => Verdict::Commit,
    };
    (0..steps).map(|_| one(&mut rng)).collect()
}

fn run(seed: u64, rules: Rules, buckets: usize, resident: usize, slots: usize, verdicts: &[Verdict]) -> Counts {
    let mut world = World::new(seed, rules, buckets, resident, slots);
    let mut expected = Seen::new();
    for &verdict in verdicts {
        world.step(verdict, &expected);
        match verdict {
            Verdict::Commit => expected.push((world.step, 1f32.to_bits())),
            Verdict::Clip(c) => expected.push((world.step, c.0.to_bits())),
            Verdict::SkipNonFinite => {}
        }
        if seed & 1 << 20 != 0 && world.rng.next_u32().is_multiple_of(2) {
            world.begin_save(&expected);
        }
        while seed & 1 << 21 != 0 && !world.coordinator.all_settled() {
            assert!(world.advance());
        }
    }
    world.end_save();
    world.flush();
    assert!(world.state.iter().all(|s| *s == expected), "the flushed state");
    assert!(world.device.iter().flatten().all(|s| *s == expected), "the device's weights");
    world.coordinator.counts()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 400 }))]
    #[test]
    fn every_bucket_sees_exactly_the_decided_updates(
        seed: u64, policy in 0..3, adaptive: bool, deadline_order: bool, early_commit: bool,
        buckets in 1usize..9, resident in 0usize..4, slots in 1usize..4, clip in 0u32..100, skip in 0u32..40,
    ) {
        let policy = [Policy::Deferred, Policy::Inverse, Policy::ValidateFirst][policy as usize];
        let rules = Rules { policy, adaptive, deadline_order, early_commit };
        run(seed, rules, buckets, resident, slots, &verdicts(seed, clip, skip, 12));
    }
}

#[test]
fn counters_prove_that_speculation_clipping_and_skipping_happened() {
    let rules = Rules { policy: Policy::Deferred, adaptive: false, deadline_order: true, early_commit: true };
    // Under Miri, one seed; its counts are not checked.
    let seeds = if cfg!(miri) { 1 } else { 50 };
    let counts = (0..seeds).map(|seed| run(seed, rules, 6, 2, 2, &verdicts(seed, 30, 20, 20)));
    let mut all = Counts::default();
    counts.for_each(|c| all += c);
    if cfg!(feature = "stv") && !cfg!(miri) {
        assert!(all.speculated > 1000 && all.rolled_back > 300 && all.rolled_back < all.speculated, "{all:?}");
    }
    assert!(cfg!(miri) || (all.clipped > 1000 && all.skipped > 500 && all.committed > 2000), "{all:?}");
    assert_eq!(all.committed + all.clipped + all.skipped, seeds * 20 * 6);
    let waiting = Rules { policy: Policy::ValidateFirst, ..rules };
    assert_eq!(run(1, waiting, 6, 2, 2, &verdicts(1, 30, 20, 20)).speculated, 0);
}

fn done(hop: Hop, bucket: usize) -> Event {
    Event::Done { hop, bucket }
}

/// The buckets for which `hop` was started, in order.
#[cfg(feature = "deadline-order")]
fn started(c: &mut Coordinator, hop: Hop) -> Vec<usize> {
    let commands = std::iter::from_fn(|| c.next_command());
    let started = commands.map(|Command::Start { hop, bucket, .. }| (hop, bucket));
    started.filter(|(started, _)| *started == hop).map(|(_, bucket)| bucket).collect()
}

#[cfg(all(feature = "stv", feature = "deadline-order"))]
#[test]
fn the_order_is_the_earliest_deadline_or_the_order_of_arrival() {
    for (deadline_order, expected) in [(true, [0, 3, 2, 1]), (false, [0, 1, 2, 3])] {
        let rules = Rules { policy: Policy::Deferred, adaptive: false, deadline_order, early_commit: true };
        let staging = Staging { ringed_grads: false, grad_slots: 8, param_slots: 4, streamed_weights: false, split_masters: false };
        let mut c = Coordinator::new(BucketLayout::new(4 * BLOCK, BLOCK, Tier::Host), rules, staging);
        c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
        (0..4).for_each(|b| c.handle(Event::GradReady(b)));
        (0..4).for_each(|b| c.handle(done(Hop::GradsOut, b)));
        expected[..3].iter().for_each(|&b| c.handle(done(Hop::Optimize, b)));
        assert_eq!(started(&mut c, Hop::Optimize), expected);
    }
}

/// A module completes several buckets at once, and the driver is modules ahead of the device.
#[cfg(feature = "deadline-order")]
#[test]
fn slots_go_to_computed_gradients_and_then_to_the_next_ones() {
    let rules = Rules { policy: Policy::ValidateFirst, adaptive: false, deadline_order: true, early_commit: true };
    let staging = Staging { ringed_grads: false, grad_slots: 3, param_slots: 1, streamed_weights: false, split_masters: false };
    let mut c = Coordinator::new(BucketLayout::new(8 * BLOCK, BLOCK, Tier::Host), rules, staging);
    c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
    (0..8).for_each(|b| c.handle(Event::GradReady(b)));
    assert_eq!(started(&mut c, Hop::GradsOut), [0, 1, 2], "nothing is computed yet");
    (0..6).for_each(|b| c.handle(done(Hop::Backward, b)));
    (0..3).for_each(|b| c.handle(done(Hop::GradsOut, b)));
    c.handle(Event::Validated(Verdict::Commit));
    c.handle(done(Hop::Optimize, 2));
    assert_eq!(started(&mut c, Hop::GradsOut), [5], "of what is computed the earliest deadline");
    c.handle(done(Hop::ParamsIn, 2));
    c.handle(done(Hop::Optimize, 1));
    assert_eq!(started(&mut c, Hop::GradsOut), [4]);
}

/// The second step has begun with pending updates of the first; the pool writes the update of the last bucket.
#[cfg(all(feature = "stv", feature = "deadline-order"))]
fn with_pending_updates(buckets: usize, grad_slots: usize) -> Coordinator {
    let rules = Rules { policy: Policy::Deferred, adaptive: false, deadline_order: true, early_commit: true };
    let staging = Staging { ringed_grads: false, grad_slots, param_slots: buckets, streamed_weights: false, split_masters: false };
    let mut c = Coordinator::new(BucketLayout::new(buckets * BLOCK, BLOCK, Tier::Host), rules, staging);
    c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
    for b in 0..buckets {
        [Event::GradReady(b), done(Hop::GradsOut, b), done(Hop::Optimize, b)].into_iter().for_each(|event| c.handle(event));
    }
    assert_eq!(commits(&mut c), [0; 0], "a verdict may still overturn them");
    c.handle(Event::Validated(Verdict::Commit));
    assert_eq!(commits(&mut c), [buckets - 1], "the one that comes last in the next backward pass, and is awaited first");
    (0..buckets).rev().for_each(|b| c.handle(done(Hop::ParamsIn, b)));
    c.begin_step(Update { optimizer_step: 2, learning_rate: 0.1, scale: 1.0 });
    c
}

/// The buckets of the idle pool's commits, in order.
#[cfg(all(feature = "stv", feature = "deadline-order"))]
fn commits(c: &mut Coordinator) -> Vec<usize> {
    let commands = std::iter::from_fn(|| c.next_command());
    let is_commit = |load: &Load| matches!(load, Load::Job(Work::Commit(_), None));
    commands.filter_map(|Command::Start { bucket, load, .. }| is_commit(&load).then_some(bucket)).collect()
}

/// The pool is idle between the verdict and the first computed gradient of the next step, which is enqueued long before.
#[cfg(all(feature = "stv", feature = "deadline-order"))]
#[test]
fn updates_are_written_until_a_gradient_is_computed() {
    let mut c = with_pending_updates(3, 4);
    c.handle(done(Hop::Optimize, 2));
    assert_eq!((commits(&mut c), c.grad_slots.lent()), (vec![1], 2));
    c.handle(Event::GradReady(0));
    c.handle(done(Hop::Optimize, 1));
    assert_eq!(commits(&mut c), [0], "its next gradient is enqueued, and may take long");
    let mut c = with_pending_updates(3, 4);
    [Event::GradReady(0), done(Hop::Backward, 0), done(Hop::Optimize, 2)].into_iter().for_each(|event| c.handle(event));
    assert_eq!(commits(&mut c), [0; 0], "gradients come, with more urgent work");
    assert_eq!(c.buckets.iter().map(|b| b.pending.is_some()).collect::<Vec<_>>(), [true, true, false]);
}

/// While the device waits for a slot, a job that frees one runs before a job that only the next forward pass needs.
#[cfg(all(feature = "stv", feature = "deadline-order"))]
#[test]
fn while_the_driver_waits_for_a_slot_the_pool_frees_one() {
    for (awaits, expected) in [(false, 3), (true, 0)] {
        let mut c = with_pending_updates(4, 6);
        [3, 0].into_iter().for_each(|b| c.handle(Event::GradReady(b)));
        [done(Hop::Backward, 0), done(Hop::GradsOut, 3), done(Hop::GradsOut, 0)].into_iter().for_each(|event| c.handle(event));
        (1..3).for_each(|b| c.handle(Event::GradReady(b)));
        c.await_slot(awaits);
        assert_eq!(started(&mut c, Hop::Optimize), [0; 0], "the pool writes the update of 3");
        c.handle(done(Hop::Optimize, 3));
        assert_eq!((c.tally.ready, started(&mut c, Hop::Optimize)), (1, vec![expected]));
    }
}

/// A backward pass that lacks a slot waits for the pool, which holds all slots, or for copies if the pool is idle.
#[cfg(all(feature = "stv", feature = "deadline-order"))]
#[test]
fn a_gradient_without_a_slot_waits_for_the_pool_or_for_copies() {
    let mut c = with_pending_updates(3, 4);
    (0..2).for_each(|b| c.handle(Event::GradReady(b)));
    assert_eq!([0, 1, 2].map(|b| (c.is_copied(b), c.waits_for_link(b))), [(true, true), (false, false), (true, false)]);
    [done(Hop::Backward, 0), done(Hop::Optimize, 2)].into_iter().for_each(|event| c.handle(event));
    assert_eq!([0, 1].map(|b| c.waits_for_link(b)), [true, true], "the slot of 2 went to 1");
    c.handle(Event::GradReady(2));
    assert_eq!((c.is_copied(2), c.waits_for_link(2)), (false, true), "the pool is idle");
    c.handle(done(Hop::GradsOut, 0));
    assert_eq!((c.is_copied(2), c.waits_for_link(2)), (false, false), "the pool works");
}

/// A coordinator in the middle of a step of four buckets: one runs, one has arrived, one is being copied, one is not enqueued.
fn in_a_step(policy: Policy) -> Coordinator {
    let rules = Rules { policy, adaptive: false, deadline_order: false, early_commit: true };
    let staging = Staging { ringed_grads: false, grad_slots: 5, param_slots: 2, streamed_weights: false, split_masters: false };
    let mut c = Coordinator::new(BucketLayout::new(4 * BLOCK, BLOCK, Tier::Host), rules, staging);
    c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
    (0..3).for_each(|b| c.handle(Event::GradReady(b)));
    (0..2).for_each(|b| c.handle(done(Hop::GradsOut, b)));
    c
}

/// A coordinator in the middle of a step of four buckets. Two left early, and their late rows are enqueued now. The gradients of the other
/// two are enqueued as well.
#[cfg(feature = "stv")]
fn with_late_rows() -> Coordinator {
    let rules = Rules { policy: Policy::Deferred, adaptive: false, deadline_order: true, early_commit: true };
    let staging = Staging { ringed_grads: false, grad_slots: 5, param_slots: 2, streamed_weights: false, split_masters: false };
    let layout = BucketLayout::new(4 * BLOCK, BLOCK, Tier::Host).with_early(2 * BLOCK..4 * BLOCK);
    let mut c = Coordinator::new(layout, rules, staging);
    c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
    [3, 2].into_iter().for_each(|b| c.handle(Event::HeadGradReady(b)));
    [3, 2].into_iter().for_each(|b| c.handle(done(Hop::GradsOut, b)));
    [3, 2].into_iter().for_each(|b| c.handle(done(Hop::Optimize, b)));
    c.handle(done(Hop::ParamsIn, 3));
    [2, 3].into_iter().for_each(|b| c.handle(Event::RowsBegin(b)));
    (0..4).for_each(|b| c.handle(Event::GradReady(b)));
    c
}

#[cfg(all(feature = "stv", feature = "deadline-order"))]
#[test]
fn rows_follow_when_they_are_computed_and_after_a_clip_the_whole_gradient_does() {
    let mut c = with_late_rows();
    assert!(!started(&mut c, Hop::RowsOut).contains(&3), "the stream of copies would wait for them");
    (0..4).rev().for_each(|b| c.handle(done(Hop::Backward, b)));
    assert_eq!(started(&mut c, Hop::RowsOut), [3], "the other one's weights are still in the second slot");
    c.handle(done(Hop::ParamsIn, 2));
    c.handle(done(Hop::RowsOut, 3));
    assert_eq!(started(&mut c, Hop::Optimize), [3]);
    c.handle(done(Hop::RowsOut, 2));
    c.handle(Event::Validated(Verdict::Clip(ClipScale(0.5))));
    assert_eq!(started(&mut c, Hop::GradsOut), [2], "its rows never met the others");
    c.handle(done(Hop::Optimize, 3));
    let next = std::iter::from_fn(|| c.next_command()).find(|Command::Start { hop, .. }| *hop == Hop::Optimize);
    let redone = matches!(next, Some(Command::Start { bucket: 3, load: Load::Job(Work::Step { .. }, _), .. }));
    assert!(redone, "its gradient is whole, and its step is done again: {next:?}");
}

/// A bucket that has no slot when its late rows begin leaves later as one whole gradient.
#[cfg(feature = "stv")]
#[test]
fn gradients_without_a_slot_leave_with_their_rows() {
    let rules = Rules { policy: Policy::Deferred, adaptive: false, deadline_order: true, early_commit: true };
    let staging = Staging { ringed_grads: false, grad_slots: 3, param_slots: 1, streamed_weights: false, split_masters: false };
    let layout = BucketLayout::new(2 * BLOCK, BLOCK, Tier::Host).with_early(0..2 * BLOCK);
    let mut c = Coordinator::new(layout, rules, staging);
    // A step with updates that stay pending and keep their slots.
    c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
    for b in [0, 1] {
        let events = [Event::GradReady(b), done(Hop::GradsOut, b), done(Hop::Optimize, b), done(Hop::ParamsIn, b)];
        events.into_iter().for_each(|event| c.handle(event));
    }
    c.handle(Event::Validated(Verdict::Commit));
    c.begin_step(Update { optimizer_step: 2, learning_rate: 0.1, scale: 1.0 });
    [1, 0].into_iter().for_each(|b| c.handle(Event::HeadGradReady(b)));
    [0, 1].into_iter().for_each(|b| c.handle(Event::RowsBegin(b)));
    let phases = |c: &Coordinator| [0, 1].map(|b| (c.buckets[b].phase, c.buckets[b].late));
    assert_eq!(phases(&c), [(Phase::Settled, Late::Nothing), (Phase::Copying, Late::Rows)]);
    [0, 1].into_iter().for_each(|b| c.handle(Event::GradReady(b)));
    assert_eq!(phases(&c), [(Phase::Ready, Late::Nothing), (Phase::Copying, Late::EnqueuedRows)]);
}

#[test]
fn a_new_placement_keeps_decisions_and_none_is_applied_in_a_step() {
    let (rules, layout) = (
        Rules { policy: Policy::ValidateFirst, adaptive: true, deadline_order: true, early_commit: true },
        BucketLayout::new(4 * BLOCK, BLOCK, Tier::Host),
    );
    let staging =
        |slots| Staging { ringed_grads: false, grad_slots: slots, param_slots: slots, streamed_weights: false, split_masters: false };
    let mut c = Coordinator::new(layout.clone(), rules, staging(4));
    c.set_history(SpeculationHistory::of(0b101));
    c.counts.committed = 7;
    c.rearrange(&layout.with_resident(3), staging(1));
    assert_eq!((c.history().bits(), c.counts().committed, c.buckets.len()), (0b101, 7, 1));
    let mut in_a_step = in_a_step(Policy::ValidateFirst);
    assert!(panics(|| in_a_step.rearrange(&layout, staging(4))));
}

fn panics(work: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err()
}

#[cfg(feature = "stv")]
#[test]
fn every_invariant_is_missed_when_it_is_broken() {
    let pending =
        |b: &Bucket| b.grads.map(|grads| GradUpdate { grads, update: Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 } });
    let spoils: [&dyn Fn(&mut Coordinator); 14] = [
        &|c| _ = c.grad_slots.take(),
        &|c| _ = c.param_slots.take(),
        &|c| c.grad_slots.give(Slot(0)),
        &|c| c.returning.push_back((1, Slot(1))),
        &|c| c.buckets[1].grads = None,
        &|c| c.buckets[3].grads = Some(Slot(4)),
        &|c| c.buckets[3].phase = Phase::Ready,
        &|c| c.buckets[1].phase = Phase::Running,
        &|c| c.buckets[0].phase = Phase::Arrived,
        &|c| c.buckets[3].phase = Phase::Queued(Queued::Commit),
        &|c| c.buckets[1].speculated_in_place = true,
        &|c| c.verdict = Some(Verdict::SkipNonFinite),
        &|c| c.running.as_mut().unwrap().kind = JobKind::Flush,
        &|c| c.running = None,
    ];
    for (nth, spoil) in spoils.into_iter().enumerate() {
        let mut c = in_a_step(Policy::Deferred);
        c.check();
        spoil(&mut c);
        // Without this, the check of the tally would fail first.
        c.tally = c.recount();
        assert!(panics(|| c.check()), "nobody misses {nth}");
    }
    let mut c = in_a_step(Policy::Deferred);
    c.tally.ready += 1;
    assert!(panics(|| c.check()), "nobody misses a bucket that is counted and not there");
    let spoils: [&dyn Fn(&mut Coordinator); 5] = [
        &|c| c.buckets[3].rows = None,
        &|c| c.buckets[3].late = Late::Nothing,
        &|c| c.buckets[2].late = Late::Nothing,
        &|c| c.buckets[1].late = Late::Rows,
        &|c| c.speculating = false,
    ];
    for (nth, spoil) in spoils.into_iter().enumerate() {
        let mut c = with_late_rows();
        (0..4).rev().for_each(|b| c.handle(done(Hop::Backward, b)));
        c.check();
        spoil(&mut c);
        assert!(panics(|| c.check()), "nobody misses {nth} of late rows");
    }
    let mut c = in_a_step(Policy::ValidateFirst);
    c.check();
    c.buckets[1].pending = pending(&c.buckets[1]);
    c.buckets[1].grads = None;
    c.buckets[1].phase = Phase::Settled;
    c.tally = c.recount();
    assert!(panics(|| c.check()), "an update is pending though nothing was speculated");
}

#[test]
fn a_broken_invariant_is_detected_at_the_next_event_or_with_many_buckets_a_few_later() {
    let rules = Rules { policy: Policy::ValidateFirst, adaptive: false, deadline_order: false, early_commit: false };
    let staging = Staging { ringed_grads: false, grad_slots: 5, param_slots: 2, streamed_weights: false, split_masters: false };
    for (buckets, events) in [(4, 1), (16, 1), (17, 2), (300, 19)] {
        let mut c = Coordinator::new(BucketLayout::new(buckets * BLOCK, BLOCK, Tier::Host), rules, staging);
        c.begin_step(Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 });
        c.unchecked = 0;
        c.tally.under_way += 1;
        let unseen = (0..buckets).take_while(|&bucket| !panics(|| c.handle(Event::GradReady(bucket)))).count();
        assert_eq!(unseen + 1, events, "{buckets} buckets");
    }
}

#[test]
fn transitions_outside_the_table_do_not_happen() {
    let wrong = [Event::GradReady(0), done(Hop::GradsOut, 0), done(Hop::GradsOut, 3), done(Hop::ParamsIn, 0), done(Hop::PageIn, 0)];
    for event in wrong {
        assert!(panics(|| in_a_step(Policy::Deferred).handle(event)), "{event:?}");
    }
    let mut c = in_a_step(Policy::Deferred);
    assert!(panics(|| c.transition(3, Phase::Settled, Phase::Copying)) && panics(|| c.transition(2, Phase::Arrived, Phase::Settled)));
}

#[test]
fn device_steps_begin_at_the_verdict_with_the_first_layers() {
    for (away, hops) in [(Tier::Device, vec![Hop::StepOnDevice]), (Tier::Unified, vec![Hop::PageIn, Hop::StepOnDevice, Hop::PageOut])] {
        let rules = Rules { policy: Policy::ValidateFirst, adaptive: false, deadline_order: true, early_commit: true };
        let staging = Staging { ringed_grads: false, grad_slots: 0, param_slots: 0, streamed_weights: false, split_masters: false };
        let mut c = Coordinator::new(BucketLayout::new(3 * BLOCK, BLOCK, away), rules, staging);
        let update = Update { optimizer_step: 1, learning_rate: 0.1, scale: 1.0 };
        c.begin_step(update);
        (0..3).for_each(|b| c.handle(Event::GradReady(b)));
        assert_eq!(c.next_command(), None);
        c.handle(Event::Validated(Verdict::Commit));
        let have: Vec<_> = std::iter::from_fn(|| c.next_command()).collect();
        let start = |bucket| hops.iter().map(move |&hop| Command::Start { hop, bucket, load: Load::Update(update) });
        assert_eq!(have, (0..3).rev().flat_map(start).collect::<Vec<_>>());
    }
}
