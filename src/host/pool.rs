//! The optimizer's worker pool: one job at a time, divided into pieces that the workers take one by one.
//!
//! With a fixed division the whole pool would wait for its slowest worker, 16 to 25 % longer where virtual machines share cores and memory.
//! The assignment of pieces to workers changes no bit. The driver publishes a job, the workers run it, and the last worker to finish rings
//! the driver's doorbell.
//!
//! On a machine with several memory nodes each bucket is spread over all of them, its first part on the first node
//! (`HostMemory::alloc_periodic`). Pieces are counted for each node. A worker begins with the pieces of its own node, then takes pieces of
//! other nodes.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::host::heartbeats::Heartbeats;
use crate::host::worker_nodes::WorkerNodes;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{UnsafeCell, mpsc};
use crate::trace::{Recorder, now_ns};
use std::sync::Arc;

/// Work for a pool: plain data, divided into pieces.
///
/// # Safety
/// A job has access to all memory that its pieces touch: until all pieces are done, the memory stays valid and has no other user. A
/// function that makes jobs is therefore `unsafe` unless it ensures this itself. Pieces of one job touch disjoint memory, except memory
/// that they only read.
pub unsafe trait Job: Send + Sync + 'static {
    /// Name and index of the span that a worker records.
    fn label(&self) -> (&'static str, u32);
    /// Bytes that the job reads and writes.
    fn traffic_bytes(&self) -> u64;
    fn pieces(&self) -> usize;
    /// Runs a piece.
    ///
    /// # Safety
    /// No two threads run the same piece at the same time.
    unsafe fn run(&self, piece: usize);
}

/// Runs `job` on this thread, the last piece first.
pub fn run_alone(job: impl Job) {
    // SAFETY: this thread owns the job and runs one piece after the other.
    (0..job.pieces()).rev().for_each(|piece| unsafe { job.run(piece) });
}

/// Gives the calling thread the lowest priority.
pub(crate) fn yield_to_others() {
    const THIS_THREAD: u32 = 0;
    // SAFETY: the arguments are numbers. A lower priority is always allowed.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, THIS_THREAD, 19) };
}

/// A job that accesses only memory that it owns.
pub struct Call<F> {
    /// Name and index of its span.
    pub label: (&'static str, u32),
    pub pieces: usize,
    pub run: F,
}

// SAFETY: `run` is safe code that threads may share, for every piece.
unsafe impl<F: Fn(usize) + Send + Sync + 'static> Job for Call<F> {
    fn label(&self) -> (&'static str, u32) {
        self.label
    }

    fn traffic_bytes(&self) -> u64 {
        0
    }

    fn pieces(&self) -> usize {
        self.pieces
    }

    unsafe fn run(&self, piece: usize) {
        (self.run)(piece);
    }
}

pub struct Threads<J: Job> {
    shared: Arc<PoolShared<J>>,
    handles: Vec<JoinHandle<Recorder>>,
    published: u64,
}

struct PoolShared<J> {
    /// Written by the driver while `remaining` is zero, read by the workers after `generation` rises.
    job: UnsafeCell<Option<J>>,
    generation: AtomicU64,
    /// Number of pieces taken, for each node.
    taken: Vec<Taken>,
    /// Workers that have not finished the job.
    remaining: AtomicUsize,
    /// Time at which the job was published, and total time of all earlier jobs.
    published_ns: AtomicU64,
    busy_ns: AtomicU64,
    /// Set when a worker panics: the job will never be complete.
    failed: AtomicBool,
    bells: Vec<Doorbell>,
    driver: Arc<Doorbell>,
    heartbeats: Arc<Heartbeats>,
}

// SAFETY: only the driver writes `job`, while no worker runs (`remaining` is zero, acquired); workers read it only after the release of the
// next `generation`.
unsafe impl<J: Send + Sync> Sync for PoolShared<J> {}

/// Number of pieces taken on one node, on a separate cache line to avoid false sharing between nodes.
#[derive(Default)]
#[repr(align(128))]
struct Taken(AtomicUsize);

impl<J: Job> PoolShared<J> {
    /// Runs pieces until all are taken, those of the node `node` first.
    fn work_on(&self, job: &J, worker: usize, node: usize) {
        let (nodes, pieces) = (self.taken.len(), job.pieces());
        for node in (node..nodes).chain(0..node) {
            let (start, end) = (pieces * node / nodes, pieces * (node + 1) / nodes);
            let taken = std::iter::repeat_with(|| start + self.taken[node].0.fetch_add(1, Ordering::Relaxed));
            taken.take_while(|&piece| piece < end).for_each(|piece| {
                self.heartbeats.beat(worker);
                // SAFETY: `taken` returns each number to one worker only, and is reset while no worker has a job.
                unsafe { job.run(piece) };
            });
        }
    }
}

/// The generation that makes workers end.
const STOP: u64 = u64::MAX;

impl<J: Job> Threads<J> {
    /// Starts `workers` threads with memory nodes `worker_nodes`. `on_start(worker)` runs first on each thread (naming, pinning); `driver`
    /// is rung when a job ends. Workers spin between jobs if the machine has more CPUs than workers.
    ///
    /// # Errors
    /// `Resource` when a thread cannot start or `on_start` fails.
    pub fn start(
        workers: usize,
        worker_nodes: WorkerNodes,
        driver: Arc<Doorbell>,
        trace_spans: usize,
        on_start: impl Fn(usize) -> Result<()> + Send + Clone + 'static,
    ) -> Result<Self> {
        let has_core = std::thread::available_parallelism().is_ok_and(|cpus| workers < cpus.get());
        Self::spawn(workers, worker_nodes, driver, trace_spans, on_start, has_core)
    }

    /// Starts `workers` threads beside compute threads, to which they leave their cores soon after a job: a thread that spins on a core that
    /// a compute thread needs delays the job that it waits for. `on_start`, `driver` and `worker_nodes` are those of [`Threads::start`].
    ///
    /// # Errors
    /// `Resource` when a thread cannot start or `on_start` fails.
    pub(crate) fn start_beside_compute(
        workers: usize,
        worker_nodes: WorkerNodes,
        driver: Arc<Doorbell>,
        trace_spans: usize,
        on_start: impl Fn(usize) -> Result<()> + Send + Clone + 'static,
    ) -> Result<Self> {
        Self::spawn(workers, worker_nodes, driver, trace_spans, on_start, false)
    }

    /// `has_core` says whether each worker has a core to itself.
    fn spawn(
        workers: usize,
        worker_nodes: WorkerNodes,
        driver: Arc<Doorbell>,
        trace_spans: usize,
        on_start: impl Fn(usize) -> Result<()> + Send + Clone + 'static,
        has_core: bool,
    ) -> Result<Self> {
        let bells = (0..workers).map(|_| Doorbell::new(has_core)).collect();
        let (generation, remaining) = (AtomicU64::new(0), AtomicUsize::new(0));
        let failed = AtomicBool::new(false);
        let (published_ns, busy_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        let (job, taken) = (UnsafeCell::new(None), (0..worker_nodes.nodes).map(|_| Taken::default()).collect());
        let heartbeats = Arc::new(Heartbeats::new(workers));
        let shared = Arc::new(PoolShared { job, generation, taken, remaining, published_ns, busy_ns, failed, bells, driver, heartbeats });
        let mut pool = Self { shared, handles: Vec::with_capacity(workers), published: 0 };
        let (started, outcome) = mpsc::channel();
        for worker in 0..workers {
            let (shared, started, on_start) = (pool.shared.clone(), started.clone(), on_start.clone());
            let node = worker_nodes.of_worker.get(worker).map_or(0, |&node| node % worker_nodes.nodes);
            let body = move || {
                let _ = started.send(on_start(worker));
                drop(started);
                work(&shared, worker, node, Recorder::new(format!("adam-{worker:02}"), trace_spans))
            };
            let spawned = thread::Builder::new().name(format!("adam-{worker:02}")).spawn(body);
            pool.handles.push(spawned.map_err(|e| Error::resource(format!("start optimizer worker {worker}"), e))?);
        }
        drop(started);
        (0..workers).map_while(|_| outcome.recv().ok()).collect::<Result<Vec<()>>>()?;
        Ok(pool)
    }

    /// Submits the next job.
    ///
    /// # Panics
    /// If the last job is not done.
    pub fn submit(&mut self, job: J) {
        assert!(matches!(self.is_idle(), Ok(true)), "one job at a time");
        self.published += 1;
        self.shared.heartbeats.given(self.published, job.label().1);
        // SAFETY: `remaining` was zero, so no worker reads the job now.
        self.shared.job.with_mut(|place| unsafe { *place = Some(job) });
        self.shared.taken.iter().for_each(|taken| taken.0.store(0, Ordering::Relaxed));
        self.shared.remaining.store(self.handles.len(), Ordering::Relaxed);
        self.shared.published_ns.store(now_ns(), Ordering::Relaxed);
        self.announce(self.published);
    }

    /// Whether the last job is done.
    ///
    /// # Errors
    /// `Resource` if a worker panicked: its bucket is partly stepped and must not be saved.
    pub fn is_idle(&self) -> Result<bool> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(Error::resource("step a bucket", "an optimizer worker panicked; see the message above"));
        }
        Ok(self.shared.remaining.load(Ordering::Acquire) == 0)
    }

    pub(crate) fn heartbeats(&self) -> Arc<Heartbeats> {
        self.shared.heartbeats.clone()
    }

    /// Total nanoseconds between the submission of each job and the end of its last worker.
    pub(crate) fn busy_ns(&self) -> u64 {
        self.shared.busy_ns.load(Ordering::Relaxed)
    }

    /// Ends the workers after their current job, and returns their recorded spans.
    ///
    /// # Errors
    /// `Resource` when a worker has panicked.
    pub fn finish(&mut self) -> Result<Vec<Recorder>> {
        self.stop()
    }

    fn announce(&self, generation: u64) {
        self.shared.generation.store(generation, Ordering::Release);
        self.shared.bells.iter().for_each(Doorbell::ring);
    }

    fn stop(&mut self) -> Result<Vec<Recorder>> {
        self.announce(STOP);
        let join = |h: JoinHandle<Recorder>| h.join().map_err(|_| Error::resource("join optimizer worker", "it panicked"));
        self.handles.drain(..).map(join).collect()
    }
}

impl<J: Job> Drop for Threads<J> {
    fn drop(&mut self) {
        // `finish` reports a worker's panic; on this path the driver is already unwinding or done.
        let _ = self.stop();
    }
}

/// Reports a worker's panic to the driver, which would otherwise wait forever.
struct WorkerPanic<'a, J: Job>(&'a PoolShared<J>);

impl<J: Job> Drop for WorkerPanic<'_, J> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
            self.0.driver.ring();
        }
    }
}

fn work<J: Job>(shared: &PoolShared<J>, worker: usize, node: usize, mut recorder: Recorder) -> Recorder {
    let _guard = WorkerPanic(shared);
    let mut seen = 0;
    loop {
        shared.bells[worker].wait_until(|| shared.generation.load(Ordering::Acquire) != seen);
        seen = shared.generation.load(Ordering::Acquire);
        if seen == STOP {
            return recorder;
        }
        shared.job.with(|job| {
            // SAFETY: published before `generation`; the driver does not write until this worker has decremented `remaining`.
            let Some(job) = (unsafe { &*job }) else { return };
            let (start, (name, index)) = (now_ns(), job.label());
            shared.work_on(job, worker, node);
            recorder.span(name, index, start);
        });
        // Read before the decrement: once the count is zero the driver may publish the next job.
        let job_ns = now_ns() - shared.published_ns.load(Ordering::Relaxed);
        shared.heartbeats.done(worker, seen);
        if shared.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            shared.busy_ns.fetch_add(job_ns, Ordering::Relaxed);
            shared.driver.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_piece_of_every_job_is_done_once() {
        const PIECES: usize = 7;
        let (bell, jobs) = (Arc::new(Doorbell::default()), if cfg!(miri) { 5 } else { 100 });
        // One node; a node without its own worker; more nodes than pieces.
        for (nodes, of_worker) in [(1, vec![]), (3, vec![0, 1]), (9, vec![8, 0, 4])] {
            let sums = Arc::new([const { AtomicU32::new(0) }; PIECES]);
            let mut pool = Threads::start(3, WorkerNodes { nodes, of_worker }, bell.clone(), 1000, |_| Ok(())).unwrap();
            for i in 1..=jobs {
                let sums = sums.clone();
                let run = move |piece: usize| _ = sums[piece].fetch_add(i, Ordering::Relaxed);
                pool.submit(Call { label: ("count", i), pieces: PIECES, run });
                bell.wait_until(|| pool.is_idle().unwrap());
            }
            let recorders = pool.finish().unwrap();
            assert!(recorders.iter().all(|r| r.spans().len() == jobs as usize));
            assert_eq!(sums.each_ref().map(|sum| sum.load(Ordering::Relaxed)), [jobs * (jobs + 1) / 2; PIECES], "{nodes} nodes");
        }
    }

    #[test]
    fn a_worker_does_the_pieces_of_its_own_node_first() {
        let (bell, places) = (Arc::new(Doorbell::default()), Arc::<[AtomicU32; 4]>::default());
        let worker_nodes = WorkerNodes { nodes: 2, of_worker: vec![1, 0] };
        let mut pool = Threads::start(2, worker_nodes, bell.clone(), 0, |_| Ok(())).unwrap();
        let seen = places.clone();
        let run = move |piece: usize| {
            let worker = std::thread::current().name().unwrap().ends_with("01");
            seen[piece].store(worker.into(), Ordering::Relaxed);
            // Long enough for both workers to begin.
            std::thread::sleep(std::time::Duration::from_millis(50));
        };
        pool.submit(Call { label: ("place", 0), pieces: 4, run });
        bell.wait_until(|| pool.is_idle().unwrap());
        pool.finish().unwrap();
        let first_of_node = [0, 2].map(|piece: usize| places[piece].load(Ordering::Relaxed));
        assert_eq!(first_of_node, [1, 0], "worker 1 is on node 0");
    }

    #[test]
    fn a_worker_that_cannot_be_placed_is_an_error() {
        let failing = |worker: usize| if worker == 1 { Err(Error::resource("pin adam-01", "no such cpu")) } else { Ok(()) };
        let result = Threads::<Call<fn(usize)>>::start(3, WorkerNodes::default(), Arc::default(), 0, failing);
        assert!(result.err().unwrap().to_string().contains("adam-01"));
    }
}
