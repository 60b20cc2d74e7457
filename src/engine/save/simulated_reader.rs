//! The reader of a state that exists in a simulation alone: it takes pieces in the order of a real save, and reads no memory.

use super::frozen_state::FrozenState;

/// Passes over the state of one rank, piece after piece.
pub(crate) struct SimulatedReader {
    state: FrozenState,
    /// The bucket of the next piece, and its bytes from that piece on.
    rest: Option<(usize, usize)>,
    /// Rings of the reader's doorbell when no bucket was ready; `None`: one may be.
    seen: Option<u64>,
}

impl SimulatedReader {
    pub(in crate::engine) fn new(state: FrozenState) -> Self {
        Self { state, rest: None, seen: None }
    }

    /// Passes over at most `most` bytes of a bucket, and returns their number; `None` while no bucket is ready. The memory of a bucket is
    /// free when its last piece was passed over.
    pub(crate) fn next_piece(&mut self, most: usize) -> Option<usize> {
        let (bucket, bytes) = match self.rest.take() {
            Some(rest) => rest,
            None => self.next_bucket()?,
        };
        let piece = bytes.min(most);
        match bytes - piece {
            0 => self.state.saved(bucket),
            rest => self.rest = Some((bucket, rest)),
        }
        Some(piece)
    }

    fn next_bucket(&mut self) -> Option<(usize, usize)> {
        let rings = Some(self.state.rings());
        if self.seen == rings {
            return None;
        }
        let ready = self.state.ready();
        self.seen = if ready.is_none() { rings } else { None };
        ready.map(|bucket| (bucket, self.state.bytes(bucket)))
    }
}
