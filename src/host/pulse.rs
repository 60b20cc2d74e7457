//! Signs of life of a pool's workers, for whoever watches them: each worker writes its own, with relaxed stores.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the workers of a pool were given, and how far each of them is.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// Jobs given, and the index of the last one's span: its bucket.
    jobs: AtomicU64,
    index: AtomicU64,
    workers: Box<[Worker]>,
}

/// One worker, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Worker {
    /// Jobs done.
    jobs: AtomicU64,
    /// Pieces begun.
    pieces: AtomicU64,
}

impl Pulse {
    /// Of `workers` that have done nothing yet.
    pub(super) fn new(workers: usize) -> Self {
        Self { workers: (0..workers).map(|_| Worker::default()).collect(), ..Self::default() }
    }

    /// The driver gives job number `jobs`, from 1, whose span has this index.
    pub(super) fn given(&self, jobs: u64, index: u32) {
        self.index.store(index.into(), Ordering::Relaxed);
        self.jobs.store(jobs, Ordering::Relaxed);
    }

    /// `worker` begins a piece.
    pub(super) fn beat(&self, worker: usize) {
        let pieces = &self.workers[worker].pieces;
        pieces.store(pieces.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// `worker` is done with job number `jobs`.
    pub(super) fn done(&self, worker: usize, jobs: u64) {
        self.workers[worker].jobs.store(jobs, Ordering::Relaxed);
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Number and bucket of the job that `worker` has been given and is not done with.
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
