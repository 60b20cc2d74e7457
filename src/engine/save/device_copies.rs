//! States of the device that leave for a save: from a copy within the device through a few pinned slots of the host, or from their own
//! memory to slots of their own.

use super::board::{SaveBoard, Source};
use crate::device::{Device, EventId};
use crate::error::Result;
use crate::planner::placement::STAGED_COPIES;
use std::ops::Range;

/// A passage: a bucket that leaves the device, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passage {
    Free,
    /// The copy to the host is enqueued.
    Coming(usize),
    /// The save can read the staged slot.
    Arrived(usize),
}

/// The next thing that the driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Move {
    /// Enqueue the copy of a bucket to the host, then record [`DeviceCopies::arrival`] of `passage`.
    Send { bucket: usize, passage: usize },
    /// The state of a bucket has arrived on the host: the save can read it. It has come by `passage`, or with the last copies.
    Offer { bucket: usize, passage: Option<usize> },
}

/// Buckets of a running save whose states were on the device when it began. The first of them leave from their own memory, before the
/// device steps them.
pub(in crate::engine) struct DeviceCopies {
    /// Buckets whose states have not left the device.
    waiting: Range<usize>,
    /// The first bucket with a copy within the device, which leaves by a staged slot.
    first_copied: usize,
    passages: [Passage; STAGED_COPIES],
    /// By passage: the end of the copy that was enqueued last.
    arrivals: [EventId; STAGED_COPIES],
    /// Buckets whose copies were enqueued together, because the device is about to step them.
    last: Range<usize>,
    /// The end of the work that the copies to the host follow.
    pub(in crate::engine) made: EventId,
    /// The end of the last copies from the states' own memory.
    pub(in crate::engine) left: EventId,
}

impl DeviceCopies {
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Device>(dev: &mut D) -> Result<Self> {
        let arrivals = [dev.event()?, dev.event()?];
        let (made, left) = (dev.event()?, dev.event()?);
        Ok(Self { waiting: 0..0, first_copied: 0, passages: [Passage::Free; STAGED_COPIES], arrivals, last: 0..0, made, left })
    }

    /// States of `buckets` leave the device. Buckets from `first_copied` on have copies within the device.
    ///
    /// # Panics
    /// If states of another save are under way.
    pub(in crate::engine) fn begin(&mut self, buckets: Range<usize>, first_copied: usize) {
        assert!(self.is_idle(), "states of another save");
        (self.waiting, self.first_copied) = (buckets, first_copied);
    }

    /// Whether no state has to leave the device, or its staged slot.
    pub(in crate::engine) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.last.is_empty() && self.passages == [Passage::Free; STAGED_COPIES]
    }

    /// Whether `bucket` has a copy within the device.
    pub(in crate::engine) fn is_copied(&self, bucket: usize) -> bool {
        bucket >= self.first_copied
    }

    /// Whether a state may be leaving, or has to leave, from its own memory, which the device may not write before.
    pub(in crate::engine) fn reads_states(&self) -> bool {
        let is_coming = |passage: &Passage| matches!(passage, Passage::Coming(bucket) if !self.is_copied(*bucket));
        self.waiting.start < self.first_copied.min(self.waiting.end) || self.passages.iter().any(is_coming)
    }

    /// The device is about to step buckets. Returns those whose states must leave their own memory now, in copies that
    /// [`DeviceCopies::left`] ends.
    pub(in crate::engine) fn leave_now(&mut self) -> Range<usize> {
        let leaving = self.waiting.start..self.first_copied.clamp(self.waiting.start, self.waiting.end);
        self.waiting.start = leaving.end;
        if !leaving.is_empty() {
            self.last = leaving.clone();
        }
        leaving
    }

    /// The event that ends the last copy of `passage`.
    pub(in crate::engine) fn arrival(&self, passage: usize) -> EventId {
        self.arrivals[passage]
    }

    /// The next move; `None` if there is nothing to do now. States that the save needs no more stay on the device. `is_done` asks the
    /// device for an event.
    ///
    /// # Errors
    /// Errors of `is_done`.
    pub(in crate::engine) fn next(&mut self, board: &SaveBoard, mut is_done: impl FnMut(EventId) -> Result<bool>) -> Result<Option<Move>> {
        if !self.last.is_empty() && is_done(self.left)? {
            return Ok(self.last.next().map(|bucket| Move::Offer { bucket, passage: None }));
        }
        for passage in 0..STAGED_COPIES {
            if let Some(next) = self.next_of(passage, board, &mut is_done)? {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    fn next_of(&mut self, passage: usize, board: &SaveBoard, is_done: impl FnOnce(EventId) -> Result<bool>) -> Result<Option<Move>> {
        let is_saved = |bucket| board.source(bucket) == Source::Saved;
        if let Passage::Coming(bucket) = self.passages[passage]
            && is_done(self.arrivals[passage])?
        {
            self.passages[passage] = if self.is_copied(bucket) { Passage::Arrived(bucket) } else { Passage::Free };
            return Ok(Some(Move::Offer { bucket, passage: Some(passage) }));
        }
        if let Passage::Arrived(bucket) = self.passages[passage]
            && is_saved(bucket)
        {
            self.passages[passage] = Passage::Free;
        }
        if self.passages[passage] == Passage::Free
            && let Some(bucket) = self.waiting.find(|&bucket| !is_saved(bucket))
        {
            self.passages[passage] = Passage::Coming(bucket);
            return Ok(Some(Move::Send { bucket, passage }));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::slot::Slot;
    use std::sync::Arc;

    /// Events 7 and 8 are the arrivals, 9 and 10 `made` and `left`.
    fn copies() -> DeviceCopies {
        let arrivals = [EventId(7), EventId(8)];
        let (made, left) = (EventId(9), EventId(10));
        DeviceCopies { waiting: 0..0, first_copied: 0, passages: [Passage::Free; 2], arrivals, last: 0..0, made, left }
    }

    fn send(bucket: usize, passage: usize) -> Option<Move> {
        Some(Move::Send { bucket, passage })
    }

    fn offer(bucket: usize, passage: impl Into<Option<usize>>) -> Option<Move> {
        Some(Move::Offer { bucket, passage: passage.into() })
    }

    #[test]
    fn copies_leave_in_order_through_slots_that_are_free_again_when_their_state_was_saved() {
        let (board, mut copies) = (SaveBoard::new(5, Arc::default()), copies());
        copies.begin(1..5, 1);
        board.saved(3);
        assert!(!copies.reads_states() && copies.leave_now().is_empty());
        let mut next = |arrived: &[u32]| copies.next(&board, |event| Ok(arrived.contains(&event.0))).unwrap();
        assert_eq!([next(&[]), next(&[]), next(&[])], [send(1, 0), send(2, 1), None]);
        assert_eq!([next(&[8]), next(&[8])], [offer(2, 1), None]);
        board.offer(2, Source::Nowhere, Source::Copy(Slot(1)));
        assert_eq!(next(&[8]), None, "its state is not saved yet");
        board.saved(2);
        // Bucket 3 was saved without a copy.
        assert_eq!([next(&[]), next(&[]), next(&[7])], [send(4, 1), None, offer(1, 0)]);
        assert_eq!(next(&[8]), offer(4, 1));
        [1, 4].into_iter().for_each(|bucket| board.saved(bucket));
        assert_eq!(next(&[]), None);
        assert!(copies.is_idle());
    }

    #[test]
    fn states_leave_their_own_memory_before_the_device_steps_them() {
        let (board, mut copies) = (SaveBoard::new(7, Arc::default()), copies());
        copies.begin(1..7, 6);
        let next = |copies: &mut DeviceCopies, arrived: &[u32]| copies.next(&board, |event| Ok(arrived.contains(&event.0))).unwrap();
        assert_eq!([next(&mut copies, &[]), next(&mut copies, &[])], [send(1, 0), send(2, 1)]);
        // The slot of bucket 1 is its own, so its passage is free at once.
        assert_eq!([next(&mut copies, &[7]), next(&mut copies, &[])], [offer(1, 0), send(3, 0)]);
        assert!(copies.reads_states());
        assert_eq!((copies.leave_now(), copies.leave_now()), (4..6, 6..6));
        assert!(copies.reads_states(), "buckets 2 and 3 are coming");
        assert_eq!(next(&mut copies, &[]), None);
        let all = [7, 8, 10];
        let moves: Vec<_> = std::iter::from_fn(|| next(&mut copies, &all)).take(6).collect();
        let offers = [offer(4, None), offer(5, None), offer(3, 0), send(6, 0), offer(6, 0), offer(2, 1)];
        assert_eq!(moves, offers.map(Option::unwrap));
        assert!(!copies.reads_states() && !copies.is_idle());
        board.saved(6);
        assert_eq!(next(&mut copies, &all), None);
        assert!(copies.is_idle());
    }
}
