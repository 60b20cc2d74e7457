//! Ordered pipeline on several threads: results are taken in the order of the work.
//!
//! The caller's thread gives work, worker threads do it, and one more thread takes the results; all three at the same time. The amount of
//! work under way is limited, which bounds memory.

use crate::data::stopped::interrupted;
use crate::error::{Error, Result};
use std::iter;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;

/// Threads at most: more than memory and disks have use for, and each holds a block or a piece of text.
pub(in crate::data) const THREADS_MAX: usize = 16;

/// CPUs that this process may use, as far as they are of use here.
pub(in crate::data) fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// Work that is given and not taken back, for each thread.
const UNDER_WAY: usize = 4;

/// Where work is given.
pub(in crate::data) struct WorkQueue<W, R> {
    workers: Sender<(W, SyncSender<R>)>,
    /// Where each result will come, in order.
    order: SyncSender<Receiver<R>>,
}

impl<W, R> WorkQueue<W, R> {
    /// Gives work to the next free worker, and waits while too much is under way.
    ///
    /// # Errors
    /// When the consumer has stopped; the consumer reports the cause.
    pub(in crate::data) fn give(&self, work: W) -> Result<()> {
        let (done, result) = mpsc::sync_channel(1);
        let given = self.order.send(result).is_ok() && self.workers.send((work, done)).is_ok();
        if given { Ok(()) } else { Err(interrupted()) }
    }
}

/// Runs `give` here, `work` on `threads` threads, and `take` on another one, which gets all results in order. Returns the result of `take`.
///
/// # Errors
/// The error of `take`, which concerns earlier work, else the error of `give`; `Resource` where a thread cannot be started.
pub(in crate::data) fn run<W: Send, R: Send, T: Send>(
    threads: usize,
    work: impl Fn(W) -> R + Sync,
    take: impl FnOnce(&mut dyn Iterator<Item = R>) -> Result<T> + Send,
    give: impl FnOnce(WorkQueue<W, R>) -> Result<()>,
) -> Result<T> {
    let (workers, waiting) = mpsc::channel::<(W, SyncSender<R>)>();
    let (order, results) = mpsc::sync_channel::<Receiver<R>>(UNDER_WAY * threads);
    let waiting = Mutex::new(waiting);
    let next = || waiting.lock().ok()?.recv().ok();
    let work_all = || {
        while let Some((work_given, done)) = next() {
            // Nobody may want it any more.
            let _ = done.send(work(work_given));
        }
    };
    // Results end early where a worker panicked, which is reported when the threads are joined.
    let take_all = || take(&mut iter::from_fn(move || results.recv().ok()?.recv().ok()));
    let failed = |e| Error::resource("start a thread that prepares data", e);
    thread::scope(|scope| {
        let taker = thread::Builder::new().spawn_scoped(scope, take_all).map_err(failed)?;
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work_all).map_err(failed).map(|_| ());
        let given = (0..threads).try_for_each(spawn).and_then(|()| give(WorkQueue { workers, order }));
        let taken = taker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        taken.and_then(|taken| given.map(|()| taken))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// Squares of numbers up to `until`, by so many threads of which some are slow; `fails` is where `take` fails.
    fn squares(threads: usize, until: u64, fails: Option<u64>) -> (Result<Vec<u64>>, usize) {
        let (given, taken, most) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |n: u64| {
            thread::sleep(Duration::from_micros(n * 7919 % 300));
            n * n
        };
        let take = |results: &mut dyn Iterator<Item = u64>| {
            let mut all = Vec::new();
            for result in results {
                taken.fetch_add(1, Ordering::Relaxed);
                if fails.is_some_and(|at| result == at * at) {
                    return Err(Error::usage(format!("no {result}")));
                }
                all.push(result);
            }
            Ok(all)
        };
        let outcome = run(threads, work, take, |queue| {
            (0..until).try_for_each(|n| {
                queue.give(n)?;
                let under_way = given.fetch_add(1, Ordering::Relaxed) + 1 - taken.load(Ordering::Relaxed);
                most.fetch_max(under_way, Ordering::Relaxed);
                Ok(())
            })
        });
        (outcome, most.into_inner())
    }

    #[test]
    fn results_come_in_order_and_so_many_are_under_way_at_most() {
        for threads in [1, 3, 8] {
            let (found, most) = squares(threads, 200, None);
            assert_eq!(found.unwrap(), (0..200).map(|n| n * n).collect::<Vec<_>>());
            assert!(most <= UNDER_WAY * threads + 2, "{most} under way for {threads} threads");
        }
    }

    #[test]
    fn a_failure_ends_it_and_the_first_given_wins() {
        let (failed, most) = squares(2, u64::MAX, Some(20));
        assert_eq!(failed.unwrap_err().to_string(), "no 400");
        assert!(most <= UNDER_WAY * 2 + 2);
        let outcome = |take_fails: bool| {
            let take = |results: &mut dyn Iterator<Item = u64>| match (results.count(), take_fails) {
                (count, false) => Ok(count),
                _ => Err(Error::usage("take")),
            };
            run(2, |n: u64| n, take, |queue| queue.give(1).and_then(|()| Err(Error::usage("give")))).unwrap_err().to_string()
        };
        assert_eq!([outcome(false), outcome(true)], ["give", "take"]);
    }
}
