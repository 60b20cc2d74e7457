//! Buckets that leave early: of a tied embedding nearly all of the gradient is final when the output matrix's is, first of all in backward;
//! only the rows of the batch come last. Such a bucket is copied and speculated on at once. Its rows follow through a parameter slot, which
//! brings their gradient and takes their weights back. A speculation writes no state, so that one with a wrong gradient of some rows costs
//! nothing but these rows; and once a verdict overturns it, the bucket goes the way of all others.

use super::law::{Late, Phase, Queued};
use super::{Coordinator, Load};
use crate::engine::route::Hop;

impl Coordinator {
    /// A bucket that has not begun to leave waits for all of its gradient.
    pub(super) fn rows_begin(&mut self, bucket: usize) {
        if self.buckets[bucket].phase == Phase::Ready {
            self.drop_grads(bucket, Phase::Ready);
        }
    }

    /// Rows leave as slots allow, once they are computed: the driver is modules ahead, and the stream of copies would wait for them with
    /// gradients behind.
    pub(super) fn copy_late_rows(&mut self) {
        while self.tally.lacking_rows > 0
            && let Some(bucket) = self.next_bucket(|b| b.phase == Phase::LacksRows && b.late == Late::EnqueuedRows && b.computed)
        {
            let Some(slot) = self.take_param_slot(bucket) else { return };
            self.transition(bucket, Phase::LacksRows, Phase::CopyingRows);
            self.buckets[bucket].rows = Some(slot);
            self.start(Hop::RowsOut, bucket, Load::Slot(slot));
        }
    }

    pub(super) fn rows_arrived(&mut self, bucket: usize) {
        self.transition(bucket, Phase::CopyingRows, Phase::RowsArrived);
        self.meet_verdict(bucket);
    }

    /// The step does not happen, and the device holds weights that must go.
    pub(super) fn drop_rows(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Queued(Queued::Restore));
        self.buckets[bucket].late = Late::Nothing;
        self.give_rows_back(bucket);
    }

    /// What has come is of no use: the whole gradient leaves now.
    pub(super) fn copy_again(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Ready);
        self.give_grads_back(bucket);
        self.give_rows_back(bucket);
    }

    fn give_rows_back(&mut self, bucket: usize) {
        if let Some(slot) = self.buckets[bucket].rows.take() {
            self.param_slots.give(slot);
        }
    }
}
