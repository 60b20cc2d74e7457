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
    /// Flags say the same, with a remark where they do not say all.
    Used(Vec<FlagValue>, String),
    /// It is so anyway.
    Holds,
    /// Nothing, and why.
    Ignored(String),
    /// It is not available here; what to use.
    Missing(String),
}
