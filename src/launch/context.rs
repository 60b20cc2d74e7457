//! Sequences and the positions that a model knows.

use crate::config::settings::Settings;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use std::path::Path;

/// Refuses sequences longer than the positions that a model has learned. `config` is where it was found. Rotary positions do not end:
/// for those, a line for people where the sequence is longer than any that the model was trained on.
///
/// # Errors
/// `Usage` with flag, model and remedy.
pub(crate) fn check_context(settings: &Settings, shape: &ModelShape, config: &Path) -> Result<Option<String>> {
    let (seq_length, positions, config) = (settings.seq_length, shape.max_positions, config.display());
    if seq_length <= positions {
        return Ok(None);
    }
    let key = shape.family.spec().keys.max_positions;
    if shape.learned_positions {
        let remedy = format!("use --seq-length {positions} or less");
        return Err(Error::usage(format!(
            "--seq-length {seq_length}: {config} has {positions} positions ({key} in its config.json); {remedy}"
        )));
    }
    Ok(Some(format!(
        "--seq-length {seq_length}: {config} was made for {positions} positions ({key} in its config.json); it learns the others here"
    )))
}
