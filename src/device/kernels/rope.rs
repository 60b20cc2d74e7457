//! RMS normalisation and rotation of query and key heads. The normalisation is over each head, or over all queries and all keys of a token.

use super::attention::AttentionShape;
use crate::device::kernel::{Kernel, Operand, bytes, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// RMS-normalises every query head with `q_weight` and every key head with `k_weight`, and copies the values. Weights longer than a head
/// span all query heads, or all key heads, of a token; such a span has one root mean square.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub qkv: DeviceSlice,
    /// `[head_dim]` or `[heads * head_dim]`
    pub q_weight: DeviceSlice,
    /// `[head_dim]` or `[kv_heads * head_dim]`
    pub k_weight: DeviceSlice,
    /// Whether the factors are `1 + weight`.
    pub plus_one: bool,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Same size as `qkv`, without overlap.
    pub out: DeviceSlice,
    /// One for each span, fp32 `[T, heads + kv_heads]` or `[T, 2]`, kept for the backward pass.
    pub rstd: DeviceSlice,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for QkNorm {
    const NAME: &'static str = "qk_norm";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, spans) = (self.shape.tokens() * self.shape.qkv_cols(), Spans::of(&self.shape, self.q_weight));
        operands![self; Read qkv[n], Write out[n]; Read q_weight[spans.q], Read k_weight[spans.k], Write rstd[spans.all] Float32]
    }
}

/// Turns `dqkv` (gradient of [`QkNorm`]'s output) into the gradient of its input, in place; `dq_weight (+)=`, `dk_weight (+)=`.
#[derive(Clone, Copy, Debug)]
pub struct QkNormBackward {
    /// Same size as `qkv`.
    pub dqkv: DeviceSlice,
    /// The input of the forward pass, like the operands that follow.
    pub qkv: DeviceSlice,
    /// See [`QkNorm::q_weight`].
    pub q_weight: DeviceSlice,
    /// See [`QkNorm::k_weight`].
    pub k_weight: DeviceSlice,
    /// See [`QkNorm::plus_one`].
    pub plus_one: bool,
    /// See [`QkNorm::rstd`].
    pub rstd: DeviceSlice,
    /// Same length as `q_weight`.
    pub dq_weight: DeviceSlice,
    /// Same length as `k_weight`.
    pub dk_weight: DeviceSlice,
    /// Whether to add to the gradients of the weights.
    pub accumulate: bool,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for QkNormBackward {
    const NAME: &'static str = "qk_norm_backward";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, Spans { q, k, all }) = (self.shape.tokens() * self.shape.qkv_cols(), Spans::of(&self.shape, self.q_weight));
        operands![
            self;
            Update dqkv[n], Read qkv[n];
            Read q_weight[q], Read k_weight[k], Write dq_weight[q], Write dk_weight[k], Read rstd[all] Float32,
        ]
    }
}

/// Rotates queries and keys in place. Channel `i` pairs with `i + rotary_dim / 2`; with `interleaved`, channel `2 i` pairs with `2 i + 1`.
/// Channels from `rotary_dim` on are unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub qkv: DeviceSlice,
    /// int32 `[T]`, each a row of the table.
    pub positions: DeviceSlice,
    /// (cos, sin) by position, fp32 `[positions, rotary_dim / 2, 2]`, for any number of positions.
    pub table: DeviceSlice,
    /// Channels that are rotated, an even number.
    pub rotary_dim: usize,
    /// Whether pairs are adjacent channels.
    pub interleaved: bool,
    /// Whether to rotate back, for the backward pass.
    pub inverse: bool,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for Rope {
    const NAME: &'static str = "rope";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)?;
        let Self { rotary_dim, shape: AttentionShape { head_dim, .. }, .. } = *self;
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(refused(Self::NAME, format!("cannot rotate {rotary_dim} of {head_dim} channels")));
        }
        Ok(())
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.shape.tokens() * self.shape.qkv_cols();
        let angles = rows(self.table, self.rotary_dim) * self.rotary_dim;
        operands![self; Write qkv[n], Read table[angles] Float32, Read positions[self.shape.tokens()] Int32]
    }

    fn bytes(&self) -> f64 {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        let rotated = (heads + kv_heads) as f64 / (heads + 2 * kv_heads) as f64;
        bytes([self.qkv, self.qkv]) * rotated + bytes([self.positions])
    }
}

/// Sizes of the spans that are normalised together.
pub(crate) struct Spans {
    /// Channels of a span of queries.
    pub(crate) q: usize,
    /// Channels of a span of keys.
    pub(crate) k: usize,
    /// Spans of all tokens.
    all: usize,
}

impl Spans {
    /// Spans for this shape and length of the query weight.
    pub(crate) fn of(shape: &AttentionShape, q_weight: DeviceSlice) -> Self {
        let (d, tokens) = (shape.head_dim, shape.tokens());
        match q_weight.elems() == d {
            true => Self { q: d, k: d, all: tokens * (shape.heads + shape.kv_heads) },
            false => Self { q: shape.heads * d, k: shape.kv_heads * d, all: tokens * 2 },
        }
    }
}
