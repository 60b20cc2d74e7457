//! Copies of states within the device, on their way to a save through a few pinned slots of the host.

use super::board::{SaveBoard, Source};
use crate::device::{Device, EventId};
use crate::error::Result;
use crate::planner::placement::STAGED_COPIES;
use std::ops::Range;

/// A bucket in a staged slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Staged {
    Nothing,
    /// The copy to the host is enqueued.
    Coming(usize),
    /// The save can read the slot.
    Arrived(usize),
}

/// The next thing that the driver does for a staged slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Move {
    /// Enqueue the copy of the bucket from the device to the slot, then record [`DeviceCopies::arrival`].
    Send,
    /// The state of the bucket has arrived in the slot: the save can read it.
    Offer,
}

/// Buckets of a running save whose states were copied within the device.
pub(in crate::engine) struct DeviceCopies {
    /// Buckets whose copies have not left the device.
    waiting: Range<usize>,
    slots: [Staged; STAGED_COPIES],
    /// By slot: the end of the copy that was enqueued last.
    arrivals: [EventId; STAGED_COPIES],
    /// The end of the copies within the device.
    pub(in crate::engine) made: EventId,
}

impl DeviceCopies {
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Device>(dev: &mut D) -> Result<Self> {
        let arrivals = [dev.event()?, dev.event()?];
        Ok(Self { waiting: 0..0, slots: [Staged::Nothing; STAGED_COPIES], arrivals, made: dev.event()? })
    }

    /// The copies of `buckets` within the device are enqueued.
    ///
    /// # Panics
    /// If copies of another save are under way.
    pub(in crate::engine) fn begin(&mut self, buckets: Range<usize>) {
        assert!(self.is_idle(), "copies of another save");
        self.waiting = buckets;
    }

    /// Whether no copy has to leave the device, or be saved after that.
    pub(in crate::engine) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.slots == [Staged::Nothing; STAGED_COPIES]
    }

    /// The event that ends the copy to staged slot `slot`.
    pub(in crate::engine) fn arrival(&self, slot: usize) -> EventId {
        self.arrivals[slot]
    }

    /// The next move, with its bucket and staged slot; `None` if there is nothing to do now. Buckets that the save needs no more stay on
    /// the device. `is_done` asks the device for an event.
    ///
    /// # Errors
    /// Errors of `is_done`.
    pub(in crate::engine) fn next(
        &mut self,
        board: &SaveBoard,
        mut is_done: impl FnMut(EventId) -> Result<bool>,
    ) -> Result<Option<(Move, usize, usize)>> {
        let is_saved = |bucket| board.source(bucket) == Source::Saved;
        for slot in 0..STAGED_COPIES {
            if let Staged::Coming(bucket) = self.slots[slot]
                && is_done(self.arrivals[slot])?
            {
                self.slots[slot] = Staged::Arrived(bucket);
                return Ok(Some((Move::Offer, bucket, slot)));
            }
            if let Staged::Arrived(bucket) = self.slots[slot]
                && is_saved(bucket)
            {
                self.slots[slot] = Staged::Nothing;
            }
            if self.slots[slot] == Staged::Nothing
                && let Some(bucket) = self.waiting.find(|&bucket| !is_saved(bucket))
            {
                self.slots[slot] = Staged::Coming(bucket);
                return Ok(Some((Move::Send, bucket, slot)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::slot::Slot;
    use std::sync::Arc;

    #[test]
    fn copies_leave_in_order_through_slots_that_are_free_again_when_their_state_was_saved() {
        let board = SaveBoard::new(5, Arc::default());
        let arrivals = [EventId(7), EventId(8)];
        let mut copies = DeviceCopies { waiting: 0..0, slots: [Staged::Nothing; 2], arrivals, made: EventId(9) };
        copies.begin(1..5);
        board.saved(3);
        let mut next = |arrived: &[u32]| copies.next(&board, |event| Ok(arrived.contains(&event.0))).unwrap();
        assert_eq!([next(&[]), next(&[]), next(&[])], [Some((Move::Send, 1, 0)), Some((Move::Send, 2, 1)), None]);
        assert_eq!([next(&[8]), next(&[8])], [Some((Move::Offer, 2, 1)), None]);
        board.offer(2, Source::Nowhere, Source::Copy(Slot(1)));
        assert_eq!(next(&[8]), None, "its state is not saved yet");
        board.saved(2);
        // Bucket 3 was saved without a copy.
        assert_eq!([next(&[]), next(&[]), next(&[7])], [Some((Move::Send, 4, 1)), None, Some((Move::Offer, 1, 0))]);
        assert_eq!(next(&[8]), Some((Move::Offer, 4, 1)));
        [1, 4].into_iter().for_each(|bucket| board.saved(bucket));
        assert_eq!(next(&[]), None);
        assert!(copies.is_idle());
    }
}
