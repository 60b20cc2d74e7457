//! The shape of one decoder layer.

use crate::device::{ExpertActivation, RouterRule};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, with a weight.
    Rms,
    /// Mean and variance, with weight and bias.
    Layer,
}

/// A normalisation of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Whether the factor is the weight plus one.
    pub(crate) plus_one: bool,
    /// Added to the variance.
    pub eps: f32,
}

/// Activation between the two matrices of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// `silu(gate) * up`.
    Swiglu,
    /// `gelu(gate) * up` with the tanh approximation of GELU.
    Geglu,
    /// `gelu(up)` with the tanh approximation of GELU.
    GeluTanh,
}

/// Two matrices with an activation between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ffn {
    /// Columns of the activation.
    pub(crate) width: usize,
    pub(crate) act: Act,
    /// Whether both matrices have biases.
    pub(crate) bias: bool,
}

impl Ffn {
    /// Columns of the first matrix's output, including both gate and up projection.
    pub(crate) fn in_cols(&self) -> usize {
        if self.gated() { 2 * self.width } else { self.width }
    }

    /// Whether the first matrix has a gate beside the up projection.
    pub(crate) fn gated(&self) -> bool {
        match self.act {
            Act::Swiglu | Act::Geglu => true,
            Act::GeluTanh => false,
        }
    }
}

/// The block after attention in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mlp {
    /// One pair of matrices for every token.
    Dense(Ffn),
    /// Several pairs of matrices, of which a router chooses some for each token.
    Moe(Moe),
}

impl Mlp {
    /// The pair of matrices; all experts have the same shape.
    pub(crate) fn ffn(&self) -> Ffn {
        match *self {
            Self::Dense(ffn) | Self::Moe(Moe { ffn, .. }) => ffn,
        }
    }

    pub(crate) fn moe(&self) -> Option<Moe> {
        match *self {
            Self::Dense(_) => None,
            Self::Moe(moe) => Some(moe),
        }
    }

    pub(crate) fn shared(&self) -> Option<SharedExpertShape> {
        self.moe().and_then(|moe| moe.shared)
    }

    /// Whether the experts, the router and the shared expert have norms of their own.
    pub(crate) fn own_norms(&self) -> bool {
        self.moe().is_some_and(|moe| moe.own_norms)
    }

    /// Experts that a router chooses for one token; 1 without experts.
    fn taken(&self) -> usize {
        self.moe().map_or(1, |moe| moe.top_k)
    }
}

/// Experts and their router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moe {
    pub experts: usize,
    /// Experts for each token.
    pub(crate) top_k: usize,
    /// Shape of one expert.
    pub(crate) ffn: Ffn,
    /// Activation of an expert.
    pub(crate) activation: ExpertActivation,
    pub(crate) rule: RouterRule,
    pub(crate) router_bias: bool,
    /// Whether each expert's score has a correction, which is no parameter: it decides the choice and never changes.
    pub(crate) corrected: bool,
    pub(crate) shared: Option<SharedExpertShape>,
    /// Whether the layer is one of Gemma 4: see [`crate::model::moe_norms`]. It has a shared expert without a gate.
    pub(crate) own_norms: bool,
}

/// An MLP beside the experts that every token uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedExpertShape {
    /// Columns of the activation, which is that of an expert.
    pub(crate) width: usize,
    /// Whether the output is multiplied by the sigmoid of a product of the input with a vector.
    pub(crate) gated: bool,
}

/// Span of a norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkSpan {
    /// Each head alone.
    Head,
    /// All query heads of a token, and all its key heads.
    Whole,
}

/// The values of attention before they are weighted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// Projections of the input.
    Projected,
    /// Projections of the input; each head is RMS-normalised without a weight, beside a norm of queries and keys.
    Normed,
    /// The projected keys before their norm and rotation, each head RMS-normalised without a weight. There is no projection to values.
    NormedKeys,
}

/// Queries, keys and values of multi-head latent attention: products of matrices with normalised latent vectors, which are projections of the
/// input. Every key ends with the same rotated channels, which are a projection of the input, too. There are as many key heads as query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latent {
    /// Channels of the latent vector of queries; `None`: queries are projections of the input.
    pub(crate) query_rank: Option<usize>,
    /// Channels of the latent vector of keys and values.
    pub(crate) rank: usize,
    /// Last channels of a head of queries and keys, which rotate.
    pub(crate) rotary: usize,
    /// Channels of a value, at most those of a head. Attention reads values with zeros behind them.
    pub(crate) value: usize,
}

/// Arithmetic between the projections of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttnKind {
    /// Softmax of scores.
    Softmax,
    /// Softmax of scores; a gate, the sigmoid of a projection of the input, multiplies the output.
    GatedSoftmax,
    /// Gated delta rule after a short convolution, without scores; a gated norm of each head follows.
    Delta,
    /// Softmax of scores, between queries, keys and values from latent vectors.
    Latent(Latent),
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attn {
    pub(crate) kind: AttnKind,
    /// Query heads, NH; value heads with [`AttnKind::Delta`].
    pub heads: usize,
    /// Key and value heads, NKV, or heads of queries and keys with [`AttnKind::Delta`]; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Whether query, key and value projections have biases.
    pub(crate) qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub(crate) out_bias: bool,
    /// RMS normalisation of queries and keys.
    pub qk_norm: Option<QkSpan>,
    /// The values; if they are normalised, queries and keys are, too, each head alone.
    pub(crate) values: Values,
    /// Index in [`ModelShape::ropes`] of the rotation of queries and keys.
    pub(crate) rope: Option<usize>,
    /// Number of tokens that a token sees, including itself; `None`: all earlier tokens.
    pub window: Option<usize>,
    /// Factor on scores.
    pub scale: f32,
    /// Soft cap of scaled scores.
    pub(crate) softcap: Option<f32>,
    /// Whether the softmax of each query head has a learned sink score.
    pub(crate) sinks: bool,
}

impl Attn {
    /// Whether the layer has a gated delta rule instead of scores.
    pub(crate) fn is_delta(&self) -> bool {
        self.kind == AttnKind::Delta
    }

    /// Latent vectors, if the layer has them.
    pub(crate) fn latent(&self) -> Option<Latent> {
        if let AttnKind::Latent(latent) = self.kind { Some(latent) } else { None }
    }

    /// Columns of the gate of the output; 0 without one.
    pub(crate) fn gate_cols(&self) -> usize {
        match self.kind {
            AttnKind::Softmax | AttnKind::Latent(_) => 0,
            AttnKind::GatedSoftmax | AttnKind::Delta => self.out_cols(),
        }
    }

    /// Columns of the decay, and of the strength of updates, in a gated delta rule; 0 without one.
    pub(crate) fn rule_cols(&self) -> usize {
        if self.is_delta() { self.heads } else { 0 }
    }

    /// Log-sum-exps of a token; 0 without scores.
    pub(crate) fn lse_cols(&self) -> usize {
        if self.is_delta() { 0 } else { self.heads }
    }

    /// Columns of the fused projection to queries, keys and values; with latent vectors, of the projection to queries or to their latent vector.
    pub(crate) fn projected_cols(&self) -> usize {
        if let Some(Latent { query_rank, .. }) = self.latent() {
            return query_rank.unwrap_or(self.out_cols());
        }
        self.qkv_cols() - if self.values == Values::NormedKeys { self.kv_heads * self.head_dim } else { 0 }
    }

    /// Columns of projections that a norm, a convolution or further products change before attention; 0 if attention reads the projections.
    pub(crate) fn raw_qkv_cols(&self) -> usize {
        if self.is_delta() || self.qk_norm.is_some() || self.latent().is_some() { self.projected_cols() } else { 0 }
    }

    /// Columns of the fused query, key and value: `(heads + 2 kv_heads) head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the output: `heads head_dim`.
    pub(crate) fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the output without the zeros behind values: those of the output projection's input.
    pub(crate) fn value_cols(&self) -> usize {
        self.heads * self.latent().map_or(self.head_dim, |latent| latent.value)
    }

    /// Columns that a product with a key or with a value multiplies, in the mean of both.
    pub(crate) fn score_cols(&self) -> f64 {
        (self.out_cols() + self.value_cols()) as f64 / 2.0
    }

    /// Columns of gradients that are in memory at once beside those of the output: of queries, keys and values, or of latent vectors and their
    /// norms.
    pub(crate) fn gradient_cols(&self) -> usize {
        let of_latent = |Latent { query_rank, rank, .. }: Latent| 2 * (query_rank.unwrap_or(0) + rank);
        self.qkv_cols().max(self.latent().map_or(0, of_latent))
    }

    /// Statistics that norms of queries and keys, or of latent vectors, save for a token.
    pub(crate) fn qk_stats_cols(&self) -> usize {
        match self.qk_norm {
            None if self.latent().is_some_and(|latent| latent.query_rank.is_some()) => 2,
            None if self.latent().is_some() => 1,
            None => 0,
            // The keys that are values, too, have one statistic.
            Some(QkSpan::Head) if self.values == Values::Normed => self.heads + 2 * self.kv_heads,
            Some(QkSpan::Head) => self.heads + self.kv_heads,
            Some(QkSpan::Whole) => 2,
        }
    }
}

/// The operation that adds the output of attention or of an MLP to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Join {
    Add,
    /// Multiplied by this factor.
    Scale(f32),
    /// Normalised.
    Norm,
}

/// One decoder layer: attention, then an MLP, each added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerShape {
    pub attn: Attn,
    pub mlp: Mlp,
    /// Shape of every norm of the residual stream in this layer.
    pub norm: NormSpec,
    /// Whether the inputs of attention and of the MLP are normalised.
    pub(crate) pre_norm: bool,
    pub(crate) join: Join,
    /// Whether the residual stream after the layer is multiplied by a number of the files, which is not trained.
    pub(crate) scaled: bool,
}

impl LayerShape {
    /// Columns of the first matrix's output and of the second matrix's input in the MLP, summed over all experts of a token.
    pub(crate) fn mlp_cols(&self) -> (usize, usize) {
        let (ffn, taken) = (self.mlp.ffn(), self.mlp.taken());
        (taken * ffn.in_cols(), taken * ffn.width)
    }

    /// As [`Self::mlp_cols`], of the widest pair of matrices whose gradients are in memory at once.
    pub(crate) fn widest_mlp_cols(&self) -> (usize, usize) {
        let ((ins, outs), shared) = (self.mlp_cols(), self.mlp.shared().map_or(0, |shared| shared.width));
        (ins.max(2 * shared), outs.max(shared))
    }

    /// Whether the outputs of attention and of the MLP are normalised.
    pub(crate) fn post_norm(&self) -> bool {
        self.join == Join::Norm
    }
}
