//! Work on many items by all CPUs that this thread may use.

use std::sync::mpsc;
use std::thread;

/// Elements of an array that one thread handles at once: below two of these parts, the start of a thread takes longer than it saves. Parts
/// consist of whole groups of 8-bit moments.
pub(crate) const PART_ELEMS: usize = if cfg!(test) { 1 << 10 } else { 256 << 10 };

/// Calls `work` for every item. The calling thread works, too, and alone if there is one item, one CPU, or no further thread can start.
///
/// # Panics
/// If `work` panics.
pub(crate) fn for_each<T: Send>(items: impl ExactSizeIterator<Item = T>, work: impl Fn(T) + Sync) {
    if items.len() < 2 {
        return items.for_each(work);
    }
    let (helpers, work) = (thread::available_parallelism().map_or(1, |cpus| cpus.get().min(items.len())) - 1, &work);
    thread::scope(|scope| {
        let start = |_| {
            let (give, take) = mpsc::channel();
            thread::Builder::new().name("parts".into()).spawn_scoped(scope, move || take.into_iter().for_each(work)).map(|_| give)
        };
        let helpers: Vec<_> = (0..helpers).map_while(|helper| start(helper).ok()).collect();
        let mut own = Vec::new();
        for (nth, item) in items.enumerate() {
            match helpers.get(nth % (helpers.len() + 1)) {
                Some(helper) => own.extend(helper.send(item).err().map(|unsent| unsent.0)),
                None => own.push(item),
            }
        }
        drop(helpers);
        own.into_iter().for_each(work);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::{Duration, Instant};

    #[test]
    fn every_item_is_handled_once() {
        for count in [0, 1, 2, 1000] {
            let mut items = vec![0; count];
            for_each(items.iter_mut(), |item| *item += 1);
            assert_eq!(items, vec![1; count]);
        }
    }

    #[test]
    fn several_threads_work_if_there_are_several_cpus() {
        let cpus = thread::available_parallelism().unwrap().get().min(2);
        let (begun, begin) = (AtomicUsize::new(0), Instant::now());
        for_each(0..cpus, |_| {
            begun.fetch_add(1, Relaxed);
            while begun.load(Relaxed) < cpus {
                assert!(begin.elapsed() < Duration::from_secs(30), "one thread handles all items");
                thread::yield_now();
            }
        });
    }
}
