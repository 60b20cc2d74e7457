//! How queries and keys rotate, by `config.json`.

use super::keys::{INDEX_MAX, Keys};
use crate::error::Result;
use crate::model::family::{Family, FamilySpec};
use crate::model::shape::{RopeConfig, RopeScaling};
use serde_json::{Map, Value};

pub(super) fn rope(keys: &Keys, spec: &FamilySpec, head_dim: usize, max_positions: usize) -> Result<RopeConfig> {
    let empty = Map::new();
    let (within, map) = keys.rope_parameters(&empty)?;
    let inner = Keys { map, path: keys.path, within };
    let theta_keys = if inner.get("rope_theta").is_some() { &inner } else { keys };
    // transformers has another default for this family, and rotates another way where the file says nothing.
    let default = if spec.family == Family::GptOss { None } else { Some(10000.0) };
    let theta = theta_keys.number("rope_theta", default, 1.0, 1e30)?;
    let fraction_keys = if inner.get("partial_rotary_factor").is_some() { &inner } else { keys };
    let fraction = fraction_keys.number("partial_rotary_factor", Some(1.0), 0.0, 1.0)?;
    if fraction != 1.0 && !spec.partial_rotary {
        return Err(fraction_keys.unsupported("partial_rotary_factor", &Value::from(fraction), spec.architecture));
    }
    let rotary_dim = (head_dim as f64 * fraction) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(keys.bad("head_dim", format_args!("{rotary_dim} rotating channels of {head_dim}: rope needs an even number")));
    }
    let scaling = rope_scaling(keys, &inner, max_positions)?;
    if theta <= 1.0 && matches!(scaling, RopeScaling::Yarn { .. }) {
        return Err(theta_keys.bad("rope_theta", format_args!("{theta}: yarn needs more than 1")));
    }
    Ok(RopeConfig { theta, rotary_dim, scaling })
}

fn rope_scaling(keys: &Keys, inner: &Keys, max_positions: usize) -> Result<RopeScaling> {
    let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let factor = |key| inner.number(key, None, 1e-6, 1e9);
    match inner.get(key) {
        None => Ok(RopeScaling::Default),
        Some(Value::String(kind)) if kind == "default" => Ok(RopeScaling::Default),
        Some(Value::String(kind)) if kind == "linear" => Ok(RopeScaling::Linear { factor: factor("factor")? }),
        Some(Value::String(kind)) if kind == "yarn" => yarn(keys, inner, max_positions),
        Some(Value::String(kind)) if kind == "llama3" => {
            let (low_freq_factor, high_freq_factor) = (factor("low_freq_factor")?, factor("high_freq_factor")?);
            if high_freq_factor <= low_freq_factor {
                return Err(
                    inner.bad("high_freq_factor", format_args!("{high_freq_factor} must be above low_freq_factor {low_freq_factor}"))
                );
            }
            let original_max_positions = original_max_positions(keys, inner, max_positions)?;
            Ok(RopeScaling::Llama3 { factor: factor("factor")?, low_freq_factor, high_freq_factor, original_max_positions })
        }
        Some(other) => Err(inner.unsupported(key, other, "known: default, linear, llama3, yarn")),
    }
}

/// transformers gives the key beside the dictionary precedence over the one inside.
fn original_max_positions(keys: &Keys, inner: &Keys, max_positions: usize) -> Result<usize> {
    let original = "original_max_position_embeddings";
    let original_keys = if keys.get(original).is_some() { keys } else { inner };
    original_keys.count_or(original, max_positions, INDEX_MAX)
}

fn yarn(keys: &Keys, inner: &Keys, max_positions: usize) -> Result<RopeScaling> {
    let number = |key, default| inner.number(key, default, 1e-6, 1e9);
    let factor = number("factor", None)?;
    let (beta_fast, beta_slow) = (number("beta_fast", Some(32.0))?, number("beta_slow", Some(1.0))?);
    // The scale of scores grows with the logarithm of the context.
    let growth = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 };
    let scales = ["mscale", "mscale_all_dim"].map(|key| inner.get(key).and_then(Value::as_f64).filter(|scale| *scale != 0.0));
    let derived = match scales {
        [Some(mscale), Some(all)] => growth(mscale) / growth(all),
        _ => growth(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        original_max_positions: original_max_positions(keys, inner, max_positions)?,
        truncate: inner.flag("truncate", true)?,
        attention_factor: number("attention_factor", Some(derived))?,
    })
}
