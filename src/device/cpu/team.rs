//! Fork-join over independent blocks, without allocation and without locks.
//!
//! A job is a number of blocks and a closure. The caller opens a gate, wakes its helpers, works along, closes the gate and waits for the
//! helpers that are still inside. A late helper finds the gate closed and keeps sleeping, so a small job never waits for a thread that the
//! system has not scheduled yet. An atomic counter assigns the blocks to threads in no fixed order, so blocks must not depend on one
//! another.

use crate::error::{Error, Result};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Work of a job: `(thread, block)`.
type BlockWork<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Polls of an idle helper before it sleeps, and of a waiting caller before it yields its core, if each thread has a core. Otherwise a thread
/// that spins delays the thread that it waits for, and none does.
const SPINS: u32 = 2000;

/// Flag in [`TeamShared::gate`]: helpers may enter. The bits below count the helpers inside; the bits above are the number of the job.
const OPEN: u64 = 1 << 16;
const JOB_SHIFT: u32 = 17;

struct TeamJob {
    work: *const BlockWork<'static>,
    blocks: usize,
}

struct TeamShared {
    /// Written by the caller while the gate is closed and no helper is inside; read by helpers inside.
    job: UnsafeCell<TeamJob>,
    gate: AtomicU64,
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// [`SPINS`], or 1 if there are more threads than cores.
    spins: u32,
}

// SAFETY: the gate separates the caller's writes of `job` from the helpers' reads, and the closure is `Sync`.
unsafe impl Send for TeamShared {}
// SAFETY: as above.
unsafe impl Sync for TeamShared {}

/// The compute threads: the caller's own and its helpers.
pub(crate) struct Team {
    shared: Arc<TeamShared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of `threads`: the caller and `threads - 1` helpers, named `compute-01` and so on.
    ///
    /// # Errors
    /// `Resource` when the system cannot start a thread.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        fn nothing(_: usize, _: usize) {}
        let job = UnsafeCell::new(TeamJob { work: &nothing, blocks: 0 });
        let (gate, next) = (AtomicU64::new(0), AtomicUsize::new(0));
        let spins = if std::thread::available_parallelism().is_ok_and(|cores| threads <= cores.get()) { SPINS } else { 1 };
        let [panicked, stop] = [false; 2].map(AtomicBool::new);
        let shared = Arc::new(TeamShared { job, gate, next, panicked, stop, spins });
        let mut team = Self { shared, helpers: Vec::new() };
        for thread in 1..threads {
            let shared = Arc::clone(&team.shared);
            let helper = std::thread::Builder::new().name(format!("compute-{thread:02}")).spawn(move || shared.help(thread));
            team.helpers.push(helper.map_err(|e| Error::resource(format!("start compute thread {thread} of {threads}"), e))?);
        }
        Ok(team)
    }

    /// Number of threads, including the caller's.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work(thread, block)` for every block below `blocks` and returns when all have run. `thread` is below [`Team::threads`], and
    /// each thread runs one block at a time.
    ///
    /// # Panics
    /// If a block panics. Blocks that have not begun are then skipped.
    pub(crate) fn run(&mut self, blocks: usize, work: &BlockWork<'_>) {
        if self.helpers.is_empty() || blocks <= 1 {
            for block in 0..blocks {
                work(0, block);
            }
            return;
        }
        self.open(blocks, work);
        for helper in self.helpers.iter().take(blocks - 1) {
            helper.thread().unpark();
        }
        let outcome = self.shared.work(0);
        self.close();
        // Reset before a panic unwinds, so that the next job starts clean.
        let helper_panicked = self.shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        assert!(!helper_panicked, "a compute helper panicked");
    }

    fn open(&self, blocks: usize, work: &BlockWork<'_>) {
        // SAFETY: only the lifetime changes; `close` waits for every helper before `run` returns, even after a panic.
        let work = unsafe { std::mem::transmute::<*const BlockWork<'_>, *const BlockWork<'static>>(work) };
        // SAFETY: the gate is closed and no helper is inside: `close` ensured both, and `run` borrows the team exclusively.
        unsafe { *self.shared.job.get() = TeamJob { work, blocks } };
        self.shared.next.store(0, Ordering::Relaxed);
        let number = (self.shared.gate.load(Ordering::Relaxed) >> JOB_SHIFT) + 1;
        self.shared.gate.store((number << JOB_SHIFT) | OPEN, Ordering::Release);
    }

    fn close(&self) {
        self.shared.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let mut turns = 0;
        while self.shared.gate.load(Ordering::Acquire) & (OPEN - 1) != 0 {
            turns += 1;
            if turns < self.shared.spins { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper catches all panics of its blocks, so the result carries no information.
            let _ = helper.join();
        }
    }
}

impl TeamShared {
    /// Main loop of helper `thread`.
    fn help(&self, thread: usize) {
        let mut done = 0;
        while let Some(gate) = self.next_job(done) {
            if self.gate.compare_exchange(gate, gate + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            if self.work(thread).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.gate.fetch_sub(1, Ordering::Release);
            done = gate >> JOB_SHIFT;
        }
    }

    /// Waits for an open gate with a job other than `done`; `None` when the team ends.
    fn next_job(&self, done: u64) -> Option<u64> {
        let mut turns = 0;
        loop {
            let gate = self.gate.load(Ordering::Relaxed);
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            if gate & OPEN != 0 && gate >> JOB_SHIFT != done {
                return Some(gate);
            }
            turns += 1;
            if turns % self.spins == 0 { std::thread::park() } else { std::hint::spin_loop() }
        }
    }

    /// Runs blocks until none is left. Called only inside the gate, or by the caller of the job.
    fn work(&self, thread: usize) -> std::result::Result<(), Box<dyn Any + Send>> {
        // SAFETY: the caller wrote the job before it opened the gate, and job and closure stay valid until this thread leaves the gate.
        let (work, blocks) = unsafe { (&*(*self.job.get()).work, (*self.job.get()).blocks) };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let block = self.next.fetch_add(1, Ordering::Relaxed);
                if block >= blocks {
                    break;
                }
                work(thread, block);
            }
        }));
        if outcome.is_err() {
            self.next.store(blocks, Ordering::Relaxed);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_runs_once_for_any_number_of_threads_and_blocks() {
        for threads in [1, 2, 3, 5] {
            let mut team = Team::new(threads).unwrap();
            for blocks in (0..200).chain([5000]) {
                let hits: Vec<AtomicUsize> = (0..blocks).map(|_| AtomicUsize::new(0)).collect();
                team.run(blocks, &|thread, block| {
                    assert!(thread < threads);
                    hits[block].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{threads} threads, {blocks} blocks");
            }
        }
    }

    #[test]
    fn helpers_that_sleep_wake_up_and_work() {
        let mut team = Team::new(2).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let both = std::sync::Barrier::new(2);
        // Two blocks that wait for each other can finish only on two threads.
        team.run(2, &|_, _| {
            both.wait();
        });
    }

    #[test]
    fn a_panicking_block_panics_the_caller_and_the_team_lives_on() {
        for threads in [1, 2, 4] {
            let mut team = Team::new(threads).unwrap();
            for bad in 0..20 {
                let runs = AtomicUsize::new(0);
                let run = catch_unwind(AssertUnwindSafe(|| {
                    team.run(20, &|_, block| {
                        runs.fetch_add(1, Ordering::Relaxed);
                        assert_ne!(block, bad);
                    });
                }));
                assert!(run.is_err() && runs.into_inner() <= 20, "{threads} threads, block {bad}");
                team.run(20, &|_, _| {});
            }
        }
    }
}
