//! Measurement of the pool's wake-up latency.

use super::affinity::{CpuPlacement, name_and_pin};
use super::doorbell::Doorbell;
use super::pool::{Call, Threads};
use super::worker_nodes::WorkerNodes;
use crate::error::Result;
use crate::units::counted;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Nanoseconds from the submission of an empty job to the end of its last worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeUp {
    /// Workers measured.
    pub workers: usize,
    /// Latency while workers still spin after the previous job.
    pub spinning: Latency,
    /// Latency after workers have gone to sleep.
    pub parked: Latency,
}

/// Median and 99th percentile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// Median.
    pub ns_median: u64,
    /// 99th percentile.
    pub ns_p99: u64,
}

const SPINNING_JOBS: usize = 1000;
const PARKED_JOBS: usize = 100;
/// Longer than the spin time of any worker.
const PAUSE: Duration = Duration::from_millis(3);

impl WakeUp {
    /// Measures a pool of `workers`, placed as in a run. Takes about half a second.
    ///
    /// # Errors
    /// `Resource` when a thread cannot be started or placed.
    pub fn measure(workers: usize, placement: Option<CpuPlacement>) -> Result<Self> {
        let bell = Arc::new(Doorbell::default());
        let on_start = move |worker: usize| placement.as_ref().map_or(Ok(()), |place| name_and_pin("wake", worker, place.workers[worker]));
        let mut pool = Threads::start(workers, WorkerNodes::default(), bell.clone(), 0, on_start)?;
        let mut sample = |pause: Option<Duration>| -> Result<u64> {
            pause.into_iter().for_each(std::thread::sleep);
            let before = pool.busy_ns();
            pool.submit(Call { label: ("empty", 0), pieces: 0, run: |_| () });
            let mut idle = Ok(false);
            bell.wait_until(|| {
                idle = pool.is_idle();
                !matches!(idle, Ok(false))
            });
            idle.map(|_| pool.busy_ns() - before)
        };
        let mut latency = |jobs: usize, pause: Option<Duration>| (0..jobs).map(|_| sample(pause)).collect::<Result<_>>().map(Latency::new);
        let (spinning, parked) = (latency(SPINNING_JOBS, None)?, latency(PARKED_JOBS, Some(PAUSE))?);
        pool.finish()?;
        Ok(Self { workers, spinning, parked })
    }
}

impl Latency {
    fn new(mut samples: Vec<u64>) -> Self {
        samples.sort_unstable();
        Self { ns_median: samples[samples.len() / 2], ns_p99: samples[samples.len() * 99 / 100] }
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        write!(f, "{:.1} us (99 %: {:.1})", us(self.ns_median), us(self.ns_p99))
    }
}

impl fmt::Display for WakeUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} spinning, {} parked, {}", self.spinning, self.parked, counted(self.workers, "worker"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_ordered_and_every_job_is_counted() {
        let latency = Latency::new((1..=200).rev().map(|us| us * 1000).collect());
        assert_eq!(latency, Latency { ns_median: 101_000, ns_p99: 199_000 });
        assert_eq!(latency.to_string(), "101.0 us (99 %: 199.0)");
        let wake_up = WakeUp::measure(1, None).unwrap();
        assert!(wake_up.spinning.ns_median > 0 && wake_up.parked.ns_median > 0, "{wake_up}");
        assert!(wake_up.spinning.ns_p99 >= wake_up.spinning.ns_median && wake_up.parked.ns_p99 >= wake_up.parked.ns_median);
    }
}
