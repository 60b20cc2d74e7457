//! A file of state that is written from its first byte to its last.

use super::placed_state::{PlacedState, WrittenState};
use super::save_rate::SaveRate;
use super::writers::{FilePiece, Writers};
use crate::disk::Dir;
use crate::error::Result;

/// The threads that write the file, and the piece that is filled.
pub(super) struct StateWriter {
    writers: Writers,
    piece: Option<FilePiece>,
    /// Bytes appended so far.
    end: u64,
}

impl StateWriter {
    pub(super) fn create(dir: &Dir, name: &str, rate: SaveRate) -> Result<Self> {
        Ok(Self { writers: Writers::start(PlacedState::create(dir, name)?, rate)?, piece: None, end: 0 })
    }

    /// Reserves disk space for the whole file, which will have `bytes` bytes.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        self.writers.reserve(bytes)
    }

    pub(super) fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut piece = match self.piece.take() {
                Some(piece) => piece,
                None => self.writers.piece(self.end)?,
            };
            let target = piece.extend(bytes.len());
            let (head, rest) = bytes.split_at(target.len());
            target.copy_from_slice(head);
            bytes = rest;
            self.end += head.len() as u64;
            if piece.is_full() {
                self.writers.write(piece);
            } else {
                self.piece = Some(piece);
            }
        }
        Ok(())
    }

    /// The threads, for pieces in any order. Nothing was appended.
    pub(super) fn into_writers(self) -> Writers {
        self.writers
    }

    /// Has all of it on the disk.
    pub(super) fn finish(mut self) -> Result<WrittenState> {
        if let Some(piece) = self.piece.take() {
            self.writers.write(piece);
        }
        self.writers.finish()
    }
}
