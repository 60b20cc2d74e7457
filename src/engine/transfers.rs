//! Hops of streams: one event for each hop and bucket, and for each stream a queue of the hops that the coordinator waits for.

use super::protocol::route::{Hop, Leg, route};
use crate::bucket::layout::BucketLayout;
use crate::bucket::slot::Slot;
use crate::device::{Device, EventId, Stream};
use crate::error::Result;
use std::collections::VecDeque;

/// A pending hop; its completion will be reported to the coordinator.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    hop: Hop,
    bucket: usize,
    done: EventId,
}

/// Events and queues of all hops. It allocates only in `new` and `rearrange`.
pub(super) struct Transfers {
    layout: BucketLayout,
    /// By hop, and by bucket or position in the window: the end of the work that was enqueued last.
    events: [Vec<EventId>; Hop::ALL.len()],
    /// By parameter slot: the end of the copy that was enqueued last.
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
        transfers.reserve_queues();
        Ok(transfers)
    }

    /// Continues with the same buckets in other tiers, and with `param_slots` parameter slots. No work may be pending.
    pub(super) fn rearrange<D: Device>(&mut self, dev: &mut D, layout: &BucketLayout, param_slots: usize) -> Result<()> {
        self.layout = layout.clone();
        // Events live as long as a device: those of unused slots are kept for later plans.
        let more = (self.slots.len()..param_slots).map(|_| dev.event()).collect::<Result<Vec<_>>>()?;
        self.slots.extend(more);
        self.reserve_queues();
        Ok(())
    }

    fn reserve_queues(&mut self) {
        let most = (self.layout.count() + self.layout.early().len()).max(self.slots.len());
        for queue in &mut self.in_flight {
            queue.reserve(most);
        }
    }

    /// Whether no hop is pending that the coordinator waits for.
    pub(super) fn are_done(&self) -> bool {
        self.in_flight.iter().all(VecDeque::is_empty)
    }

    /// End of the last enqueued `hop` of `bucket`.
    ///
    /// # Panics
    /// If no stream runs that hop.
    pub(super) fn event(&self, hop: Hop, bucket: usize) -> EventId {
        let events = &self.events[hop as usize];
        events[bucket % events.len()]
    }

    /// Makes later work on the stream of `hop` wait for the preceding hops of `bucket`.
    pub(super) fn wait<D: Device>(&self, dev: &mut D, hop: Hop, bucket: usize) -> Result<()> {
        let Leg { stream: Some(stream), after, .. } = *hop.leg() else { return Ok(()) };
        let taken = route(self.layout.tier(bucket), self.layout.early().contains(&bucket));
        after.iter().filter(|after| taken.contains(after)).try_for_each(|after| dev.wait(stream, self.event(*after, bucket)))
    }

    /// Records the end of `hop` of `bucket`, with `slot`, after its work was enqueued on `stream`. For an offloaded bucket,
    /// [`Transfers::poll`] reports it.
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

    /// Removes the first hop of `stream`'s queue if it is complete; streams complete hops in order. Never blocks.
    pub(super) fn poll<D: Device>(&mut self, dev: &mut D, stream: Stream) -> Result<Option<(Hop, usize)>> {
        let queue = &mut self.in_flight[stream as usize];
        match queue.front() {
            Some(first) if dev.is_done(first.done)? => Ok(queue.pop_front().map(|first| (first.hop, first.bucket))),
            _ => Ok(None),
        }
    }

    /// The first hop in `stream`'s queue, with its bucket.
    pub(super) fn front(&self, stream: Stream) -> Option<(Hop, usize)> {
        self.in_flight[stream as usize].front().map(|first| (first.hop, first.bucket))
    }
}
