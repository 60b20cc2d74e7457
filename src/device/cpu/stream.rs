//! One stream of the CPU device: a queue of operations, filled by the driver, emptied in order by a thread or by the seeded adversary.
//! Operations are closures stored inline, so enqueuing allocates nothing and takes no lock.
#![allow(unsafe_code)]

use crate::host::doorbell::Doorbell;
use crate::sync::UnsafeCell;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use std::mem::MaybeUninit;

/// Operations that a stream holds before the driver has to wait: few under loom, which explores all orders.
pub(super) const QUEUE_OPS: usize = if cfg!(loom) { 2 } else { 1024 };
/// Maximum size of a closure's captured values, in words.
const CAPTURE_WORDS: usize = 48;
/// Value of [`OpQueue::awaited`] when the stream waits for no other stream.
const NOTHING: u64 = u64::MAX;

/// A closure without heap memory: its captured values and the function that runs them.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) name: &'static str,
    call: unsafe fn(*const u8),
    captured: [MaybeUninit<u64>; CAPTURE_WORDS],
}

impl Task {
    pub(super) fn new<F: FnOnce() + Copy + Send + 'static>(name: &'static str, f: F) -> Self {
        const { assert!(size_of::<F>() <= CAPTURE_WORDS * 8 && align_of::<F>() <= 8, "an operation captures too much") };
        unsafe fn call<F: FnOnce() + Copy>(captured: *const u8) {
            // SAFETY: `new` wrote an `F` there, and `F` is `Copy`.
            unsafe { captured.cast::<F>().read()() }
        }
        let mut captured = [MaybeUninit::uninit(); CAPTURE_WORDS];
        // SAFETY: size and alignment are checked above.
        unsafe { captured.as_mut_ptr().cast::<F>().write(f) };
        Self { name, call: call::<F>, captured }
    }

    pub(super) fn run(&self) {
        // SAFETY: `call` and `captured` were made for the same type in `new`.
        unsafe { (self.call)(self.captured.as_ptr().cast()) }
    }
}

/// A position in a stream: the number of operations done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) stream: usize,
    pub(super) ops: u64,
}

impl Point {
    /// Packs the point into one word.
    pub(super) fn pack(self) -> u64 {
        self.ops << 3 | self.stream as u64
    }

    pub(super) fn unpack(word: u64) -> Self {
        Self { stream: (word & 7) as usize, ops: word >> 3 }
    }

    /// Whether a stream that has reached `reached` has passed this point. Both streams have the same index, possibly on different devices.
    fn is_reached_by(self, reached: Self) -> bool {
        self.stream == reached.stream && self.ops <= reached.ops
    }
}

/// An operation of a stream.
#[derive(Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "stored in the queue itself: a box would be an allocation per operation")]
pub(super) enum Op {
    Run(Task),
    /// Wait until a stream of this device has reached the point.
    Wait(Point),
    /// Wait until a stream of a peer has reached the point.
    WaitForPeer {
        peer: usize,
        point: Point,
    },
}

/// The queue, with one producer (the driver) and one consumer.
pub(super) struct OpQueue {
    slots: Box<[UnsafeCell<MaybeUninit<Op>>]>,
    enqueued: AtomicU64,
    done: AtomicU64,
    /// Packed [`Point`] for which the stream sleeps.
    awaited: AtomicU64,
    /// Rung when an operation is added, and when another stream has reached the awaited point.
    pub(super) bell: Doorbell,
}

// SAFETY: the producer writes a slot only while `enqueued - done < QUEUE_OPS`, when the consumer does not access it; the consumer reads a
// slot only after it has acquired the `enqueued` that the producer released.
unsafe impl Sync for OpQueue {}
// SAFETY: operations are `Send`.
unsafe impl Send for OpQueue {}

impl OpQueue {
    pub(super) fn new() -> Self {
        let slots = (0..QUEUE_OPS).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
        let [enqueued, done] = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { slots, enqueued, done, awaited: AtomicU64::new(NOTHING), bell: Doorbell::default() }
    }

    pub(super) fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Acquire)
    }

    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Number of pending operations.
    pub(super) fn ahead(&self) -> usize {
        (self.enqueued() - self.done()) as usize
    }

    pub(super) fn is_full(&self) -> bool {
        self.ahead() == QUEUE_OPS
    }

    /// Adds an operation. Only the driver calls this function, and only when the queue is not full.
    pub(super) fn push(&self, op: Op) {
        assert!(!self.is_full(), "the driver must wait for a full queue");
        let at = self.enqueued.load(Ordering::Relaxed);
        // SAFETY: the queue is not full, so the consumer is past this slot; there is one producer.
        self.slots[at as usize % QUEUE_OPS].with_mut(|slot| unsafe { (*slot).write(op) });
        self.enqueued.store(at + 1, Ordering::Release);
        self.bell.ring();
    }

    /// The next operation, which stays in place until [`OpQueue::pop`]. Only the consumer calls this function.
    pub(super) fn front(&self) -> Option<Op> {
        let at = self.done.load(Ordering::Relaxed);
        if at == self.enqueued() {
            return None;
        }
        // SAFETY: the slot was written before `enqueued` was released; the producer does not reuse it until `done` passes it.
        Some(self.slots[at as usize % QUEUE_OPS].with(|slot| unsafe { (*slot).assume_init_read() }))
    }

    /// Marks the front operation as done.
    pub(super) fn pop(&self) {
        self.done.fetch_add(1, Ordering::AcqRel);
    }

    /// Sleeps until `is_over` holds, at the latest when the stream of `point` has reached it. Only the consumer calls this function.
    pub(super) fn wait_for(&self, point: Point, is_over: impl FnMut() -> bool) {
        self.awaited.store(point.pack(), Ordering::Relaxed);
        // Pairs with the fence in `wake`: either this stream sees the operation done, or the other stream sees the awaited point.
        fence(Ordering::SeqCst);
        self.bell.wait_until(is_over);
        self.awaited.store(NOTHING, Ordering::Relaxed);
    }

    /// Wakes the streams of `queues` that wait for a point up to `reached`; the remaining streams are not woken.
    pub(super) fn wake<'a>(reached: Point, queues: impl Iterator<Item = &'a Self>) {
        fence(Ordering::SeqCst);
        let is_awaited = |queue: &&Self| match queue.awaited.load(Ordering::Relaxed) {
            NOTHING => false,
            word => Point::unpack(word).is_reached_by(reached),
        };
        for queue in queues.filter(is_awaited) {
            queue.bell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn tasks_run_with_their_captures_in_order() {
        static SUM: AtomicU64 = AtomicU64::new(0);
        let queue = OpQueue::new();
        for i in 0..3 * QUEUE_OPS as u64 {
            let pair = (i, [1u64; 8]);
            queue.push(Op::Run(Task::new("add", move || {
                assert_eq!(SUM.fetch_add(pair.1[7], Ordering::Relaxed), pair.0);
            })));
            let Some(Op::Run(task)) = queue.front() else { panic!("a task was enqueued") };
            task.run();
            queue.pop();
        }
        assert!(queue.front().is_none() && queue.done() == 3 * QUEUE_OPS as u64);
    }
}
