//! Reads a Hugging Face `config.json`. Whatever it holds, the answer is a shape that can be trained or one error that
//! names key, value and file; nothing is guessed that `transformers` would read from the file.
//!
//! Two things of training differ by design: there is no dropout (see [`ModelShape::ignored_dropout`]), and
//! `pad_token_id` does not freeze its embedding: nothing here is padded with it.

use super::family::{Family, FamilySpec, Missing, Presence, WindowRule};
use super::shape::{DEMO_CONFIG, Mlp, ModelShape, NormKind, Positions, RopeConfig, RopeScaling};
use super::tensors::TensorTable;
use crate::disk;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// A width or count above this is a mistake; it also keeps every product of sizes inside 64 bits.
const SIZE_MAX: usize = 1 << 24;
/// Token ids and positions are int32.
const INDEX_MAX: usize = i32::MAX as usize;
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
    keys.refuse_unsupported()?;
    let shape = read_shape(&keys, architecture(&keys)?)?;
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
    let heads = keys.count(names.heads, SIZE_MAX)?;
    let kv_heads = if spec.gpt { heads } else { keys.derived("num_key_value_heads", spec.kv_heads, heads)? };
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.bad("num_key_value_heads", format_args!("{kv_heads} does not divide the {heads} of {}", names.heads)));
    }
    let head_dim = head_dim(keys, spec, channels, heads)?;
    let max_positions = keys.count(names.max_positions, INDEX_MAX)?;
    let shape = ModelShape {
        family: spec.family,
        vocab: keys.count("vocab_size", INDEX_MAX)?,
        channels,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn: if spec.gpt { keys.count_or(names.ffn, 4 * channels, SIZE_MAX)? } else { keys.count(names.ffn, SIZE_MAX)? },
        max_positions,
        norm: if spec.gpt { NormKind::Layer } else { NormKind::Rms },
        eps: keys.number(names.eps, None, 1e-30, 1.0)? as f32,
        mlp: activation(keys, spec)?,
        positions: if spec.gpt { Positions::Learned } else { Positions::Rope(rope(keys, spec, head_dim, max_positions)?) },
        qkv_bias: keys.rule(spec.qkv_bias)?,
        out_bias: keys.rule(spec.out_bias)?,
        mlp_bias: keys.rule(spec.mlp_bias)?,
        qk_norm: spec.qk_norm,
        tied: keys.flag("tie_word_embeddings", spec.tied)?,
        windows: windows(keys, spec, layers)?,
        scale: if keys.flag("scale_attn_weights", true)? || !spec.gpt { (head_dim as f64).sqrt().recip() as f32 } else { 1.0 },
        init_std: keys.number("initializer_range", Some(0.02), 0.0, 100.0)? as f32,
        ignored_dropout: keys.dropout()?,
    };
    Ok(shape)
}

fn head_dim(keys: &Keys, spec: &FamilySpec, channels: usize, heads: usize) -> Result<usize> {
    if spec.gpt || keys.get("head_dim").is_none() && matches!(spec.head_dim, Missing::Derive) {
        if !channels.is_multiple_of(heads) {
            let cause = format_args!("{heads} does not divide the {channels} of {}", spec.keys.channels);
            return Err(keys.bad(spec.keys.heads, cause));
        }
        return Ok(channels / heads);
    }
    let head_dim = keys.derived("head_dim", spec.head_dim, (channels / heads).max(1))?;
    if heads * head_dim > SIZE_MAX {
        return Err(keys.bad("head_dim", format_args!("{heads} heads of {head_dim} are more than {SIZE_MAX} channels")));
    }
    Ok(head_dim)
}

fn activation(keys: &Keys, spec: &FamilySpec) -> Result<Mlp> {
    let key = spec.keys.activation;
    let (mlp, accepted): (Mlp, &[&str]) = match spec.gpt {
        true => (Mlp::GeluTanh, &["gelu_new", "gelu_pytorch_tanh"]),
        false => (Mlp::Swiglu, &["silu", "swish"]),
    };
    match keys.get(key) {
        None => Ok(mlp),
        Some(Value::String(name)) if accepted.contains(&name.as_str()) => Ok(mlp),
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

fn rope(keys: &Keys, spec: &FamilySpec, head_dim: usize, max_positions: usize) -> Result<RopeConfig> {
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

/// An object of the file, read key by key; `null` counts as absent.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
    /// Name of the object inside the file with a dot, for messages.
    within: &'static str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, cause: impl std::fmt::Display) -> Error {
        Error::format(self.path, format_args!("{}{key}: {cause}", self.within))
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        match self.map.get(key) {
            None => self.bad(key, format_args!("missing; expected {expected}")),
            Some(value) => self.wrong(key, value, expected),
        }
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        self.bad(key, format_args!("expected {expected}, found {}", brief(value)))
    }

    fn unsupported(&self, key: &str, value: &Value, note: &str) -> Error {
        Error::Unsupported(format!("{}: {}{key} = {} ({note})", self.path.display(), self.within, brief(value)))
    }

    /// A whole number that may be 0.
    fn whole(&self, key: &str) -> Result<usize> {
        let expected = "a whole number";
        let value = self.get(key).ok_or_else(|| self.missing(key, expected))?;
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        number.ok_or_else(|| self.wrong(key, value, expected))
    }

    /// A size: at least 1 and at most `max`.
    fn count(&self, key: &str, max: usize) -> Result<usize> {
        let number = self.whole(key)?;
        if number == 0 || number > max {
            return Err(self.bad(key, format_args!("{number} is outside 1 to {max}")));
        }
        Ok(number)
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|_| self.count(key, INDEX_MAX)).transpose()
    }

    fn count_or(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        if self.get(key).is_none() { Ok(default) } else { self.count(key, max) }
    }

    /// A size that `null`, or where allowed a missing key, derives from others.
    fn derived(&self, key: &str, missing: Missing, default: usize) -> Result<usize> {
        match (self.map.get(key), missing) {
            (None, Missing::Derive) | (Some(Value::Null), _) => Ok(default),
            _ => self.count(key, SIZE_MAX),
        }
    }

    /// A number from `min` to `max`.
    fn number(&self, key: &str, default: Option<f64>, min: f64, max: f64) -> Result<f64> {
        let number = match (self.get(key), default) {
            (None, Some(default)) => default,
            (None, None) => return Err(self.missing(key, "a number")),
            (Some(value), _) => value.as_f64().ok_or_else(|| self.wrong(key, value, "a number"))?,
        };
        if !(min..=max).contains(&number) {
            return Err(self.bad(key, format_args!("{number} is outside {min} to {max}")));
        }
        Ok(number)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")),
        }
    }

    fn rule(&self, rule: Presence) -> Result<bool> {
        match rule {
            Presence::Never => Ok(false),
            Presence::Always => Ok(true),
            Presence::Key(key, default) => self.flag(key, default),
        }
    }

    /// The dictionary of rope parameters in its old or its new spelling.
    fn rope_parameters(&self, empty: &'a Map<String, Value>) -> Result<(&'static str, &'a Map<String, Value>)> {
        for (key, within) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
            match self.get(key) {
                None => {}
                Some(Value::Object(map)) if map.is_empty() => {}
                Some(Value::Object(map)) => return Ok((within, map)),
                Some(other) => return Err(self.wrong(key, other, "an object")),
            }
        }
        Ok(("", empty))
    }

    /// Features that would change the arithmetic without changing the architecture's name.
    fn refuse_unsupported(&self) -> Result<()> {
        let features = [
            "quantization_config",
            "num_local_experts",
            "num_experts",
            "add_cross_attention",
            "scale_attn_by_inverse_layer_idx",
            "is_encoder_decoder",
        ];
        let on = |value: &Value| *value != false && *value != 0;
        if let Some((key, value)) = features.iter().find_map(|key| self.get(key).filter(|v| on(v)).map(|v| (key, v))) {
            return Err(self.unsupported(key, value, "not one of this engine's features"));
        }
        match self.flag("is_causal", true)? {
            true => Ok(()),
            false => Err(self.unsupported("is_causal", &Value::from(false), "attention is causal here")),
        }
    }

    fn dropout(&self) -> Result<Vec<String>> {
        let keys = ["attention_dropout", "residual_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"];
        let mut ignored = Vec::new();
        for key in keys {
            let probability = self.number(key, Some(0.0), 0.0, 1.0)?;
            if probability != 0.0 {
                ignored.push(format!("{key} = {probability}"));
            }
        }
        Ok(ignored)
    }
}

/// The value for a message, cut to a readable length.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn base(architecture: &str) -> Value {
        json!({
            "architectures": [architecture], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "layer_norm_epsilon": 1e-5
        })
    }

    fn with(architecture: &str, changes: Value) -> Result<ModelShape> {
        let mut config = base(architecture);
        for (key, value) in changes.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        parse(&config.to_string(), Path::new("m/config.json"))
    }

    fn without(architecture: &str, key: &str) -> Result<ModelShape> {
        let mut config = base(architecture);
        config.as_object_mut().map(|map| map.remove(key));
        parse(&config.to_string(), Path::new("m/config.json"))
    }

    fn error(shape: Result<ModelShape>) -> String {
        shape.expect_err("must be refused").to_string()
    }

    fn rope_of(shape: &ModelShape) -> RopeConfig {
        match shape.positions {
            Positions::Rope(rope) => rope,
            Positions::Learned => panic!("no rope"),
        }
    }

    #[test]
    fn families_differ_where_transformers_says() {
        let biases = |s: &ModelShape| (s.qkv_bias, s.out_bias, s.mlp_bias);
        let get = |architecture| with(architecture, json!({})).unwrap();
        let gpt2 = get("GPT2LMHeadModel");
        assert_eq!((gpt2.norm, gpt2.mlp, gpt2.positions), (NormKind::Layer, Mlp::GeluTanh, Positions::Learned));
        assert_eq!((gpt2.ffn, gpt2.kv_heads, gpt2.max_positions, gpt2.tied), (128, 4, 24, true));
        assert_eq!(biases(&gpt2), (true, true, true));
        assert_eq!(biases(&get("LlamaForCausalLM")), (false, false, false));
        assert_eq!(biases(&get("Qwen2ForCausalLM")), (true, false, false));
        assert_eq!(biases(&get("SeedOssForCausalLM")), (true, false, false));
        assert_eq!(biases(&with("LlamaForCausalLM", json!({"attention_bias": true})).unwrap()), (true, true, false));
        assert_eq!(biases(&with("MistralForCausalLM", json!({"attention_bias": true})).unwrap()), (false, false, false));
        assert!(get("Qwen3ForCausalLM").qk_norm);
        assert_eq!(get("MistralForCausalLM").windows, [Some(4096); 3]);
        assert_eq!(get("Phi3ForCausalLM").windows, [None; 3]);
        assert_eq!(with("MistralForCausalLM", json!({"sliding_window": null})).unwrap().windows, [None; 3]);
    }

    #[test]
    fn windows_of_single_layers() {
        let by_depth = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1});
        assert_eq!(with("Qwen2ForCausalLM", by_depth).unwrap().windows, [None, Some(5), Some(5)]);
        let types = json!(["sliding_attention", "full_attention", "full_attention"]);
        let by_type = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 0, "layer_types": types});
        assert_eq!(with("Qwen3ForCausalLM", by_type).unwrap().windows, [Some(5), None, None]);
        let off = json!({"use_sliding_window": false, "sliding_window": 5, "max_window_layers": 0});
        assert_eq!(with("Qwen2ForCausalLM", off).unwrap().windows, [None; 3]);
        let contradiction = json!({"sliding_window": 5, "layer_types": types});
        assert!(error(with("Qwen3ForCausalLM", contradiction)).contains("use_sliding_window"));
    }

    #[test]
    fn old_and_new_rope_spellings_agree() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let old = with("LlamaForCausalLM", json!({"rope_theta": 5e5, "rope_scaling": llama3})).unwrap();
        let mut inner = llama3.clone();
        inner["rope_theta"] = json!(5e5);
        let new = with("LlamaForCausalLM", json!({"rope_parameters": inner})).unwrap();
        assert_eq!(old, new);
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 64 };
        assert_eq!(rope_of(&old), RopeConfig { theta: 5e5, rotary_dim: 8, scaling });
        let linear = with("LlamaForCausalLM", json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(rope_of(&linear), RopeConfig { theta: 1e4, rotary_dim: 8, scaling: RopeScaling::Linear { factor: 2.0 } });
        let partial = with("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.5})).unwrap();
        assert_eq!(rope_of(&partial).rotary_dim, 4);
    }

    #[test]
    fn what_cannot_be_trained_is_named() {
        let cases = [
            (with("MixtralForCausalLM", json!({})), "MixtralForCausalLM"),
            (with("LlamaForCausalLM", json!({"hidden_act": "relu"})), "hidden_act = \"relu\""),
            (with("LlamaForCausalLM", json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})), "rope_scaling.rope_type = \"yarn\""),
            (with("LlamaForCausalLM", json!({"partial_rotary_factor": 0.5})), "partial_rotary_factor = 0.5"),
            (with("LlamaForCausalLM", json!({"quantization_config": {"bits": 4}})), "quantization_config"),
            (with("LlamaForCausalLM", json!({"is_causal": false})), "is_causal = false"),
            (with("GPT2LMHeadModel", json!({"scale_attn_by_inverse_layer_idx": true})), "scale_attn_by_inverse_layer_idx = true"),
            (
                with("Qwen3ForCausalLM", json!({"layer_types": ["linear_attention", "full_attention", "full_attention"]})),
                "linear_attention",
            ),
        ];
        for (shape, needle) in cases {
            assert!(matches!(&shape, Err(Error::Unsupported(_))), "{needle}: {shape:?}");
            let message = error(shape);
            assert!(message.contains(needle) && message.contains("m/config.json"), "{message}");
        }
    }

    #[test]
    fn senseless_values_name_their_key() {
        let sizes =
            ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"];
        for key in sizes.into_iter().chain(["num_key_value_heads", "head_dim"]) {
            for value in [json!(0), json!(-1), json!(1.5), json!("64"), json!([]), json!(u64::MAX)] {
                assert!(error(with("Qwen3ForCausalLM", json!({key: value}))).contains(key), "{key} = {value}");
            }
            assert!(error(without("Qwen3ForCausalLM", key)).contains(key), "{key} missing");
        }
        for (key, value) in [
            ("num_attention_heads", json!(5)),
            ("num_key_value_heads", json!(3)),
            ("head_dim", json!(7)),
            ("rms_norm_eps", json!(0)),
            ("rms_norm_eps", json!(-1e-5)),
            ("rms_norm_eps", json!(null)),
            ("rope_theta", json!(0.0)),
            ("rope_scaling", json!([1])),
            ("rope_scaling", json!({"type": "linear", "factor": 0.0})),
            ("tie_word_embeddings", json!("yes")),
            ("architectures", json!([])),
            ("architectures", json!("LlamaForCausalLM")),
        ] {
            assert!(error(with("LlamaForCausalLM", json!({key: value}))).contains(key), "{key} = {value}");
        }
    }

    #[test]
    fn the_largest_sizes_do_not_overflow() {
        let huge = json!({"hidden_size": SIZE_MAX, "intermediate_size": SIZE_MAX, "num_hidden_layers": LAYERS_MAX, "vocab_size": INDEX_MAX,
            "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 12});
        assert!(error(with("LlamaForCausalLM", huge)).contains("parameters"));
        let gpt2 =
            json!({"n_embd": SIZE_MAX, "n_inner": SIZE_MAX, "n_layer": LAYERS_MAX, "n_positions": INDEX_MAX, "vocab_size": INDEX_MAX});
        assert!(error(with("GPT2LMHeadModel", gpt2)).contains("parameters"));
    }

    #[test]
    fn numbers_that_are_not_json_are_refused() {
        for number in ["NaN", "Infinity", "1e999", "-"] {
            let text = base("LlamaForCausalLM").to_string().replace("1e-6", number);
            assert!(text.contains(number));
            assert!(error(parse(&text, Path::new("m/config.json"))).starts_with("m/config.json: "), "{number}");
        }
    }

    /// Any JSON value, small.
    fn any_json() -> impl Strategy<Value = Value> {
        let number = prop_oneof![any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from), (0u64..300).prop_map(Value::from)];
        let text = prop_oneof!["[a-z_0-9]{0,12}", Just("sliding_attention".to_string()), Just("llama3".to_string()), Just("é".repeat(90))];
        let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, text.prop_map(Value::from)];
        leaf.prop_recursive(2, 8, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-z_]{1,8}|rope_type|factor|rope_theta", inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in ".{0,200}") {
            let _ = parse(&text, Path::new("m/config.json"));
        }

        #[test]
        fn arbitrary_values_never_panic(family in 0usize..7, changes in prop::collection::vec((0usize..40, any_json()), 1..4)) {
            let known = ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                "Phi3ForCausalLM", "SeedOssForCausalLM"];
            let mut config = base(known[family]);
            let extra = ["rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "use_sliding_window",
                "max_window_layers", "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "n_inner", "initializer_range"];
            let mut keys: Vec<String> = config.as_object().into_iter().flat_map(|map| map.keys().cloned()).collect();
            keys.extend(extra.map(String::from));
            for (key, value) in changes {
                config[&keys[key % keys.len()]] = value;
            }
            if let Ok(shape) = parse(&config.to_string(), Path::new("m/config.json")) {
                let table = TensorTable::new(&shape);
                prop_assert!(table.flat_elems() >= table.params());
            }
        }
    }
}
