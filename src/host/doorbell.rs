//! Sleeping and waking without locks: one thread waits, any thread rings. The README.md beside this file proves that no wake-up is lost.

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread::{self, Thread};

/// Polls before a waiting thread sleeps. A wake-up costs tens of microseconds; spinning occupies a core that another thread may need.
const SPINS: u32 = 200;
/// Polls for a thread with a core to itself: some hundred microseconds, longer than the pool waits for its next job.
const SPINS_ALONE: u32 = 20_000;

/// Increment of the count for each ring; the bit below is [`ASLEEP`].
const RING: u64 = 2;
/// Set by the waiter before it sleeps, and cleared by the waiter. A ring that finds this flag must wake the waiter.
const ASLEEP: u64 = 1;

/// An event count: the waiter reads the count, looks for work, and sleeps only while the count is unchanged.
#[derive(Default)]
pub struct Doorbell {
    /// Count and flag in one word, so that setting the flag and checking the count is one atomic operation.
    state: AtomicU64,
    waiter: OnceLock<Thread>,
    has_core: bool,
}

impl Doorbell {
    /// A doorbell; `has_core` says whether its waiter has a core to itself.
    pub fn new(has_core: bool) -> Self {
        Self { has_core, ..Self::default() }
    }

    /// The count for [`Doorbell::wait`]; read it before looking for work.
    pub(crate) fn rings(&self) -> u64 {
        self.state.load(Ordering::Acquire) & !ASLEEP
    }

    /// Wakes the waiter, because there may be work.
    pub fn ring(&self) {
        // Release: a thread that sees the new count also sees the writes before the ring. Acquire: a ring that finds the flag also finds
        // the waiter's handle.
        let before = self.state.fetch_add(RING, Ordering::AcqRel);
        if before & ASLEEP != 0
            && let Some(thread) = self.waiter.get()
        {
            thread.unpark();
        }
    }

    /// Returns when the bell has rung since `seen`. Only one thread may call this function.
    pub fn wait(&self, seen: u64) {
        for _ in 0..self.spins() {
            if self.rings() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let waiter = self.waiter.get_or_init(thread::current);
        assert!(waiter.id() == thread::current().id(), "a doorbell wakes the thread that waited first");
        // Fails if the bell has rung since `seen`. Release: see `ring`.
        if self.state.compare_exchange(seen, seen | ASLEEP, Ordering::Release, Ordering::Acquire).is_ok() {
            while self.state.load(Ordering::Acquire) == seen | ASLEEP {
                thread::park();
            }
            self.state.fetch_and(!ASLEEP, Ordering::Relaxed);
        }
    }

    /// Number of polls; 0 under loom, which would explore each poll as a further read of the count.
    fn spins(&self) -> u32 {
        match self.has_core {
            _ if cfg!(loom) => 0,
            true => SPINS_ALONE,
            false => SPINS,
        }
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
        let rings = if cfg!(miri) { 40 } else { 2000 };
        let (bell, count) = (Arc::new(Doorbell::default()), Arc::new(AtomicUsize::new(0)));
        let (b, c) = (bell.clone(), count.clone());
        let ringer = std::thread::spawn(move || {
            for i in 0..rings {
                c.fetch_add(1, Ordering::SeqCst);
                b.ring();
                if i % 97 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        bell.wait_until(|| count.load(Ordering::SeqCst) == rings);
        ringer.join().unwrap();
    }
}
