//! Words that the driver and the thread of a save share. No thread waits for a lock.

use crate::bucket::slot::Slot;
use crate::host::doorbell::Doorbell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};

/// Place of a bucket's state for the save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Source {
    /// The state is not that of the save yet.
    Nowhere,
    /// The bucket's memory.
    Memory,
    /// A copy.
    Copy(Slot),
    /// The save needs the state no more.
    Saved,
}

impl Source {
    fn word(self) -> u32 {
        match self {
            Self::Nowhere => 0,
            Self::Memory => 1,
            Self::Saved => 2,
            Self::Copy(slot) => 3 + slot.0 as u32,
        }
    }

    fn of(word: u32) -> Self {
        match word {
            0 => Self::Nowhere,
            1 => Self::Memory,
            2 => Self::Saved,
            copy => Self::Copy(Slot(copy as usize - 3)),
        }
    }
}

/// Number of no bucket.
const NONE: usize = usize::MAX;

/// The words. All accesses have one order, so that either the reader sees a new source, or the driver sees that the reader still reads.
pub(in crate::engine) struct SaveBoard {
    sources: Box<[AtomicU32]>,
    /// The bucket that the thread reads.
    read: AtomicUsize,
    /// Increases when the driver should look at the sources.
    news: AtomicU64,
    is_cancelled: AtomicBool,
    driver: Arc<Doorbell>,
    /// Rung for the thread of the save.
    pub(in crate::engine) writer: Doorbell,
}

impl SaveBoard {
    /// Words for `buckets` buckets. The driver waits on `driver`.
    pub(in crate::engine) fn new(buckets: usize, driver: Arc<Doorbell>) -> Self {
        Self {
            sources: (0..buckets).map(|_| AtomicU32::new(Source::Nowhere.word())).collect(),
            read: AtomicUsize::new(NONE),
            news: AtomicU64::new(0),
            is_cancelled: AtomicBool::new(false),
            driver,
            writer: Doorbell::default(),
        }
    }

    pub(in crate::engine) fn source(&self, bucket: usize) -> Source {
        Source::of(self.sources[bucket].load(SeqCst))
    }

    /// Sources of all buckets, in order.
    pub(in crate::engine) fn sources(&self) -> impl DoubleEndedIterator<Item = Source> {
        self.sources.iter().map(|word| Source::of(word.load(SeqCst)))
    }

    /// Changes the source of `bucket` for the driver, unless the save needs the state no more.
    pub(in crate::engine) fn offer(&self, bucket: usize, from: Source, to: Source) {
        // The only other change is to `Saved`, which is final.
        let _ = self.sources[bucket].compare_exchange(from.word(), to.word(), SeqCst, SeqCst);
        self.writer.ring();
    }

    /// The save needs the state of `bucket` no more.
    pub(in crate::engine) fn saved(&self, bucket: usize) {
        self.sources[bucket].store(Source::Saved.word(), SeqCst);
        self.wake_driver();
    }

    /// The thread of the save reads `bucket` until [`SaveBoard::end_read`]. Returns its source; `None` after a cancellation.
    pub(in crate::engine) fn begin_read(&self, bucket: usize) -> Option<Source> {
        self.read.store(bucket, SeqCst);
        (!self.is_cancelled()).then(|| self.source(bucket))
    }

    /// Ends a read from `source`. The driver may wait for that if it has offered another source meanwhile.
    pub(in crate::engine) fn end_read(&self, bucket: usize, source: Source) {
        self.read.store(NONE, SeqCst);
        if self.source(bucket) != source {
            self.wake_driver();
        }
    }

    /// Whether the thread of the save reads `bucket` at this moment.
    pub(in crate::engine) fn is_read(&self, bucket: usize) -> bool {
        self.read.load(SeqCst) == bucket
    }

    /// Whether the save needs no state any more.
    pub(in crate::engine) fn is_complete(&self) -> bool {
        self.sources().all(|source| source == Source::Saved)
    }

    /// Number of changes that the driver should look at.
    pub(in crate::engine) fn news(&self) -> u64 {
        self.news.load(SeqCst)
    }

    fn wake_driver(&self) {
        self.news.fetch_add(1, SeqCst);
        self.driver.ring();
    }

    pub(in crate::engine) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(SeqCst)
    }

    /// Ends the save before it is complete. Afterwards no state and no copy is read.
    pub(in crate::engine) fn cancel(&self) {
        self.is_cancelled.store(true, SeqCst);
        self.writer.ring();
        while self.read.load(SeqCst) != NONE {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_one_source_and_saved_is_final() {
        for source in [Source::Nowhere, Source::Memory, Source::Saved, Source::Copy(Slot(0)), Source::Copy(Slot(9))] {
            assert_eq!(Source::of(source.word()), source);
        }
        let board = SaveBoard::new(2, Arc::default());
        board.offer(1, Source::Nowhere, Source::Memory);
        board.saved(1);
        board.offer(1, Source::Memory, Source::Copy(Slot(0)));
        assert_eq!((board.source(0), board.source(1), board.news()), (Source::Nowhere, Source::Saved, 1));
    }

    #[test]
    fn the_driver_is_told_when_a_read_ends_after_the_source_changed() {
        let board = SaveBoard::new(1, Arc::default());
        board.offer(0, Source::Nowhere, Source::Memory);
        assert_eq!((board.begin_read(0), board.is_read(0)), (Some(Source::Memory), true));
        board.end_read(0, Source::Memory);
        assert_eq!((board.is_read(0), board.news()), (false, 0));
        assert_eq!(board.begin_read(0), Some(Source::Memory));
        board.offer(0, Source::Memory, Source::Copy(Slot(0)));
        board.end_read(0, Source::Memory);
        assert_eq!(board.news(), 1);
        board.cancel();
        assert_eq!(board.begin_read(0), None);
    }
}
