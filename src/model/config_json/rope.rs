//! Rotary embedding of queries and keys, from `config.json`.

use super::keys::{INDEX_MAX, Keys};
use crate::error::Result;
use crate::model::family::{FamilySpec, LocalRope, Rotates};
use crate::model::shape::{RopeConfig, RopeScaling};
use serde_json::{Map, Value};

const ORIGINAL: &str = "original_max_position_embeddings";

/// Sizes shared by all rotations of a model.
pub(super) struct RotatedHeads {
    /// Channels of a head, or with latent attention those that may rotate, in layers with full attention, and in layers with a sliding window.
    pub(super) head_dims: [usize; 2],
    pub(super) max_positions: usize,
}

/// The rotations of a model, and the index of each layer's rotation. `slides` marks the layers with a sliding window.
pub(super) fn ropes(
    keys: &Keys,
    spec: &FamilySpec,
    heads: &RotatedHeads,
    slides: &[bool],
) -> Result<(Vec<RopeConfig>, Vec<Option<usize>>)> {
    let empty = Map::new();
    let one = || -> Result<Vec<RopeConfig>> {
        let (within, map) = keys.rope_parameters(&empty)?;
        Ok(vec![rope(keys, &Keys { map, within, ..*keys }, spec, (heads.head_dims[0], heads.max_positions))?])
    };
    match spec.rotates {
        Rotates::Never => Ok((vec![], vec![None; slides.len()])),
        Rotates::All => Ok((one()?, vec![Some(0); slides.len()])),
        Rotates::NotEvery(interval) => {
            let rotates = rotating_layers(keys, interval, slides.len())?;
            Ok((one()?, rotates.into_iter().map(|rotates| rotates.then_some(0)).collect()))
        }
        Rotates::ByType(local) => {
            Ok((by_type(keys, spec, local, heads)?.into(), slides.iter().map(|&slides| Some(usize::from(slides))).collect()))
        }
    }
}

/// The first position whose query has a factor; `None` if no query has one.
pub(super) fn scaled_from(keys: &Keys, spec: &FamilySpec) -> Result<Option<usize>> {
    if !spec.scales_queries {
        return Ok(None);
    }
    let empty = Map::new();
    let (within, map) = keys.rope_parameters(&empty)?;
    let inner = Keys { map, within, ..*keys };
    let growth = inner.number("llama_4_scaling_beta", None, 0.0, 1e9)?;
    let original = original_keys(keys, &inner).count(ORIGINAL, INDEX_MAX)?;
    Ok((growth > 0.0).then_some(original))
}

/// The rotations of layers with full attention and of layers with a sliding window. Old files scale only the first, and have no object for
/// the second.
fn by_type(keys: &Keys, spec: &FamilySpec, local: LocalRope, heads: &RotatedHeads) -> Result<[RopeConfig; 2]> {
    let (key, within, empty) = ("rope_parameters", "rope_parameters.", Map::new());
    let types = keys.object(key)?.map(|map| Keys { map, within, ..*keys });
    let kinds = ["full_attention", "sliding_attention"];
    let is_flat = |types: &Keys| kinds.iter().all(|kind| types.get(kind).is_none());
    if types.as_ref().is_some_and(|types| is_flat(types) || !is_equivalent(keys, types)) {
        let cause = "expected objects full_attention and sliding_attention, and no other rope_scaling beside";
        return Err(keys.bad(key, cause));
    }
    let of_type = |kind, within| -> Result<Keys> {
        let map = types.as_ref().map_or(Ok(None), |types| types.object(kind))?.unwrap_or(&empty);
        Ok(Keys { map, within, ..*keys })
    };
    let (full, sliding) = (of_type(kinds[0], "rope_parameters.full_attention.")?, of_type(kinds[1], "rope_parameters.sliding_attention.")?);
    let old = keys.object("rope_scaling")?.map(|map| Keys { map, within: "rope_scaling.", ..*keys });
    let first = if full.map.is_empty() { old.unwrap_or(full) } else { full };
    let [of_full, of_sliding] = heads.head_dims.map(|head_dim| (head_dim, heads.max_positions));
    let (full, mut rotation) = (rope(keys, &first, spec, of_full)?, rope(keys, &sliding, spec, of_sliding)?);
    if sliding.get("rope_theta").is_none() {
        rotation.theta = local.key.map_or(Ok(local.theta), |key| keys.number(key, Some(local.theta), 1.0, 1e30))?;
    }
    Ok([full, rotation])
}

/// Whether `rope_scaling` beside the new names only repeats their values for layers with full attention, as exports repeat them for readers
/// of the old names.
fn is_equivalent(keys: &Keys, types: &Keys) -> bool {
    let Some(Value::Object(old)) = keys.get("rope_scaling") else { return keys.get("rope_scaling").is_none() };
    types.get("full_attention").is_some_and(|new| old.iter().all(|(key, value)| new.get(key) == Some(value)))
}

/// Layers with rotation: those marked with 1 in `no_rope_layers`, or all except every n-th.
pub(super) fn rotating_layers(keys: &Keys, interval: usize, layers: usize) -> Result<Vec<bool>> {
    let (key, interval) = ("no_rope_layers", keys.count_or("no_rope_layer_interval", interval, INDEX_MAX)?);
    let Some(marks) = keys.get(key) else { return Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect()) };
    let marks = marks.as_array().filter(|marks| marks.len() == layers);
    let marks: Option<Vec<u64>> = marks.and_then(|marks| marks.iter().map(Value::as_u64).collect());
    let marks = marks.filter(|marks| marks.iter().all(|mark| *mark <= 1));
    let marks = marks.ok_or_else(|| keys.bad(key, format_args!("expected a list of {layers} times 0 or 1")))?;
    Ok(marks.into_iter().map(|mark| mark == 1).collect())
}

/// One rotation from `inner`, the object of its parameters. Missing parameters are read beside the object, or have their defaults.
fn rope(keys: &Keys, inner: &Keys, spec: &FamilySpec, (head_dim, max_positions): (usize, usize)) -> Result<RopeConfig> {
    if spec.is_gemma4() && inner.get("rope_type").is_some_and(|kind| kind == "proportional") {
        return proportional(inner, spec, head_dim);
    }
    let nearest = |key| if inner.get(key).is_some() { inner } else { keys };
    let theta = nearest("rope_theta").number("rope_theta", Some(spec.rope_theta), 1.0, 1e30)?;
    let fraction_keys = nearest("partial_rotary_factor");
    let fraction = fraction_keys.number("partial_rotary_factor", Some(spec.partial_rotary.unwrap_or(1.0)), 0.0, 1.0)?;
    if fraction != 1.0 && spec.partial_rotary.is_none() {
        return Err(fraction_keys.unsupported("partial_rotary_factor", &Value::from(fraction), spec.architecture));
    }
    let rotary_dim = (head_dim as f64 * fraction) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(keys.bad("head_dim", format_args!("{rotary_dim} rotating channels of {head_dim}: rope needs an even number")));
    }
    if spec.names_rope && inner.map.is_empty() {
        return Err(keys.missing("rope_scaling", "an object with the rotations of this family"));
    }
    let (scaling, attention_factor) = match inner.get("rope_type").or(inner.get("type")) {
        Some(kind) if kind == "mrope" && spec.text_part.is_some() => (RopeScaling::Default, 1.0),
        _ => scaling(keys, inner, max_positions, rotary_dim)?,
    };
    let interleaved = spec.latent().map_or(Ok(spec.interleaved), |latent| keys.rule(latent.interleaved))?;
    Ok(RopeConfig { theta, rotary_dim, interleaved, scaling, attention_factor: attention_factor as f32 })
}

/// A rotation of which only a part of the pairs of channels rotate, by the frequencies that they have among all pairs.
fn proportional(inner: &Keys, spec: &FamilySpec, head_dim: usize) -> Result<RopeConfig> {
    let theta = inner.number("rope_theta", Some(spec.rope_theta), 1.0, 1e30)?;
    let fraction = inner.number("partial_rotary_factor", Some(1.0), 0.0, 1.0)?;
    if let Some(factor) = inner.get("factor").filter(|factor| factor.as_f64() != Some(1.0)) {
        return Err(inner.unsupported("factor", factor, "a proportional rotation is supported without a factor"));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(inner.bad("rope_type", format_args!("{head_dim} channels: rope needs an even number")));
    }
    let pairs = (fraction * head_dim as f64) as usize / 2;
    let scaling = RopeScaling::Proportional { pairs };
    Ok(RopeConfig { theta, rotary_dim: head_dim, interleaved: spec.interleaved, scaling, attention_factor: 1.0 })
}

/// The scaling of positions, and the factor on cosines and sines.
fn scaling(keys: &Keys, inner: &Keys, max_positions: usize, rotary_dim: usize) -> Result<(RopeScaling, f64)> {
    let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let factor = || inner.number("factor", None, 1e-6, 1e9);
    let original = || original_keys(keys, inner).count_or(ORIGINAL, max_positions, INDEX_MAX);
    let Some(kind) = inner.get(key) else { return Ok((RopeScaling::Default, 1.0)) };
    match kind.as_str() {
        Some("default") => Ok((RopeScaling::Default, 1.0)),
        Some("linear") => Ok((RopeScaling::Linear { factor: factor()? }, 1.0)),
        Some("dynamic") => Ok((RopeScaling::Dynamic { factor: inner.number("factor", None, 1.0, 1e9)?, max_positions }, 1.0)),
        Some("llama3") => Ok((llama3(inner, factor()?, original()?)?, 1.0)),
        // The first files of Phi-3 use the name `su`, later ones `yarn`.
        Some("longrope" | "su") => longrope(keys, inner, max_positions, rotary_dim),
        Some("yarn") if inner.get("short_factor").is_some() => longrope(keys, inner, max_positions, rotary_dim),
        Some("yarn") => yarn(inner, factor()?, original()?),
        _ => Err(inner.unsupported(key, kind, "known: default, linear, dynamic, llama3, yarn, longrope")),
    }
}

/// In transformers the key beside the dictionary takes precedence over the key inside.
fn original_keys<'a>(keys: &'a Keys<'a>, inner: &'a Keys<'a>) -> &'a Keys<'a> {
    if keys.get(ORIGINAL).is_some() { keys } else { inner }
}

fn llama3(inner: &Keys, factor: f64, original_max_positions: usize) -> Result<RopeScaling> {
    let [low_freq_factor, high_freq_factor] = ["low_freq_factor", "high_freq_factor"].map(|key| inner.number(key, None, 1e-6, 1e9));
    let (low_freq_factor, high_freq_factor) = (low_freq_factor?, high_freq_factor?);
    if high_freq_factor <= low_freq_factor {
        let cause = format_args!("{high_freq_factor} must be above low_freq_factor {low_freq_factor}");
        return Err(inner.bad("high_freq_factor", cause));
    }
    Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions })
}

fn yarn(inner: &Keys, factor: f64, original_max_positions: usize) -> Result<(RopeScaling, f64)> {
    let [beta_fast, beta_slow] =
        [("beta_fast", 32.0), ("beta_slow", 1.0)].map(|(key, default)| inner.number(key, Some(default), 1e-6, 1e9));
    let (beta_fast, beta_slow, truncate) = (beta_fast?, beta_slow?, inner.flag("truncate", true)?);
    let [scale, scale_all] = ["mscale", "mscale_all_dim"].map(|key| inner.number(key, Some(0.0), 0.0, 1e9));
    let growth = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 };
    let usual = match (scale?, scale_all?) {
        (scale, scale_all) if scale > 0.0 && scale_all > 0.0 => growth(scale) / growth(scale_all),
        _ => growth(1.0),
    };
    let scaling = RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_positions };
    Ok((scaling, inner.number("attention_factor", Some(usual), 0.0, 1e9)?))
}

fn longrope(keys: &Keys, inner: &Keys, max_positions: usize, rotary_dim: usize) -> Result<(RopeScaling, f64)> {
    let divisors = |key| inner.numbers(key, rotary_dim / 2, 1e-6, 1e9);
    let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
    let original_max_positions = original_keys(keys, inner).count(ORIGINAL, INDEX_MAX)?;
    let stretch = max_positions as f64 / original_max_positions as f64;
    let factor = inner.number("factor", Some(stretch), 1e-6, 1e9)?;
    let usual = if factor <= 1.0 { 1.0 } else { (1.0 + libm::log(factor) / libm::log(original_max_positions as f64)).sqrt() };
    // The logarithm of one original position is 0, so the quotient is not finite.
    let usual = if usual.is_finite() { usual } else { 1.0 };
    Ok((RopeScaling::Long { short, long, original_max_positions }, inner.number("attention_factor", Some(usual), 0.0, 1e9)?))
}
