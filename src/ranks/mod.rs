//! Ranks: devices that train together. Each rank of a process has a thread. Ranks publish their progress on the [`board`]; in tests a
//! [`baton`] chooses the rank that runs. Several processes have a board each, with [`links`] between them. Ranks with the same index in
//! their processes are *namesakes*.

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

/// Maximum number of ranks over all processes.
pub(crate) const RANKS_MAX: usize = 16;

/// The NCCL identifier that the GPUs of all processes share: an `ncclUniqueId`, an opaque value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct RailKey(pub(crate) [u8; 128]);

/// The context of a rank: its board and its index.
#[derive(Clone)]
pub(crate) struct Seat {
    /// The progress counters of all ranks.
    pub board: Arc<Board>,
    /// Index of the rank.
    pub rank: usize,
}

impl Seat {
    /// Checks that no rank has failed.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub(crate) fn check(&self) -> Result<()> {
        self.board.failure().map_or(Ok(()), Err)
    }

    /// Passes the turn token. Does nothing outside of tests with a turn token.
    ///
    /// # Errors
    /// Errors of [`Seat::check`].
    pub(crate) fn pass(&self) -> Result<()> {
        let Some(baton) = self.board.baton() else { return Ok(()) };
        baton.pass(self.rank);
        self.check()
    }

    /// Passes the turn token because this rank has nothing to do. Returns false outside of tests with a turn token.
    ///
    /// # Errors
    /// `Resource` when all ranks are idle, which is a deadlock; errors of [`Seat::check`].
    pub(crate) fn pass_idle(&self) -> Result<bool> {
        let Some(baton) = self.board.baton() else { return Ok(false) };
        if !baton.pass_idle(self.rank) {
            return Err(Error::resource("wait for the other ranks", "no operation is in progress in any rank: a deadlock in the protocol"));
        }
        self.check().map(|()| true)
    }

    /// Publishes that this rank failed. Returns the first failure, with the name of its rank.
    pub(crate) fn blame(&self, error: Error) -> Error {
        self.fail(&error);
        self.check().err().unwrap_or(error)
    }

    /// Publishes that this rank failed. A failure that another rank or process caused keeps that name.
    pub(crate) fn fail(&self, why: &Error) {
        match why {
            Error::Rank { name, cause } => self.board.end_for(name, cause),
            _ => self.board.fail(self.rank, &why.to_string()),
        }
    }
}
