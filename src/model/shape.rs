//! What a `config.json` says about a model: the one description that every other part of the model reads.

use super::family::{Family, FamilySpec, Missing, Rule, WindowRule};
use super::tensors::TensorTable;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A width, length or count above this is a mistake; it also keeps every product of sizes inside 64 bits.
const SIZE_MAX: usize = 1 << 24;
/// Token ids are int32.
const VOCAB_MAX: usize = i32::MAX as usize;
const LAYERS_MAX: usize = 4096;
/// 2^48 parameters.
const PARAMS_MAX: usize = 1 << 48;

/// Normalisation of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// By root mean square, with a weight.
    Rms,
    /// By mean and variance, with weight and bias.
    Layer,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))`.
    Swiglu,
    /// `down(gelu(up(x)))` with the tanh form of GELU.
    GeluTanh,
}

/// How tokens know where they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// A learned embedding per position.
    Learned,
    /// Rotation of queries and keys.
    Rope(Rope),
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading channels of a head that rotate; even.
    pub rotary_dim: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// Stretching of rope frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, those between blended.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length before stretching.
        original_max_positions: usize,
    },
}

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The family, which knows the Hugging Face names.
    pub family: Family,
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Width of the residual stream, C.
    pub channels: usize,
    /// Decoder layers, L.
    pub layers: usize,
    /// Query heads, NH.
    pub heads: usize,
    /// Key and value heads, NKV; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub ffn: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Kind of norm.
    pub norm: Norm,
    /// Added to the variance in every norm.
    pub eps: f32,
    /// Kind of MLP.
    pub mlp: Mlp,
    /// Kind of position information.
    pub positions: Positions,
    /// Query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub out_bias: bool,
    /// The MLP's matrices have biases.
    pub mlp_bias: bool,
    /// Queries and keys are RMS-normalised per head.
    pub qk_norm: bool,
    /// The output matrix is the token embedding.
    pub tied: bool,
    /// Per layer: how many tokens a token sees, itself included; `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// Factor on attention scores.
    pub scale: f32,
    /// Standard deviation of randomly initialised matrices.
    pub init_std: f32,
    /// Dropout probabilities of the file that are not 0, as `key = value`: this engine trains without dropout.
    pub ignored_dropout: Vec<String>,
}

impl ModelShape {
    /// Reads `config.json` at `path`.
    ///
    /// # Errors
    /// `Io` when it cannot be read, otherwise as [`ModelShape::parse`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        Self::parse(&text, path)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// `Unsupported` for an architecture, activation, rope type or other feature that this build cannot train, `Format` for
    /// missing keys and senseless values; both name key, value and file.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
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

    /// The built-in model: a small Llama-style decoder over bytes.
    pub fn demo() -> Self {
        Self::parse(DEMO_CONFIG, &PathBuf::from("(built-in config.json)")).expect("the built-in configuration is valid")
    }

    /// What the name of every tensor but `lm_head.weight` starts with; files saved from the bare model lack it.
    pub fn base_prefix(&self) -> &'static str {
        self.family.spec().names.prefix
    }

    /// Columns of the fused query, key and value: `(heads + 2 kv_heads) head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of attention's output: `heads head_dim`.
    pub fn attn_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the first MLP matrix's output: gate and up together.
    pub fn mlp_in_cols(&self) -> usize {
        match self.mlp {
            Mlp::Swiglu => 2 * self.ffn,
            Mlp::GeluTanh => self.ffn,
        }
    }

    /// Model FLOPs of one optimizer step over `sequences` sequences of `seq_length` tokens, forward and backward, by
    /// [`FLOPS_FORMULA`]: nothing for recomputation, norms, activations or the optimizer.
    pub fn flops_per_step(&self, sequences: usize, seq_length: usize) -> f64 {
        let (tokens, s) = (sequences as f64 * seq_length as f64, seq_length as f64);
        let attended = |window: &Option<usize>| match window.map(|w| w as f64) {
            Some(w) if w < s => 2.0 * w - w * w / s,
            _ => s,
        };
        let attention: f64 = self.windows.iter().map(attended).sum::<f64>() * self.attn_cols() as f64;
        6.0 * tokens * (TensorTable::new(self).matmul_params() as f64 + attention)
    }
}

/// How [`ModelShape::flops_per_step`] counts.
pub const FLOPS_FORMULA: &str = "6*N*T + 6*sum_l(heads*head_dim*S_l)*T; N matrix parameters with the output matrix, T tokens, S_l sequence length (2W - W^2/S in a window of W): causal, no recompute";

/// `config.json` of [`ModelShape::demo`].
pub const DEMO_CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 256,
  "hidden_size": 256,
  "intermediate_size": 704,
  "num_hidden_layers": 6,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 1024,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "initializer_range": 0.02,
  "attention_bias": false,
  "mlp_bias": false,
  "tie_word_embeddings": true,
  "torch_dtype": "float32"
}
"#;

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
    if heads % kv_heads != 0 {
        return Err(keys.bad("num_key_value_heads", format_args!("{kv_heads} does not divide the {heads} of {}", names.heads)));
    }
    let head_dim = head_dim(keys, spec, channels, heads)?;
    let max_positions = keys.count(names.max_positions, VOCAB_MAX)?;
    let shape = ModelShape {
        family: spec.family,
        vocab: keys.count("vocab_size", VOCAB_MAX)?,
        channels,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn: if spec.gpt { keys.count_or(names.ffn, 4 * channels, SIZE_MAX)? } else { keys.count(names.ffn, SIZE_MAX)? },
        max_positions,
        norm: if spec.gpt { Norm::Layer } else { Norm::Rms },
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
        if channels % heads != 0 {
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
            let window = keys.count("sliding_window", VOCAB_MAX)?;
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

fn rope(keys: &Keys, spec: &FamilySpec, head_dim: usize, max_positions: usize) -> Result<Rope> {
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
    if rotary_dim == 0 || rotary_dim % 2 != 0 {
        return Err(keys.bad("head_dim", format_args!("{rotary_dim} rotating channels of {head_dim}: rope needs an even number")));
    }
    Ok(Rope { theta, rotary_dim, scaling: rope_scaling(keys, &inner, max_positions)? })
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
            let original_max_positions = original_keys.count_or(original, max_positions, VOCAB_MAX)?;
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
        self.get(key).map(|_| self.count(key, VOCAB_MAX)).transpose()
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

    fn rule(&self, rule: Rule) -> Result<bool> {
        match rule {
            Rule::Never => Ok(false),
            Rule::Always => Ok(true),
            Rule::Key(key, default) => self.flag(key, default),
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
        let on = |value: &Value| *value != Value::Bool(false) && *value != Value::from(0);
        match features.iter().find_map(|key| self.get(key).filter(|v| on(v)).map(|v| (key, v))) {
            Some((key, value)) => Err(self.unsupported(key, value, "not one of this engine's features")),
            None => Ok(()),
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
