//! Attention sinks: an additional column of every head's softmax with a learned score and no value. They are applied after attention, which
//! does not know them. The backward pass of attention is correct with the corrected output and log-sum-exp.

use super::attention::AttentionShape;
use crate::device::kernel::{Kernel, Operand, operands};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Scales each head's output by the probability that the sink leaves, and adds the sink to the log-sum-exp.
#[derive(Clone, Copy, Debug)]
pub struct Sinks {
    /// `[heads]`
    pub sinks: DeviceSlice,
    /// `[T, heads * head_dim]`
    pub out: DeviceSlice,
    /// fp32 `[batch, heads, seq_length]`
    pub lse: DeviceSlice,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for Sinks {
    const NAME: &'static str = "sinks";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let AttentionShape { heads, .. } = self.shape;
        let t = self.shape.tokens();
        operands![self; Update out[t * self.shape.out_cols()]; Read sinks[heads], Update lse[t * heads] Float32]
    }
}

/// `dsinks[h] (+)= -` the sum over tokens of `exp(sinks[h] - lse) <dout, out>`, with the results of [`Sinks`].
#[derive(Clone, Copy, Debug)]
pub struct SinksBackward {
    /// `[T, heads * head_dim]`
    pub dout: DeviceSlice,
    /// `[T, heads * head_dim]`
    pub out: DeviceSlice,
    /// fp32 `[batch, heads, seq_length]`
    pub lse: DeviceSlice,
    /// `[heads]`
    pub sinks: DeviceSlice,
    /// `[heads]`
    pub dsinks: DeviceSlice,
    /// Adds to `dsinks`.
    pub accumulate: bool,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for SinksBackward {
    const NAME: &'static str = "sinks_backward";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let AttentionShape { heads, .. } = self.shape;
        let n = self.shape.tokens() * self.shape.out_cols();
        operands![
            self;
            Read dout[n], Read out[n];
            Read sinks[heads], Write dsinks[heads], Read lse[self.shape.tokens() * heads] Float32,
        ]
    }
}
