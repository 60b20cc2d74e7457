//! Invariants that must hold between any two events, checked in tests and debug builds.

use super::law::Phase::{self, Arrived, Copying, CopyingRows, LacksRows, Ready, RowsArrived, Running, Settled, Speculated};
use super::law::Queued::{Commit, Redo, Restore};
use super::law::{Hold, Late, Tally};
use super::{Coordinator, JobKind, Policy, Verdict};

/// Up to this number of buckets, the check runs after every event. With N times as many buckets it runs after every N-th event.
const BUCKETS_AT_ONCE: usize = 16;

impl Coordinator {
    /// Runs [`Coordinator::check`] so rarely that its mean cost an event does not depend on the number of buckets.
    pub(super) fn check_often(&mut self) {
        self.unchecked += 1;
        if self.unchecked * BUCKETS_AT_ONCE >= self.buckets.len() {
            self.unchecked = 0;
            self.check();
        }
    }

    /// # Panics
    /// If an invariant is violated.
    pub(super) fn check(&self) {
        (0..self.buckets.len()).for_each(|bucket| self.check_bucket(bucket));
        assert_eq!(self.tally, self.recount(), "buckets by phase, as counted and as they are");
        self.check_slots();
        self.check_pool();
        self.check_save();
    }

    pub(super) fn recount(&self) -> Tally {
        let mut tally = Tally::default();
        self.buckets.iter().for_each(|b| tally.enter(b.phase));
        tally
    }

    /// Checks that the slots and updates of a bucket match its phase.
    fn check_bucket(&self, bucket: usize) {
        let (b, policy) = (&self.buckets[bucket], self.policy());
        let has_gradient = match b.phase {
            Settled | Ready | Phase::Queued(Commit) => Some(false),
            Copying | Arrived | Speculated | LacksRows | CopyingRows | RowsArrived | Phase::Queued(Redo) => Some(true),
            // A restore of fresh state has no gradient, and a flush has only the pending one.
            Running | Phase::Queued(Restore) => None,
        };
        assert!(has_gradient.is_none_or(|has| has == b.grads.is_some()), "bucket {bucket}: {b:?} and its gradient's slot");
        assert!(b.pending.is_none() || policy == Policy::Deferred, "bucket {bucket}: {policy:?} leaves no update pending");
        assert!(b.phase != Phase::Queued(Commit) || b.pending.is_some(), "bucket {bucket}: nothing to flush");
        assert!(!b.speculated_in_place || policy == Policy::Inverse, "bucket {bucket}: {policy:?} does not speculate in place");
        assert!(b.phase != Speculated || self.speculating && self.verdict.is_none(), "bucket {bucket}: speculated after the verdict");
        let has_rows = matches!(b.phase, CopyingRows | RowsArrived);
        assert_eq!(has_rows, b.rows.is_some(), "bucket {bucket}: {b:?} and the slot of its rows");
        let may_lack = match b.phase {
            LacksRows => b.late != Late::Nothing,
            CopyingRows | RowsArrived => b.late == Late::EnqueuedRows,
            Ready | Copying | Arrived | Running => true,
            Settled | Speculated | Phase::Queued(_) => b.late == Late::Nothing,
        };
        assert!(may_lack && (b.late != Late::Rows || self.verdict.is_none()), "bucket {bucket}: {b:?} and its late rows");
        let may_be_early = || self.speculating && self.layout.early().contains(&bucket);
        assert!(b.late == Late::Nothing || may_be_early(), "bucket {bucket}: {b:?} left early");
        let dropped = self.verdict == Some(Verdict::SkipNonFinite) && matches!(b.phase, Ready | Arrived);
        assert!(!dropped, "bucket {bucket}: {:?} in a step that is skipped", b.phase);
    }

    /// Every lent slot has an owner, and no gradient waits while a slot is free.
    fn check_slots(&self) {
        let held: usize = self.buckets.iter().map(|b| usize::from(b.grads.is_some()) + usize::from(b.pending.is_some())).sum();
        assert_eq!(self.grad_slots.lent(), held, "gradient slots lent, and with buckets: copying, arrived, running, pending");
        let waits = self.buckets.iter().any(|b| b.phase == Ready);
        assert!(!waits || held == self.grad_slots.count(), "a gradient waits while a slot is free");
        let written = self.running.as_ref().and_then(|running| running.params);
        let rows = self.buckets.iter().filter(|b| b.rows.is_some()).count();
        let sent = self.returning.len() + usize::from(written.is_some()) + rows;
        assert_eq!(self.param_slots.lent(), sent, "parameter slots lent, and written or on their way");
    }

    /// At most one bucket is in the phase `Running`, the bucket of the pool's job. An early commit and a copy do not change the phase of
    /// their bucket.
    fn check_pool(&self) {
        let running = (0..self.buckets.len()).filter(|&bucket| self.buckets[bucket].phase == Running);
        let pool = self
            .running
            .as_ref()
            .filter(|running| running.kind != JobKind::Commit && running.kind != JobKind::Copy)
            .map(|running| running.bucket);
        assert!(running.eq(pool), "the pool has bucket {pool:?} and others run");
        let Some(running) = &self.running else {
            let has_capacity = !self.staging.streams() && self.param_slots.lent() < self.param_slots.count();
            let waits = |b| self.is_runnable(b) && !self.is_held_back(b) && (has_capacity || b.phase == RowsArrived);
            return assert!(!self.buckets.iter().any(waits), "a bucket waits for an idle pool");
        };
        assert!(!running.speculative || self.may_speculate(), "the pool speculates under {:?}", self.policy());
        assert_eq!(
            running.params.is_none(),
            matches!(running.kind, JobKind::Flush | JobKind::Commit | JobKind::Copy),
            "new weights need a slot"
        );
    }

    /// A held state is not written, and every slot for copies that is lent has an owner.
    fn check_save(&self) {
        for (bucket, b) in self.buckets.iter().enumerate() {
            assert!(b.hold != Hold::UnderWay || b.phase != Settled, "bucket {bucket} is settled, and its step is under way for the save");
            assert!(b.hold != Hold::Due || b.pending.is_some(), "bucket {bucket}: no update is due for the save");
        }
        let copies = self.buckets.iter().filter(|b| b.copy.is_some()).count();
        assert_eq!(self.copy_slots.lent(), copies, "slots for copies lent, and with a bucket");
        let Some(running) = &self.running else { return };
        let b = &self.buckets[running.bucket];
        let writes = match running.kind {
            JobKind::Copy | JobKind::Rows => false,
            JobKind::Commit | JobKind::Flush | JobKind::Step => true,
            JobKind::Speculate | JobKind::Restore => b.pending.is_some() || self.policy() != Policy::Deferred,
        };
        assert!(!(writes && b.hold.is_held()), "the pool writes the held state of bucket {}: {b:?}", running.bucket);
    }
}
