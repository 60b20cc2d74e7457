//! Compilation of several plans by several threads: cuDNN takes half a second of one thread for each plan.

use crate::error::Result;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Calls `make` for every item and returns the results in the order of the items. Each worker is used by one thread, the first worker by
/// the calling thread. A thread calls `enter` before it makes an item.
///
/// # Errors
/// The error of the first failed item in the order of the items, whatever the order of the threads.
pub(super) fn make_all<W: Send, T: Sync, R: Send>(
    workers: &mut [W],
    items: &[T],
    enter: impl Fn() -> Result<()> + Sync,
    make: impl Fn(&W, &T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    // Items begin in order, and an item that has begun is completed. So every item before the first failed one is made.
    let take = || (!failed.load(Ordering::Relaxed)).then(|| next.fetch_add(1, Ordering::Relaxed)).filter(|&index| index < items.len());
    let work = |worker: &mut W| -> Vec<(usize, Result<R>)> {
        let mut made = Vec::new();
        while let Some(index) = take() {
            let result = enter().and_then(|()| make(worker, &items[index]));
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            made.push((index, result));
        }
        made
    };
    let mut made = thread::scope(|scope| {
        let (first, others) = workers.split_first_mut().expect("somebody makes them");
        let others: Vec<_> = others.iter_mut().map(|worker| scope.spawn(|| work(worker))).collect();
        let mut made = work(first);
        made.extend(others.into_iter().flat_map(|other| other.join().expect("making returns errors")));
        made
    });
    made.sort_unstable_by_key(|(index, _)| *index);
    made.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::time::{Duration, Instant};

    #[test]
    fn all_are_made_in_order_by_as_many_threads_as_there_are_workers() {
        for workers in 1..5 {
            // No thread continues before all threads have begun; if a thread never begins, its number is missing below.
            let (begun, items, start) = (AtomicUsize::new(0), Vec::from_iter(0..workers * 20), Instant::now());
            let meet = |worker: &usize, item: &usize| {
                begun.fetch_add(1, Ordering::Relaxed);
                while begun.load(Ordering::Relaxed) < workers && start.elapsed() < Duration::from_secs(10) {
                    thread::yield_now();
                }
                Ok((*worker, *item))
            };
            let made = make_all(&mut Vec::from_iter(0..workers), &items, || Ok(()), meet).unwrap();
            assert_eq!(made.iter().map(|(_, item)| *item).collect::<Vec<_>>(), items);
            let mut used: Vec<_> = made[..workers].iter().map(|(worker, _)| *worker).collect();
            used.sort_unstable();
            assert_eq!(used, Vec::from_iter(0..workers));
        }
    }

    #[test]
    fn of_several_errors_the_first_in_order_is_reported() {
        let make = |_: &usize, item: &usize| match item {
            // The later item fails first.
            30 => {
                thread::sleep(Duration::from_millis(20));
                Err(Error::usage("30"))
            }
            31 => Err(Error::usage("31")),
            _ => Ok(*item),
        };
        for _ in 0..20 {
            let refused = make_all(&mut [0, 1, 2, 3], &Vec::from_iter(0..100), || Ok(()), make).unwrap_err();
            assert!(refused.to_string().contains("30"), "{refused}");
        }
        let refused = make_all(&mut [0, 1], &[0; 3], || Err(Error::usage("enter")), |_, item| Ok(*item)).unwrap_err();
        assert!(refused.to_string().contains("enter"), "{refused}");
    }
}
