//! Heartbeats of a pool's workers for the watchdog. Each worker writes its own, with relaxed stores.

use std::sync::atomic::{AtomicU64, Ordering};

/// Jobs submitted to the workers of a pool, and the progress of each worker.
#[derive(Debug, Default)]
pub(crate) struct Heartbeats {
    /// Number of submitted jobs, and the span index of the last one, which is its bucket.
    jobs: AtomicU64,
    index: AtomicU64,
    workers: Box<[Worker]>,
}

/// Progress of one worker, on a separate cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Worker {
    /// Jobs done.
    jobs: AtomicU64,
    /// Pieces begun.
    pieces: AtomicU64,
}

impl Heartbeats {
    /// Heartbeats of `workers` that have not started any job.
    pub(super) fn new(workers: usize) -> Self {
        Self { workers: (0..workers).map(|_| Worker::default()).collect(), ..Self::default() }
    }

    /// Records that the driver submits job number `jobs`, counted from 1, with this span index.
    pub(super) fn given(&self, jobs: u64, index: u32) {
        self.index.store(index.into(), Ordering::Relaxed);
        self.jobs.store(jobs, Ordering::Relaxed);
    }

    /// Records that `worker` begins a piece.
    pub(super) fn beat(&self, worker: usize) {
        let pieces = &self.workers[worker].pieces;
        pieces.store(pieces.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Records that `worker` has finished job number `jobs`.
    pub(super) fn done(&self, worker: usize, jobs: u64) {
        self.workers[worker].jobs.store(jobs, Ordering::Relaxed);
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Number and bucket of the job that `worker` has not finished yet.
    pub(crate) fn owes(&self, worker: usize) -> Option<(u64, u64)> {
        let jobs = self.jobs.load(Ordering::Relaxed);
        let done = self.workers[worker].jobs.load(Ordering::Relaxed);
        (done < jobs).then(|| (jobs, self.index.load(Ordering::Relaxed)))
    }

    /// Pieces that `worker` has begun so far.
    pub(crate) fn pieces(&self, worker: usize) -> u64 {
        self.workers[worker].pieces.load(Ordering::Relaxed)
    }
}
