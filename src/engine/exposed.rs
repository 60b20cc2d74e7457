//! Waits for the inputs of the next computation, and measures the idle time of the device meanwhile.

use super::executor::Engine;
use super::idle_times::IdleCause;
use super::watch::driver_state::DriverActivity;
use crate::device::{Kernels, Stream};
use crate::error::Result;

impl<D: Kernels> Engine<D> {
    pub(super) fn wait_until_settled(&mut self, bucket: usize) -> Result<()> {
        if self.coordinator.is_settled(bucket) {
            return Ok(());
        }
        self.wait_exposed(DriverActivity::Params, bucket, "await params", |engine| Ok(engine.coordinator.is_settled(bucket)))
    }

    /// Waits until the gradient of `bucket` has a slot on the host, so that its copy is enqueued.
    pub(super) fn wait_until_copied(&mut self, bucket: usize) -> Result<()> {
        if self.coordinator.is_copied(bucket) {
            return Ok(());
        }
        self.coordinator.await_slot(true);
        let waited = self.wait_exposed(DriverActivity::Gradient, bucket, "await slot", |engine| Ok(engine.coordinator.is_copied(bucket)));
        self.coordinator.await_slot(false);
        waited
    }

    /// Waits for other ranks until `ready`. `activity` describes the wait; `bucket` is its bucket, if it has one.
    pub(super) fn wait_for_peers(
        &mut self,
        activity: DriverActivity,
        bucket: usize,
        ready: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        if self.exchange.slices().ranks() == 1 {
            return self.block_until(activity, bucket, ready);
        }
        self.wait_exposed(activity, bucket, "await ranks", ready)
    }

    fn wait_exposed(
        &mut self,
        activity: DriverActivity,
        bucket: usize,
        span: &'static str,
        mut ready: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let (start, mut idle_since) = (self.dev.now_ns(), None);
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.block_until(activity, bucket, |engine| {
            engine.count_exposed(activity, bucket, &mut idle_since)?;
            ready(engine)
        })?;
        self.driver_span(span, bucket as u32, start);
        Ok(())
    }

    /// While the compute stream is idle, adds the time to the current cause. For peers the time ends at the peer's publication: the delay
    /// from then until this thread sees it is this rank's own.
    fn count_exposed(&mut self, activity: DriverActivity, bucket: usize, idle_since: &mut Option<u64>) -> Result<()> {
        if idle_since.is_none() && !self.dev.is_done(self.compute_tail)? {
            return Ok(());
        }
        let waits_for_save = self.coordinator.waits_for_save();
        let shown = if waits_for_save { DriverActivity::Save } else { activity };
        self.driver_state.set_activity(shown, bucket as u64);
        let now = self.dev.now_ns();
        let since = idle_since.replace(now).unwrap_or(now);
        let (cause, until) = match activity {
            DriverActivity::Params | DriverActivity::Gradient if waits_for_save => (IdleCause::Save, now),
            DriverActivity::Params | DriverActivity::Gradient if self.coordinator.waits_for_link(bucket) => (IdleCause::Transfer, now),
            DriverActivity::Params | DriverActivity::Gradient => (IdleCause::Cpu, now),
            _ => (IdleCause::Peers, Some(self.exchange.published_ns()).filter(|at| (since..now).contains(at)).unwrap_or(now)),
        };
        self.idle.add(cause, until - since);
        Ok(())
    }

    /// Adds the time that streams waited since the last call, for the device's own streams and for peers.
    pub(super) fn count_waits_of_streams(&mut self) {
        self.idle.count_waits(self.dev.waited_ns(), self.exchange.waited_ns(&self.dev));
    }

    /// Records a span of the driver from `start_ns` until now.
    pub(super) fn driver_span(&mut self, name: &'static str, index: u32, start_ns: u64) {
        let duration_ns = self.dev.now_ns() - start_ns;
        self.recorder.past_span(name, index, start_ns, duration_ns);
    }
}
