//! State of the driver for the watchdog, published by relaxed stores into preallocated memory.

use crate::device::Stream;
use crate::engine::protocol::coordinator::{Command, Event};
use crate::engine::protocol::route::Hop;
use crate::engine::protocol::verdict::Verdict;
use crate::host::doorbell::Doorbell;
use crate::host::heartbeats::Heartbeats;
use crate::trace::now_ns;
use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of events kept.
pub(crate) const EVENTS: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum DriverActivity {
    /// Outside of a step, for example while the program saves or prints.
    Else,
    /// Enqueuing work.
    Enqueuing,
    /// Reading a micro-batch.
    Data,
    /// Waiting until the device is at most a few modules behind.
    Device,
    /// Waiting until the gradient of a bucket has a slot on the host.
    Gradient,
    /// Waiting for the parameters of a bucket.
    Params,
    Norm,
    /// Waiting until every update is decided and written.
    Updates,
    /// Waiting for sums of gradients: this rank's own, or those of peers that pull from it.
    Sums,
    /// Waiting for other ranks' parameters of a bucket.
    Gather,
    /// Waiting for activations of its sequence group; the number is the size of the group.
    HandOver,
    /// Waiting until other ranks have completed an order.
    Orders,
    /// Moving states and memory to another plan's placement.
    Moving,
    /// Waiting until the running save has read the state.
    Save,
}

impl DriverActivity {
    const ALL: [(Self, &str); 14] = [
        (Self::Else, "is not in a step"),
        (Self::Enqueuing, "enqueues work for the device"),
        (Self::Data, "waits for data"),
        (Self::Device, "waits for the device to finish enqueued work"),
        (Self::Gradient, "waits for the gradient's copy of bucket"),
        (Self::Params, "waits for the parameters of bucket"),
        (Self::Norm, "waits for the gradient norm"),
        (Self::Updates, "waits for updates to be written"),
        (Self::Sums, "waits for the gradients of other ranks"),
        (Self::Gather, "waits for other ranks' parameters of bucket"),
        (Self::HandOver, "waits for activations of its sequences from other ranks"),
        (Self::Orders, "waits for other ranks to carry out an order"),
        (Self::Moving, "moves states to the placement of another plan"),
        (Self::Save, "waits for the disk, to which the last checkpoint is written"),
    ];

    /// Description; the number of a bucket follows if [`Doing::has_bucket`].
    pub(crate) fn description(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Whether the number is a bucket.
    pub(in crate::engine) fn has_bucket(self) -> bool {
        matches!(self, Self::Gradient | Self::Params | Self::Gather)
    }
}

/// The last event of a bucket or step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum DriverEvent {
    /// No event yet.
    Nothing,
    /// A step began; its number.
    Step,
    /// A module was enqueued; the count so far.
    Module,
    /// A verdict: commit.
    Commit,
    /// A verdict: clip.
    Clip,
    /// A verdict: skip.
    Skip,
    Begun(Hop),
    Done(Hop),
}

impl DriverEvent {
    /// Marks without a bucket, with their descriptions.
    const OF_STEPS: [(Self, &str); 6] = [
        (Self::Nothing, "nothing"),
        (Self::Step, "begin step"),
        (Self::Module, "enqueue module"),
        (Self::Commit, "verdict: commit step"),
        (Self::Clip, "verdict: clip step"),
        (Self::Skip, "verdict: skip step"),
    ];

    /// Description of the event, to be followed by its number.
    pub(in crate::engine) fn event(self) -> &'static str {
        match self {
            Self::Begun(hop) => hop.leg().begun[0],
            Self::Done(hop) => hop.leg().done[0],
            of_step => Self::OF_STEPS[of_step.code() as usize].1,
        }
    }

    /// Description of the wait that follows this event in a bucket.
    pub(in crate::engine) fn pending(self) -> &'static str {
        match self {
            Self::Begun(hop) => hop.leg().begun[1],
            Self::Done(hop) => hop.leg().done[1],
            _ => "nothing is pending",
        }
    }

    fn code(self) -> u8 {
        let code = match self {
            Self::Begun(hop) => Self::OF_STEPS.len() + 2 * hop as usize,
            Self::Done(hop) => Self::OF_STEPS.len() + 2 * hop as usize + 1,
            of_step => Self::OF_STEPS.iter().position(|(mark, _)| *mark == of_step).unwrap_or(0),
        };
        code as u8
    }

    fn of(code: u8) -> Self {
        match (code as usize).checked_sub(Self::OF_STEPS.len()) {
            None => Self::OF_STEPS[code as usize].0,
            Some(of_hop) => [Self::Begun, Self::Done][of_hop % 2](Hop::ALL[of_hop / 2]),
        }
    }
}

/// Packs a small code and a number into one word, so that both are read at once.
fn pack(code: u8, number: u64) -> u64 {
    number << 8 | u64::from(code)
}

/// An event with its time.
#[derive(Debug, Default)]
struct EventRecord {
    at_ns: AtomicU64,
    packed: AtomicU64,
}

pub(crate) struct DriverState {
    activity: AtomicU64,
    records: [EventRecord; EVENTS],
    recorded: AtomicU64,
    /// The last event of each bucket.
    buckets: Box<[AtomicU64]>,
    /// By stream, the first pending hop that the driver waits for (its number plus 1) and its bucket; 0 means none.
    streams: [AtomicU64; Stream::WITH_PEERS.len()],
    bell: Arc<Doorbell>,
    pub workers: Arc<Heartbeats>,
}

impl DriverState {
    /// State of an engine with `buckets` buckets. Its driver waits on `bell`.
    pub(in crate::engine) fn new(buckets: usize, bell: Arc<Doorbell>, workers: Arc<Heartbeats>) -> Self {
        Self {
            activity: AtomicU64::new(0),
            records: array::from_fn(|_| EventRecord::default()),
            recorded: AtomicU64::new(0),
            buckets: (0..buckets).map(|_| AtomicU64::new(0)).collect(),
            streams: array::from_fn(|_| AtomicU64::new(0)),
            bell,
            workers,
        }
    }

    /// Sets the driver's current activity; `number` is a bucket, if the activity has one.
    pub(in crate::engine) fn set_activity(&self, activity: DriverActivity, number: u64) {
        self.activity.store(pack(activity as u8, number), Ordering::Relaxed);
    }

    /// Records an event of bucket, module or step `number`. Only the driver calls it.
    pub(in crate::engine) fn record(&self, mark: DriverEvent, number: u64) {
        let (packed, nth) = (pack(mark.code(), number), self.recorded.load(Ordering::Relaxed));
        let record = &self.records[nth as usize % EVENTS];
        record.at_ns.store(now_ns(), Ordering::Relaxed);
        record.packed.store(packed, Ordering::Relaxed);
        self.recorded.store(nth + 1, Ordering::Release);
        if let DriverEvent::Begun(_) | DriverEvent::Done(_) = mark {
            let last = &self.buckets[number as usize];
            // A copy may be enqueued before the device has computed the gradient. The start of the copy is then the more informative event.
            let is_progress = match mark {
                DriverEvent::Done(hop @ (Hop::Backward | Hop::HeadBackward)) => {
                    last.load(Ordering::Relaxed) == pack(DriverEvent::Begun(hop).code(), number)
                }
                _ => true,
            };
            if is_progress {
                last.store(packed, Ordering::Relaxed);
            }
        }
    }

    /// Records an event that is passed to the coordinator in step `step`.
    pub(in crate::engine) fn event(&self, event: Event, step: u64) {
        match event {
            Event::HeadGradReady(bucket) => self.record(DriverEvent::Begun(Hop::HeadBackward), bucket as u64),
            Event::RowsBegin(_) => {}
            Event::GradReady(bucket) => self.record(DriverEvent::Begun(Hop::Backward), bucket as u64),
            Event::Done { hop, bucket } => self.record(DriverEvent::Done(hop), bucket as u64),
            Event::Validated(Verdict::Commit) => self.record(DriverEvent::Commit, step),
            Event::Validated(Verdict::Clip(_)) => self.record(DriverEvent::Clip, step),
            Event::Validated(Verdict::SkipNonFinite) => self.record(DriverEvent::Skip, step),
        }
    }

    /// Records a command of the coordinator.
    pub(in crate::engine) fn command(&self, command: &Command) {
        let Command::Start { hop, bucket, .. } = *command;
        self.record(DriverEvent::Begun(hop), bucket as u64);
    }

    /// Sets the first pending hop that the driver waits for on `stream`, with its bucket.
    pub(in crate::engine) fn set_pending(&self, stream: Stream, front: Option<(Hop, usize)>) {
        let word = front.map_or(0, |(hop, bucket)| pack(hop as u8 + 1, bucket as u64));
        self.streams[stream as usize].store(word, Ordering::Relaxed);
    }

    /// A counter that increases with every event, doorbell ring and finished piece of work.
    pub(crate) fn progress(&self) -> u64 {
        let pieces: u64 = (0..self.workers.workers()).map(|worker| self.workers.pieces(worker)).sum();
        self.recorded.load(Ordering::Relaxed).wrapping_add(self.bell.rings()).wrapping_add(pieces)
    }

    /// The driver's current activity and its number.
    pub(crate) fn activity(&self) -> (DriverActivity, u64) {
        let word = self.activity.load(Ordering::Relaxed);
        (DriverActivity::ALL[(word & 0xff) as usize].0, word >> 8)
    }

    /// The first pending hop that the driver waits for on `stream`, with its bucket.
    pub(in crate::engine) fn pending(&self, stream: Stream) -> Option<(Hop, u64)> {
        let word = self.streams[stream as usize].load(Ordering::Relaxed);
        (word & 0xff).checked_sub(1).map(|hop| (Hop::ALL[hop as usize], word >> 8))
    }

    /// The last event of each bucket.
    pub(in crate::engine) fn buckets(&self) -> impl Iterator<Item = DriverEvent> {
        self.buckets.iter().map(|word| unpack(word.load(Ordering::Relaxed)).0)
    }

    /// Number of events so far.
    pub(in crate::engine) fn recorded(&self) -> u64 {
        self.recorded.load(Ordering::Acquire)
    }

    /// The last events, at most `count` and [`EVENTS`], oldest first: time, event and number.
    pub(in crate::engine) fn events(&self, count: usize) -> impl Iterator<Item = (u64, DriverEvent, u64)> {
        let end = self.recorded();
        (end.saturating_sub(count.min(EVENTS) as u64)..end).map(|nth| {
            let record = &self.records[nth as usize % EVENTS];
            let (mark, number) = unpack(record.packed.load(Ordering::Relaxed));
            (record.at_ns.load(Ordering::Relaxed), mark, number)
        })
    }
}

fn unpack(word: u64) -> (DriverEvent, u64) {
    (DriverEvent::of(word as u8), word >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::slot::Slot;
    use crate::engine::protocol::coordinator::Load;

    #[test]
    fn every_description_has_the_index_of_its_activity() {
        assert!(DriverActivity::ALL.iter().enumerate().all(|(place, (activity, _))| *activity as usize == place));
        let marks = (0..).take(DriverEvent::OF_STEPS.len() + 2 * Hop::ALL.len());
        assert!(marks.clone().all(|code| DriverEvent::of(code).code() == code));
        assert!(
            marks
                .into_iter()
                .all(|code| !DriverEvent::of(code).event().is_empty() || matches!(DriverEvent::of(code), DriverEvent::Done(_)))
        );
    }

    #[test]
    fn the_last_events_are_kept_and_buckets_have_their_pending_hop() {
        let driver_state = DriverState::new(3, Arc::default(), Arc::default());
        (0..300).for_each(|step| driver_state.record(DriverEvent::Step, step));
        driver_state.event(Event::GradReady(1), 300);
        driver_state.command(&Command::Start { hop: Hop::GradsOut, bucket: 1, load: Load::Slot(Slot(0)) });
        driver_state.event(Event::Done { hop: Hop::Backward, bucket: 1 }, 300);
        let events: Vec<_> = driver_state.events(EVENTS).map(|(_, mark, number)| (mark, number)).collect();
        assert_eq!((events.len(), events[0]), (EVENTS, (DriverEvent::Step, 300 + 3 - EVENTS as u64)));
        assert_eq!(
            events[EVENTS - 3..],
            [DriverEvent::Begun(Hop::Backward), DriverEvent::Begun(Hop::GradsOut), DriverEvent::Done(Hop::Backward)].map(|mark| (mark, 1))
        );
        assert!(driver_state.buckets().eq([DriverEvent::Nothing, DriverEvent::Begun(Hop::GradsOut), DriverEvent::Nothing]));
        let before = driver_state.progress();
        driver_state.bell.ring();
        assert!(driver_state.progress() > before);
    }
}
