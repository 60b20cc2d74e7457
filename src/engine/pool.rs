//! Executors of the optimizer's jobs: worker threads, the driver's thread in adversarial tests, or a simulated pool.

use crate::device::sim::SimPool;
use crate::error::{Error, Result};
use crate::host::heartbeats::Heartbeats;
use crate::host::pool::{Job, Threads, run_alone};
use crate::trace::{Recorder, now_ns};
use std::sync::Arc;

pub enum Pool<J: Job> {
    Threads(Threads<J>),
    /// The caller's thread, in [`Pool::advance`]; the seeded adversary chooses when.
    Stepped(Stepped<J>),
    /// No execution: only the simulated clock advances.
    Simulated(SimPool),
}

/// A pool without threads.
pub struct Stepped<J> {
    job: Option<J>,
    recorder: Recorder,
    busy_ns: u64,
}

impl<J: Job> Pool<J> {
    /// A pool that runs jobs on the caller's thread, last piece first.
    pub fn stepped(trace_spans: usize) -> Self {
        Self::Stepped(Stepped { job: None, recorder: Recorder::new("adam", trace_spans), busy_ns: 0 })
    }

    /// [`Threads::submit`].
    pub fn submit(&mut self, job: J) {
        match self {
            Self::Threads(pool) => pool.submit(job),
            Self::Stepped(pool) => assert!(pool.job.replace(job).is_none(), "one job at a time"),
            Self::Simulated(pool) => pool.submit(job.label(), job.traffic_bytes()),
        }
    }

    /// [`Threads::is_idle`].
    pub fn is_idle(&self) -> Result<bool> {
        match self {
            Self::Threads(pool) => pool.is_idle(),
            Self::Stepped(pool) => Ok(pool.job.is_none()),
            Self::Simulated(pool) => Ok(pool.is_idle()),
        }
    }

    /// [`Threads::heartbeats`]; without workers if there are no threads.
    pub(crate) fn heartbeats(&self) -> Arc<Heartbeats> {
        match self {
            Self::Threads(pool) => pool.heartbeats(),
            Self::Stepped(_) | Self::Simulated(_) => Arc::default(),
        }
    }

    /// [`Threads::busy_ns`].
    pub(crate) fn busy_ns(&self) -> u64 {
        match self {
            Self::Threads(pool) => pool.busy_ns(),
            Self::Stepped(pool) => pool.busy_ns,
            Self::Simulated(pool) => pool.busy_ns(),
        }
    }

    /// Lets a stepped pool run its job. Returns false if there is none, or if the pool has threads or is simulated.
    pub(crate) fn advance(&mut self) -> bool {
        let Self::Stepped(pool) = self else { return false };
        let Some(job) = pool.job.take() else { return false };
        let (start, (name, index)) = (now_ns(), job.label());
        run_alone(job);
        pool.recorder.span(name, index, start);
        pool.busy_ns += now_ns() - start;
        true
    }

    /// [`Threads::finish`]; an error if the pool is not idle.
    pub fn finish(&mut self) -> Result<Vec<Recorder>> {
        if !self.is_idle()? {
            return Err(Error::resource("end the optimizer workers", "a job is not done"));
        }
        match self {
            Self::Threads(pool) => pool.finish(),
            Self::Stepped(pool) => Ok(vec![std::mem::take(&mut pool.recorder)]),
            Self::Simulated(pool) => Ok(vec![pool.finish()]),
        }
    }
}
