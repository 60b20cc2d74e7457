//! A save of the state after step N, while later steps run. Each bucket is *held* from the time at which update N is in its state until its
//! state is written or copied. Nothing but the next write of the state waits for a held bucket: a step whose update can stay pending
//! becomes a speculation with the final factor.

use super::law::{Hold, Phase, Queued};
use super::{Bucket, Coordinator, JobKind, Load, RunningJob, Work};
use crate::bucket::slot::{FreeList, Slot};
use crate::engine::protocol::route::Hop;
use crate::planner::rules::Policy;

impl Coordinator {
    /// Sets the number of slots for copies of states that wait to be saved.
    ///
    /// # Panics
    /// If a save runs.
    pub(in crate::engine) fn set_copy_slots(&mut self, slots: usize) {
        assert!(!self.is_saving(), "the slots of a running save");
        self.copy_slots = FreeList::new(slots);
    }

    /// Begins a save of the state after the last step, between two steps. [`Hop::Save`] starts for each bucket as soon as its state can be
    /// read, and is done when the bucket's memory may be written again.
    ///
    /// # Panics
    /// If a save runs.
    pub(in crate::engine) fn begin_save(&mut self) {
        assert!(!self.is_saving(), "one save at a time");
        for bucket in 0..self.buckets.len() {
            match (self.buckets[bucket].phase, self.buckets[bucket].pending) {
                (Phase::Settled, None) => self.hold(bucket),
                (Phase::Settled, Some(_)) => self.buckets[bucket].hold = Hold::Due,
                _ => self.buckets[bucket].hold = Hold::UnderWay,
            }
        }
        self.run_next();
        #[cfg(any(test, debug_assertions))]
        self.check_often();
    }

    /// Whether a save still needs the memory of a bucket, or a copy of it.
    pub(in crate::engine) fn is_saving(&self) -> bool {
        self.buckets.iter().any(|b| b.hold != Hold::Free || b.copy.is_some())
    }

    /// Whether a save still needs the memory of a bucket.
    pub(in crate::engine) fn is_holding(&self) -> bool {
        self.buckets.iter().any(|b| b.hold != Hold::Free)
    }

    /// Writes the updates that the running save waits for, without another step.
    ///
    /// # Panics
    /// If a bucket is not settled.
    pub(in crate::engine) fn commit_due(&mut self) {
        self.queue_all(Queued::Commit, |b| b.hold == Hold::Due);
    }

    /// Whether the pool is idle because buckets wait for their states to be saved.
    pub(in crate::engine) fn waits_for_save(&self) -> bool {
        self.running.is_none() && self.buckets.iter().any(|b| self.is_held_back(b))
    }

    /// Whether the bucket's next job would write a state that is held.
    pub(super) fn is_held_back(&self, b: &Bucket) -> bool {
        let writes = match self.policy() {
            Policy::Deferred => b.pending.is_some(),
            Policy::Inverse | Policy::ValidateFirst => true,
        };
        b.hold.is_held() && writes && matches!(b.phase, Phase::Arrived | Phase::Queued(_))
    }

    /// Whether an update is pending that may be written into the state.
    pub(super) fn may_commit(b: &Bucket) -> bool {
        b.pending.is_some() && !b.hold.is_held()
    }

    /// The bucket's step N ends; its update may be pending.
    pub(super) fn meet_save(&mut self, bucket: usize) {
        if self.buckets[bucket].hold == Hold::UnderWay {
            match self.buckets[bucket].pending {
                Some(_) => self.buckets[bucket].hold = Hold::Due,
                None => self.hold(bucket),
            }
        }
    }

    /// The bucket's pending update was written into the state.
    pub(super) fn update_written(&mut self, bucket: usize) {
        if self.buckets[bucket].hold == Hold::Due {
            self.hold(bucket);
        }
    }

    fn hold(&mut self, bucket: usize) {
        self.buckets[bucket].hold = Hold::Held;
        self.start(Hop::Save, bucket, Load::State);
    }

    /// While the pool would be idle, it copies a state that holds up an update, if a slot is free.
    pub(super) fn copy_held(&mut self) {
        let waits = |b: &Bucket| b.pending.is_some() || self.is_held_back(b);
        let Some(bucket) = self.next_bucket(|b| b.hold == Hold::Held && b.copy.is_none() && waits(b)) else { return };
        let Some(slot) = self.copy_slots.take() else { return };
        self.buckets[bucket].copy = Some(slot);
        self.running = Some(RunningJob { bucket, params: None, speculative: false, kind: JobKind::Copy });
        self.start(Hop::Optimize, bucket, Load::Job(Work::Copy(slot), None));
    }

    /// The pool has copied the state of `bucket`. The writer may have finished with it meanwhile.
    pub(super) fn state_copied(&mut self, bucket: usize) {
        if self.buckets[bucket].hold == Hold::Held {
            self.buckets[bucket].hold = Hold::Leaving;
        }
        let slot = self.buckets[bucket].copy.expect("the slot of the copy");
        self.start(Hop::SaveCopy, bucket, Load::Slot(slot));
    }

    /// The memory of `bucket` may be written again.
    pub(super) fn state_saved(&mut self, bucket: usize) {
        assert!(self.buckets[bucket].hold.is_held(), "bucket {bucket} is not held");
        self.buckets[bucket].hold = Hold::Free;
    }

    /// The copy of the state of `bucket` is saved.
    pub(super) fn copy_saved(&mut self, bucket: usize) {
        let slot: Slot = self.buckets[bucket].copy.take().expect("a copy that was saved");
        self.copy_slots.give(slot);
    }
}
