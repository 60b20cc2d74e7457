//! Work on a device, timed by the device's own clock.

use super::samples::Samples;
use crate::device::{Device, EventId, Stream};
use crate::error::Result;

/// Aim of one sample, in seconds: so long that its beginning and end do not count.
const SAMPLE_S: f64 = 0.02;
/// Most repetitions in a sample: fewer than a launch queue holds.
const REPEATS_MAX: f64 = 256.0;
/// Samples are kept; a clock that stands still must not fill the memory.
const SAMPLES_MAX: usize = 4096;

/// A device and events at the ends of its streams.
pub struct Timer<'a, D> {
    pub dev: &'a mut D,
    ends: [EventId; 3],
}

impl<'a, D: Device> Timer<'a, D> {
    /// Gets ready to measure `dev`.
    pub fn new(dev: &'a mut D) -> Result<Self> {
        let ends = [dev.event()?, dev.event()?, dev.event()?];
        Ok(Self { dev, ends })
    }

    /// Waits until nothing is enqueued.
    pub fn settle(&mut self) -> Result<()> {
        for (stream, end) in Stream::ALL.into_iter().zip(self.ends) {
            self.dev.record(end, stream)?;
        }
        self.ends.into_iter().try_for_each(|end| self.dev.synchronize(end))
    }

    /// Seconds since `start_ns` on the device's clock.
    pub fn since(&self, start_ns: u64) -> f64 {
        // A clock that did not move would make a rate infinite.
        self.dev.now_ns().saturating_sub(start_ns).max(1) as f64 * 1e-9
    }

    /// Seconds from the first call of `work` to the end of all that it enqueued.
    ///
    /// # Errors
    /// The device's, and what `work` says.
    pub fn seconds(&mut self, work: impl FnOnce(&mut D) -> Result<()>) -> Result<f64> {
        let start_ns = self.dev.now_ns();
        work(self.dev)?;
        self.settle()?;
        Ok(self.since(start_ns))
    }

    /// Takes samples for about `time_s`, one at least.
    pub fn samples(&mut self, time_s: f64, mut sample: impl FnMut(&mut Self) -> Result<f64>) -> Result<Samples> {
        let (start_ns, mut samples) = (self.dev.now_ns(), Vec::new());
        while samples.is_empty() || (self.since(start_ns) < time_s && samples.len() < SAMPLES_MAX) {
            samples.push(sample(self)?);
        }
        Ok(Samples::new(samples))
    }

    /// Units a second, where `work` does `units`, again and again for about `time_s`.
    ///
    /// # Errors
    /// The device's, and what `work` says.
    pub fn rates(&mut self, time_s: f64, units: f64, mut work: impl FnMut(&mut D) -> Result<()>) -> Result<Samples> {
        // The first time may compile or allocate.
        self.seconds(&mut work)?;
        let once_s = self.seconds(&mut work)?;
        let repeats = (SAMPLE_S.min(time_s / 4.0) / once_s).clamp(1.0, REPEATS_MAX) as usize;
        self.samples(time_s, |timer| {
            let seconds = timer.seconds(|dev| (0..repeats).try_for_each(|_| work(dev)))?;
            Ok(units * repeats as f64 / seconds)
        })
    }
}
