//! The checkpoint that a person means.

use super::{is_called_checkpoint, is_checkpoint, newest_good};
use crate::disk::did_you_mean;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// `dir`, if it is a checkpoint; otherwise the newest good one in it, as an output directory. With a line for each that was passed over.
///
/// # Errors
/// `Format` when `dir` holds no good checkpoint; `Io` when it cannot be read.
pub(crate) fn find(dir: &Path) -> Result<(PathBuf, Vec<String>)> {
    if is_checkpoint(dir) {
        return Ok((dir.to_path_buf(), vec![]));
    }
    let newest = newest_good(dir)?;
    match newest.found {
        Some((path, _)) => Ok((path, newest.warnings)),
        // A directory named like a checkpoint without a manifest is damaged: opening it reports that.
        None if newest.warnings.is_empty() && is_called_checkpoint(dir) => Ok((dir.to_path_buf(), vec![])),
        None => {
            let damaged = match newest.warnings.as_slice() {
                [] if !dir.exists() => format!("there is no such directory{}", did_you_mean(dir, Path::is_dir)),
                [] => "the directory is not a checkpoint and contains none".into(),
                warnings => warnings.join("; "),
            };
            Err(Error::format(dir, format_args!("no good checkpoint: {damaged}")))
        }
    }
}
