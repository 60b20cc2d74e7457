//! The record of frozen tensors in a checkpoint's `run`: their names in the table of tensors, and the tokens whose rows are trained.

use crate::model::shape::ModelShape;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ops::Range;

/// Key of the list.
const KEY: &str = "frozen";
/// Key of the tokens: the first, and the end of their range.
const TOKENS: &str = "trained_tokens";

/// Records the frozen tensors of `shape` in `run`, if there are any.
pub(crate) fn record_frozen(run: &mut Map<String, Value>, shape: &ModelShape) {
    if !shape.frozen.is_empty() {
        run.insert(KEY.into(), shape.frozen.iter().cloned().collect());
    }
    if let Some(Range { start, end }) = shape.trained_tokens {
        run.insert(TOKENS.into(), json!([start, end]));
    }
}

/// The frozen tensors that `run` records.
pub(crate) fn frozen_names(run: &Map<String, Value>) -> BTreeSet<String> {
    let names = run.get(KEY).and_then(Value::as_array).into_iter().flatten();
    names.filter_map(|name| name.as_str().map(String::from)).collect()
}

/// The tokens that `run` records; `vocab` is the vocabulary of its model.
///
/// # Errors
/// A record that is no range of tokens.
pub(crate) fn trained_tokens(run: &Map<String, Value>, vocab: usize) -> std::result::Result<Option<Range<usize>>, String> {
    let Some(found) = run.get(TOKENS) else { return Ok(None) };
    let bounds = <[usize; 2]>::deserialize(found).ok().filter(|[start, end]| start < end && *end <= vocab);
    let [start, end] = bounds.ok_or_else(|| format!("{TOKENS}: {found} is no range of ids below {vocab}"))?;
    Ok(Some(start..end))
}
