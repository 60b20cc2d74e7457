//! Concurrent loads of the cases.

use std::sync::atomic::{AtomicBool, Ordering};
use superoffload::Result;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::Job;
use superoffload::internals::probe::{States, Workers};

/// The load during a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyLoad {
    /// No load.
    None,
    /// A copy of equal size in the other direction.
    OtherWay,
    /// The optimizer's pass on its pool.
    Adam,
    /// A triad on as many threads as the optimizer's pool.
    HostTriad,
}

impl CopyLoad {
    /// All loads.
    pub const ALL: [Self; 4] = [Self::None, Self::OtherWay, Self::Adam, Self::HostTriad];

    /// Name in the output lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::OtherWay => "a copy the other way",
            Self::Adam => "the optimizer's pass",
            Self::HostTriad => "a triad in host memory",
        }
    }

    /// Runs `work` while this load keeps host threads busy. `None` and `OtherWay` use no threads; the caller of `OtherWay` enqueues both
    /// copies.
    ///
    /// # Errors
    /// Errors of `work`; `Resource` if threads cannot be started.
    pub fn beside<T>(self, topology: &Topology, threads: usize, states: &States, work: impl FnOnce() -> Result<T>) -> Result<T> {
        match self {
            Self::None | Self::OtherWay => work(),
            Self::Adam => beside(topology, threads, |index| states.adam(index), work),
            Self::HostTriad => beside(topology, threads, |_| states.triad(), work),
        }
    }
}

/// Runs jobs back to back until `work` returns.
fn beside<J: Job, T>(topology: &Topology, threads: usize, job: impl Fn(usize) -> J + Sync, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let keep_busy = || -> Result<()> {
        let mut workers = Workers::new(topology, threads)?;
        begun.store(true, Ordering::Release);
        while !ended.load(Ordering::Acquire) {
            workers.rates(0.0, &job)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(keep_busy);
        while !begun.load(Ordering::Acquire) && !load.is_finished() {
            std::thread::yield_now();
        }
        let done = work();
        ended.store(true, Ordering::Release);
        match load.join() {
            Ok(outcome) => outcome.and(done),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Returns the topology without caches and with little memory, so that optimizer states become small and quick to fill.
pub fn small_caches(mut machine: Topology) -> Topology {
    machine.caches.clear();
    machine.memory_available_bytes = Some(1 << 28);
    machine
}
