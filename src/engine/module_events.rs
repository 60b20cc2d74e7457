//! Events after the modules that the driver has enqueued, which bound its lead over the device.

use crate::device::{Device, EventId, Stream};
use crate::error::Result;

/// Modules (a layer's forward or backward) that the driver enqueues ahead of the device. They hide the launch latency from the device. More
/// of them would fill the launch queue and block the driver, which must keep the pool busy.
pub(super) const MODULES_AHEAD: usize = 2;

/// End events of the last modules that were enqueued.
pub(super) struct ModuleEvents {
    events: [EventId; MODULES_AHEAD + 1],
    enqueued: usize,
}

impl ModuleEvents {
    /// # Errors
    /// Errors of the device.
    pub(super) fn new<D: Device>(dev: &mut D) -> Result<Self> {
        Ok(Self { events: [dev.event()?, dev.event()?, dev.event()?], enqueued: 0 })
    }

    /// Number of modules enqueued so far.
    pub(super) fn enqueued(&self) -> usize {
        self.enqueued
    }

    /// Records the end of a module that was enqueued. Returns the event that is done once the device is at most `MODULES_AHEAD` modules
    /// behind.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn record<D: Device>(&mut self, dev: &mut D) -> Result<EventId> {
        dev.record(self.events[self.enqueued % self.events.len()], Stream::Compute)?;
        self.enqueued += 1;
        Ok(self.events[self.enqueued % self.events.len()])
    }
}
