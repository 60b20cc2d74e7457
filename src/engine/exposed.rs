//! Waits for a bucket's parameters, and counts the time in which the device has nothing to compute meanwhile.

use super::exchange::Exchange;
use super::executor::Engine;
use super::vitals::Doing;
use crate::device::{Kernels, Stream};
use crate::error::Result;

impl<D: Kernels, X: Exchange<D>> Engine<D, X> {
    pub(super) fn wait_until_settled(&mut self, bucket: usize) -> Result<()> {
        if self.coordinator.is_settled(bucket) {
            return Ok(());
        }
        let (start, mut idle_since) = (self.dev.now_ns(), None);
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.block_until(Doing::Params, bucket, |engine| {
            engine.count_exposed(bucket, &mut idle_since)?;
            Ok(engine.coordinator.is_settled(bucket))
        })?;
        self.driver_span("await params", bucket as u32, start);
        Ok(())
    }

    /// While the compute stream has nothing to do, the time goes to what `bucket` waits for now.
    fn count_exposed(&mut self, bucket: usize, idle_since: &mut Option<u64>) -> Result<()> {
        if idle_since.is_some() || self.dev.is_done(self.compute_tail)? {
            let (now, link) = (self.dev.now_ns(), self.coordinator.waits_for_link(bucket));
            let exposed = if link { &mut self.exposed.transfer_ns } else { &mut self.exposed.cpu_ns };
            *exposed += now - idle_since.replace(now).unwrap_or(now);
        }
        Ok(())
    }

    /// Records what the driver did from `start_ns` until now.
    pub(super) fn driver_span(&mut self, name: &'static str, index: u32, start_ns: u64) {
        let duration_ns = self.dev.now_ns() - start_ns;
        self.recorder.past_span(name, index, start_ns, duration_ns);
    }
}
