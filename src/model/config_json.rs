//! Reads a Hugging Face `config.json`. Whatever it holds, the answer is a shape that can be trained or one error that
//! names key, value and file; nothing is guessed that `transformers` would read from the file.
//!
//! Two things of training differ by design: there is no dropout (see [`ModelShape::ignored_dropout`]), and
//! `pad_token_id` does not freeze its embedding: packed sequences hold no padding.

mod experts;
mod keys;
mod rope;
#[cfg(test)]
mod tests;

use super::family::{Family, FamilySpec, Missing, ScaleRule, WindowRule};
use super::layer_shape::{Act, Attn, Ffn, LayerShape, NormSpec, QkSpan};
use super::shape::{DEMO_CONFIG, ModelShape};
use super::tensors::TensorTable;
use crate::disk;
use crate::error::{Error, Result};
use keys::{INDEX_MAX, Keys, SIZE_MAX};
use serde_json::Value;
use std::path::Path;

const LAYERS_MAX: usize = 4096;
const PARAMS_MAX: usize = 1 << 48;

/// No `config.json` is larger.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

impl ModelShape {
    /// Reads `config.json` at `path`.
    ///
    /// # Errors
    /// `Io` or `Format` when it cannot be read, otherwise as [`ModelShape::parse`].
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&disk::read_small_text(path, CONFIG_BYTES_MAX)?, path)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// `Unsupported` for an architecture, activation, rope type or other feature that this build cannot train, `Format` for
    /// missing keys and senseless values; both name key, value and file.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        parse(text, path)
    }

    /// The built-in model: a small Llama-style decoder over bytes.
    pub fn demo() -> Self {
        Self::parse(DEMO_CONFIG, Path::new("(built-in config.json)")).expect("the built-in configuration is valid")
    }
}

/// The shape that `text`, the content of `path`, describes.
fn parse(text: &str, path: &Path) -> Result<ModelShape> {
    let value: Value = serde_json::from_str(text).map_err(|e| Error::format(path, e))?;
    let Value::Object(map) = value else { return Err(Error::format(path, "expected a JSON object")) };
    let keys = Keys { map: &map, path, within: "" };
    let spec = architecture(&keys)?;
    keys.refuse_unsupported(spec)?;
    let shape = read_shape(&keys, spec)?;
    let params = TensorTable::new(&shape).params();
    if params > PARAMS_MAX {
        return Err(Error::format(path, format_args!("these sizes make {params} parameters, more than {PARAMS_MAX}")));
    }
    Ok(shape)
}

fn architecture(keys: &Keys) -> Result<&'static FamilySpec> {
    let name = keys.get("architectures").and_then(|v| v.get(0)).and_then(Value::as_str);
    let name = name.ok_or_else(|| keys.missing("architectures", "a list that names the model class"))?;
    Family::find(name).ok_or_else(|| {
        let known = Family::architectures();
        keys.unsupported("architectures", &Value::from(name), &format!("known: {known}"))
    })
}

fn read_shape(keys: &Keys, spec: &FamilySpec) -> Result<ModelShape> {
    let names = spec.keys;
    let channels = keys.count(names.channels, SIZE_MAX)?;
    let layers = keys.count(names.layers, LAYERS_MAX)?;
    let attn = attention(keys, spec, channels)?;
    let max_positions = keys.count(names.max_positions, INDEX_MAX)?;
    let norm = NormSpec { kind: spec.norm, eps: keys.number(names.eps, None, 1e-30, 1.0)? as f32 };
    let ropes = if spec.learned_positions { vec![] } else { vec![rope::rope(keys, spec, attn.head_dim, max_positions)?] };
    let attn = Attn { rope: (!ropes.is_empty()).then_some(0), ..attn };
    let mlps = experts::mlps(keys, spec, layers, || ffn(keys, spec, channels))?;
    let layer = |(window, mlp)| LayerShape { attn: Attn { window, ..attn }, mlp, norm };
    Ok(ModelShape {
        family: spec.family,
        vocab: keys.count("vocab_size", INDEX_MAX)?,
        channels,
        max_positions,
        learned_positions: spec.learned_positions,
        ropes,
        layers: windows(keys, spec, layers)?.into_iter().zip(mlps).map(layer).collect(),
        final_norm: norm,
        tied: keys.flag("tie_word_embeddings", spec.tied)?,
        init_std: keys.number("initializer_range", Some(0.02), 0.0, 100.0)? as f32,
        ignored_dropout: keys.dropout()?,
    })
}

/// Attention of every layer, without window and rope.
fn attention(keys: &Keys, spec: &FamilySpec, channels: usize) -> Result<Attn> {
    let names = spec.keys;
    let heads = keys.count(names.heads, SIZE_MAX)?;
    let kv_heads = names.kv_heads.map_or(Ok(heads), |key| keys.derived(key, spec.kv_heads, heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.bad("num_key_value_heads", format_args!("{kv_heads} does not divide the {heads} of {}", names.heads)));
    }
    if spec.qk_norm == Some(QkSpan::Whole) && kv_heads != heads {
        let value = Value::from(kv_heads);
        return Err(keys.unsupported("num_key_value_heads", &value, &format!("the norm of all heads together needs {heads}")));
    }
    let head_dim = head_dim(keys, spec, channels, heads)?;
    Ok(Attn {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: keys.rule(spec.qkv_bias)?,
        out_bias: keys.rule(spec.out_bias)?,
        qk_norm: spec.qk_norm,
        rope: None,
        window: None,
        scale: scale(keys, spec, head_dim)?,
        sinks: spec.sinks,
    })
}

fn scale(keys: &Keys, spec: &FamilySpec, head_dim: usize) -> Result<f32> {
    let scaled = match spec.scale {
        ScaleRule::HeadDim => true,
        ScaleRule::Unless(key) => keys.flag(key, true)?,
    };
    Ok(if scaled { (head_dim as f64).sqrt().recip() as f32 } else { 1.0 })
}

fn head_dim(keys: &Keys, spec: &FamilySpec, channels: usize, heads: usize) -> Result<usize> {
    let key = spec.keys.head_dim.filter(|key| keys.get(key).is_some() || matches!(spec.head_dim, Missing::Refuse));
    let Some(key) = key else {
        if !channels.is_multiple_of(heads) {
            let cause = format_args!("{heads} does not divide the {channels} of {}", spec.keys.channels);
            return Err(keys.bad(spec.keys.heads, cause));
        }
        return Ok(channels / heads);
    };
    let head_dim = keys.derived(key, spec.head_dim, (channels / heads).max(1))?;
    if heads * head_dim > SIZE_MAX {
        return Err(keys.bad(key, format_args!("{heads} heads of {head_dim} are more than {SIZE_MAX} channels")));
    }
    Ok(head_dim)
}

fn ffn(keys: &Keys, spec: &FamilySpec, channels: usize) -> Result<Ffn> {
    let key = spec.keys.ffn;
    let width = match spec.ffn_ratio {
        Some(ratio) => keys.count_or(key, ratio * channels, SIZE_MAX)?,
        None => keys.count(key, SIZE_MAX)?,
    };
    check_activation(keys, spec)?;
    Ok(Ffn { width, act: spec.act, bias: keys.rule(spec.mlp_bias)? })
}

fn check_activation(keys: &Keys, spec: &FamilySpec) -> Result<()> {
    let key = spec.keys.activation;
    let accepted: &[&str] = match spec.act {
        Act::GeluTanh => &["gelu_new", "gelu_pytorch_tanh"],
        Act::Swiglu => &["silu", "swish"],
    };
    match keys.get(key) {
        None => Ok(()),
        Some(Value::String(name)) if accepted.contains(&name.as_str()) => Ok(()),
        Some(other) => Err(keys.unsupported(key, other, &format!("known for {}: {}", spec.architecture, accepted.join(", ")))),
    }
}

fn windows(keys: &Keys, spec: &FamilySpec, layers: usize) -> Result<Vec<Option<usize>>> {
    match spec.window {
        WindowRule::Never => Ok(vec![None; layers]),
        WindowRule::All(missing) => {
            let window = if keys.map.contains_key("sliding_window") { keys.optional_count("sliding_window")? } else { missing };
            Ok(vec![window; layers])
        }
        WindowRule::AllIf(key, missing) => {
            let window = keys.flag(key, false)?.then(|| keys.count_or("sliding_window", missing, INDEX_MAX)).transpose()?;
            Ok(vec![window; layers])
        }
        WindowRule::Alternating(missing) => {
            let slides = match keys.get("layer_types") {
                None => (0..layers).map(|layer| layer % 2 == 0).collect(),
                Some(types) => named_layers(keys, types, layers, true)?,
            };
            let window = keys.count_or("sliding_window", missing, INDEX_MAX)?;
            Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
        }
        WindowRule::PerLayer => {
            let slides = sliding_layers(keys, layers)?;
            if !slides.contains(&true) {
                return Ok(vec![None; layers]);
            }
            let window = keys.count("sliding_window", INDEX_MAX)?;
            Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
        }
    }
}

/// Which layers slide: those that `layer_types` names, or those from `max_window_layers` on.
fn sliding_layers(keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    let enabled = keys.flag("use_sliding_window", false)?;
    let Some(types) = keys.get("layer_types") else {
        let full = if enabled { keys.whole("max_window_layers")? } else { layers };
        return Ok((0..layers).map(|layer| layer >= full).collect());
    };
    named_layers(keys, types, layers, enabled)
}

/// Which layers `layer_types` has slide, where that is `enabled`.
fn named_layers(keys: &Keys, types: &Value, layers: usize, enabled: bool) -> Result<Vec<bool>> {
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
