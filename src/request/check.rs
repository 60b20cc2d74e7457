//! Checks of values of flags.

use crate::error::{Error, Result};
use crate::units::compact;
use std::fmt::Display;

/// Checks that `flag` has a valid value. `rule` completes the message: `must be at least 1`, `needs --device cuda`.
pub(crate) fn require(holds: bool, flag: &str, value: impl Display, rule: impl Display) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::usage(format!("--{flag} {}: {rule}", compact(value)))) }
}
