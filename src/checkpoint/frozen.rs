//! The record of frozen tensors in a checkpoint's `run`: their names in the table of tensors.

use crate::model::shape::ModelShape;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Key of the list.
const KEY: &str = "frozen";

/// Records the frozen tensors of `shape` in `run`, if there are any.
pub(crate) fn record_frozen(run: &mut Map<String, Value>, shape: &ModelShape) {
    if !shape.frozen.is_empty() {
        run.insert(KEY.into(), shape.frozen.iter().cloned().collect());
    }
}

/// The frozen tensors that `run` records.
pub(crate) fn frozen_names(run: &Map<String, Value>) -> BTreeSet<String> {
    let names = run.get(KEY).and_then(Value::as_array).into_iter().flatten();
    names.filter_map(|name| name.as_str().map(String::from)).collect()
}
