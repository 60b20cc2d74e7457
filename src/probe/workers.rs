//! Threads like the optimizer's, and their rates.

use super::samples::Samples;
use crate::engine::pool::Pool;
use crate::error::Result;
use crate::hardware::topology::Topology;
use crate::host::affinity::{CpuPlacement, name_and_pin};
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::HugePagesChoice;
use crate::host::memory_policy::MemoryPolicy;
use crate::host::perf::WORKER_ROLE;
use crate::host::pool::{Job, Threads};
use crate::trace::now_ns;
use std::sync::Arc;

/// Warm-up jobs that are not timed: they map pages and wake threads.
const WARM_UP: usize = 2;

/// A pool with its threads placed as in a run.
pub struct Workers<J: Job> {
    pub pool: Pool<J>,
    bell: Arc<Doorbell>,
}

impl<J: Job> Workers<J> {
    /// Starts `threads` workers.
    ///
    /// # Errors
    /// `Resource` if a thread cannot be started or placed.
    pub fn new(topology: &Topology, threads: usize) -> Result<Self> {
        Self::ringing(Arc::default(), topology, threads)
    }

    /// Starts `threads` workers that ring `bell`.
    pub(crate) fn ringing(bell: Arc<Doorbell>, topology: &Topology, threads: usize) -> Result<Self> {
        let placement = CpuPlacement::on(topology, threads);
        let worker_nodes = memory_policy(topology, threads)?.worker_nodes();
        let on_start =
            move |worker: usize| placement.as_ref().map_or(Ok(()), |place| name_and_pin(WORKER_ROLE, worker, place.workers[worker]));
        Ok(Self { pool: Pool::Threads(Threads::start(threads, worker_nodes, bell.clone(), 0, on_start)?), bell })
    }

    /// Bytes per second that jobs move, measured for about `time_s`. `job` creates the next job.
    pub fn rates(&mut self, time_s: f64, mut job: impl FnMut(usize) -> J) -> Result<Samples> {
        let mut rate = |index| -> Result<f64> {
            let (job, start_ns) = (job(index), now_ns());
            let bytes = job.traffic_bytes() as f64;
            self.pool.submit(job);
            self.wait()?;
            Ok(bytes / seconds_since(start_ns))
        };
        (0..WARM_UP).try_for_each(|index| rate(index).map(drop))?;
        let (start_ns, mut rates) = (now_ns(), Vec::new());
        while rates.is_empty() || seconds_since(start_ns) < time_s {
            rates.push(rate(WARM_UP + rates.len())?);
        }
        Ok(Samples::new(rates))
    }

    fn wait(&self) -> Result<()> {
        let mut idle = Ok(false);
        self.bell.wait_until(|| {
            idle = self.pool.is_idle();
            !matches!(idle, Ok(false))
        });
        idle.map(drop)
    }
}

/// The memory policy of a run with this number of workers.
pub fn memory_policy(topology: &Topology, threads: usize) -> Result<MemoryPolicy> {
    let cpus = CpuPlacement::on(topology, threads).map_or(Vec::new(), |placement| placement.workers);
    MemoryPolicy::new(topology, HugePagesChoice::Auto, &cpus, threads)
}

fn seconds_since(start_ns: u64) -> f64 {
    (now_ns() - start_ns).max(1) as f64 * 1e-9
}
