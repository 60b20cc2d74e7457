//! The driver's end of a save.

use super::board::{SaveBoard, Source};
use crate::bucket::slot::Slot;
use crate::engine::protocol::route::Hop;
use std::sync::Arc;

/// Memory of a bucket that the save still needs, as the coordinator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Memory,
    /// The pool has made a copy, and the writer may still read the memory.
    MemoryAndCopy,
    Copy,
}

/// A running save. Dropping it ends the save, complete or not; afterwards nothing reads the state.
pub(in crate::engine) struct RunningSave {
    board: Arc<SaveBoard>,
    needs: Vec<Need>,
    /// [`SaveBoard::news`] when the driver last looked; `None`: it must look.
    seen: Option<u64>,
    /// On rank 0, the words of the other ranks.
    peers: Vec<Arc<SaveBoard>>,
}

impl RunningSave {
    pub(in crate::engine) fn new(board: Arc<SaveBoard>, buckets: usize) -> Self {
        Self { board, needs: vec![Need::Nothing; buckets], seen: None, peers: Vec::new() }
    }

    /// [`Hop::Save`] of `bucket` starts: its memory has the state of the save.
    pub(in crate::engine) fn hold(&mut self, bucket: usize) {
        self.needs[bucket] = Need::Memory;
        self.board.offer(bucket, Source::Nowhere, Source::Memory);
        self.seen = None;
    }

    /// [`Hop::SaveCopy`] of `bucket` starts: `slot` has the state of the save, too.
    pub(in crate::engine) fn copied(&mut self, bucket: usize, slot: Slot) {
        self.needs[bucket] = if self.needs[bucket] == Need::Memory { Need::MemoryAndCopy } else { Need::Copy };
        self.board.offer(bucket, Source::Memory, Source::Copy(slot));
        self.seen = None;
    }

    /// The words that the writer's thread shares.
    pub(in crate::engine) fn board(&self) -> &SaveBoard {
        &self.board
    }

    /// On rank 0, sets the words of the other ranks.
    pub(in crate::engine) fn set_peers(&mut self, peers: Vec<Arc<SaveBoard>>) {
        self.peers = peers;
    }

    /// Whether the save needs no state of this rank any more.
    pub(in crate::engine) fn is_complete(&self) -> bool {
        self.board.is_complete()
    }

    /// Whether the save needs no state of this rank any more, and on rank 0 none of any rank.
    pub(in crate::engine) fn is_complete_on_all_ranks(&self) -> bool {
        self.is_complete() && self.peers.iter().all(|peer| peer.is_complete())
    }

    /// A hop that has ended since the last call.
    pub(in crate::engine) fn poll(&mut self) -> Option<(Hop, usize)> {
        let news = Some(self.board.news());
        if self.seen == news {
            return None;
        }
        for bucket in 0..self.needs.len() {
            if let Some((hop, need)) = self.ended(bucket) {
                self.needs[bucket] = need;
                return Some((hop, bucket));
            }
        }
        self.seen = news;
        None
    }

    /// The hop of `bucket` that has ended, and what the save needs after it.
    fn ended(&self, bucket: usize) -> Option<(Hop, Need)> {
        let is_saved = || self.board.source(bucket) == Source::Saved;
        match self.needs[bucket] {
            Need::Memory if is_saved() => Some((Hop::Save, Need::Nothing)),
            // From its next read on, the writer reads the copy.
            Need::MemoryAndCopy if !self.board.is_read(bucket) => Some((Hop::Save, Need::Copy)),
            Need::Copy if is_saved() => Some((Hop::SaveCopy, Need::Nothing)),
            _ => None,
        }
    }
}

impl Drop for RunningSave {
    fn drop(&mut self) {
        self.board.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save() -> (Arc<SaveBoard>, RunningSave) {
        let board = Arc::new(SaveBoard::new(2, Arc::default()));
        (board.clone(), RunningSave::new(board, 2))
    }

    #[test]
    fn a_bucket_is_held_until_it_was_read() {
        let (board, mut save) = save();
        assert_eq!(save.poll(), None);
        save.hold(1);
        assert_eq!((save.poll(), board.source(1)), (None, Source::Memory));
        board.saved(1);
        assert_eq!((save.poll(), save.poll(), save.is_complete()), (Some((Hop::Save, 1)), None, false));
    }

    #[test]
    fn a_bucket_with_a_copy_is_held_until_the_present_read_ends() {
        let (board, mut save) = save();
        save.hold(0);
        let source = board.begin_read(0).unwrap();
        save.copied(0, Slot(3));
        assert_eq!(save.poll(), None, "its memory is read");
        board.end_read(0, source);
        assert_eq!((save.poll(), save.poll()), (Some((Hop::Save, 0)), None));
        assert_eq!(board.begin_read(0), Some(Source::Copy(Slot(3))));
        board.end_read(0, Source::Copy(Slot(3)));
        board.saved(0);
        assert_eq!((save.poll(), save.poll()), (Some((Hop::SaveCopy, 0)), None));
    }

    #[test]
    fn a_copy_of_a_bucket_that_was_read_meanwhile_is_free_at_once() {
        let (board, mut save) = save();
        save.hold(0);
        board.saved(0);
        save.copied(0, Slot(0));
        assert_eq!([save.poll(), save.poll(), save.poll()], [Some((Hop::Save, 0)), Some((Hop::SaveCopy, 0)), None]);
    }
}
