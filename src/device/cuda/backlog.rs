//! Limit on the operations that a rank enqueues ahead of its GPU.
//!
//! The driver's launch queue of a stream holds about a thousand operations. A thread that finds the queue full blocks inside the driver,
//! possibly with locks of its context. Without these locks no other thread can enqueue a copy from this GPU's memory or a wait for its
//! events. A rank therefore waits earlier, outside the driver.

use crate::error::Result;
use std::time::Duration;

/// Operations between two marks, and the number of marks. An operation with a trace span takes three entries of the driver's queue.
const STRIDE: usize = 16;
const MARKS: usize = 16;
/// Interval between two polls of a mark: a fraction of the time that the operations after the mark take.
pub(super) const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Operations enqueued and not yet done on one stream.
pub(super) struct Backlog<Mark> {
    /// Recorded in turn, one every [`STRIDE`] operations.
    marks: Vec<Mark>,
    operations: usize,
}

impl<Mark> Backlog<Mark> {
    /// # Errors
    /// Errors of `mark`, which makes a mark that has passed.
    pub(super) fn new(mark: impl Fn() -> Result<Mark>) -> Result<Self> {
        Ok(Self { marks: (0..MARKS).map(|_| mark()).collect::<Result<_>>()?, operations: 0 })
    }

    /// Counts an operation that is about to be enqueued. At every [`STRIDE`]th operation returns the next mark; the caller waits until the
    /// stream has passed it, then records it again.
    pub(super) fn count(&mut self) -> Option<&mut Mark> {
        let nth = self.operations;
        self.operations += 1;
        nth.is_multiple_of(STRIDE).then(|| &mut self.marks[nth / STRIDE % MARKS])
    }

    /// The mark that [`Self::count`] returns next. Once the stream has passed this mark, up to [`STRIDE`] operations can be enqueued
    /// without waiting.
    pub(super) fn next(&self) -> &Mark {
        &self.marks[self.operations.div_ceil(STRIDE) % MARKS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_each_mark_keeps_the_backlog_between_one_mark_and_a_full_queue() {
        // A mark holds the number of operations before it; the stream runs only when the test waits for a mark.
        let mut backlog = Backlog::new(|| Ok(0)).unwrap();
        let (mut passed, mut most_ahead) = (0, 0);
        for enqueued in 0..10_000 {
            if let Some(mark) = backlog.count() {
                let waits = *mark > passed;
                assert!(!waits || enqueued - *mark >= STRIDE * (MARKS - 1), "waits for what was just enqueued");
                passed = passed.max(*mark);
                *mark = enqueued;
            }
            most_ahead = most_ahead.max(enqueued + 1 - passed);
        }
        assert_eq!(most_ahead, STRIDE * (MARKS + 1));
        assert!(3 * most_ahead < 1024);
    }

    #[test]
    fn a_check_before_each_bucket_waits_for_no_mark() {
        let mut backlog = Backlog::new(|| Ok(0)).unwrap();
        let (mut passed, mut enqueued, mut full, mut most_ahead) = (0, 0, 0, 0);
        for round in 0..10_000 {
            // One operation less than the bucket has, so that the queue fills.
            passed = enqueued.min(passed + round % STRIDE);
            if *backlog.next() > passed {
                full += 1;
                continue;
            }
            for _ in 0..1 + round % STRIDE {
                if let Some(mark) = backlog.count() {
                    assert!(*mark <= passed, "waits in round {round}");
                    *mark = enqueued;
                }
                enqueued += 1;
            }
            most_ahead = most_ahead.max(enqueued - passed);
        }
        assert!(full > 100 && most_ahead > STRIDE * (MARKS - 1), "{full} {most_ahead}");
    }
}
