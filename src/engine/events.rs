//! The points in the device's streams that the driver waits for.

use crate::device::{EventId, Kernels};
use crate::error::Result;
use crate::planner::budget::PAGED_WINDOW;

/// Stages (a layer's forward or backward) that the driver enqueues ahead of the device: enough that the device never
/// waits for a launch, and not so many that a full launch queue blocks the driver, who has a pool to feed.
pub(super) const STAGES_AHEAD: usize = 2;

/// All of them, made once.
pub(super) struct Events {
    pub(super) grad_ready: Vec<EventId>,
    pub(super) grad_arrived: Vec<EventId>,
    pub(super) params_ready: Vec<EventId>,
    pub(super) slot_copied: Vec<EventId>,
    pub(super) compute_tail: EventId,
    pub(super) paging: [Paging; PAGED_WINDOW],
    /// The ends of the last stages that were enqueued.
    pub(super) stages: [EventId; STAGES_AHEAD + 1],
}

/// How far the paged bucket is that has this place in the window.
#[derive(Clone, Copy)]
pub(super) struct Paging {
    pub(super) fetched: EventId,
    pub(super) stepped: EventId,
    pub(super) returned: EventId,
}

impl Events {
    pub(super) fn new<D: Kernels>(dev: &mut D, buckets: usize, slots: usize) -> Result<Self> {
        let mut many = |count: usize| (0..count).map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let (grad_ready, grad_arrived, params_ready, slot_copied) = (many(buckets)?, many(buckets)?, many(buckets)?, many(slots)?);
        let stages = [dev.event()?, dev.event()?, dev.event()?];
        let mut paging = || Ok(Paging { fetched: dev.event()?, stepped: dev.event()?, returned: dev.event()? });
        let paging = [paging()?, paging()?, paging()?, paging()?];
        Ok(Self { grad_ready, grad_arrived, params_ready, slot_copied, compute_tail: dev.event()?, paging, stages })
    }
}
