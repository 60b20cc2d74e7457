//! Check of the sequence length against the positions of the model.

use crate::config::settings::Settings;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use std::path::Path;

/// Rejects sequences that are longer than the learned positions of a model, or than its positions without a factor on queries. Other rotary
/// positions have no such limit: for them, returns a warning if the sequence is longer than any sequence of the pretraining. `config` is the
/// path of the model's configuration.
///
/// # Errors
/// `Usage` with flag, model and remedy.
pub(crate) fn check_context(settings: &Settings, shape: &ModelShape, config: &Path) -> Result<Option<String>> {
    let (seq_length, positions, config) = (settings.seq_length, shape.max_positions, config.display());
    if seq_length <= positions {
        return Ok(None);
    }
    let remedy = format!("use --seq-length {positions} or less");
    if shape.scales_queries {
        return Err(Error::usage(format!(
            "--seq-length {seq_length}: {config} scales queries from position {positions} on (llama_4_scaling_beta and \
             original_max_position_embeddings in its config.json), which is not supported; {remedy}"
        )));
    }
    let key = shape.family.spec().keys.max_positions;
    if shape.learned_positions {
        return Err(Error::usage(format!(
            "--seq-length {seq_length}: {config} has {positions} positions ({key} in its config.json); {remedy}"
        )));
    }
    Ok(Some(format!(
        "--seq-length {seq_length}: {config} was made for {positions} positions ({key} in its config.json); this run trains longer ones"
    )))
}
