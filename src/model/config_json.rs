//! Reads a Hugging Face `config.json`. The result is a shape that can be trained, or one error with key, value and file. Every value that
//! `transformers` would read from the file is read; none is guessed.
//!
//! Training differs from `transformers` in two ways by design: there is no dropout (see [`ModelShape::ignored_dropout`]), and
//! `pad_token_id` does not freeze its embedding, because rows are not padded with it.

mod delta;
mod experts;
mod gemma4;
mod keys;
mod latent;
mod rope;
#[cfg(test)]
mod tests;
mod text_part;
#[cfg(test)]
mod text_part_tests;
mod windows;

use super::family::{Family, FamilySpec, Missing, Multipliers, Rotates, ScaleRule};
use super::layer_shape::{Act, Attn, AttnKind, Ffn, Join, LayerShape, NormSpec, Values};
use super::shape::{DEMO_CONFIG, EmbedScale, ModelShape};
use super::tensors::TensorTable;
use crate::data::loss_weight::VOCAB_MAX;
use crate::disk;
use crate::error::{Error, Result};
use keys::{INDEX_MAX, Keys, SIZE_MAX};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const LAYERS_MAX: usize = 4096;
const PARAMS_MAX: usize = 1 << 48;

/// Maximum size of a `config.json`.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

impl ModelShape {
    /// Reads `config.json` at `path`.
    ///
    /// # Errors
    /// `Io` or `Format` when the file cannot be read, otherwise as [`ModelShape::parse`].
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&disk::read_small_text(path, CONFIG_BYTES_MAX)?, path)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// `Unsupported` for an architecture, activation, rope type or other feature that this build cannot train, `Format` for missing keys
    /// and invalid values. Both have key, value and file.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        parse(text, path)
    }

    /// The built-in model: a small Llama-style decoder over bytes.
    pub fn demo() -> Self {
        Self::parse(DEMO_CONFIG, Path::new("(built-in config.json)")).expect("the built-in configuration is valid")
    }
}

/// The shape described by `text`, the content of `path`.
fn parse(text: &str, path: &Path) -> Result<ModelShape> {
    let value: Value = serde_json::from_str(text).map_err(|e| Error::format(path, e))?;
    let Value::Object(map) = value else { return Err(Error::format(path, "expected a JSON object")) };
    let keys = Keys { map: &map, path, within: "" };
    let family = family(&keys)?;
    keys.refuse_unsupported(family.spec())?;
    let shape = match family.text_part() {
        None => read_shape(&keys, family)?,
        Some(part) => text_part::decoder(&keys, family, part, |keys| {
            keys.refuse_unsupported(family.spec())?;
            read_shape(keys, family)
        })?,
    };
    let params = TensorTable::new(&shape).params();
    if params > PARAMS_MAX {
        return Err(Error::format(path, format_args!("these sizes make {params} parameters, more than {PARAMS_MAX}")));
    }
    Ok(shape)
}

fn family(keys: &Keys) -> Result<Family> {
    let name = keys.get("architectures").and_then(|v| v.get(0)).and_then(Value::as_str);
    let name = name.ok_or_else(|| keys.missing("architectures", "a list that names the model class"))?;
    let family = Family::find(name).ok_or_else(|| {
        let known = Family::architectures().collect::<Vec<_>>().join(", ");
        let why = Family::lacking(name).map_or(String::new(), |lacking| format!("it needs {lacking}, which this decoder lacks; "));
        keys.unsupported("architectures", &Value::from(name), &format!("{why}known: {known}"))
    })?;
    let decoder = keys.get(text_part::NESTED).and_then(|nested| nested.get("model_type")).and_then(Value::as_str);
    Ok(decoder.map_or(family, |decoder| family.with_decoder(decoder)))
}

fn read_shape(keys: &Keys, family: Family) -> Result<ModelShape> {
    let (spec, names) = (family.spec(), family.spec().keys);
    let channels = keys.count(names.channels, SIZE_MAX)?;
    let layers = keys.count(names.layers, LAYERS_MAX)?;
    let attn = latent::attention(keys, spec)?.map_or_else(|| attention(keys, spec, channels), Ok)?;
    let max_positions = keys.count(names.max_positions, INDEX_MAX)?;
    let norm = NormSpec { kind: spec.norm, plus_one: spec.plus_one, eps: keys.number(names.eps, None, 1e-30, 1.0)? as f32 };
    let windows = windows::windows(keys, spec, layers)?;
    let slides: Vec<bool> = windows.iter().map(Option::is_some).collect();
    let attns = gemma4::attention(keys, spec, attn, &slides)?;
    let of_type = |slides_here: bool| slides.iter().zip(&attns).find(|(slides, _)| **slides == slides_here);
    let head_dim = |slides| of_type(slides).map_or(attn.head_dim, |(_, attn)| attn.latent().map_or(attn.head_dim, |latent| latent.rotary));
    let heads = rope::RotatedHeads { head_dims: [head_dim(false), head_dim(true)], max_positions };
    let (ropes, rope_of) = rope::ropes(keys, spec, &heads, &slides)?;
    let scaled_from = rope::scaled_from(keys, spec)?;
    let mlps = experts::mlps(keys, spec, layers, || ffn(keys, spec, channels))?;
    let factor =
        |key: fn(&Multipliers) -> &'static str| spec.multipliers.as_ref().map_or(Ok(1.0), |multipliers| keys.factor(key(multipliers)));
    let join = match factor(|multipliers| multipliers.residual)? {
        _ if spec.names.post_attn_norm.is_some() => Join::Norm,
        1.0 => Join::Add,
        factor => Join::Scale(factor),
    };
    let pre_norm = spec.names.attn_norm.is_some();
    let delta = delta::layers(keys, spec, layers, attn)?;
    let of_layer = |(attn, (window, rope)), delta: Option<Attn>| delta.unwrap_or(Attn { window, rope, ..attn });
    let scaled = spec.is_gemma4();
    let layer = |((of_attn, delta), mlp)| LayerShape { attn: of_layer(of_attn, delta), mlp, norm, pre_norm, join, scaled };
    Ok(ModelShape {
        family,
        vocab: keys.count("vocab_size", VOCAB_MAX)?,
        channels,
        max_positions: scaled_from.unwrap_or(max_positions),
        learned_positions: matches!(spec.rotates, Rotates::Never),
        scales_queries: scaled_from.is_some(),
        embed_scale: match spec.root_embed_scale {
            true => EmbedScale { factor: (channels as f64).sqrt() as f32, rounded: true },
            false => EmbedScale { factor: factor(|multipliers| multipliers.embed)?, rounded: false },
        },
        logit_softcap: keys.softcap("final_logit_softcapping", spec.softcaps.as_ref().map(|caps| caps.logits))?,
        logit_scale: 1.0 / factor(|multipliers| multipliers.logits)?,
        ropes,
        layers: attns.into_iter().zip(windows.into_iter().zip(rope_of)).zip(delta).zip(mlps).map(layer).collect(),
        final_norm: norm,
        tied: keys.flag("tie_word_embeddings", spec.tied)?,
        init_std: keys.number("initializer_range", Some(0.02), 0.0, 100.0)? as f32,
        ignored_dropout: keys.dropout()?,
        media_tokens: Vec::new(),
        frozen: BTreeSet::new(),
        trained_tokens: None,
        packs_experts: keys.has_mxfp4_experts(spec),
    })
}

/// Attention shared by all layers, without window and rope.
fn attention(keys: &Keys, spec: &FamilySpec, channels: usize) -> Result<Attn> {
    let names = spec.keys;
    let heads = keys.count(names.heads, SIZE_MAX)?;
    let kv_heads = names.kv_heads.map_or(Ok(heads), |key| keys.derived(key, spec.kv_heads, heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.bad("num_key_value_heads", format_args!("{kv_heads} does not divide the {heads} of {}", names.heads)));
    }
    let head_dim = head_dim(keys, spec, channels, heads)?;
    let has_qk_norm = keys.rule(spec.has_qk_norm)?;
    Ok(Attn {
        kind: if spec.delta.is_some() { AttnKind::GatedSoftmax } else { AttnKind::Softmax },
        heads,
        kv_heads,
        head_dim,
        qkv_bias: keys.rule(spec.qkv_bias)?,
        out_bias: keys.rule(spec.out_bias)?,
        qk_norm: spec.qk_norm.filter(|_| has_qk_norm),
        values: Values::Projected,
        rope: None,
        window: None,
        scale: scale(keys, spec, head_dim)?,
        softcap: keys.softcap("attn_logit_softcapping", spec.softcaps.as_ref().map(|caps| caps.scores))?,
        sinks: spec.sinks,
    })
}

fn scale(keys: &Keys, spec: &FamilySpec, head_dim: usize) -> Result<f32> {
    let scaled = match spec.scale {
        ScaleRule::HeadDim => true,
        ScaleRule::One => false,
        ScaleRule::Unless(key) => keys.flag(key, true)?,
        ScaleRule::Key(key) => return keys.factor(key),
        ScaleRule::Root(key, default) => return Ok(keys.number(key, Some(default), 1e-9, 1e9)?.sqrt().recip() as f32),
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
        Act::GeluTanh | Act::Geglu => &["gelu_new", "gelu_pytorch_tanh"],
        Act::Swiglu => &["silu", "swish"],
    };
    match keys.get(key) {
        None => Ok(()),
        Some(Value::String(name)) if accepted.contains(&name.as_str()) => Ok(()),
        Some(other) => Err(keys.unsupported(key, other, &format!("known for {}: {}", spec.architecture, accepted.join(", ")))),
    }
}
