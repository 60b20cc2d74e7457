//! The step protocol as a pure state machine: events in, commands out. It has no clock, no thread and no tensor memory.
//!
//! A *hop* is an asynchronous operation on a bucket, such as a copy or an optimizer job (`route.rs`). The *verdict* on a step follows from
//! its gradient norm: commit, clip or skip (`verdict.rs`). README.md beside this file draws the phases of a bucket in a step; `law.rs` is
//! the same diagram as a table.
//!
//! A bucket is `Settled` when the device holds its final parameters of the step, or will hold them after a copy that is already enqueued.
//! Only then may the next forward pass wait for that copy and proceed.

#[cfg(any(test, debug_assertions))]
mod check;
mod early;
mod law;
mod save;

use super::counters::amounts;
use super::route::{Hop, route};
use super::verdict::{SpeculationHistory, Verdict};
use crate::bucket::layout::BucketLayout;
use crate::bucket::slot::{FreeList, Slot};
use crate::optim::optimizer::Update;
use crate::planner::rules::{Policy, Rules};
use law::{Hold, Late, Phase, Queued, Tally};
use std::collections::VecDeque;

/// Properties of the step's memory that constrain the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Staging {
    /// Gradients lie in a ring on the device: copies must keep the order of backward, because the oldest gradient blocks the next one.
    pub(crate) ringed_grads: bool,
    /// Host slots for gradients.
    pub(crate) grad_slots: usize,
    /// Host slots for working weights.
    pub(crate) param_slots: usize,
    /// Every offloaded bucket owns the parameter slot of its number permanently, and the device fetches weights from there.
    pub(crate) streamed_weights: bool,
    /// The streamed weights are the upper halves of the masters, so a speculation would write into the state.
    pub(crate) split_masters: bool,
}

impl Staging {
    /// Constant at compile time without the feature `weight-flow`.
    fn streams(&self) -> bool {
        cfg!(feature = "weight-flow") && self.streamed_weights
    }

    /// The policy of buckets in this memory: those with split masters are stepped after the verdict.
    fn policy(&self, rules: Rules) -> Policy {
        if self.streams() && self.split_masters { Policy::ValidateFirst } else { rules.policy }
    }
}

/// A gradient slot and the update to apply with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradUpdate {
    /// Slot of the gradient.
    pub grads: Slot,
    /// The update.
    pub update: Update,
}

/// A pass of the pool over the state of one bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Apply `pending` to the state, if there is one. Then compute the working weights after `next` without writing the state.
    CommitThenSpeculate {
        /// Gradient of the last step.
        pending: Option<GradUpdate>,
        /// Gradient of this step.
        next: GradUpdate,
    },
    /// Undo `undo` by the algebraic inverse, if there is one. Then apply `next` to the state.
    Step {
        /// The speculation to undo.
        undo: Option<GradUpdate>,
        next: GradUpdate,
    },
    /// Undo `undo` by the algebraic inverse, if there is one. Then write the working weights of the state.
    Restore {
        /// The speculation to undo.
        undo: Option<GradUpdate>,
    },
    /// Apply the gradient to the state; write no weights.
    Commit(GradUpdate),
    /// Speculate on the late rows of a tied embedding. Their gradient arrives in the parameter slot: move it into the gradient slot, and
    /// compute the working weights of these rows in place, without writing the state.
    SpeculateRows(GradUpdate),
    /// Copy the state into this slot for copies, from where it is saved.
    Copy(Slot),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) enum Event {
    /// For a bucket that leaves early: all gradients but those of the batch's rows are enqueued, and its [`Hop::HeadBackward`] has started.
    HeadGradReady(usize),
    /// For a bucket that leaves early: the kernels enqueued next write the gradient of the batch's rows.
    RowsBegin(usize),
    /// All gradients of the bucket are enqueued on the device, and its [`Hop::Backward`] has started.
    GradReady(usize),
    /// A hop of an offloaded bucket is complete. If it was started twice, the first start completes first.
    Done { hop: Hop, bucket: usize },
    /// The gradient norm is known.
    Validated(Verdict),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) enum Command {
    /// Start a hop of a bucket.
    Start { hop: Hop, bucket: usize, load: Load },
}

/// Arguments of a hop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) enum Load {
    /// The host slot that a copy fills or empties.
    Slot(Slot),
    /// The pool's job, and the slot for its working weights, if it writes any.
    Job(Work, Option<Slot>),
    /// The update that the device applies.
    Update(Update),
    /// The bucket's state, as it is.
    State,
}

amounts! {
    /// Bucket steps by outcome.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
    pub struct Counts {
        /// Bucket steps computed before the verdict was known.
        pub speculated: u64,
        /// Speculations that the verdict overturned.
        pub rolled_back: u64,
        /// Bucket steps whose gradients were used unchanged.
        pub committed: u64,
        /// Bucket steps whose gradients were scaled down.
        pub clipped: u64,
        /// Bucket steps that were skipped.
        pub skipped: u64,
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    phase: Phase,
    /// The device has computed this step's gradient.
    computed: bool,
    grads: Option<Slot>,
    /// The part of the gradient that is missing in `grads`.
    late: Late,
    /// Slot through which the late rows pass, unless a job has it.
    rows: Option<Slot>,
    /// An update that is decided but not yet written into the state ([`Policy::Deferred`]).
    pending: Option<GradUpdate>,
    /// The speculation was written into the state before the verdict ([`Policy::Inverse`]).
    speculated_in_place: bool,
    hold: Hold,
    /// Slot with a copy of the state that a save has not written yet, or that the pool writes.
    copy: Option<Slot>,
}

struct RunningJob {
    bucket: usize,
    params: Option<Slot>,
    /// Started before the verdict.
    speculative: bool,
    kind: JobKind,
}

/// Effect of the pool's job on the bucket's step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum JobKind {
    /// New weights and new state.
    Step,
    /// New weights; the state receives this step's update later ([`Policy::Deferred`]).
    Speculate,
    /// Weights of the unchanged state.
    Restore,
    /// Only the pending update: a flush.
    Flush,
    /// Only the pending update, while the bucket's step continues. It frees a gradient slot when the pool is idle.
    Commit,
    /// New weights of late rows; the state receives the bucket's update later.
    Rows,
    /// A copy of the state, while the bucket's step continues.
    Copy,
}

pub(in crate::engine) struct Coordinator {
    layout: BucketLayout,
    rules: Rules,
    buckets: Vec<Bucket>,
    tally: Tally,
    /// Number of transitions to `Settled` so far.
    settlings: u64,
    staging: Staging,
    grad_slots: FreeList,
    param_slots: FreeList,
    copy_slots: FreeList,
    /// Pending copies of weights to the device: bucket and source slot.
    returning: VecDeque<(usize, Slot)>,
    running: Option<RunningJob>,
    /// This step's update without clipping.
    update: Update,
    speculating: bool,
    /// The device has computed a gradient of this step. More gradients follow, and the pool is kept free for them.
    gradients_come: bool,
    /// The driver cannot enqueue more work until a gradient gets a slot.
    awaits_slot: bool,
    verdict: Option<Verdict>,
    history: SpeculationHistory,
    counts: Counts,
    commands: VecDeque<Command>,
    /// Events since the last check of the invariants.
    #[cfg(any(test, debug_assertions))]
    unchecked: usize,
}

impl Coordinator {
    /// A state machine with all buckets settled and no pending update.
    ///
    /// # Panics
    /// If a bucket is offloaded and there is no slot, or if there are too few slots for retained gradients or streamed weights.
    pub(in crate::engine) fn new(layout: BucketLayout, rules: Rules, staging: Staging) -> Self {
        let Staging { grad_slots, param_slots, .. } = staging;
        let offloaded = layout.offloaded();
        let retained = if staging.policy(rules) == Policy::Deferred { offloaded } else { 0 };
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
            hold: Hold::Free,
            copy: None,
        };
        let update = Update { optimizer_step: 0, learning_rate: 0.0, scale: 1.0 };
        Self {
            buckets: vec![bucket; offloaded],
            tally: Tally::default(),
            settlings: 0,
            commands: VecDeque::with_capacity(3 * layout.count() + 5 * offloaded + 16),
            returning: VecDeque::with_capacity(param_slots),
            staging,
            grad_slots: FreeList::new(grad_slots),
            param_slots: FreeList::new(param_slots),
            copy_slots: FreeList::new(0),
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

    /// Continues with another layout and other slots. Speculation history and counts are kept.
    ///
    /// # Panics
    /// If a bucket is not settled or an update is pending; as [`Coordinator::new`].
    pub(in crate::engine) fn rearrange(&mut self, layout: &BucketLayout, staging: Staging) {
        let is_flushed = !self.is_saving() && self.buckets.iter().all(|b| b.pending.is_none());
        let is_idle = self.all_settled() && self.returning.is_empty() && is_flushed;
        assert!(is_idle, "flush before buckets change their places");
        *self = Self { history: self.history, counts: self.counts, ..Self::new(layout.clone(), self.rules, staging) };
    }

    /// Begins a step, before its gradients arrive. `update.scale` undoes the loss scale.
    ///
    /// # Panics
    /// If a bucket is not settled: the forward pass did not wait for it.
    pub(crate) fn begin_step(&mut self, update: Update) {
        let settled = self.buckets.iter().all(|b| b.phase == Phase::Settled);
        assert!(settled, "a step began before the last one was settled");
        self.update = update;
        self.verdict = None;
        self.gradients_come = false;
        self.speculating = self.may_speculate() && (!self.rules.adaptive || self.history.pays());
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// Processes an event. The resulting commands are returned by [`Coordinator::next_command`].
    ///
    /// # Panics
    /// If the event cannot occur in the current phase: a bug of the driver.
    pub(in crate::engine) fn handle(&mut self, event: Event) {
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
            Event::Done { hop: Hop::Save, bucket } => self.state_saved(bucket),
            Event::Done { hop: Hop::SaveCopy, bucket } => self.copy_saved(bucket),
            Event::Done { hop, bucket } => panic!("unexpected {hop:?} of bucket {bucket}"),
            Event::Validated(verdict) => self.validated(verdict),
        }
        self.copy_ready_grads();
        self.copy_late_rows();
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// The next command, oldest first.
    pub(crate) fn next_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// Whether the parameters of `bucket` on the device are final, or will be after a copy that is already enqueued.
    pub(crate) fn is_settled(&self, bucket: usize) -> bool {
        !self.is_offloaded(bucket) || self.buckets[bucket].phase == Phase::Settled
    }

    /// Whether no bucket is in a step: all gradients have been copied and all weights are final.
    pub(in crate::engine) fn is_between_steps(&self) -> bool {
        self.tally.under_way == 0
    }

    /// Number of transitions to `Settled` so far. While it is unchanged, no further bucket has settled.
    pub(in crate::engine) fn settlings(&self) -> u64 {
        self.settlings
    }

    fn is_offloaded(&self, bucket: usize) -> bool {
        self.layout.tier(bucket).is_offloaded()
    }

    fn policy(&self) -> Policy {
        self.staging.policy(self.rules)
    }

    fn may_speculate(&self) -> bool {
        self.rules.may_speculate() && self.policy() != Policy::ValidateFirst
    }

    /// Whether every bucket is settled and the pool is idle.
    pub(crate) fn all_settled(&self) -> bool {
        self.running.is_none() && self.buckets.iter().all(|b| b.phase == Phase::Settled)
    }

    /// Whether this step's gradient of `bucket` has been copied from the device, or its copy is enqueued.
    pub(crate) fn is_copied(&self, bucket: usize) -> bool {
        !self.is_offloaded(bucket) || self.buckets[bucket].phase != Phase::Ready
    }

    /// Sets whether the driver is blocked until a gradient gets a slot.
    pub(in crate::engine) fn await_slot(&mut self, awaits: bool) {
        self.awaits_slot = awaits;
    }

    /// Whether the bucket waits for a copy and not for the optimizer. The optimizer can also block a bucket without a slot, because it
    /// holds the slots; while the pool is idle, copies hold them.
    pub(crate) fn waits_for_link(&self, bucket: usize) -> bool {
        match self.buckets[bucket].phase {
            Phase::Copying | Phase::CopyingRows => true,
            Phase::Ready => self.running.is_none(),
            _ => false,
        }
    }

    /// Whether this step's buckets are stepped before the verdict.
    pub(crate) fn is_speculating(&self) -> bool {
        self.speculating
    }

    /// Outcomes of all bucket steps so far.
    pub(in crate::engine) fn counts(&self) -> Counts {
        self.counts
    }

    /// The last verdicts, for the checkpoint.
    pub(crate) fn history(&self) -> SpeculationHistory {
        self.history
    }

    /// Restores the last verdicts from a checkpoint.
    pub(crate) fn set_history(&mut self, history: SpeculationHistory) {
        self.history = history;
    }

    /// Writes every pending update into the state, before a checkpoint, digest or export.
    ///
    /// # Panics
    /// If a bucket is not settled, or a save holds one.
    pub(in crate::engine) fn flush(&mut self) {
        assert!(!self.is_holding(), "a flush would write a state that is being saved");
        self.queue_all(Queued::Commit, |b| b.pending.is_some());
    }

    /// Sends the working weights of every bucket, after the state was set from outside.
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

    /// Moves a bucket from one phase to another. No other function changes a phase.
    fn transition(&mut self, bucket: usize, from: Phase, to: Phase) {
        let phase = &mut self.buckets[bucket].phase;
        assert!(*phase == from && law::allows(from, to), "bucket {bucket}: {phase:?}, not {from:?}, cannot become {to:?}");
        *phase = to;
        self.tally.leave(from);
        self.tally.enter(to);
        self.settlings += u64::from(to == Phase::Settled);
    }

    /// A bucket's gradient is enqueued on the device, except the part `late`.
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

    /// Ends the bucket's step without an update. The device's weights were not changed.
    fn drop_grads(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Settled);
        self.give_grads_back(bucket);
        self.meet_save(bucket);
    }

    fn give_grads_back(&mut self, bucket: usize) {
        self.buckets[bucket].late = Late::Nothing;
        if let Some(slot) = self.buckets[bucket].grads.take() {
            self.grad_slots.give(slot);
        }
    }

    /// Ends the bucket's step with an update that is not yet written into the state.
    fn settle_pending(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Settled);
        let update = self.final_update();
        let b = &mut self.buckets[bucket];
        b.pending = b.grads.take().map(|grads| GradUpdate { grads, update });
        self.meet_save(bucket);
    }

    /// Ends the bucket's step with an update that is already in the state.
    fn settle_written(&mut self, bucket: usize, from: Phase) {
        self.buckets[bucket].speculated_in_place = false;
        self.drop_grads(bucket, from);
    }

    fn settle(&mut self, bucket: usize, from: Phase) {
        match self.policy() {
            Policy::Deferred => self.settle_pending(bucket, from),
            Policy::Inverse | Policy::ValidateFirst => self.settle_written(bucket, from),
        }
    }

    /// This step's update with the scale of the verdict.
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

    /// Applies the verdict to a bucket, if it is known.
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
            // All other phases handle the verdict when their copy or job is complete.
            _ => {}
        }
    }

    /// Starts copies of ready gradients while slots are free.
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

    /// Among computed gradients, the bucket that the pool needs first: slots are few, and a less urgent gradient would block a more urgent
    /// one. If no gradient is computed, the oldest enqueued bucket, so that the copy starts as soon as possible; a later bucket would hold
    /// a slot and the copy stream while several modules are computed.
    fn next_to_copy(&self) -> Option<usize> {
        let oldest = || self.buckets.iter().position(|b| b.phase == Phase::Ready);
        if self.staging.ringed_grads {
            return oldest();
        }
        self.next_bucket(|b| b.phase == Phase::Ready && b.computed).or_else(oldest)
    }

    /// The matching bucket with the earliest deadline. Flat order is backward order, so the next forward pass needs the last bucket first.
    fn next_bucket(&self, is: impl Fn(&Bucket) -> bool) -> Option<usize> {
        let mut buckets = 0..self.buckets.len();
        let is = |&bucket: &usize| is(&self.buckets[bucket]);
        if self.rules.takes_earliest_deadline() { buckets.rfind(is) } else { buckets.find(is) }
    }

    /// Gives an idle pool the bucket with the earliest deadline. While the driver waits for a slot, a bucket with a pending update goes
    /// first, because its job frees a slot, and without one the device would soon be idle.
    fn run_next(&mut self) {
        if self.running.is_some() {
            return;
        }
        let frees_slot = self.awaits_slot.then(|| self.next_runnable(|b| b.pending.is_some())).flatten();
        match frees_slot.or_else(|| self.next_runnable(|_| true)) {
            // Late rows that have arrived hold a parameter slot that another bucket may wait for.
            Some(bucket) if self.run(bucket) => {}
            Some(_) => _ = self.next_bucket(|b| b.phase == Phase::RowsArrived).is_some_and(|bucket| self.run(bucket)),
            None => self.commit_early(),
        }
        if self.running.is_none() {
            self.copy_held();
        }
    }

    fn next_runnable(&self, is: impl Fn(&Bucket) -> bool) -> Option<usize> {
        if self.tally.for_pool == 0 {
            return None;
        }
        self.next_bucket(|b| self.is_runnable(b) && !self.is_held_back(b) && is(b))
    }

    fn is_runnable(&self, b: &Bucket) -> bool {
        let may_step = self.speculating || self.verdict.is_some();
        matches!(b.phase, Phase::Queued(_) | Phase::RowsArrived) || (b.phase == Phase::Arrived && may_step)
    }

    /// Writes pending updates into the state while the pool is idle, so that the next gradients find free slots and less work. The pool has
    /// time from one backward pass until the first gradient of the next one is computed. The driver enqueues that gradient long before: the
    /// head of a large vocabulary takes as long as dozens of updates. In a step without speculation the pool has time until the verdict,
    /// and must use it: slots that only the verdict would free could otherwise block gradients, and so the verdict.
    fn commit_early(&mut self) {
        let awaits_verdict = !self.speculating && self.verdict.is_none();
        let is_between = self.rules.early_commit && (self.is_between_steps() || !self.gradients_come);
        if !awaits_verdict && !is_between {
            return;
        }
        if let Some(bucket) = self.next_bucket(Self::may_commit) {
            let pending = self.buckets[bucket].pending.expect("just seen");
            self.running = Some(RunningJob { bucket, params: None, speculative: false, kind: JobKind::Commit });
            self.start(Hop::Optimize, bucket, Load::Job(Work::Commit(pending), None));
        }
    }

    /// Gives the pool a bucket. Returns false if no slot is free.
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

    /// A parameter slot that no copy is reading.
    fn take_param_slot(&mut self, bucket: usize) -> Option<Slot> {
        if self.staging.streams() { self.param_slots.take_this(Slot(bucket)) } else { self.param_slots.take() }
    }

    fn work(&self, bucket: usize, phase: Phase) -> (JobKind, Work) {
        let b = &self.buckets[bucket];
        let with = |update| GradUpdate { grads: b.grads.expect("a bucket that is stepped has its gradient"), update };
        let undo = b.speculated_in_place.then(|| with(self.update));
        // Once the verdict is known, the update is final and can be written into the state at once.
        let waits = b.pending.is_some() || self.verdict.is_none() || b.hold.is_held();
        let defer = self.policy() == Policy::Deferred && waits;
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
            self.update_written(bucket);
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
            JobKind::Copy => self.state_copied(bucket),
            JobKind::Flush => self.transition(bucket, Phase::Running, Phase::Settled),
            JobKind::Restore | JobKind::Step => self.settle_written(bucket, Phase::Running),
            JobKind::Speculate | JobKind::Rows => self.settle_pending(bucket, Phase::Running),
        }
    }

    fn speculation_done(&mut self, bucket: usize, params: Option<Slot>, kind: JobKind) {
        let in_place = self.policy() == Policy::Inverse;
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
                // The verdict overturned the job before its weights were sent. The device still holds the last step's weights, unless it
                // fetches them from the slot that the speculation wrote, or already holds all of this speculation's weights but the late
                // rows.
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
