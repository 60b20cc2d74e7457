//! What one decoder layer is made of.

use crate::device::{ExpertActivation, RouterRule};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By root mean square, with a weight.
    Rms,
    /// By mean and variance, with weight and bias.
    Layer,
}

/// A normalisation of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// The factor is the weight plus one.
    pub(crate) plus_one: bool,
    /// Added to the variance.
    pub eps: f32,
}

/// What stands between the two matrices of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// `silu(gate) * up`.
    Swiglu,
    /// `gelu(gate) * up` with the tanh form of GELU.
    Geglu,
    /// `gelu(up)` with the tanh form of GELU.
    GeluTanh,
}

/// A pair of matrices with an activation between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ffn {
    /// Columns of the activation.
    pub(crate) width: usize,
    pub(crate) act: Act,
    /// Both matrices have biases.
    pub(crate) bias: bool,
}

impl Ffn {
    /// Columns of the first matrix's output: gate and up together.
    pub(crate) fn in_cols(&self) -> usize {
        if self.gated() { 2 * self.width } else { self.width }
    }

    /// The first matrix makes a gate beside what it gates.
    pub(crate) fn gated(&self) -> bool {
        match self.act {
            Act::Swiglu | Act::Geglu => true,
            Act::GeluTanh => false,
        }
    }
}

/// What follows attention in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mlp {
    /// Every token takes the same pair of matrices.
    Dense(Ffn),
    /// A router chooses some of several such pairs for each token.
    Moe(Moe),
}

impl Mlp {
    /// A pair of matrices: all are alike.
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

    /// Pairs that one token takes.
    fn taken(&self) -> usize {
        self.moe().map_or(1, |moe| moe.top_k)
    }
}

/// Experts, and who chooses among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moe {
    pub experts: usize,
    /// Experts of a token.
    pub(crate) top_k: usize,
    /// One expert.
    pub(crate) ffn: Ffn,
    /// What an expert does between its matrices.
    pub(crate) activation: ExpertActivation,
    pub(crate) rule: RouterRule,
    pub(crate) router_bias: bool,
}

/// What one norm of queries and keys spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkSpan {
    /// Each head alone.
    Head,
    /// All query heads of a token, and all its key heads.
    Whole,
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attn {
    /// Query heads, NH.
    pub heads: usize,
    /// Key and value heads, NKV; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Query, key and value projections have biases.
    pub(crate) qkv_bias: bool,
    /// The output projection has a bias.
    pub(crate) out_bias: bool,
    /// Queries and keys are RMS-normalised.
    pub qk_norm: Option<QkSpan>,
    /// Queries and keys are rotated by this one of [`ModelShape::ropes`].
    pub(crate) rope: Option<usize>,
    /// How many tokens a token sees, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Factor on scores.
    pub scale: f32,
    /// What scaled scores are bent to stay below.
    pub(crate) softcap: Option<f32>,
    /// The softmax of each query head has a learned score that no token has.
    pub(crate) sinks: bool,
}

impl Attn {
    /// Columns of the fused query, key and value: `(heads + 2 kv_heads) head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the output: `heads head_dim`.
    pub(crate) fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers that the norm of queries and keys keeps for a token.
    pub(crate) fn qk_stats_cols(&self) -> usize {
        match self.qk_norm {
            None => 0,
            Some(QkSpan::Head) => self.heads + self.kv_heads,
            Some(QkSpan::Whole) => 2,
        }
    }
}

/// How what attention or an MLP makes joins the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Join {
    Add,
    /// Times this factor.
    Scale(f32),
    /// Normalised.
    Norm,
}

/// One decoder layer: attention, then an MLP, each added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerShape {
    pub attn: Attn,
    pub mlp: Mlp,
    /// Of every norm of the residual stream here.
    pub norm: NormSpec,
    /// What enters attention, and what enters the MLP, is normalised.
    pub(crate) pre_norm: bool,
    pub(crate) join: Join,
}

impl LayerShape {
    /// Columns that leave the first matrix of the MLP, and that enter the second one, for all experts of a token together.
    pub(crate) fn mlp_cols(&self) -> (usize, usize) {
        let (ffn, taken) = (self.mlp.ffn(), self.mlp.taken());
        (taken * ffn.in_cols(), taken * ffn.width)
    }

    /// What leaves attention, and what leaves the MLP, is normalised.
    pub(crate) fn post_norm(&self) -> bool {
        self.join == Join::Norm
    }
}
