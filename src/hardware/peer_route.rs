//! What lies on the way of copies between GPUs of a machine.

use std::fmt;

/// What a copy out of another GPU's memory passes; the later, the slower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerRoute {
    /// Links that nothing else passes, as NVLink is.
    #[default]
    Own,
    /// The links of both GPUs to the host, from one straight to the other.
    Links,
    /// Host memory, where there is no direct access: out over one link, then in over the other.
    Host,
}

impl PeerRoute {
    /// As profiles write it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Links => "links",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for PeerRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "over links of their own",
            Self::Links => "over the links to the host",
            Self::Host => "through host memory, in buffers of the driver that are not counted here",
        })
    }
}
