//! The shape of a model, read from a `config.json`: the single description that all other parts of the model use.

use super::family::Family;
use super::heads::{HeadShare, SequenceRank};
use super::layer_shape::{Attn, Latent, LayerShape, NormSpec};
use crate::data::encode::media_token::MediaToken;
use crate::device::{AttentionShape, DeltaShape, LatentHeads};
use crate::dtype::Dtype;
use std::collections::BTreeSet;
use std::ops::Range;

/// Factor on embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EmbedScale {
    pub(crate) factor: f32,
    /// Whether the factor is rounded to the format of the weights first.
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

/// Rotation of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Leading channels of a head that rotate; even.
    pub rotary_dim: usize,
    /// Whether adjacent channels form a pair; otherwise channels that are `rotary_dim / 2` apart do.
    pub(crate) interleaved: bool,
    pub(crate) scaling: RopeScaling,
    /// Factor on cosines and sines.
    pub(crate) attention_factor: f32,
}

/// Scaling of a rotation to longer contexts than the original one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    /// No scaling.
    Default,
    /// Only the first pairs of channels rotate.
    Proportional {
        /// Rotating pairs.
        pairs: usize,
    },
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: frequencies of long wavelengths divided by `factor`, those of short wavelengths unchanged, a blend in between.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Frequencies of wavelengths above `original_max_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Frequencies of wavelengths below `original_max_positions / high_freq_factor` are unchanged.
        high_freq_factor: f64,
        /// Context length before scaling.
        original_max_positions: usize,
    },
    /// YaRN: frequencies of the first pairs of channels unchanged, those of the last pairs divided by `factor`, a blend in between.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Rotations over the original context of the last unchanged pair.
        beta_fast: f64,
        /// Rotations over the original context of the first divided pair.
        beta_slow: f64,
        /// Whether the blend begins and ends at whole pairs.
        truncate: bool,
        /// Context length before scaling.
        original_max_positions: usize,
    },
    /// LongRoPE: each pair of channels has a divisor, from one of two sets.
    Long {
        /// Divisors for sequences up to the original context.
        short: Vec<f32>,
        /// Divisors for longer sequences.
        long: Vec<f32>,
        /// Context length before scaling.
        original_max_positions: usize,
    },
    /// Dynamic NTK: the base grows with sequences longer than the model's positions.
    Dynamic {
        /// Factor on the length relative to `max_positions`.
        factor: f64,
        /// Maximum sequence length with unscaled frequencies.
        max_positions: usize,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The family, with the Hugging Face tensor names.
    pub family: Family,
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Width of the residual stream, C.
    pub channels: usize,
    /// Longest sequence.
    pub(crate) max_positions: usize,
    /// Whether positions are a learned table beside the token embedding.
    pub(crate) learned_positions: bool,
    /// Whether queries at positions from `max_positions` on have a factor, which no kernel applies.
    pub(crate) scales_queries: bool,
    pub(crate) embed_scale: EmbedScale,
    /// Factor on logits.
    pub(crate) logit_scale: f32,
    /// Soft cap of logits.
    pub(crate) logit_softcap: Option<f32>,
    /// Rotations that layers refer to by index.
    pub ropes: Vec<RopeConfig>,
    /// Decoder layers from the first on; at least one.
    pub layers: Vec<LayerShape>,
    /// Norm after the last layer.
    pub(crate) final_norm: NormSpec,
    /// Whether the output matrix is the token embedding.
    pub tied: bool,
    /// Standard deviation of randomly initialised matrices.
    pub(crate) init_std: f32,
    /// Non-zero dropout probabilities of the file, as `key = value`. Training here has no dropout.
    pub(crate) ignored_dropout: Vec<String>,
    /// Tokens that stand for images, sound or video, which the text part alone does not process.
    pub(crate) media_tokens: Vec<MediaToken>,
    /// Names in the table of the tensors that training leaves as they are.
    pub frozen: BTreeSet<String>,
    /// Tokens whose rows of the token embedding and of the output matrix are trained, while both tables are frozen.
    pub trained_tokens: Option<Range<usize>>,
    /// Whether frozen matrices of experts stay in MXFP4 on the device. A `config.json` with MXFP4 permits it; the format of weights decides:
    /// see [`ModelShape::computing_in`].
    pub packs_experts: bool,
}

impl ModelShape {
    /// This model with an output matrix apart from the token embedding, if `has_head`. The tensors decide where a configuration ties two
    /// tensors that differ.
    pub(crate) fn untied_if(self, has_head: bool) -> Self {
        Self { tied: self.tied && !has_head, ..self }
    }

    /// This model with weights of `dtype`. Numbers in MXFP4 are exact in bfloat16; in other formats frozen experts have the format of all
    /// weights.
    pub fn computing_in(self, dtype: Dtype) -> Self {
        Self { packs_experts: self.packs_experts && dtype == Dtype::Bfloat16, ..self }
    }

    /// Whether no sequence may be longer than [`ModelShape::max_positions`].
    pub(crate) fn limits_sequences(&self) -> bool {
        self.learned_positions || self.scales_queries
    }

    /// Attention of `layer` over `batch` sequences of `seq_length` tokens.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn attention(&self, batch: usize, seq_length: usize, layer: usize) -> AttentionShape {
        let Attn { heads, kv_heads, head_dim, scale, window, softcap, .. } = self.layers[layer].attn;
        AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale, window, softcap }
    }

    /// The part of attention of `layer`, over `batch` sequences of `seq_length` tokens, that one rank computes: its heads, all tokens.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn attention_of(&self, (batch, seq_length): (usize, usize), layer: usize, of: SequenceRank) -> AttentionShape {
        let HeadShare { heads, kv_heads } = HeadShare::of(&self.layers[layer].attn, of);
        AttentionShape { heads: heads.len(), kv_heads: kv_heads.len(), ..self.attention(batch, seq_length, layer) }
    }

    /// The gated delta rule of `layer` over `batch` sequences of `seq_length` tokens; `None` if the layer has scores.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn delta(&self, batch: usize, seq_length: usize, layer: usize) -> Option<DeltaShape> {
        let Attn { heads, kv_heads, head_dim, .. } = self.layers[layer].attn;
        let shape = DeltaShape { batch, seq_length, key_heads: kv_heads, value_heads: heads, width: head_dim };
        self.layers[layer].attn.is_delta().then_some(shape)
    }

    /// The heads of `layer`, if they come from latent vectors.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn latent_heads(&self, layer: usize) -> Option<LatentHeads> {
        let attn = self.layers[layer].attn;
        let (Latent { rotary, value, .. }, rope) = (attn.latent()?, attn.rope?);
        Some(LatentHeads { heads: attn.heads, plain: attn.head_dim - rotary, rotary, value, interleaved: self.ropes[rope].interleaved })
    }

    /// The gated delta rule of the first layer that has one; all have the same shape.
    pub(crate) fn first_delta(&self, batch: usize, seq_length: usize) -> Option<DeltaShape> {
        (0..self.layers.len()).find_map(|layer| self.delta(batch, seq_length, layer))
    }

    /// Attention of the first layer with scores; of the first layer if no layer has scores.
    pub(crate) fn first_attention(&self) -> &Attn {
        let mut all = self.layers.iter().map(|layer| &layer.attn);
        all.find(|attn| !attn.is_delta()).unwrap_or(&self.layers[0].attn)
    }

    /// Layers with scores.
    pub(crate) fn layers_with_scores(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|layer| !self.layers[*layer].attn.is_delta())
    }

    /// Whether some layer has latent attention.
    pub(crate) fn has_latent(&self) -> bool {
        self.layers.iter().any(|layer| layer.attn.latent().is_some())
    }

    /// Whether some layer has a gated delta rule.
    pub(crate) fn has_delta(&self) -> bool {
        self.layers.iter().any(|layer| layer.attn.is_delta())
    }

    /// Number of experts in all layers.
    pub(crate) fn experts(&self) -> usize {
        self.layers.iter().filter_map(|layer| layer.mlp.moe()).map(|moe| moe.experts).sum()
    }

    /// Maximum of `cols` over all layers.
    pub(crate) fn widest(&self, cols: impl Fn(&LayerShape) -> usize) -> usize {
        self.layers.iter().map(cols).max().unwrap_or(0)
    }

    /// This model with another number of layers: its first layers, repeated if necessary.
    pub fn with_layers(&self, layers: usize) -> Self {
        let frozen = self.frozen.iter().flat_map(|name| self.repeated(name, layers)).collect();
        Self { layers: self.layers.iter().copied().cycle().take(layers).collect(), frozen, ..self.clone() }
    }

    /// The names of the tensor `name` in a model with `layers` of these layers in a cycle.
    fn repeated(&self, name: &str, layers: usize) -> Vec<String> {
        let of_layer = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
        match of_layer.and_then(|(layer, rest)| Some((layer.parse::<usize>().ok()?, rest))) {
            Some((layer, rest)) => (layer..layers).step_by(self.layers.len()).map(|layer| format!("layers.{layer}.{rest}")).collect(),
            None => vec![name.to_string()],
        }
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
