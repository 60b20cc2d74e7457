//! The hops that streams do: one event for each hop and bucket, and for each stream one queue of what the coordinator waits for.

use super::route::{Hop, Leg, route};
use crate::bucket::layout::BucketLayout;
use crate::bucket::slot::Slot;
use crate::device::{Device, EventId, Stream};
use crate::error::Result;
use std::collections::VecDeque;

/// A hop whose end the coordinator will be told of.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    hop: Hop,
    bucket: usize,
    done: EventId,
}

/// Nothing in here allocates after construction.
pub(super) struct Transfers {
    layout: BucketLayout,
    /// By hop, and by bucket or place in the window: the end of what was last enqueued.
    events: [Vec<EventId>; Hop::ALL.len()],
    /// The end of what was last enqueued with each parameter slot.
    slots: Vec<EventId>,
    in_flight: [VecDeque<InFlight>; Stream::WITH_PEERS.len()],
}

impl Transfers {
    pub(super) fn new<D: Device>(dev: &mut D, layout: &BucketLayout, param_slots: usize) -> Result<Self> {
        let mut many = |count: usize| (0..count).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let mut events = [const { Vec::new() }; Hop::ALL.len()];
        for hop in Hop::ALL.into_iter().filter(|hop| hop.leg().stream.is_some()) {
            events[hop as usize] = many(hop.leg().window.unwrap_or(layout.count()))?;
        }
        let slots = many(param_slots)?;
        let mut transfers =
            Self { layout: layout.clone(), events, slots, in_flight: [const { VecDeque::new() }; Stream::WITH_PEERS.len()] };
        transfers.make_room();
        Ok(transfers)
    }

    /// Goes on with the same buckets in other places, and with so many parameter slots. Nothing is under way.
    pub(super) fn rearrange<D: Device>(&mut self, dev: &mut D, layout: &BucketLayout, param_slots: usize) -> Result<()> {
        self.layout = layout.clone();
        // Events stay for the life of a device: those of slots that go now wait for slots that come.
        let more = (self.slots.len()..param_slots).map(|_| dev.event()).collect::<Result<Vec<_>>>()?;
        self.slots.extend(more);
        self.make_room();
        Ok(())
    }

    fn make_room(&mut self) {
        let most = (self.layout.count() + self.layout.early().len()).max(self.slots.len());
        self.in_flight.iter_mut().for_each(|queue| queue.reserve(most));
    }

    /// Whether nothing is under way that somebody waits for.
    pub(super) fn are_done(&self) -> bool {
        self.in_flight.iter().all(VecDeque::is_empty)
    }

    /// The end of the last `hop` of `bucket` that was enqueued.
    ///
    /// # Panics
    /// If no stream does that hop.
    pub(super) fn event(&self, hop: Hop, bucket: usize) -> EventId {
        let events = &self.events[hop as usize];
        events[bucket % events.len()]
    }

    /// What is enqueued next for `hop` of `bucket` runs behind the hops that come before it.
    pub(super) fn wait<D: Device>(&self, dev: &mut D, hop: Hop, bucket: usize) -> Result<()> {
        let Leg { stream: Some(stream), after, .. } = *hop.leg() else { return Ok(()) };
        let taken = route(self.layout.tier(bucket), self.layout.early().contains(&bucket));
        after.iter().filter(|after| taken.contains(after)).try_for_each(|after| dev.wait(stream, self.event(*after, bucket)))
    }

    /// `hop` of `bucket`, with `slot`, is what was enqueued last on `stream`; of an offloaded bucket [`Transfers::poll`] tells its end.
    pub(super) fn issue<D: Device>(&mut self, dev: &mut D, stream: Stream, hop: Hop, bucket: usize, slot: Option<Slot>) -> Result<()> {
        let mut done = self.event(hop, bucket);
        dev.record(done, stream)?;
        if let Some(slot) = slot.filter(|_| hop.leg().by_slot) {
            done = self.slots[slot.0];
            dev.record(done, stream)?;
        }
        if self.layout.tier(bucket).is_offloaded() {
            self.in_flight[stream as usize].push_back(InFlight { hop, bucket, done });
        }
        Ok(())
    }

    /// Takes the first hop of `stream`'s queue if it is done; a stream does what it was given in order. Never blocks.
    pub(super) fn poll<D: Device>(&mut self, dev: &mut D, stream: Stream) -> Result<Option<(Hop, usize)>> {
        let queue = &mut self.in_flight[stream as usize];
        match queue.front() {
            Some(first) if dev.is_done(first.done)? => Ok(queue.pop_front().map(|first| (first.hop, first.bucket))),
            _ => Ok(None),
        }
    }

    /// The first hop, and its bucket, in `stream`'s queue.
    pub(super) fn front(&self, stream: Stream) -> Option<(Hop, usize)> {
        self.in_flight[stream as usize].front().map(|first| (first.hop, first.bucket))
    }
}
