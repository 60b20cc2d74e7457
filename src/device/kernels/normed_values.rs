//! Heads of queries, keys and values that are all RMS-normalised, as in Gemma 4, and a factor on the residual stream.

use super::attention::AttentionShape;
use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Channels of a head that a GPU's kernel keeps in registers.
#[cfg(feature = "cuda")]
pub(crate) const NORMED_CHANNELS_MAX: usize = 512;

/// The heads of a token before and after their norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormedHeads {
    /// Heads of a token after the norms: `heads` queries, `kv_heads` keys, `kv_heads` values.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Whether values are the keys before their norm, which are stored once.
    pub values_are_keys: bool,
}

impl NormedHeads {
    pub(crate) fn of(shape: &AttentionShape, values_are_keys: bool) -> Self {
        let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
        Self { heads, kv_heads, head_dim, values_are_keys }
    }

    /// Heads before the norms; each has a statistic.
    pub(crate) fn raw(&self) -> usize {
        self.heads + self.kv_heads * if self.values_are_keys { 1 } else { 2 }
    }

    /// Heads after the norms.
    pub(crate) fn all(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    fn check(&self, kernel: &'static str) -> Result<()> {
        if self.heads * self.kv_heads * self.head_dim > 0 { Ok(()) } else { Err(refused(kernel, format!("{self:?} makes no sense"))) }
    }
}

/// RMS-normalises every query head with `q_weight`, every key head with `k_weight`, and every value head without a weight.
#[derive(Clone, Copy, Debug)]
pub struct QkvNorm {
    /// `[T, raw heads * head_dim]`
    pub qkv: DeviceSlice,
    /// `[head_dim]`
    pub q_weight: DeviceSlice,
    /// `[head_dim]`
    pub k_weight: DeviceSlice,
    /// Added to the mean of squares.
    pub eps: f32,
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub out: DeviceSlice,
    /// fp32 `[T, raw heads]`, kept for the backward pass.
    pub rstd: DeviceSlice,
    /// Number of tokens.
    pub tokens: usize,
    pub heads: NormedHeads,
}

impl Kernel for QkvNorm {
    const NAME: &'static str = "qkv_norm";

    fn check_shape(&self) -> Result<()> {
        self.heads.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, d) = (self.tokens, self.heads.head_dim);
        operands![
            self;
            Read qkv[t * self.heads.raw() * d], Write out[t * self.heads.all() * d];
            Read q_weight[d], Read k_weight[d], Write rstd[t * self.heads.raw()] Float32,
        ]
    }
}

/// Turns `qkv`, the input of [`QkvNorm`], into its gradient, in place; `dq_weight (+)=`, `dk_weight (+)=`.
#[derive(Clone, Copy, Debug)]
pub struct QkvNormBackward {
    /// Gradient of the output, `[T, (heads + 2 kv_heads) * head_dim]`.
    pub dout: DeviceSlice,
    /// `[T, raw heads * head_dim]`
    pub qkv: DeviceSlice,
    /// `[head_dim]`
    pub q_weight: DeviceSlice,
    /// `[head_dim]`
    pub k_weight: DeviceSlice,
    /// See [`QkvNorm::rstd`].
    pub rstd: DeviceSlice,
    /// `[head_dim]`
    pub dq_weight: DeviceSlice,
    /// `[head_dim]`
    pub dk_weight: DeviceSlice,
    /// Adds to the gradients of the weights.
    pub accumulate: bool,
    /// Number of tokens.
    pub tokens: usize,
    pub heads: NormedHeads,
}

impl Kernel for QkvNormBackward {
    const NAME: &'static str = "qkv_norm_backward";

    fn check_shape(&self) -> Result<()> {
        self.heads.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, d) = (self.tokens, self.heads.head_dim);
        operands![
            self;
            Read dout[t * self.heads.all() * d], Update qkv[t * self.heads.raw() * d];
            Read q_weight[d], Read k_weight[d], Write dq_weight[d], Write dk_weight[d], Read rstd[t * self.heads.raw()] Float32,
        ]
    }
}

/// `x = x * factor`, with a factor in device memory.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBy {
    pub x: DeviceSlice,
    /// `[1]`
    pub factor: DeviceSlice,
}

impl Kernel for ScaleBy {
    const NAME: &'static str = "scale_by";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Update x[self.x.elems()]; Read factor[1]]
    }
}
