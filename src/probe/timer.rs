//! Device work timed by the device's clock.

use super::samples::Samples;
use crate::device::{Device, EventId, Stream};
use crate::error::Result;

/// Target duration of a sample in seconds, long enough to make its start and end negligible.
const SAMPLE_S: f64 = 0.02;
/// Maximum number of repetitions in a sample, below the capacity of a launch queue.
const REPEATS_MAX: f64 = 256.0;
/// Maximum number of samples, so that a clock that stands still does not fill the memory.
const SAMPLES_MAX: usize = 4096;

/// A device with events at the ends of its streams.
pub struct Timer<'a, D> {
    pub dev: &'a mut D,
    ends: [EventId; 3],
}

impl<'a, D: Device> Timer<'a, D> {
    /// Creates the events to measure `dev`.
    pub fn new(dev: &'a mut D) -> Result<Self> {
        let ends = [dev.event()?, dev.event()?, dev.event()?];
        Ok(Self { dev, ends })
    }

    /// Waits until all streams are empty.
    pub fn settle(&mut self) -> Result<()> {
        for (stream, end) in Stream::ALL.into_iter().zip(self.ends) {
            self.dev.record(end, stream)?;
        }
        self.ends.into_iter().try_for_each(|end| self.dev.synchronize(end))
    }

    /// Seconds since `start_ns` on the device's clock.
    pub fn since(&self, start_ns: u64) -> f64 {
        // A clock that did not advance would give an infinite rate.
        self.dev.now_ns().saturating_sub(start_ns).max(1) as f64 * 1e-9
    }

    /// Seconds from the call of `work` to the end of everything that it enqueued.
    ///
    /// # Errors
    /// Errors of the device and of `work`.
    pub fn seconds(&mut self, work: impl FnOnce(&mut D) -> Result<()>) -> Result<f64> {
        let start_ns = self.dev.now_ns();
        work(self.dev)?;
        self.settle()?;
        Ok(self.since(start_ns))
    }

    /// Takes samples for about `time_s`, at least one.
    pub fn samples(&mut self, time_s: f64, mut sample: impl FnMut(&mut Self) -> Result<f64>) -> Result<Samples> {
        let (start_ns, mut samples) = (self.dev.now_ns(), Vec::new());
        while samples.is_empty() || (self.since(start_ns) < time_s && samples.len() < SAMPLES_MAX) {
            samples.push(sample(self)?);
        }
        Ok(Samples::new(samples))
    }

    /// Repeats `work`, which performs `units`, for about `time_s`. Returns units per second.
    ///
    /// # Errors
    /// Errors of the device and of `work`.
    pub fn rates(&mut self, time_s: f64, units: f64, mut work: impl FnMut(&mut D) -> Result<()>) -> Result<Samples> {
        // The first run may compile or allocate.
        self.seconds(&mut work)?;
        let once_s = self.seconds(&mut work)?;
        let repeats = (SAMPLE_S.min(time_s / 4.0) / once_s).clamp(1.0, REPEATS_MAX) as usize;
        self.samples(time_s, |timer| {
            let seconds = timer.seconds(|dev| (0..repeats).try_for_each(|_| work(dev)))?;
            Ok(units * repeats as f64 / seconds)
        })
    }
}
