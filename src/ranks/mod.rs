//! Ranks: devices that train together. Those of one process are a thread each. They meet on the [`board`]; [`baton`] lets tests choose who
//! goes on. Several processes have a board each, and [`links`] between them; ranks in the same place of their processes are *namesakes*.

pub(crate) mod baton;
pub(crate) mod board;
mod control_line;
mod desk;
mod doorkeeper;
mod handshake;
pub(crate) mod hello;
pub(crate) mod lanes;
pub(crate) mod links;
pub(crate) mod notice;
pub(crate) mod rendezvous;
pub(crate) mod run_token;
pub(crate) mod wire;

use crate::error::{Error, Result};
use board::Board;
use std::sync::Arc;

/// Devices that train together, at most, in all processes.
pub(crate) const RANKS_MAX: usize = 16;

/// What the GPUs of all processes find each other by in NCCL: an `ncclUniqueId`, which nobody looks into.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct RailKey(pub(crate) [u8; 128]);

/// A rank's place at the board.
#[derive(Clone)]
pub(crate) struct Seat {
    /// Where all ranks meet.
    pub board: Arc<Board>,
    /// Whose place it is.
    pub rank: usize,
}

impl Seat {
    /// Whether all ranks can go on, as far as is known.
    ///
    /// # Errors
    /// What ended the first that cannot.
    pub(crate) fn check(&self) -> Result<()> {
        self.board.failure().map_or(Ok(()), Err)
    }

    /// In a test whose seed chooses who goes on: lets it choose. Otherwise nothing.
    ///
    /// # Errors
    /// Those of [`Seat::check`].
    pub(crate) fn pass(&self) -> Result<()> {
        let Some(baton) = self.board.baton() else { return Ok(()) };
        baton.pass(self.rank);
        self.check()
    }

    /// In such a test: this rank has nothing to do; false outside of one.
    ///
    /// # Errors
    /// `Resource` when nobody has anything to do; those of [`Seat::check`].
    pub(crate) fn pass_idle(&self) -> Result<bool> {
        let Some(baton) = self.board.baton() else { return Ok(false) };
        if !baton.pass_idle(self.rank) {
            return Err(Error::resource("wait for the other ranks", "nothing is under way in any of them: a deadlock in their protocol"));
        }
        self.check().map(|()| true)
    }

    /// Tells all ranks that this one cannot go on; returns what ended the first that cannot, and whose it is.
    pub(crate) fn blame(&self, error: Error) -> Error {
        self.fail(&error);
        self.check().err().unwrap_or(error)
    }

    /// Tells all ranks that this one cannot go on. An error that another rank or process has made is not this one's.
    pub(crate) fn fail(&self, why: &Error) {
        match why {
            Error::Rank { name, cause } => self.board.end_for(name, cause),
            _ => self.board.fail(self.rank, &why.to_string()),
        }
    }
}
