//! What the driver says of itself while it steps, for the watchdog: relaxed stores into memory that is there from the start.

use super::coordinator::{Command, Event};
use super::verdict::Verdict;
use crate::device::Stream;
use crate::host::doorbell::Doorbell;
use crate::host::pulse::Pulse;
use crate::trace::now_ns;
use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Events that are remembered.
pub const EVENTS: usize = 256;

/// What the driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Doing {
    /// Nothing of a step: saving, evaluating, printing.
    Else,
    /// Enqueuing work.
    Enqueuing,
    /// Reading a micro-batch.
    Data,
    /// Waiting until the device is not far behind.
    Device,
    /// Waiting for the gradient of a bucket to leave the device.
    Gradient,
    /// Waiting for the parameters of a bucket.
    Params,
    /// Waiting for the gradient norm.
    Norm,
    /// Waiting until every update is decided and written.
    Updates,
}

impl Doing {
    const ALL: [(Self, &str); 8] = [
        (Self::Else, "is not in a step"),
        (Self::Enqueuing, "enqueues work for the device"),
        (Self::Data, "waits for data"),
        (Self::Device, "waits for the device to do what is enqueued"),
        (Self::Gradient, "waits for the gradient's copy of bucket"),
        (Self::Params, "waits for the parameters of bucket"),
        (Self::Norm, "waits for the gradient norm"),
        (Self::Updates, "waits for updates to be written"),
    ];

    /// In words; a bucket's number follows where one belongs.
    pub fn words(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// What happened last, to a bucket or in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// Nothing yet.
    Nothing,
    /// A step began; its number.
    Step,
    /// A stage was enqueued; how many so far.
    Stage,
    /// See [`Event::GradReady`].
    Enqueued,
    /// See [`Event::GradComputed`].
    Computed,
    /// See [`Command::CopyGrads`].
    Leaving,
    /// See [`Event::GradArrived`].
    Arrived,
    /// See [`Command::Run`].
    Given,
    /// See [`Event::JobDone`].
    Done,
    /// See [`Command::CopyParams`].
    Returning,
    /// See [`Event::ParamsCopied`].
    Returned,
    /// See [`Command::StepResident`].
    Resident,
    /// A verdict: commit.
    Commit,
    /// A verdict: clip.
    Clip,
    /// A verdict: skip.
    Skip,
}

impl Mark {
    const ALL: [(Self, &str, &str); 15] = [
        (Self::Nothing, "nothing", "nothing is pending"),
        (Self::Step, "begin step", ""),
        (Self::Stage, "enqueue stage", ""),
        (Self::Enqueued, "gradient enqueued: bucket", "waits for the device to compute its gradient"),
        (Self::Computed, "gradient computed: bucket", "waits for a staging slot for its gradient"),
        (Self::Leaving, "copy gradient: bucket", "waits for its gradient's copy to the host"),
        (Self::Arrived, "gradient arrived: bucket", "waits for the optimizer's workers, or for the verdict"),
        (Self::Given, "give the workers bucket", "is with the optimizer's workers"),
        (Self::Done, "workers done: bucket", "waits for the verdict, or is done"),
        (Self::Returning, "copy parameters: bucket", "waits for its parameters' copy to the device"),
        (Self::Returned, "parameters copied: bucket", "nothing is pending"),
        (Self::Resident, "step on the device: bucket", "is stepped by the device"),
        (Self::Commit, "verdict: commit step", ""),
        (Self::Clip, "verdict: clip step", ""),
        (Self::Skip, "verdict: skip step", ""),
    ];

    /// As an event, to be followed by its number.
    pub fn event(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// What a bucket waits for to which this happened last.
    pub fn pending(self) -> &'static str {
        Self::ALL[self as usize].2
    }

    /// Whether it is about one bucket.
    fn of_bucket(self) -> bool {
        !matches!(self, Self::Nothing | Self::Step | Self::Stage | Self::Commit | Self::Clip | Self::Skip)
    }
}

/// A small code and a number in one word, so that both are read at once.
fn pack(code: u8, number: u64) -> u64 {
    number << 8 | u64::from(code)
}

/// Something that happened at a time.
#[derive(Debug, Default)]
struct Record {
    at_ns: AtomicU64,
    what: AtomicU64,
}

/// The signs of life of an engine.
pub struct Vitals {
    doing: AtomicU64,
    records: [Record; EVENTS],
    recorded: AtomicU64,
    /// What happened last to each bucket.
    buckets: Box<[AtomicU64]>,
    /// One more than the bucket that each stream works for first, as far as the driver waits for it; 0 is none.
    streams: [AtomicU64; 3],
    running: AtomicU64,
    bell: Arc<Doorbell>,
    /// The optimizer's workers.
    pub workers: Arc<Pulse>,
}

impl Vitals {
    /// Of an engine with these buckets, whose driver `bell` wakes.
    pub(super) fn new(buckets: usize, bell: Arc<Doorbell>, workers: Arc<Pulse>) -> Self {
        Self {
            doing: AtomicU64::new(0),
            records: array::from_fn(|_| Record::default()),
            recorded: AtomicU64::new(0),
            buckets: (0..buckets).map(|_| AtomicU64::new(0)).collect(),
            streams: array::from_fn(|_| AtomicU64::new(0)),
            running: AtomicU64::new(0),
            bell,
            workers,
        }
    }

    /// The driver does this now; `number` is a bucket where one belongs.
    pub(super) fn now(&self, doing: Doing, number: u64) {
        self.doing.store(pack(doing as u8, number), Ordering::Relaxed);
    }

    /// This happened, to bucket, stage or step `number`. Only the driver calls it.
    pub(super) fn record(&self, mark: Mark, number: u64) {
        let (what, nth) = (pack(mark as u8, number), self.recorded.load(Ordering::Relaxed));
        let record = &self.records[nth as usize % EVENTS];
        record.at_ns.store(now_ns(), Ordering::Relaxed);
        record.what.store(what, Ordering::Relaxed);
        self.recorded.store(nth + 1, Ordering::Release);
        if mark.of_bucket() {
            let last = &self.buckets[number as usize];
            // A gradient may be on its way before the device has computed it: that says more.
            if mark != Mark::Computed || last.load(Ordering::Relaxed) == pack(Mark::Enqueued as u8, number) {
                last.store(what, Ordering::Relaxed);
            }
        }
    }

    /// The coordinator is told this in step `step`.
    pub(super) fn event(&self, event: Event, step: u64) {
        match event {
            Event::GradReady(bucket) => self.record(Mark::Enqueued, bucket as u64),
            Event::GradComputed(bucket) => self.record(Mark::Computed, bucket as u64),
            Event::GradArrived(bucket) => self.record(Mark::Arrived, bucket as u64),
            Event::JobDone => self.record(Mark::Done, self.running.load(Ordering::Relaxed)),
            // The executor knows the bucket, and says so.
            Event::ParamsCopied(_) => {}
            Event::Validated(Verdict::Commit) => self.record(Mark::Commit, step),
            Event::Validated(Verdict::Clip(_)) => self.record(Mark::Clip, step),
            Event::Validated(Verdict::SkipNonFinite) => self.record(Mark::Skip, step),
        }
    }

    /// The coordinator asks for this.
    pub(super) fn command(&self, command: &Command) {
        match *command {
            Command::CopyGrads { bucket, .. } => self.record(Mark::Leaving, bucket as u64),
            Command::Run { bucket, .. } => {
                self.running.store(bucket as u64, Ordering::Relaxed);
                self.record(Mark::Given, bucket as u64);
            }
            Command::CopyParams { bucket, .. } => self.record(Mark::Returning, bucket as u64),
            Command::StepResident { bucket, .. } => self.record(Mark::Resident, bucket as u64),
        }
    }

    /// The first bucket that the driver waits for on `stream`.
    pub(super) fn front(&self, stream: Stream, bucket: Option<usize>) {
        self.streams[stream as usize].store(bucket.map_or(0, |bucket| bucket as u64 + 1), Ordering::Relaxed);
    }

    /// Rises whenever an event happens or something is done that might cause one.
    pub fn progress(&self) -> u64 {
        let pieces: u64 = (0..self.workers.workers()).map(|worker| self.workers.pieces(worker)).sum();
        self.recorded.load(Ordering::Relaxed).wrapping_add(self.bell.rings()).wrapping_add(pieces)
    }

    /// What the driver does, and the number that belongs to it.
    pub fn doing(&self) -> (Doing, u64) {
        let word = self.doing.load(Ordering::Relaxed);
        (Doing::ALL[(word & 0xff) as usize].0, word >> 8)
    }

    /// The first bucket that the driver waits for on `stream`.
    pub fn pending(&self, stream: Stream) -> Option<u64> {
        self.streams[stream as usize].load(Ordering::Relaxed).checked_sub(1)
    }

    /// What happened last to each bucket.
    pub fn buckets(&self) -> impl Iterator<Item = Mark> {
        self.buckets.iter().map(|word| unpack(word.load(Ordering::Relaxed)).0)
    }

    /// The last events, oldest first: time, what, and the number that belongs to it.
    pub fn events(&self) -> impl Iterator<Item = (u64, Mark, u64)> {
        let end = self.recorded.load(Ordering::Acquire);
        (end.saturating_sub(EVENTS as u64)..end).map(|nth| {
            let record = &self.records[nth as usize % EVENTS];
            let (mark, number) = unpack(record.what.load(Ordering::Relaxed));
            (record.at_ns.load(Ordering::Relaxed), mark, number)
        })
    }
}

fn unpack(word: u64) -> (Mark, u64) {
    (Mark::ALL[(word & 0xff) as usize].0, word >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_belongs_to_its_place() {
        assert!(Doing::ALL.iter().enumerate().all(|(place, (doing, _))| *doing as usize == place));
        assert!(Mark::ALL.iter().enumerate().all(|(place, (mark, ..))| *mark as usize == place));
    }

    #[test]
    fn the_last_events_are_kept_and_buckets_know_what_they_wait_for() {
        let vitals = Vitals::new(3, Arc::default(), Arc::default());
        (0..300).for_each(|step| vitals.record(Mark::Step, step));
        vitals.event(Event::GradReady(1), 300);
        vitals.command(&Command::CopyGrads { bucket: 1, grads: crate::bucket::slot::Slot(0) });
        vitals.event(Event::GradComputed(1), 300);
        let events: Vec<_> = vitals.events().map(|(_, mark, number)| (mark, number)).collect();
        assert_eq!((events.len(), events[0]), (EVENTS, (Mark::Step, 300 + 3 - EVENTS as u64)));
        assert_eq!(events[EVENTS - 3..], [(Mark::Enqueued, 1), (Mark::Leaving, 1), (Mark::Computed, 1)]);
        assert!(vitals.buckets().eq([Mark::Nothing, Mark::Leaving, Mark::Nothing]));
        let before = vitals.progress();
        vitals.bell.ring();
        assert!(vitals.progress() > before);
    }
}
