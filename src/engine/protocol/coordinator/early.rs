//! Buckets of a tied embedding that leave early. The output matrix is computed first in backward; after it nearly all of the embedding's
//! gradient is final, and only the rows of the batch are completed at the end. Such a bucket is copied and speculated on at once. Its late
//! rows follow through a parameter slot, which carries their gradient to the host and their weights back. A speculation writes no state, so
//! incomplete rows only have to be computed again. Once a verdict overturns the speculation, the bucket is handled like any other.

use super::law::{Late, Phase, Queued};
use super::{Coordinator, Load};
use crate::engine::protocol::route::Hop;

impl Coordinator {
    /// Drops a bucket if its gradient has no slot yet: it leaves later with its whole gradient.
    pub(super) fn rows_begin(&mut self, bucket: usize) {
        if self.buckets[bucket].phase == Phase::Ready {
            self.drop_grads(bucket, Phase::Ready);
        }
    }

    /// Copies late rows to the host while slots are free, once they are computed. The driver enqueues modules ahead of the device, so that
    /// a copy of uncomputed rows would block the gradients behind it on the copy stream.
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

    /// The step is skipped, and the device holds speculated weights that must be restored.
    pub(super) fn drop_rows(&mut self, bucket: usize, from: Phase) {
        self.transition(bucket, from, Phase::Queued(Queued::Restore));
        self.buckets[bucket].late = Late::Nothing;
        self.give_rows_back(bucket);
    }

    /// Discards the copied gradient; the whole gradient is copied again.
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
