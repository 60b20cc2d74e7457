//! The gated delta rule, a linear attention: each head has a state, a matrix that every token decays and corrects.
//!
//! Value head `h` reads key head `h / (value_heads / key_heads)`. With queries and keys of unit length, the state `S` and the output `o` of a
//! token are
//!
//! ```text
//! S = e^al S;  S = S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(width)
//! al = -exp(a_log) softplus(a + dt_bias),  beta = sigmoid(b)
//! ```
//!
//! A document begins with a state of zeros. Devices compute [`CHUNK`] tokens at a time, counted from the first token of each document, so
//! neighbours do not change a document's bits.

use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Tokens that are computed together.
pub(crate) const CHUNK: usize = 64;
/// Added to the sum of squares of a query or a key before it is divided by its length.
pub(crate) const UNIT_EPS: f32 = 1e-6;

/// Bytes of a kernel in rows of a head's channels, for each token and value head, so that the memory bandwidth gives its time. A GPU computes a delta
/// rule in several passes, which read and write matrices of this size. On an H200, 16,384 tokens of 32 value heads with 128 channels take
/// 0.77 ms forward and 2.22 ms backward (4 rows of 4096 tokens, 16 key heads, bfloat16).
const FORWARD_ROWS: f64 = 25.0;
const BACKWARD_ROWS: f64 = 71.0;

/// Shape of one layer's delta rule. A row of `qkv` is a token; it holds `key_heads` queries, then `key_heads` keys, then `value_heads`
/// values, each of `width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, gates and outputs; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Channels of a head.
    pub width: usize,
}

impl DeltaShape {
    /// Tokens: rows of `qkv` and of the output.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq_length
    }

    /// Columns of `qkv`: `(2 key_heads + value_heads) * width`.
    pub fn qkv_cols(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.width
    }

    /// Columns of the output: `value_heads * width`.
    pub fn out_cols(&self) -> usize {
        self.value_heads * self.width
    }

    /// FLOPs of the recurrence: the state's correction and two products with it, for each token.
    pub fn flops(&self) -> f64 {
        6.0 * (self.tokens() * self.value_heads) as f64 * (self.width * self.width) as f64
    }

    /// Bytes of `rows` rows of channels for each token and value head.
    fn bytes_of(&self, rows: f64, qkv: DeviceSlice) -> f64 {
        rows * (self.tokens() * self.out_cols() * qkv.dtype().bytes()) as f64
    }

    /// An error of `kernel` if the numbers of heads do not fit together or a size is zero.
    pub(crate) fn check(&self, kernel: &'static str) -> Result<()> {
        let whole = self.key_heads > 0 && self.value_heads.is_multiple_of(self.key_heads);
        if whole && self.value_heads * self.width * self.tokens() > 0 {
            return Ok(());
        }
        Err(refused(kernel, format!("{self:?} makes no sense")))
    }
}

/// The gated delta rule over the documents of each row.
///
/// # Errors
/// `Unsupported` on a GPU unless heads have 64 or 128 channels in a 16-bit format.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule {
    /// `[T, (2 key_heads + value_heads) * width]`, the result of [`ShortConv`](super::ShortConv).
    pub qkv: DeviceSlice,
    /// Gates of the decay, `[T, value_heads]`.
    pub a: DeviceSlice,
    /// Gates of the correction, `[T, value_heads]`.
    pub b: DeviceSlice,
    /// `[value_heads]`
    pub a_log: DeviceSlice,
    /// `[value_heads]`
    pub dt_bias: DeviceSlice,
    /// Index in its row at which each token's document begins, int32 `[T]`. `None`: every row is one document.
    pub documents: Option<DeviceSlice>,
    /// `[T, value_heads * width]`
    pub out: DeviceSlice,
    /// Sizes of all operands.
    pub shape: DeltaShape,
}

impl Kernel for DeltaRule {
    const NAME: &'static str = "delta_rule";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, heads) = (self.shape.tokens(), self.shape.value_heads);
        operands![
            self;
            Read qkv[t * self.shape.qkv_cols()], Read a[t * heads], Read b[t * heads], Write out[t * self.shape.out_cols()];
            Read a_log[heads], Read dt_bias[heads], Read documents[t] Int32,
        ]
    }

    fn bytes(&self) -> f64 {
        self.shape.bytes_of(FORWARD_ROWS, self.qkv)
    }
}

/// Overwrites `dqkv`, `da` and `db` with the gradients of [`DeltaRule`]'s inputs; `da_log (+)=`, `ddt_bias (+)=`. The states are computed
/// again.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRuleBackward {
    /// Gradient of the output, `[T, value_heads * width]`.
    pub dout: DeviceSlice,
    /// See [`DeltaRule::qkv`].
    pub qkv: DeviceSlice,
    /// See [`DeltaRule::a`].
    pub a: DeviceSlice,
    /// See [`DeltaRule::b`].
    pub b: DeviceSlice,
    /// `[value_heads]`
    pub a_log: DeviceSlice,
    /// `[value_heads]`
    pub dt_bias: DeviceSlice,
    /// See [`DeltaRule::documents`].
    pub documents: Option<DeviceSlice>,
    /// Same size as `qkv`.
    pub dqkv: DeviceSlice,
    /// `[T, value_heads]`
    pub da: DeviceSlice,
    /// `[T, value_heads]`
    pub db: DeviceSlice,
    /// `[value_heads]`
    pub da_log: DeviceSlice,
    /// `[value_heads]`
    pub ddt_bias: DeviceSlice,
    /// Adds to `da_log` and `ddt_bias`.
    pub accumulate: bool,
    /// Sizes of all operands.
    pub shape: DeltaShape,
}

impl Kernel for DeltaRuleBackward {
    const NAME: &'static str = "delta_rule_backward";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, heads) = (self.shape.tokens(), self.shape.value_heads);
        let (gates, n) = (t * heads, t * self.shape.qkv_cols());
        operands![
            self;
            Read dout[t * self.shape.out_cols()], Read qkv[n], Read a[gates], Read b[gates], Write dqkv[n], Write da[gates], Write db[gates];
            Read a_log[heads], Read dt_bias[heads], Write da_log[heads], Write ddt_bias[heads], Read documents[t] Int32,
        ]
    }

    fn bytes(&self) -> f64 {
        self.shape.bytes_of(BACKWARD_ROWS, self.qkv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: DeltaShape = DeltaShape { batch: 4, seq_length: 4096, key_heads: 16, value_heads: 32, width: 128 };

    #[test]
    fn value_heads_are_multiples_of_key_heads_and_nothing_is_empty() {
        assert!(SHAPE.check("delta_rule").is_ok());
        let wrong = [
            DeltaShape { value_heads: 24, ..SHAPE },
            DeltaShape { key_heads: 0, ..SHAPE },
            DeltaShape { value_heads: 0, ..SHAPE },
            DeltaShape { width: 0, ..SHAPE },
            DeltaShape { seq_length: 0, ..SHAPE },
        ];
        assert!(wrong.iter().all(|shape| shape.check("delta_rule").unwrap_err().to_string().ends_with("makes no sense")));
    }
}
