//! The error of reading that a person ended.

use crate::error::Error;

/// The error for data that was not read to its end because of a signal.
pub(super) fn interrupted() -> Error {
    Error::Interrupted("data was being read".into())
}
