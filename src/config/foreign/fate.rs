//! The fate of a key of another program's configuration.

use crate::config::document::NodeValue;

/// A flag and its value.
pub(super) type FlagValue = (String, NodeValue);

pub(super) fn set(flag: &str, value: NodeValue) -> FlagValue {
    (flag.into(), value)
}

/// The fate of a key.
#[derive(Debug, PartialEq)]
pub(super) enum Fate {
    /// Flags with the same meaning, and a remark if they do not cover the whole meaning.
    Used(Vec<FlagValue>, String),
    /// The program always behaves this way.
    Holds,
    /// The key is ignored for this reason.
    Ignored(String),
    /// The key is not available. The text names the alternative.
    Missing(String),
}
