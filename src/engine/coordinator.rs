//! The step protocol as a pure state machine: events in, commands out; no clock, no thread, no memory of its own.
//!
//! README.md beside this file draws what happens to a bucket in a step, and `law.rs` is the table of it.
//!
//! A bucket is `Settled` when what the device holds, or will hold once its copy is done, are the final parameters of the
//! step: then, and only then, the next forward may wait for that copy and go on.

#[cfg(any(test, debug_assertions))]
mod check;
mod early;
mod law;

use super::counters::amounts;
use super::route::{Hop, route};
use super::verdict::{SpeculationHistory, Verdict};
use crate::bucket::layout::BucketLayout;
use crate::bucket::slot::{FreeList, Slot};
use crate::planner::rules::{Policy, Rules};
use law::{Late, Phase, Queued, Tally};
use std::collections::VecDeque;

/// The step's memory, as far as it bears on what may happen when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staging {
    /// Gradients lie in a ring on the device: copies keep the order of backward, for the oldest is in the way of the next.
    pub(crate) ringed_grads: bool,
    /// Host slots for gradients.
    pub(crate) grad_slots: usize,
    /// Host slots for working weights.
    pub(crate) param_slots: usize,
    /// Every offloaded bucket has the parameter slot of its number for good, and the device fetches weights from there.
    pub(crate) streamed_weights: bool,
}

impl Staging {
    /// Without the feature `weight-flow` known at compile time.
    fn streams(&self) -> bool {
        cfg!(feature = "weight-flow") && self.streamed_weights
    }
}

/// One application of a gradient: which optimizer step, at which learning rate, times which factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The optimizer step, from 1: Adam's `t`.
    pub optimizer_step: u64,
    /// Learning rate of that step.
    pub learning_rate: f64,
    /// Factor on the gradients: clip scale over loss scale.
    pub scale: f32,
}

/// A gradient and how it is to be applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradUpdate {
    /// Where the gradient lies.
    pub grads: Slot,
    /// How it is applied.
    pub update: Update,
}

/// What the pool does to the state of one bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Apply `pending` to the state, if there is one; then compute the working weights after `next` without writing it.
    CommitThenSpeculate {
        /// Last step's gradient.
        pending: Option<GradUpdate>,
        /// This step's gradient.
        next: GradUpdate,
    },
    /// Take `undo` back by algebra, if there is one; then apply `next` to the state.
    Step {
        /// The speculation to take back.
        undo: Option<GradUpdate>,
        next: GradUpdate,
    },
    /// Take `undo` back by algebra, if there is one; then write the working weights of the state as it is.
    Restore {
        /// The speculation to take back.
        undo: Option<GradUpdate>,
    },
    /// Apply the gradient to the state; no weights are written.
    Commit(GradUpdate),
    /// The gradient of the batch's rows has come to where their weights go: put it into its place among the others, and compute the working
    /// weights of these rows after it, without writing the state.
    SpeculateRows(GradUpdate),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Event {
    /// All gradients but those of the batch's rows are enqueued for a bucket that leaves early: its [`Hop::HeadBackward`] has begun.
    HeadGradReady(usize),
    /// What is enqueued next writes the gradient of the rows of such a bucket.
    RowsBegin(usize),
    /// All gradients of the bucket are enqueued on the device: its [`Hop::Backward`] has begun.
    GradReady(usize),
    /// A hop of an offloaded bucket is done. Where it was begun twice, the first is done first.
    Done { hop: Hop, bucket: usize },
    /// The gradient norm is known.
    Validated(Verdict),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Command {
    /// Begin a hop of a bucket.
    Start { hop: Hop, bucket: usize, load: Load },
}

/// What a hop needs to know.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Load {
    /// The host slot that a copy fills or empties.
    Slot(Slot),
    /// The pool's job; its working weights, if it writes any, go to the slot.
    Job(Work, Option<Slot>),
    /// What the device applies.
    Update(Update),
}

amounts! {
    /// Bucket steps by what became of them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
    pub struct Counts {
        /// Computed before the verdict was known.
        pub speculated: u64,
        /// Speculations that the verdict overturned.
        pub rolled_back: u64,
        /// Bucket steps whose gradients were used as they are.
        pub committed: u64,
        /// Bucket steps whose gradients were scaled down.
        pub clipped: u64,
        /// Bucket steps that did not happen.
        pub skipped: u64,
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    phase: Phase,
    /// The device has computed this step's gradient.
    computed: bool,
    grads: Option<Slot>,
    /// What `grads` lacks.
    late: Late,
    /// Through which the late rows go, as long as no job has it.
    rows: Option<Slot>,
    /// Decided but not yet written into the state ([`Policy::Deferred`]).
    pending: Option<GradUpdate>,
    /// Written into the state before the verdict ([`Policy::Inverse`]).
    speculated_in_place: bool,
}

struct RunningJob {
    bucket: usize,
    params: Option<Slot>,
    /// Started before the verdict.
    speculative: bool,
    kind: JobKind,
}

/// What the pool's job does to the bucket's step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum JobKind {
    /// New weights, and the state with them.
    Step,
    /// New weights; the state gets this step's update later ([`Policy::Deferred`]).
    Speculate,
    /// The weights of the state as it is.
    Restore,
    /// Only the pending update: a flush.
    Flush,
    /// Only the pending update, while the bucket's step goes on: its gradient's slot is needed, and the pool is idle.
    Commit,
    /// New weights of late rows; the state gets the bucket's update later.
    Rows,
}

pub(super) struct Coordinator {
    layout: BucketLayout,
    rules: Rules,
    buckets: Vec<Bucket>,
    tally: Tally,
    /// How often a bucket was settled.
    settlings: u64,
    staging: Staging,
    grad_slots: FreeList,
    param_slots: FreeList,
    /// Buckets whose weights are on their way to the device, and from which slots.
    returning: VecDeque<(usize, Slot)>,
    running: Option<RunningJob>,
    /// This step's update, with the scale that no clipping leaves.
    update: Update,
    speculating: bool,
    /// The device has computed one of this step's gradients: more of them come, and the pool is for those.
    gradients_come: bool,
    /// The driver can enqueue nothing more until a gradient has a slot.
    awaits_slot: bool,
    verdict: Option<Verdict>,
    history: SpeculationHistory,
    counts: Counts,
    commands: VecDeque<Command>,
    /// Events since all that must hold was looked at.
    #[cfg(any(test, debug_assertions))]
    unchecked: usize,
}

impl Coordinator {
    /// A machine whose buckets are all settled, with no update pending.
    ///
    /// # Panics
    /// If there is a bucket to offload but no slot, or too few for each to have its own.
    pub(super) fn new(layout: BucketLayout, rules: Rules, staging: Staging) -> Self {
        let Staging { grad_slots, param_slots, .. } = staging;
        let offloaded = layout.offloaded();
        let retained = if rules.policy == Policy::Deferred { offloaded } else { 0 };
        let least_params = if staging.streams() { offloaded } else { 1 };
        assert!(offloaded == 0 || (grad_slots > retained && param_slots >= least_params), "too few slots for {offloaded} buckets");
        let bucket = Bucket {
            phase: Phase::Settled,
            computed: false,
            grads: None,
            late: Late::Nothing,
            rows: None,
            pending: None,
            speculated_in_place: false,
        };
        let update = Update { optimizer_step: 0, learning_rate: 0.0, scale: 1.0 };
        Self {
            buckets: vec![bucket; offloaded],
            tally: Tally::default(),
            settlings: 0,
            commands: VecDeque::with_capacity(3 * layout.count() + 4 * offloaded + 16),
            returning: VecDeque::with_capacity(param_slots),
            staging,
            grad_slots: FreeList::new(grad_slots),
            param_slots: FreeList::new(param_slots),
            running: None,
            update,
            speculating: false,
            gradients_come: false,
            awaits_slot: false,
            verdict: None,
            history: SpeculationHistory::default(),
            counts: Counts::default(),
            layout,
            rules,
            #[cfg(any(test, debug_assertions))]
            unchecked: 0,
        }
    }

    /// Goes on with other places of buckets and other slots; what was counted and decided so far stays.
    ///
    /// # Panics
    /// If something is under way or pending, and as [`Coordinator::new`].
    pub(super) fn rearrange(&mut self, layout: &BucketLayout, staging: Staging) {
        let is_idle = self.all_settled() && self.returning.is_empty() && self.buckets.iter().all(|b| b.pending.is_none());
        assert!(is_idle, "flush before buckets change their places");
        *self = Self { history: self.history, counts: self.counts, ..Self::new(layout.clone(), self.rules, staging) };
    }

    /// Starts a step: its gradients come next. `update.scale` undoes the loss scale.
    ///
    /// # Panics
    /// If a bucket is not settled: a forward that read it did not wait.
    pub(crate) fn begin_step(&mut self, update: Update) {
        let settled = self.buckets.iter().all(|b| b.phase == Phase::Settled);
        assert!(settled, "a step began before the last one was settled");
        self.update = update;
        self.verdict = None;
        self.gradients_come = false;
        self.speculating = self.rules.may_speculate() && (!self.rules.adaptive || self.history.pays());
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// Takes an event; the commands it causes wait in [`Coordinator::next_command`].
    ///
    /// # Panics
    /// If the event cannot happen now: a bug of the driver.
    pub(super) fn handle(&mut self, event: Event) {
        match event {
            Event::HeadGradReady(bucket) => self.grads_enqueued(bucket, Late::Rows),
            Event::RowsBegin(bucket) => self.rows_begin(bucket),
            Event::GradReady(bucket) if self.is_offloaded(bucket) && self.buckets[bucket].late == Late::Rows => {
                (self.buckets[bucket].computed, self.buckets[bucket].late) = (false, Late::EnqueuedRows);
            }
            Event::GradReady(bucket) if self.is_offloaded(bucket) => self.grads_enqueued(bucket, Late::Nothing),
            Event::GradReady(_) => {}
            Event::Done { hop: Hop::Backward | Hop::HeadBackward, bucket } => self.grads_computed(bucket),
            Event::Done { hop: Hop::GradsOut, bucket } => self.grad_arrived(bucket),
            Event::Done { hop: Hop::Optimize, bucket } => self.job_done(bucket),
            Event::Done { hop: Hop::RowsOut, bucket } => self.rows_arrived(bucket),
            Event::Done { hop: Hop::ParamsIn | Hop::RowsIn, bucket } => self.params_arrived(bucket),
            Event::Done { hop, bucket } => panic!("nobody waits for {hop:?} of bucket {bucket}"),
            Event::Validated(verdict) => self.validated(verdict),
        }
        self.copy_ready_grads();
        self.copy_late_rows();
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// What to do next, oldest first.
    pub(crate) fn next_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// Whether the parameters of `bucket` on the device are final, up to the copy that brings them.
    pub(crate) fn is_settled(&self, bucket: usize) -> bool {
        !self.is_offloaded(bucket) || self.buckets[bucket].phase == Phase::Settled
    }

    /// Whether nothing of the last step is under way, and nothing of the next one: all gradients have been copied, all weights are final.
    pub(super) fn is_between_steps(&self) -> bool {
        self.tally.under_way == 0
    }

    /// How often a bucket was settled: while this stands still, no other is.
    pub(super) fn settlings(&self) -> u64 {
        self.settlings
    }

    fn is_offloaded(&self, bucket: usize) -> bool {
        self.layout.tier(bucket).is_offloaded()
    }

    /// Whether every bucket is settled and the pool idle.
    pub(crate) fn all_settled(&self) -> bool {
        self.running.is_none() && self.buckets.iter().all(|b| b.phase == Phase::Settled)
    }

    /// Whether this step's gradient of `bucket` has left the device's memory, or will with a copy that is enqueued.
    pub(crate) fn is_copied(&self, bucket: usize) -> bool {
        !self.is_offloaded(bucket) || self.buckets[bucket].phase != Phase::Ready
    }

    /// The driver begins, or ends, to wait for the slot of a gradient.
    pub(super) fn await_slot(&mut self, awaits: bool) {
        self.awaits_slot = awaits;
    }

    /// Whether the bucket waits for a copy rather than for the optimizer, which also keeps slots occupied: while the pool has nothing to do,
    /// copies do.
    pub(crate) fn waits_for_link(&self, bucket: usize) -> bool {
        match self.buckets[bucket].phase {
            Phase::Copying | Phase::CopyingRows => true,
            Phase::Ready => self.running.is_none(),
            _ => false,
        }
    }

    /// Whether this step's buckets are stepped before its verdict.
    pub(crate) fn is_speculating(&self) -> bool {
        self.speculating
    }

    /// What became of all bucket steps so far.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The last verdicts, for the checkpoint.
    pub(crate) fn history(&self) -> SpeculationHistory {
        self.history
    }

    /// Takes the last verdicts from a checkpoint.
    pub(crate) fn set_history(&mut self, history: SpeculationHistory) {
        self.history = history;
    }

    /// Writes every pending update into the state: before a checkpoint, a digest, an export.
    ///
    /// # Panics
    /// If a bucket is not settled.
    pub(super) fn flush(&mut self) {
        self.queue_all(Queued::Commit, |b| b.pending.is_some());
    }

    /// Sends the working weights of every bucket: after the state was set from outside.
    ///
    /// # Panics
    /// If a bucket is not settled or has an update pending.
    pub(crate) fn restore(&mut self) {
        assert!(self.buckets.iter().all(|b| b.pending.is_none()), "flush before new state is set");
        self.queue_all(Queued::Restore, |_| true);
    }

    fn queue_all(&mut self, why: Queued, which: impl Fn(&Bucket) -> bool) {
        assert!(self.all_settled());
        for bucket in 0..self.buckets.len() {
            if which(&self.buckets[bucket]) {
                self.transition(bucket, Phase::Settled, Phase::Queued(why));
            }
        }
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// The only way from one phase to another.
    fn transition(&mut self, bucket: usize, from: Phase, to: Phase) {
        let phase = &mut self.buckets[bucket].phase;
        assert!(*phase == from && law::allows(from, to), "bucket {bucket}: {phase:?}, not {from:?}, cannot become {to:?}");
        *phase = to;
        self.tally.leave(from);
        self.tally.enter(to);
        self.settlings += u64::from(to == Phase::Settled);
    }

    /// A bucket's gradient is enqueued on the device, but for what is `late`.
    fn grads_enqueued(&mut self, bucket: usize, late: Late) {
        self.transition(bucket, Phase::Settled, Phase::Ready);
        (self.buckets[bucket].computed, self.buckets[bucket].late) = (false, late);
    }

    fn grads_computed(&mut self, bucket: usize) {
        self.buckets[bucket].computed = true;
        self.gradients_come = true;
    }

    fn grad_arrived(&mut self, bucket: usize) {
        self.transition(bucket, Phase::Copying, Phase::Arrived);
        self.meet_verdict(bucket);
    }

    /// The bucket's step ends without an update, and the device's weights were never touched.
    fn drop_grads(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Settled);
        self.give_grads_back(bucket);
    }

    fn give_grads_back(&mut self, bucket: usize) {
        self.buckets[bucket].late = Late::Nothing;
        if let Some(slot) = self.buckets[bucket].grads.take() {
            self.grad_slots.give(slot);
        }
    }

    /// The bucket's step ends with an update that is yet to be written into the state.
    fn settle_pending(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Settled);
        let update = self.final_update();
        let b = &mut self.buckets[bucket];
        b.pending = b.grads.take().map(|grads| GradUpdate { grads, update });
    }

    /// The bucket's step ends with an update that the state holds.
    fn settle_written(&mut self, bucket: usize, from: Phase) {
        self.buckets[bucket].speculated_in_place = false;
        self.drop_grads(bucket, from);
    }

    fn settle(&mut self, bucket: usize, from: Phase) {
        match self.rules.policy {
            Policy::Deferred => self.settle_pending(bucket, from),
            Policy::Inverse | Policy::ValidateFirst => self.settle_written(bucket, from),
        }
    }

    /// This step's update with the verdict's scale.
    fn final_update(&self) -> Update {
        match self.verdict {
            Some(Verdict::Clip(clip)) => Update { scale: clip.0 * self.update.scale, ..self.update },
            _ => self.update,
        }
    }

    fn validated(&mut self, verdict: Verdict) {
        assert!(self.verdict.is_none(), "one verdict a step");
        self.verdict = Some(verdict);
        self.history.record(verdict);
        let all = self.layout.count() as u64;
        match verdict {
            Verdict::Commit => self.counts.committed += all,
            Verdict::Clip(_) => self.counts.clipped += all,
            Verdict::SkipNonFinite => self.counts.skipped += all,
        }
        if verdict != Verdict::Commit {
            let running = self.running.as_ref().is_some_and(|r| r.speculative);
            let speculated = self.buckets.iter().filter(|b| b.phase.is_speculated()).count();
            self.counts.rolled_back += speculated as u64 + u64::from(running);
        }
        if verdict != Verdict::SkipNonFinite {
            let update = self.final_update();
            for bucket in (self.layout.offloaded()..self.layout.count()).rev() {
                let after_backward = &route(self.layout.tier(bucket), false)[1..];
                after_backward.iter().for_each(|&hop| self.start(hop, bucket, Load::Update(update)));
            }
        }
        (0..self.buckets.len()).for_each(|bucket| self.meet_verdict(bucket));
    }

    /// What the verdict means to a bucket, if it is known.
    fn meet_verdict(&mut self, bucket: usize) {
        let Some(verdict) = self.verdict else { return };
        match (self.buckets[bucket].phase, verdict) {
            (from @ Phase::Speculated, Verdict::Commit) => self.settle(bucket, from),
            (from @ Phase::Speculated, Verdict::Clip(_)) => self.transition(bucket, from, Phase::Queued(Queued::Redo)),
            (from @ Phase::Speculated, Verdict::SkipNonFinite) => self.transition(bucket, from, Phase::Queued(Queued::Restore)),
            (from @ (Phase::Ready | Phase::Arrived), Verdict::SkipNonFinite) => self.drop_grads(bucket, from),
            (from @ (Phase::LacksRows | Phase::RowsArrived), Verdict::SkipNonFinite) => self.drop_rows(bucket, from),
            (from @ (Phase::LacksRows | Phase::RowsArrived), Verdict::Clip(_)) => self.copy_again(bucket, from),
            (from @ Phase::Arrived, _) if self.buckets[bucket].late != Late::Nothing => self.copy_again(bucket, from),
            // Everything else meets the verdict when its copy or its job is done.
            _ => {}
        }
    }

    /// Gradients leave as slots allow.
    fn copy_ready_grads(&mut self) {
        while self.tally.ready > 0
            && let Some(grads) = self.grad_slots.take()
        {
            let bucket = self.next_to_copy().expect("one is ready");
            self.transition(bucket, Phase::Ready, Phase::Copying);
            self.buckets[bucket].grads = Some(grads);
            self.start(Hop::GradsOut, bucket, Load::Slot(grads));
        }
    }

    /// Of what is computed, the bucket that the pool will want first: slots are few, and a gradient that came too early would keep out
    /// the one that is needed first. When nothing is, the next that will be, so that the link begins at once: a later one would hold
    /// its slot, and the stream of copies, for modules.
    fn next_to_copy(&self) -> Option<usize> {
        let oldest = || self.buckets.iter().position(|b| b.phase == Phase::Ready);
        if self.staging.ringed_grads {
            return oldest();
        }
        self.next_bucket(|b| b.phase == Phase::Ready && b.computed).or_else(oldest)
    }

    /// The bucket of this kind whose parameters are needed first. Flat order is backward order, so that the last bucket has
    /// the earliest deadline: the next forward begins there.
    fn next_bucket(&self, is: impl Fn(&Bucket) -> bool) -> Option<usize> {
        let mut buckets = 0..self.buckets.len();
        let is = |&bucket: &usize| is(&self.buckets[bucket]);
        if self.rules.takes_earliest_deadline() { buckets.rfind(is) } else { buckets.find(is) }
    }

    /// Gives an idle pool the bucket whose parameters are needed first; while the driver waits for a slot, one that frees it, because the device
    /// stands still soon, and not only in the next forward.
    fn run_next(&mut self) {
        if self.running.is_some() {
            return;
        }
        let frees_slot = self.awaits_slot.then(|| self.next_runnable(|b| b.pending.is_some())).flatten();
        match frees_slot.or_else(|| self.next_runnable(|_| true)) {
            // Rows that have come hold the slot that another bucket may wait for.
            Some(bucket) if self.run(bucket) => {}
            Some(_) => _ = self.next_bucket(|b| b.phase == Phase::RowsArrived).is_some_and(|bucket| self.run(bucket)),
            None => self.commit_early(),
        }
    }

    fn next_runnable(&self, is: impl Fn(&Bucket) -> bool) -> Option<usize> {
        if self.tally.for_pool == 0 {
            return None;
        }
        self.next_bucket(|b| self.is_runnable(b) && is(b))
    }

    fn is_runnable(&self, b: &Bucket) -> bool {
        let may_step = self.speculating || self.verdict.is_some();
        matches!(b.phase, Phase::Queued(_) | Phase::RowsArrived) || (b.phase == Phase::Arrived && may_step)
    }

    /// From one backward pass to the next the pool has time to write pending updates into the state: the next one's gradients find free slots
    /// then, and less to do. The driver enqueues a backward pass long before its first gradient is computed: a large vocabulary's takes as long as
    /// dozens of updates. While nothing is speculated it has until the verdict, and must do it: slots that only a verdict would free
    /// could keep gradients, and so the verdict, from coming.
    fn commit_early(&mut self) {
        let awaits_verdict = !self.speculating && self.verdict.is_none();
        let is_between = self.rules.early_commit && (self.is_between_steps() || !self.gradients_come);
        if !awaits_verdict && !is_between {
            return;
        }
        if let Some(bucket) = self.next_bucket(|b| b.pending.is_some()) {
            let pending = self.buckets[bucket].pending.expect("just seen");
            self.running = Some(RunningJob { bucket, params: None, speculative: false, kind: JobKind::Commit });
            self.start(Hop::Optimize, bucket, Load::Job(Work::Commit(pending), None));
        }
    }

    /// Gives the pool a bucket, unless a slot is missing: then it is false.
    fn run(&mut self, bucket: usize) -> bool {
        let phase = self.buckets[bucket].phase;
        let params = match phase {
            Phase::Queued(Queued::Commit) => None,
            Phase::RowsArrived => self.buckets[bucket].rows.take(),
            _ => {
                let Some(slot) = self.take_param_slot(bucket) else { return false };
                Some(slot)
            }
        };
        let speculative = matches!(phase, Phase::Arrived | Phase::RowsArrived) && self.verdict.is_none();
        self.counts.speculated += u64::from(speculative && phase == Phase::Arrived);
        let (kind, work) = self.work(bucket, phase);
        self.transition(bucket, phase, Phase::Running);
        self.running = Some(RunningJob { bucket, params, speculative, kind });
        self.start(Hop::Optimize, bucket, Load::Job(work, params));
        true
    }

    /// A slot from which weights are still being copied is not written.
    fn take_param_slot(&mut self, bucket: usize) -> Option<Slot> {
        if self.staging.streams() { self.param_slots.take_this(Slot(bucket)) } else { self.param_slots.take() }
    }

    fn work(&self, bucket: usize, phase: Phase) -> (JobKind, Work) {
        let b = &self.buckets[bucket];
        let with = |update| GradUpdate { grads: b.grads.expect("a bucket that is stepped has its gradient"), update };
        let undo = b.speculated_in_place.then(|| with(self.update));
        // Once the verdict is known nothing is left to guess, and the state can be written at once.
        let defer = self.rules.policy == Policy::Deferred && (b.pending.is_some() || self.verdict.is_none());
        match phase {
            Phase::Queued(Queued::Commit) => (JobKind::Flush, Work::Commit(b.pending.expect("only pending updates are committed"))),
            Phase::Queued(Queued::Restore) => (JobKind::Restore, Work::Restore { undo }),
            Phase::RowsArrived => (JobKind::Rows, Work::SpeculateRows(with(self.final_update()))),
            _ if defer => (JobKind::Speculate, Work::CommitThenSpeculate { pending: b.pending, next: with(self.final_update()) }),
            _ => (JobKind::Step, Work::Step { undo, next: with(self.final_update()) }),
        }
    }

    fn job_done(&mut self, of: usize) {
        let RunningJob { bucket, params, speculative, kind } = self.running.take().expect("a job was running");
        assert_eq!(of, bucket, "the pool was given another bucket");
        if matches!(kind, JobKind::Speculate | JobKind::Flush | JobKind::Commit)
            && let Some(done) = self.buckets[bucket].pending.take()
        {
            self.grad_slots.give(done.grads);
        }
        if kind == JobKind::Rows {
            self.buckets[bucket].late = Late::Nothing;
        }
        if speculative {
            return self.speculation_done(bucket, params, kind);
        }
        self.send(bucket, params, kind);
        match kind {
            JobKind::Commit => {}
            JobKind::Flush => self.transition(bucket, Phase::Running, Phase::Settled),
            JobKind::Restore | JobKind::Step => self.settle_written(bucket, Phase::Running),
            JobKind::Speculate | JobKind::Rows => self.settle_pending(bucket, Phase::Running),
        }
    }

    fn speculation_done(&mut self, bucket: usize, params: Option<Slot>, kind: JobKind) {
        let in_place = self.rules.policy == Policy::Inverse;
        self.buckets[bucket].speculated_in_place = in_place;
        let lacks_rows = self.buckets[bucket].late != Late::Nothing;
        match self.verdict {
            None | Some(Verdict::Commit) => {
                self.send(bucket, params, kind);
                match self.verdict {
                    _ if lacks_rows => self.transition(bucket, Phase::Running, Phase::LacksRows),
                    None => self.transition(bucket, Phase::Running, Phase::Speculated),
                    Some(_) => self.settle(bucket, Phase::Running),
                }
            }
            Some(verdict) => {
                // Overturned before the weights were sent: the device still holds the last step's, unless it fetches them
                // from where the speculation wrote, or has all but the rows of this speculation.
                params.into_iter().for_each(|slot| self.param_slots.give(slot));
                let is_changed = in_place || self.staging.streams() || kind == JobKind::Rows;
                match verdict {
                    Verdict::SkipNonFinite if !is_changed => self.drop_grads(bucket, Phase::Running),
                    Verdict::SkipNonFinite => self.drop_rows(bucket, Phase::Running),
                    _ if lacks_rows => self.copy_again(bucket, Phase::Running),
                    _ => self.transition(bucket, Phase::Running, Phase::Queued(Queued::Redo)),
                }
            }
        }
    }

    fn send(&mut self, bucket: usize, params: Option<Slot>, kind: JobKind) {
        if let Some(slot) = params {
            self.returning.push_back((bucket, slot));
            let hop = if kind == JobKind::Rows { Hop::RowsIn } else { Hop::ParamsIn };
            self.start(hop, bucket, Load::Slot(slot));
        }
    }

    fn params_arrived(&mut self, bucket: usize) {
        let first = self.returning.iter().position(|(returning, _)| *returning == bucket);
        let (_, slot) = first.and_then(|at| self.returning.remove(at)).expect("weights that were sent");
        self.param_slots.give(slot);
    }

    fn start(&mut self, hop: Hop, bucket: usize, load: Load) {
        self.commands.push_back(Command::Start { hop, bucket, load });
    }
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
