//! Who runs the optimizer's jobs: worker threads, the driver itself under the adversary, or nobody in a simulation.

use crate::device::sim::SimPool;
use crate::error::{Error, Result};
use crate::host::pool::{Job, Threads, run_alone};
use crate::host::pulse::Pulse;
use crate::trace::{Recorder, now_ns};
use std::sync::Arc;

pub enum Pool<J: Job> {
    Threads(Threads<J>),
    /// The caller's thread, whenever it calls [`Pool::advance`]: the seeded adversary decides when.
    Stepped(Stepped<J>),
    /// Nobody: time passes as if.
    Simulated(SimPool),
}

/// A pool without threads.
pub struct Stepped<J> {
    job: Option<J>,
    recorder: Recorder,
    busy_ns: u64,
}

impl<J: Job> Pool<J> {
    /// A pool whose jobs run on the caller's thread, last piece first.
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

    /// [`Threads::pulse`]; of no worker, where there are no threads.
    pub(crate) fn pulse(&self) -> Arc<Pulse> {
        match self {
            Self::Threads(pool) => pool.pulse(),
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

    /// Lets a stepped pool do its job; false when there is none, or when threads do the work anyway.
    pub(crate) fn advance(&mut self) -> bool {
        let Self::Stepped(pool) = self else { return false };
        let Some(job) = pool.job.take() else { return false };
        let (start, (name, index)) = (now_ns(), job.label());
        run_alone(job);
        pool.recorder.span(name, index, start);
        pool.busy_ns += now_ns() - start;
        true
    }

    /// [`Threads::finish`], once the pool is idle: an error otherwise.
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
