//! Sleeping and waking without locks: one thread waits, any thread rings.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// Turns before a waiting thread sleeps. Waking costs tens of microseconds, spinning takes a core from somebody.
const SPINS: u32 = 200;
/// The same for a thread that has a core to itself: some hundred microseconds, longer than the pool waits for its next job.
const SPINS_ALONE: u32 = 20_000;

/// An event count: the waiter notes the count, looks for work, and sleeps only while nobody has rung since.
#[derive(Default)]
pub struct Doorbell {
    rings: AtomicU64,
    sleeping: AtomicBool,
    waiter: OnceLock<Thread>,
    has_core: bool,
}

impl Doorbell {
    /// A bell whose waiter has a core to itself, or not.
    pub fn new(has_core: bool) -> Self {
        Self { has_core, ..Self::default() }
    }

    /// The count to pass to [`Doorbell::wait`]; take it before looking for work.
    pub fn rings(&self) -> u64 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Tells the waiter that there may be something to do.
    pub fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst)
            && let Some(thread) = self.waiter.get()
        {
            thread.unpark();
        }
    }

    /// Returns when the bell has rung since `seen`. Only ever called from one thread.
    pub fn wait(&self, seen: u64) {
        for _ in 0..if self.has_core { SPINS_ALONE } else { SPINS } {
            if self.rings() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let waiter = self.waiter.get_or_init(std::thread::current);
        assert_eq!(waiter.id(), std::thread::current().id(), "a doorbell wakes the thread that waited first");
        self.sleeping.store(true, Ordering::SeqCst);
        while self.rings() == seen {
            // The timeout is a belt beside the braces: a thread parked by a bug elsewhere would hang for ever.
            std::thread::park_timeout(Duration::from_millis(100));
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Waits until `ready` holds; every change that can make it hold must ring.
    pub fn wait_until(&self, mut ready: impl FnMut() -> bool) {
        loop {
            let seen = self.rings();
            if ready() {
                return;
            }
            self.wait(seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn no_ring_is_lost() {
        let (bell, count) = (Arc::new(Doorbell::default()), Arc::new(AtomicUsize::new(0)));
        let (b, c) = (bell.clone(), count.clone());
        let ringer = std::thread::spawn(move || {
            for i in 0..2000 {
                c.fetch_add(1, Ordering::SeqCst);
                b.ring();
                if i % 97 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        bell.wait_until(|| count.load(Ordering::SeqCst) == 2000);
        ringer.join().unwrap();
    }
}
