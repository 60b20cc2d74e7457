//! How far a rank runs ahead of its GPU.
//!
//! The driver's queue of a stream takes about a thousand operations. Who finds it full waits within the driver, perhaps with locks of its context,
//! without which no other thread enqueues a copy from this GPU's memory, or a wait for its events. So a rank waits before that, outside of it.

use crate::error::Result;
use std::time::Duration;

/// Operations between two marks, and marks that may be ahead. With a span around it an operation is three of the driver's.
const STRIDE: usize = 16;
const MARKS: usize = 16;
/// Between two looks at a mark: a fraction of what is still ahead behind it.
pub(super) const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// What is ahead on one stream.
pub(super) struct Backlog<Mark> {
    /// Recorded in turn, one every [`STRIDE`] operations.
    marks: Vec<Mark>,
    operations: usize,
}

impl<Mark> Backlog<Mark> {
    /// # Errors
    /// Those of `mark`, which makes one that has passed.
    pub(super) fn new(mark: impl Fn() -> Result<Mark>) -> Result<Self> {
        Ok(Self { marks: (0..MARKS).map(|_| mark()).collect::<Result<_>>()?, operations: 0 })
    }

    /// Counts an operation that is about to be enqueued. Now and then a mark comes back: once the stream has passed it, it is to be recorded again.
    pub(super) fn count(&mut self) -> Option<&mut Mark> {
        let nth = self.operations;
        self.operations += 1;
        nth.is_multiple_of(STRIDE).then(|| &mut self.marks[nth / STRIDE % MARKS])
    }

    /// The mark that comes back next. Once the stream has passed it, nobody waits who enqueues up to [`STRIDE`] operations.
    pub(super) fn next(&self) -> &Mark {
        &self.marks[self.operations.div_ceil(STRIDE) % MARKS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_each_mark_is_never_a_full_queue_ahead_nor_far_behind_one() {
        // A mark says how many operations come before it; the stream runs only when somebody waits for one.
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
    fn who_asks_before_a_bucket_waits_for_no_mark() {
        let mut backlog = Backlog::new(|| Ok(0)).unwrap();
        let (mut passed, mut enqueued, mut full, mut most_ahead) = (0, 0, 0, 0);
        for round in 0..10_000 {
            // One less than a bucket has, so that the queue fills.
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
