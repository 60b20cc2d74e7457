//! Query and key heads: their RMS normalisation, as Qwen3 has it, and their rotation.

use super::attention::AttentionShape;
use crate::device::kernel::{Kernel, Operand, bytes, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// RMS-normalises every query head with `q_weight` and every key head with `k_weight`, and copies the values.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub qkv: DeviceSlice,
    /// `[head_dim]`
    pub q_weight: DeviceSlice,
    /// `[head_dim]`
    pub k_weight: DeviceSlice,
    /// Added to the mean of squares.
    pub eps: f32,
    /// As large as `qkv`, and not the same.
    pub out: DeviceSlice,
    /// fp32 `[T, heads + kv_heads]`, kept for the backward pass.
    pub rstd: DeviceSlice,
    /// Sizes of all of them.
    pub shape: AttentionShape,
}

impl Kernel for QkNorm {
    const NAME: &'static str = "qk_norm";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, normed, d) = sizes(&self.shape);
        operands![self; Read qkv[n], Write out[n]; Read q_weight[d], Read k_weight[d], Write rstd[normed] Float32]
    }
}

/// Turns `dqkv` (gradient of [`QkNorm`]'s output) into the gradient of its input, in place; `dq_weight (+)=`, `dk_weight (+)=`.
#[derive(Clone, Copy, Debug)]
pub struct QkNormBackward {
    /// As large as `qkv`.
    pub dqkv: DeviceSlice,
    /// The input of the forward pass, like all that follow.
    pub qkv: DeviceSlice,
    /// `[head_dim]`
    pub q_weight: DeviceSlice,
    /// `[head_dim]`
    pub k_weight: DeviceSlice,
    /// See [`QkNorm::rstd`].
    pub rstd: DeviceSlice,
    /// `[head_dim]`
    pub dq_weight: DeviceSlice,
    /// `[head_dim]`
    pub dk_weight: DeviceSlice,
    /// Adds to the gradients of the weights.
    pub accumulate: bool,
    /// Sizes of all of them.
    pub shape: AttentionShape,
}

impl Kernel for QkNormBackward {
    const NAME: &'static str = "qk_norm_backward";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, normed, d) = sizes(&self.shape);
        operands![
            self;
            Update dqkv[n], Read qkv[n];
            Read q_weight[d], Read k_weight[d], Write dq_weight[d], Write dk_weight[d], Read rstd[normed] Float32,
        ]
    }
}

/// Rotates queries and keys in place. Channel `i` pairs with `i + rotary_dim / 2`; channels from `rotary_dim` on pass.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub qkv: DeviceSlice,
    /// int32 `[T]`, each below `seq_length`.
    pub positions: DeviceSlice,
    /// (cos, sin) by position, fp32 `[seq_length, rotary_dim / 2, 2]`.
    pub table: DeviceSlice,
    /// Channels that are rotated, an even number.
    pub rotary_dim: usize,
    /// Rotates back: the backward pass.
    pub inverse: bool,
    /// Sizes of all of them.
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
        let (n, angles) = (self.shape.tokens() * self.shape.qkv_cols(), self.shape.seq_length * self.rotary_dim);
        operands![self; Write qkv[n], Read table[angles] Float32, Read positions[self.shape.tokens()] Int32]
    }

    fn bytes(&self) -> f64 {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        let rotated = (heads + kv_heads) as f64 / (heads + 2 * kv_heads) as f64;
        bytes([self.qkv, self.qkv]) * rotated + bytes([self.positions])
    }
}

/// Elements of `qkv`, heads that are normalised, channels of a head.
fn sizes(shape: &AttentionShape) -> (usize, usize, usize) {
    (shape.tokens() * shape.qkv_cols(), shape.tokens() * (shape.heads + shape.kv_heads), shape.head_dim)
}
