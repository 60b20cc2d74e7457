//! Pools of threads: one for each thread that steps and each number of workers, shared by all optimizers, started when first used.

use crate::pieces::Pass;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use superoffload::Result;
use superoffload::internals::host::{Doorbell, Homes, Job, Threads, run_alone};

thread_local! {
    /// By number of workers. A pool is rung by the thread that started it.
    static POOLS: RefCell<BTreeMap<usize, OwnPool>> = const { RefCell::new(BTreeMap::new()) };
}

struct OwnPool {
    threads: ManuallyDrop<Threads<Pass>>,
    bell: Arc<Doorbell>,
    /// The process that has the threads: after a fork the child has none.
    process: u32,
}

impl OwnPool {
    fn start(workers: usize) -> Result<Self> {
        let bell = Arc::new(Doorbell::default());
        let threads = ManuallyDrop::new(Threads::start(workers, Homes::default(), bell.clone(), 0, |_| Ok(()))?);
        Ok(Self { threads, bell, process: std::process::id() })
    }

    fn is_here(&self) -> bool {
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
        if self.is_here() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.threads) };
        }
    }
}

/// Does `pass` on `threads` threads; a single piece on this one.
pub(crate) fn run(pass: Pass, threads: usize) -> Result<()> {
    if threads <= 1 || pass.pieces() <= 1 {
        run_alone(pass);
        return Ok(());
    }
    POOLS.with_borrow_mut(|pools| {
        pools.retain(|_, pool| pool.is_here());
        let pool = match pools.entry(threads) {
            Entry::Occupied(pool) => pool.into_mut(),
            Entry::Vacant(place) => place.insert(OwnPool::start(threads)?),
        };
        let outcome = pool.run(pass);
        if outcome.is_err() {
            // A worker is gone.
            pools.remove(&threads);
        }
        outcome
    })
}
