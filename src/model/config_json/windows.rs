//! Layers with a sliding window, from `config.json`.

use super::keys::{INDEX_MAX, Keys};
use super::rope::rotating_layers;
use crate::error::Result;
use crate::model::family::{FamilySpec, Pattern, TypeRule, WindowRule};
use serde_json::Value;

/// Window of each layer; `None`: full attention.
pub(super) fn windows(keys: &Keys, spec: &FamilySpec, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = |missing: Option<usize>| match keys.map.get("sliding_window") {
        None => Ok(missing),
        Some(_) => keys.optional_count("sliding_window"),
    };
    match &spec.window {
        WindowRule::Never => Ok(vec![None; layers]),
        WindowRule::All(missing) => Ok(vec![window(*missing)?; layers]),
        WindowRule::AllIf(key, missing) => Ok(vec![if keys.flag(key, false)? { window(Some(*missing))? } else { None }; layers]),
        WindowRule::ByType(rule) => {
            let slides = sliding_layers(keys, rule, layers)?;
            if !slides.contains(&true) {
                return Ok(vec![None; layers]);
            }
            let window = window(rule.missing_window)?.map_or_else(|| keys.count("sliding_window", INDEX_MAX), Ok)?;
            // The last layer of Gemma 4 has full attention whatever its type is.
            let is_full = |layer: usize| spec.is_gemma4() && layer + 1 == layers;
            Ok(slides.into_iter().enumerate().map(|(layer, slides)| (slides && !is_full(layer)).then_some(window)).collect())
        }
    }
}

/// Layers with a sliding window, from `layer_types` or from the family's pattern.
fn sliding_layers(keys: &Keys, rule: &TypeRule, layers: usize) -> Result<Vec<bool>> {
    let enabled = !rule.switch || keys.flag("use_sliding_window", false)?;
    let Some(types) = keys.get("layer_types") else {
        return if enabled { pattern(keys, rule.missing_types, layers) } else { Ok(vec![false; layers]) };
    };
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| keys.bad("layer_types", format_args!("expected a list of {layers} layer types")))?;
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") if enabled => Ok(true),
        Some("sliding_attention") => Err(keys.bad("layer_types", "sliding_attention needs use_sliding_window")),
        _ => Err(keys.unsupported("layer_types", kind, "known: full_attention, sliding_attention")),
    };
    types.iter().map(slides).collect()
}

fn pattern(keys: &Keys, pattern: Pattern, layers: usize) -> Result<Vec<bool>> {
    match pattern {
        Pattern::From(key) => {
            let full = keys.whole(key)?;
            Ok((0..layers).map(|layer| layer >= full).collect())
        }
        Pattern::EveryOtherBefore(key) => {
            let end = keys.whole(key)?;
            Ok((0..layers).map(|layer| layer.is_multiple_of(2) && layer < end).collect())
        }
        Pattern::NotEvery(n) => {
            let n = keys.count_or("sliding_window_pattern", n, INDEX_MAX)?;
            Ok((1..=layers).map(|number| !number.is_multiple_of(n)).collect())
        }
        Pattern::WithoutRope(interval) => Ok(rotating_layers(keys, interval, layers)?.into_iter().map(|rotates| !rotates).collect()),
    }
}
