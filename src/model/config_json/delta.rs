//! Layers with a gated delta rule, from `config.json`.

use super::keys::{INDEX_MAX, Keys, SIZE_MAX};
use crate::device::TAPS;
use crate::error::Result;
use crate::model::family::FamilySpec;
use crate::model::layer_shape::{Attn, AttnKind};
use serde_json::Value;

/// Every n-th layer has scores if the file names neither layers nor another number.
const INTERVAL: usize = 4;

/// Attention of each layer with a gated delta rule; `None` for layers with scores, whose attention is `attn`.
pub(super) fn layers(keys: &Keys, spec: &FamilySpec, layers: usize, attn: Attn) -> Result<Vec<Option<Attn>>> {
    if spec.delta.is_none() {
        return Ok(vec![None; layers]);
    }
    refuse_unsupported(keys)?;
    let delta = delta(keys, attn)?;
    Ok(delta_layers(keys, layers)?.into_iter().map(|is_delta| is_delta.then_some(delta)).collect())
}

fn delta(keys: &Keys, attn: Attn) -> Result<Attn> {
    let size = |key, default| keys.count_or(key, default, SIZE_MAX);
    let (kv_heads, heads) = (size("linear_num_key_heads", 16)?, size("linear_num_value_heads", 32)?);
    let (head_dim, values) = (size("linear_key_head_dim", 128)?, size("linear_value_head_dim", 128)?);
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.bad("linear_num_key_heads", format_args!("{kv_heads} does not divide the {heads} of linear_num_value_heads")));
    }
    if values != head_dim {
        let note = format!("only the {head_dim} of linear_key_head_dim is supported");
        return Err(keys.unsupported("linear_value_head_dim", &Value::from(values), &note));
    }
    if heads * head_dim > SIZE_MAX {
        let cause = format_args!("{heads} heads of {head_dim} are more than {SIZE_MAX} channels");
        return Err(keys.bad("linear_num_value_heads", cause));
    }
    Ok(Attn { kind: AttnKind::Delta, heads, kv_heads, head_dim, qk_norm: None, rope: None, window: None, ..attn })
}

/// Whether each layer has a gated delta rule: by `layer_types`, or every layer except the n-th, 2n-th and so on.
fn delta_layers(keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    let Some(types) = keys.get("layer_types") else {
        let interval = keys.count_or("full_attention_interval", INTERVAL, INDEX_MAX)?;
        return Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect());
    };
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| keys.bad("layer_types", format_args!("expected a list of {layers} layer types")))?;
    let is_delta = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("linear_attention") => Ok(true),
        _ => Err(keys.unsupported("layer_types", kind, "known: full_attention, linear_attention")),
    };
    types.iter().map(is_delta).collect()
}

/// Rejects options that would change the arithmetic. `transformers` does not read the last two.
fn refuse_unsupported(keys: &Keys) -> Result<()> {
    let taps = keys.get("linear_conv_kernel_dim").filter(|value| value.as_u64() != Some(TAPS as u64));
    let bias = keys.get("attention_bias").filter(|value| value.as_bool() != Some(false));
    let gate = keys.get("attn_output_gate").filter(|value| value.as_bool() != Some(true));
    let of_norm = keys.get("output_gate_type").filter(|value| !["swish", "silu"].map(Value::from).contains(value));
    let found = [
        ("linear_conv_kernel_dim", taps, "only 4 is supported"),
        ("attention_bias", bias, "only false is supported"),
        ("attn_output_gate", gate, "only true is supported"),
        ("output_gate_type", of_norm, "only swish is supported"),
    ];
    match found.into_iter().find_map(|(key, value, note)| Some((key, value?, note))) {
        None => Ok(()),
        Some((key, value, note)) => Err(keys.unsupported(key, value, note)),
    }
}
