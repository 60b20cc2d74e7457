//! The hello message of a process at the rendezvous, and the reasons why a rendezvous fails.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::net::SocketAddr;

/// The description that a process sends of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct HelloMessage {
    pub(crate) host: String,
    /// The address it listens on, once it listens.
    pub(crate) address: Option<SocketAddr>,
    /// Settings that must be equal in all processes.
    pub(crate) facts: Map<String, Value>,
    /// Its machine, CPUs and GPUs, for all processes.
    #[serde(rename = "has")]
    pub(crate) resources: Value,
}

/// Reasons why a rendezvous failed.
pub(super) enum RendezvousError {
    /// A process was lost and may connect again.
    Again(String),
    Over(Error),
}

impl From<Error> for RendezvousError {
    fn from(error: Error) -> Self {
        Self::Over(error)
    }
}
