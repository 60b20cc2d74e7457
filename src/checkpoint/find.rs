//! The checkpoint that a person means.

use super::{Check, is_called_checkpoint, is_checkpoint, newest_by, newest_good};
use crate::disk::did_you_mean;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// `dir`, if it is a checkpoint; otherwise the newest one in it, as an output directory, that passes `check`. With a line for each that was
/// passed over.
///
/// # Errors
/// `Format` when `dir` holds no good checkpoint; `Io` when it cannot be read.
pub(crate) fn find(dir: &Path, check: Check) -> Result<(PathBuf, Vec<String>)> {
    if is_checkpoint(dir) {
        return Ok((dir.to_path_buf(), vec![]));
    }
    let newest = newest_good(dir, check)?;
    match newest.found {
        Some((path, _)) => Ok((path, newest.warnings)),
        // A directory named like a checkpoint without a manifest is damaged: opening it reports that.
        None if newest.warnings.is_empty() && is_called_checkpoint(dir) => Ok((dir.to_path_buf(), vec![])),
        None => Err(none_good(dir, &newest.warnings)),
    }
}

/// Uses `dir`, if it is a checkpoint; otherwise the newest checkpoint in it that can be used. Returns its path, the result, and a line for
/// each newer one that is damaged. The inner error of `attempt` is a fault of the checkpoint, and the outer error is another failure.
///
/// # Errors
/// `Format` when `dir` holds no good checkpoint; `Io` when it cannot be read; errors of `attempt`.
pub(super) fn use_newest<T>(dir: &Path, mut attempt: impl FnMut(&Path) -> Result<Result<T>>) -> Result<(PathBuf, T, Vec<String>)> {
    if is_checkpoint(dir) {
        return Ok((dir.to_path_buf(), attempt(dir)??, vec![]));
    }
    let newest = newest_by(dir, &mut attempt)?;
    match newest.found {
        Some((path, result)) => Ok((path, result, newest.warnings)),
        None if newest.warnings.is_empty() && is_called_checkpoint(dir) => Ok((dir.to_path_buf(), attempt(dir)??, vec![])),
        None => Err(none_good(dir, &newest.warnings)),
    }
}

/// No checkpoint in `dir` is good; `damaged` has a line for each.
fn none_good(dir: &Path, damaged: &[String]) -> Error {
    let cause = match damaged {
        [] if !dir.exists() => format!("there is no such directory{}", did_you_mean(dir, Path::is_dir)),
        [] => "the directory is not a checkpoint and contains none".into(),
        lines => lines.join("; "),
    };
    Error::format(dir, format_args!("no good checkpoint: {cause}"))
}
