//! What a `config.json` says about a model: the one description that every other part of the model reads.

use super::family::Family;
use crate::device::AttentionShape;

/// Normalisation of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By root mean square, with a weight.
    Rms,
    /// By mean and variance, with weight and bias.
    Layer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mlp {
    /// `down(silu(gate(x)) * up(x))`.
    Swiglu,
    /// `down(gelu(up(x)))` with the tanh form of GELU.
    GeluTanh,
}

/// How tokens know where they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    Learned,
    Rope(RopeConfig),
}

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
}

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
    pub(crate) ffn: usize,
    /// Longest sequence.
    pub(crate) max_positions: usize,
    pub norm: NormKind,
    /// Added to the variance in every norm.
    pub eps: f32,
    pub(crate) mlp: Mlp,
    pub positions: Positions,
    /// Query, key and value projections have biases.
    pub(crate) qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub(crate) out_bias: bool,
    pub(crate) mlp_bias: bool,
    /// Queries and keys are RMS-normalised per head.
    pub qk_norm: bool,
    /// The output matrix is the token embedding.
    pub tied: bool,
    /// Per layer: how many tokens a token sees, itself included; `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// Factor on attention scores.
    pub scale: f32,
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
        let Self { heads, kv_heads, head_dim, scale, .. } = *self;
        AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale, window: self.windows[layer] }
    }

    /// Columns of the fused query, key and value: `(heads + 2 kv_heads) head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of attention's output: `heads head_dim`.
    pub(crate) fn attn_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the first MLP matrix's output: gate and up together.
    pub(crate) fn mlp_in_cols(&self) -> usize {
        match self.mlp {
            Mlp::Swiglu => 2 * self.ffn,
            Mlp::GeluTanh => self.ffn,
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
