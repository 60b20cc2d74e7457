//! Thread pools: one for each stepping thread and each number of workers. All optimizers share the pools, which start on first use.

use crate::pieces::Pass;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use superoffload::Result;
use superoffload::internals::host::{Doorbell, Job, Threads, WorkerNodes, run_alone};

thread_local! {
    /// Pools of this thread by number of workers. A pool can only be used by the thread that started it.
    static POOLS: RefCell<BTreeMap<usize, OwnPool>> = const { RefCell::new(BTreeMap::new()) };
}

struct OwnPool {
    threads: ManuallyDrop<Threads<Pass>>,
    bell: Arc<Doorbell>,
    /// ID of the process that owns the threads. A forked child does not have them.
    process: u32,
}

impl OwnPool {
    fn start(workers: usize) -> Result<Self> {
        let bell = Arc::new(Doorbell::default());
        let threads = ManuallyDrop::new(Threads::start(workers, WorkerNodes::default(), bell.clone(), 0, |_| Ok(()))?);
        Ok(Self { threads, bell, process: std::process::id() })
    }

    fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn run(&mut self, pass: Pass) -> Result<()> {
        self.threads.submit(pass);
        let mut idle = Ok(false);
        self.bell.wait_until(|| {
            idle = self.threads.is_idle();
            !matches!(idle, Ok(false))
        });
        idle.map(drop)
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // SAFETY: this is the only place that drops the threads, and it runs once.
            unsafe { ManuallyDrop::drop(&mut self.threads) };
        }
    }
}

/// Runs `pass` on `threads` threads. A pass with a single piece runs on the calling thread.
pub(crate) fn run(pass: Pass, threads: usize) -> Result<()> {
    if threads <= 1 || pass.pieces() <= 1 {
        run_alone(pass);
        return Ok(());
    }
    POOLS.with_borrow_mut(|pools| {
        pools.retain(|_, pool| pool.is_of_this_process());
        let pool = match pools.entry(threads) {
            Entry::Occupied(pool) => pool.into_mut(),
            Entry::Vacant(place) => place.insert(OwnPool::start(threads)?),
        };
        let outcome = pool.run(pass);
        if outcome.is_err() {
            // A worker has died.
            pools.remove(&threads);
        }
        outcome
    })
}
