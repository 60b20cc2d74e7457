//! Ranks: devices that train together. Each rank of a process has a thread. Ranks publish their progress in [`progress`] counters; in tests
//! a [`turn_token`] chooses the rank that runs. Several processes have progress counters each, with [`links`] between them. Ranks with the
//! same index in their processes are *inter-node peers*.

mod control_connection;
mod control_server;
mod handshake;
mod handshake_server;
pub(crate) mod hello_message;
pub(crate) mod links;
pub(crate) mod notice;
pub(crate) mod progress;
pub(crate) mod rendezvous;
pub(crate) mod run_token;
pub(crate) mod slice_connections;
pub(crate) mod turn_token;
pub(crate) mod wire;

use crate::error::{Error, Result};
use progress::ProgressCounters;
use std::sync::Arc;

/// Maximum number of ranks over all processes.
pub(crate) const RANKS_MAX: usize = 16;

/// The NCCL identifier that the GPUs of all processes share: an `ncclUniqueId`, an opaque value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct NcclUniqueId(pub(crate) [u8; 128]);

/// The context of a rank: the progress counters and its index.
#[derive(Clone)]
pub(crate) struct RankContext {
    /// The progress counters of all ranks.
    pub progress: Arc<ProgressCounters>,
    /// Index of the rank.
    pub rank: usize,
}

impl RankContext {
    /// Checks that no rank has failed.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub(crate) fn check(&self) -> Result<()> {
        self.progress.failure().map_or(Ok(()), Err)
    }

    /// Passes the turn token. Does nothing outside of tests with a turn token.
    ///
    /// # Errors
    /// Errors of [`RankContext::check`].
    pub(crate) fn pass(&self) -> Result<()> {
        let Some(turn_token) = self.progress.turn_token() else { return Ok(()) };
        turn_token.pass(self.rank);
        self.check()
    }

    /// Passes the turn token because this rank has nothing to do. Returns false outside of tests with a turn token.
    ///
    /// # Errors
    /// `Resource` when all ranks are idle, which is a deadlock; errors of [`RankContext::check`].
    pub(crate) fn pass_idle(&self) -> Result<bool> {
        let Some(turn_token) = self.progress.turn_token() else { return Ok(false) };
        if !turn_token.pass_idle(self.rank) {
            return Err(Error::resource("wait for the other ranks", "no operation is in progress in any rank: a deadlock in the protocol"));
        }
        self.check().map(|()| true)
    }

    /// Publishes that this rank failed. Returns the first failure, with the name of its rank.
    pub(crate) fn attribute(&self, error: Error) -> Error {
        self.fail(&error);
        self.check().err().unwrap_or(error)
    }

    /// Publishes that this rank failed. A failure that another rank or process caused keeps that name.
    pub(crate) fn fail(&self, why: &Error) {
        match why {
            Error::Rank { name, cause } => self.progress.end_for(name, cause),
            _ => self.progress.fail(self.rank, &why.to_string()),
        }
    }
}
