//! What a `config.json` says about a model: the one description that every other part of the model reads.

use super::family::Family;
use super::layer_shape::{Attn, LayerShape, NormSpec};
use crate::device::AttentionShape;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Leading channels of a head that rotate; even.
    pub rotary_dim: usize,
    pub(crate) scaling: RopeScaling,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RopeScaling {
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
    /// YaRN: pairs that turn slowly divided by `factor`, fast ones kept, those between blended; queries and keys grow.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Pairs that turn more often than this within the original context are kept.
        beta_fast: f64,
        /// Pairs that turn less often are divided.
        beta_slow: f64,
        /// Context length before stretching.
        original_max_positions: usize,
        /// The bounds between them are whole pairs.
        truncate: bool,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The family, which knows the Hugging Face names.
    pub family: Family,
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Width of the residual stream, C.
    pub channels: usize,
    /// Longest sequence.
    pub(crate) max_positions: usize,
    /// Positions are a learned table beside the token embedding.
    pub(crate) learned_positions: bool,
    /// The rotations that layers choose from.
    pub ropes: Vec<RopeConfig>,
    /// Decoder layers from the first on; at least one.
    pub layers: Vec<LayerShape>,
    /// Of what leaves the last layer.
    pub(crate) final_norm: NormSpec,
    /// The output matrix is the token embedding.
    pub tied: bool,
    /// Standard deviation of randomly initialised matrices.
    pub(crate) init_std: f32,
    /// Dropout probabilities of the file that are not 0, as `key = value`: this engine trains without dropout.
    pub(crate) ignored_dropout: Vec<String>,
}

impl ModelShape {
    /// What the name of every tensor but `lm_head.weight` starts with; files saved from the bare model lack it.
    pub(crate) fn base_prefix(&self) -> &'static str {
        self.family.spec().names.prefix
    }

    /// Attention of `layer` over `batch` sequences of `seq_length` tokens.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn attention(&self, batch: usize, seq_length: usize, layer: usize) -> AttentionShape {
        let Attn { heads, kv_heads, head_dim, scale, window, .. } = self.layers[layer].attn;
        AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale, window }
    }

    /// The most columns that any layer has of something.
    pub(crate) fn widest(&self, cols: impl Fn(&LayerShape) -> usize) -> usize {
        self.layers.iter().map(cols).max().unwrap_or(0)
    }

    /// The same model with so many layers: its first ones, or all of them again and again.
    pub fn with_layers(&self, layers: usize) -> Self {
        Self { layers: self.layers.iter().copied().cycle().take(layers).collect(), ..self.clone() }
    }
}

/// `config.json` of [`ModelShape::demo`].
pub(crate) const DEMO_CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 256,
  "hidden_size": 256,
  "intermediate_size": 512,
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
