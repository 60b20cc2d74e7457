//! What a `config.json` says about a model: the one description that every other part of the model reads.

use super::family::Family;
use super::heads::{HeadShare, SequenceRank};
use super::layer_shape::{Attn, LayerShape, NormSpec};
use crate::device::AttentionShape;
use crate::dtype::Dtype;

/// Factor on what the embedding makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EmbedScale {
    pub(crate) factor: f32,
    /// It is rounded to the format of the weights first.
    pub(crate) rounded: bool,
}

impl EmbedScale {
    /// The factor on embeddings of `dtype`.
    pub(crate) fn on(self, dtype: Dtype) -> f32 {
        match dtype {
            Dtype::Bfloat16 if self.rounded => half::bf16::from_f32(self.factor).to_f32(),
            Dtype::Float16 if self.rounded => half::f16::from_f32(self.factor).to_f32(),
            _ => self.factor,
        }
    }
}

/// How queries and keys rotate.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Leading channels of a head that rotate; even.
    pub rotary_dim: usize,
    /// Neighbouring channels are a pair; otherwise those half of `rotary_dim` apart.
    pub(crate) interleaved: bool,
    pub(crate) scaling: RopeScaling,
    /// Factor on cosines and sines.
    pub(crate) attention_factor: f32,
}

/// What stretches a rotation to longer contexts than the model first had.
#[derive(Clone, Debug, PartialEq)]
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
    /// YaRN: frequencies of the first pairs of channels kept, those of the last ones divided by `factor`, those between blended.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Rotations over the original context of the last pair that is kept.
        beta_fast: f64,
        /// Rotations over the original context of the first pair that is divided.
        beta_slow: f64,
        /// The blend begins and ends at whole pairs.
        truncate: bool,
        /// Context length before stretching.
        original_max_positions: usize,
    },
    /// LongRoPE: each pair of channels has a divisor, of two sets.
    Long {
        /// For sequences up to the original context.
        short: Vec<f32>,
        /// For longer ones.
        long: Vec<f32>,
        /// Context length before stretching.
        original_max_positions: usize,
    },
    /// A base that grows with sequences beyond the model's positions.
    Dynamic {
        /// Of the length over `max_positions`.
        factor: f64,
        /// Sequences up to here have the plain frequencies.
        max_positions: usize,
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
    pub(crate) embed_scale: EmbedScale,
    /// Factor on logits.
    pub(crate) logit_scale: f32,
    /// What logits are bent to stay below.
    pub(crate) logit_softcap: Option<f32>,
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
        let Attn { heads, kv_heads, head_dim, scale, window, softcap, .. } = self.layers[layer].attn;
        AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale, window, softcap }
    }

    /// The part of attention of `layer`, over `batch` sequences of `seq_length` tokens, that is `of` one rank: its heads, all tokens.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn attention_of(&self, (batch, seq_length): (usize, usize), layer: usize, of: SequenceRank) -> AttentionShape {
        let HeadShare { heads, kv_heads } = HeadShare::of(&self.layers[layer].attn, of);
        AttentionShape { heads: heads.len(), kv_heads: kv_heads.len(), ..self.attention(batch, seq_length, layer) }
    }

    /// Experts of all layers.
    pub(crate) fn experts(&self) -> usize {
        self.layers.iter().filter_map(|layer| layer.mlp.moe()).map(|moe| moe.experts).sum()
    }

    /// Some layer bends attention's scores.
    pub(crate) fn caps_scores(&self) -> bool {
        self.layers.iter().any(|layer| layer.attn.softcap.is_some())
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
