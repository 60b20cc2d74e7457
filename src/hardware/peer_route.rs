//! Routes of copies between GPUs of a machine.

use std::fmt;

/// Route of a copy from another GPU's memory, the fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerRoute {
    /// Links that carry no other traffic, such as NVLink.
    #[default]
    Own,
    /// The links of both GPUs to the host, directly from one to the other.
    Links,
    /// Host memory, without direct access: out over one link, then in over the other.
    Host,
}

impl PeerRoute {
    /// The name in profiles.
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
            Self::Own => "over direct links between GPUs",
            Self::Links => "over the links to the host",
            Self::Host => "through host memory, in buffers of the driver that are not counted here",
        })
    }
}
