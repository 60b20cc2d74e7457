//! What the processes of a run say of themselves when they meet, and why they may not have met.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::net::SocketAddr;

/// What a process says of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) host: String,
    /// Where it listens, once it does.
    pub(crate) address: Option<SocketAddr>,
    /// What must be the same everywhere.
    pub(crate) facts: Map<String, Value>,
    /// What it has, for all to know.
    pub(crate) has: Value,
}

/// Why processes have not met.
pub(super) enum Trouble {
    /// One is gone, and may come again.
    Again(String),
    Over(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Over(error)
    }
}
