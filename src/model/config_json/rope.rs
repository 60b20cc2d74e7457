//! How queries and keys rotate, by `config.json`.

use super::keys::{INDEX_MAX, Keys};
use crate::error::Result;
use crate::model::family::FamilySpec;
use crate::model::shape::{RopeConfig, RopeScaling};
use serde_json::{Map, Value};

pub(super) fn rope(keys: &Keys, spec: &FamilySpec, head_dim: usize, max_positions: usize) -> Result<RopeConfig> {
    let empty = Map::new();
    let (within, map) = keys.rope_parameters(&empty)?;
    let inner = Keys { map, path: keys.path, within };
    let theta_keys = if inner.get("rope_theta").is_some() { &inner } else { keys };
    let theta = theta_keys.number("rope_theta", Some(10000.0), 1.0, 1e30)?;
    let fraction_keys = if inner.get("partial_rotary_factor").is_some() { &inner } else { keys };
    let fraction = fraction_keys.number("partial_rotary_factor", Some(1.0), 0.0, 1.0)?;
    if fraction != 1.0 && !spec.partial_rotary {
        return Err(fraction_keys.unsupported("partial_rotary_factor", &Value::from(fraction), spec.architecture));
    }
    let rotary_dim = (head_dim as f64 * fraction) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(keys.bad("head_dim", format_args!("{rotary_dim} rotating channels of {head_dim}: rope needs an even number")));
    }
    Ok(RopeConfig { theta, rotary_dim, scaling: rope_scaling(keys, &inner, max_positions)? })
}

fn rope_scaling(keys: &Keys, inner: &Keys, max_positions: usize) -> Result<RopeScaling> {
    let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let factor = |key| inner.number(key, None, 1e-6, 1e9);
    match inner.get(key) {
        None => Ok(RopeScaling::Default),
        Some(Value::String(kind)) if kind == "default" => Ok(RopeScaling::Default),
        Some(Value::String(kind)) if kind == "linear" => Ok(RopeScaling::Linear { factor: factor("factor")? }),
        Some(Value::String(kind)) if kind == "llama3" => {
            let (low_freq_factor, high_freq_factor) = (factor("low_freq_factor")?, factor("high_freq_factor")?);
            if high_freq_factor <= low_freq_factor {
                return Err(
                    inner.bad("high_freq_factor", format_args!("{high_freq_factor} must be above low_freq_factor {low_freq_factor}"))
                );
            }
            // transformers gives the key beside the dictionary precedence over the one inside.
            let original = "original_max_position_embeddings";
            let original_keys = if keys.get(original).is_some() { keys } else { inner };
            let original_max_positions = original_keys.count_or(original, max_positions, INDEX_MAX)?;
            Ok(RopeScaling::Llama3 { factor: factor("factor")?, low_freq_factor, high_freq_factor, original_max_positions })
        }
        Some(other) => Err(inner.unsupported(key, other, "known: default, linear, llama3")),
    }
}
