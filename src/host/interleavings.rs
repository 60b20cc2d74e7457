//! Loom models of the doorbell and the pool, in every order that the memory model allows. Run with `tests/threads/loom.sh`.
//!
//! A lost wake-up leaves all threads asleep, which loom reports as a deadlock. Data are relaxed atomics on purpose: only the code under
//! test orders them, so loom reads a stale value if an ordering is missing.

use super::doorbell::Doorbell;
use super::pool::{Call, Threads};
use super::worker_nodes::WorkerNodes;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::thread;
use std::sync::Arc;

#[test]
fn a_bell_wakes_its_waiter_whoever_rings() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::default());
        let done: Arc<[AtomicBool; 2]> = Arc::default();
        let ring = |i: usize| {
            let (bell, done) = (bell.clone(), done.clone());
            move || {
                done[i].store(true, Ordering::Relaxed);
                bell.ring();
            }
        };
        let ringer = thread::spawn(ring(0));
        let (its_bell, its_done) = (bell.clone(), done.clone());
        // A separate thread, because in loom a late ring would wake a thread that is joining another.
        let waiter = thread::spawn(move || its_bell.wait_until(|| its_done.iter().all(|done| done.load(Ordering::Relaxed))));
        ring(1)();
        ringer.join().unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn a_bell_wakes_its_waiter_as_often_as_it_waits() {
    loom::model(|| {
        let (bell, count) = (Arc::new(Doorbell::default()), Arc::new(AtomicUsize::new(0)));
        let (its_bell, its_count) = (bell.clone(), count.clone());
        let ringer = thread::spawn(move || {
            for number in 1..=3 {
                its_count.store(number, Ordering::Relaxed);
                its_bell.ring();
            }
        });
        (1..=3).for_each(|number| bell.wait_until(|| count.load(Ordering::Relaxed) >= number));
        ringer.join().unwrap();
    });
}

/// Checks that every job of a pool of `workers` runs once, and that the driver sees its writes.
fn hand_over(workers: usize, jobs: usize) {
    let bell = Arc::new(Doorbell::default());
    let mut pool = Threads::start(workers, WorkerNodes::default(), bell.clone(), 0, |_| Ok(())).unwrap();
    let counts: Arc<[AtomicUsize; 2]> = Arc::default();
    for job in 1..=jobs {
        let counted = counts.clone();
        // A load and a store lose a count if two workers take the same piece, or if a worker does not see the writes of the job before.
        let run = move |piece: usize| counted[piece].store(counted[piece].load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        pool.submit(Call { label: ("count", 0), pieces: counts.len(), run });
        bell.wait_until(|| pool.is_idle().unwrap());
        counts.iter().for_each(|count| assert_eq!(count.load(Ordering::Relaxed), job));
    }
    pool.finish().unwrap();
}

#[test]
fn a_pool_hands_its_worker_one_job_after_the_other() {
    loom::model(|| hand_over(1, 2));
}

#[test]
fn the_workers_of_a_pool_share_a_job() {
    loom::model(|| hand_over(2, 1));
}
