//! Causal attention.

use crate::device::Attention;
use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;
use crate::hardware::rates::{AttentionKernels, Rates};
use std::ops::Range;

/// Ratio of the FLOPs of backward and forward pass, as used for the measured rate.
const BACKWARD_FLOPS: f64 = 2.0;
/// With a window, keys of a block begin at a multiple of this number, so that cuDNN's tiles are whole and all blocks share one plan.
const KEY_GRAIN: usize = 128;

/// Shape of one layer's attention. Rows of `qkv` are tokens (`batch * seq_length`); a row holds `heads` queries, then
/// `kv_heads` keys, then `kv_heads` values, each of `head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Query head `h` reads key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// Number of tokens that a token sees, including itself (sliding window); `None`: all earlier tokens.
    pub window: Option<usize>,
    /// Soft cap: scaled scores `s` become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
}

/// Queries of a block of attention by products.
pub(crate) const PRODUCT_BLOCK: usize = 1024;
/// Bytes that the softmax of attention by products reads and writes for a score, forward and backward, in a 16-bit format: raw scores and gradients
/// of probabilities in fp32, probabilities and gradients of scores in that format.
const SOFTMAX_BYTES: [f64; 2] = [4.0 + 2.0, 2.0 * (4.0 + 2.0)];
/// Bytes that the products read and write for a score, forward and backward: they write raw scores and gradients of probabilities, and read
/// probabilities once and gradients of scores twice.
const PRODUCT_BYTES: [f64; 2] = [4.0 + 2.0, 2.0 * 4.0 + 3.0 * 2.0];
/// Time of a softmax with a soft cap, relative to that of its bytes (Gemma-2-9B on an H200: `h200-kernels.jsonl`).
const CAPPED_SLOWDOWN: f64 = 1.8;

/// Tokens of a sequence up to which cuDNN's backward pass is not divided into blocks, whatever the number of heads.
const WHOLE_BACKWARD: usize = 8192;

impl AttentionShape {
    /// Tokens: rows of `qkv` and of the output.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq_length
    }

    /// Columns of `qkv`: `(heads + 2 kv_heads) * head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the attention's output: `heads * head_dim`.
    pub fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Blocks of queries of a sequence that is one document. A remainder of one query is merged with the block before it, because cuDNN's
    /// deterministic backward pass gives wrong gradients for a single query with several keys (9.19, on an H200).
    pub(crate) fn query_blocks(&self, block: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (n, end) = (self.seq_length, self.seq_length - usize::from(self.joins_rest(block)));
        (0..end).step_by(block).map(move |start| start..if start + block < end { start + block } else { n })
    }

    /// Queries of the longest of [`Self::query_blocks`].
    pub(crate) fn longest_block(&self, block: usize) -> usize {
        block.min(self.seq_length) + usize::from(self.joins_rest(block))
    }

    /// Keys of each product with `queries`, one of the blocks of [`Self::query_blocks`]: blocks of keys up to that of the queries, or one
    /// range of keys if there is a window that hides keys.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn key_blocks(&self, queries: &Range<usize>, block: usize) -> Vec<Range<usize>> {
        if self.hiding_window().is_some() {
            return vec![self.keys_behind_window(queries); 1];
        }
        self.query_blocks(block).take_while(|keys| keys.start <= queries.start).collect()
    }

    /// All keys that some of `queries` see. Behind a window they begin at a multiple of [`KEY_GRAIN`].
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn keys_behind_window(&self, queries: &Range<usize>) -> Range<usize> {
        let first = self.hiding_window().map_or(0, |window| (queries.start + 1).saturating_sub(window) / KEY_GRAIN * KEY_GRAIN);
        first..queries.end
    }

    /// Maximum keys of one of [`Self::key_blocks`].
    pub(crate) fn most_keys(&self, block: usize) -> usize {
        let longest = self.longest_block(block);
        self.hiding_window().map_or(longest, |window| (longest + window + KEY_GRAIN - 1).min(self.seq_length))
    }

    /// The window, if it hides keys from some query.
    pub(crate) fn hiding_window(&self) -> Option<usize> {
        self.window.filter(|window| *window < self.seq_length)
    }

    fn joins_rest(&self, block: usize) -> bool {
        self.seq_length > block && self.seq_length % block == 1
    }

    /// FLOPs of the forward pass: two products over the keys that each token sees.
    pub(crate) fn flops(&self) -> f64 {
        4.0 * self.tokens() as f64 * self.mean_keys() * (self.heads * self.head_dim) as f64
    }

    /// Mean number of keys that a token sees.
    fn mean_keys(&self) -> f64 {
        let s = self.seq_length as f64;
        match self.hiding_window().map(|window| window as f64) {
            Some(window) => window - window * window / (2.0 * s),
            None => s / 2.0,
        }
    }

    /// Mean number of keys for which cuDNN's backward pass computes scores, hidden ones included.
    fn mean_visited_keys(&self) -> f64 {
        let seen_of_all = self.seq_length as f64 / 2.0;
        self.hiding_window().map_or(seen_of_all, |window| seen_of_all.min((WHOLE_BACKWARD / 2 + window) as f64))
    }

    /// Seconds of both passes by products, if the machine computes this shape so.
    fn seconds_by_products(&self, rates: &Rates) -> Option<[f64; 2]> {
        let by_products = match rates.attention_kernels() {
            AttentionKernels::Products => true,
            AttentionKernels::CudnnOrProducts { .. } => Attention::cudnn_lacks(self).is_some(),
            AttentionKernels::AsMeasured | AttentionKernels::Deterministic | AttentionKernels::Plain => false,
        };
        let flops_per_s = rates.matmul_flops(self.head_dim.min(self.seq_length));
        let seconds = |[flops, bytes]: [f64; 2]| flops / flops_per_s + bytes / rates.device_bytes_per_s;
        by_products.then(|| self.costs_of_products().map(seconds))
    }

    /// FLOPs of the products of a forward pass and of a backward pass, and the bytes of scores, as many as their time equals.
    fn costs_of_products(&self) -> [[f64; 2]; 2] {
        let block = self.seq_length.min(PRODUCT_BLOCK);
        // Mean keys of a block: half of all, and the keys of the block itself; or those of a window.
        let before = self.hiding_window().map_or(f64::INFINITY, |window| window as f64);
        let keys = ((self.seq_length - block) as f64 / 2.0).min(before) + block as f64;
        let scores = (self.tokens() * self.heads) as f64 * keys;
        let product = 2.0 * scores * self.head_dim as f64;
        let slowdown = if self.softcap.is_some() { CAPPED_SLOWDOWN } else { 1.0 };
        let bytes = |pass: usize| scores * (PRODUCT_BYTES[pass] + slowdown * SOFTMAX_BYTES[pass]);
        [[2.0 * product, bytes(0)], [5.0 * product, bytes(1)]]
    }

    /// FLOP/s of the forward pass.
    fn forward_flops_per_s(&self, rates: &Rates) -> f64 {
        if let Some([forward_s, _]) = self.seconds_by_products(rates) {
            return self.flops() / forward_s;
        }
        rates.attention_forward_flops * rates.attention_share(self.head_dim)
    }

    /// Seconds of the forward pass.
    pub(crate) fn forward_s(&self, rates: &Rates) -> f64 {
        self.flops() / self.forward_flops_per_s(rates)
    }

    /// An error of `kernel` if the numbers of heads do not fit together or a size is zero.
    pub(crate) fn check(&self, kernel: &'static str) -> Result<()> {
        let whole = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        if whole && self.heads * self.head_dim * self.tokens() > 0 && self.window != Some(0) && self.softcap.is_none_or(|cap| cap > 0.0) {
            return Ok(());
        }
        Err(refused(kernel, format!("{self:?} makes no sense")))
    }
}

/// Causal attention.
///
/// # Errors
/// `Unsupported` for soft caps and for heads of more than 256 channels when cuDNN computes attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward {
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub qkv: DeviceSlice,
    /// Index in its row at which each token's document begins, int32 `[T]`; a token sees nothing before it. Indices do not descend along a
    /// row. `None`: every row is one document.
    pub documents: Option<DeviceSlice>,
    /// `[T, heads * head_dim]`
    pub out: DeviceSlice,
    /// Log-sum-exp of the scaled scores, fp32 `[batch, heads, seq_length]`, kept for the backward pass.
    pub lse: DeviceSlice,
    /// Sizes of all operands.
    pub shape: AttentionShape,
}

impl Kernel for AttentionForward {
    const NAME: &'static str = "attention";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, qkv_cols, out_cols) = (self.shape.tokens(), self.shape.qkv_cols(), self.shape.out_cols());
        operands![
            self;
            Read qkv[t * qkv_cols], Write out[t * out_cols];
            Read documents[t] Int32, Write lse[t * self.shape.heads] Float32,
        ]
    }

    fn flops(&self) -> f64 {
        self.shape.flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        self.shape.forward_flops_per_s(rates)
    }
}

/// Overwrites `dqkv` with the gradient of [`AttentionForward`]'s `qkv`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward {
    /// Gradient of the output, `[T, heads * head_dim]`.
    pub dout: DeviceSlice,
    /// As in the forward pass, like the operands that follow.
    pub qkv: DeviceSlice,
    /// See [`AttentionForward::documents`].
    pub documents: Option<DeviceSlice>,
    pub out: DeviceSlice,
    /// See [`AttentionForward::lse`].
    pub lse: DeviceSlice,
    /// `[T, (heads + 2 kv_heads) * head_dim]`
    pub dqkv: DeviceSlice,
    /// Sizes of all operands.
    pub shape: AttentionShape,
    /// Queries and keys of a block. The gradients of each block of a document are rounded to the format, and added in fp32 in the order of
    /// blocks. With a window that hides keys, keys are not divided. A remainder of one query is merged with the block before it, unless
    /// rows hold several documents. `None`: the device's default for the shape, which is one block unless cuDNN would need too much memory.
    pub block: Option<usize>,
}

impl Kernel for AttentionBackward {
    const NAME: &'static str = "attention_backward";

    fn check_shape(&self) -> Result<()> {
        if self.block == Some(0) { Err(refused(Self::NAME, "blocks of no queries".into())) } else { self.shape.check(Self::NAME) }
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, n, out_elems) =
            (self.shape.tokens(), self.shape.tokens() * self.shape.qkv_cols(), self.shape.tokens() * self.shape.out_cols());
        operands![
            self;
            Read dout[out_elems], Read qkv[n], Read out[out_elems], Write dqkv[n];
            Read documents[t] Int32, Read lse[t * self.shape.heads] Float32,
        ]
    }

    fn flops(&self) -> f64 {
        BACKWARD_FLOPS * self.shape.flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        if let Some([_, backward_s]) = self.shape.seconds_by_products(rates) {
            return self.flops() / backward_s;
        }
        let visits_hidden = self.block.is_none() && rates.backward_visits_hidden_keys();
        let useful = if visits_hidden { self.shape.mean_keys() / self.shape.mean_visited_keys() } else { 1.0 };
        rates.attention_backward_flops * rates.attention_share(self.shape.head_dim) * useful
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::hardware::rates::AttentionKernels::{AsMeasured, Deterministic, Plain};

    #[test]
    fn products_pass_over_scores_and_a_capped_softmax_takes_longer() {
        let shape =
            AttentionShape { batch: 1, seq_length: 1024, heads: 2, kv_heads: 1, head_dim: 64, scale: 1.0, window: None, softcap: None };
        let scores = 2.0 * 1024.0 * 1024.0;
        let flops = 2.0 * scores * 64.0;
        assert_eq!(shape.costs_of_products(), [[2.0 * flops, scores * 12.0], [5.0 * flops, scores * 26.0]]);
        let [[_, forward], [_, backward]] = AttentionShape { softcap: Some(50.0), ..shape }.costs_of_products();
        assert_eq!([forward, backward], [6.0 + 1.8 * 6.0, 14.0 + 1.8 * 12.0].map(|bytes| scores * bytes));
    }

    #[test]
    fn a_rest_of_one_query_is_in_the_block_before_it() {
        let blocks = |seq_length, block| {
            let shape =
                AttentionShape { batch: 1, seq_length, heads: 1, kv_heads: 1, head_dim: 8, scale: 1.0, window: None, softcap: None };
            let blocks: Vec<_> = shape.query_blocks(block).collect();
            assert_eq!(blocks.iter().map(Range::len).max(), Some(shape.longest_block(block)));
            blocks
        };
        assert_eq!(blocks(129, 64), [0..64, 64..129]);
        assert_eq!(blocks(130, 64), [0..64, 64..128, 128..130]);
        assert_eq!(blocks(128, 64), [0..64, 64..128]);
        assert_eq!(blocks(65, 64), vec![0..65; 1]);
        assert_eq!((blocks(1, 64), blocks(64, 64), blocks(3, 1)), (vec![0..1; 1], vec![0..64; 1], vec![0..1, 1..2, 2..3]));
    }

    #[test]
    fn keys_are_cut_as_queries_are_unless_a_window_hides_some() {
        let keys = |window, queries| {
            let shape = AttentionShape { batch: 1, seq_length: 129, heads: 1, kv_heads: 1, head_dim: 8, scale: 1.0, window, softcap: None };
            shape.key_blocks(&queries, 64)
        };
        assert_eq!((keys(None, 0..64), keys(None, 64..129)), (vec![0..64; 1], vec![0..64, 64..129]));
        assert_eq!(keys(Some(129), 64..129), [0..64, 64..129]);
        assert_eq!((keys(Some(16), 0..64), keys(Some(16), 64..129)), (vec![0..64; 1], vec![0..129; 1]));
        let long =
            AttentionShape { batch: 1, seq_length: 1000, heads: 1, kv_heads: 1, head_dim: 8, scale: 1.0, window: Some(100), softcap: None };
        assert_eq!(long.key_blocks(&(512..1000), 512), vec![384..1000; 1], "query 512 sees key 413");
    }

    #[test]
    fn hidden_keys_cost_time_in_deterministic_backward_passes_and_plain_kernels_in_both() {
        let seconds = |by, window, block| {
            let rates = Rates::assumed().attending_by(by);
            let shape =
                AttentionShape { batch: 4, seq_length: 4096, heads: 32, kv_heads: 8, head_dim: 128, scale: 1.0, window, softcap: None };
            let [dout, qkv, out, lse, dqkv] = [DeviceSlice::at(0, 0, Dtype::Bfloat16); 5];
            let forward = AttentionForward { qkv, documents: None, out, lse, shape };
            let backward = AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape, block };
            [forward.flops() / forward.flops_per_s(&rates), backward.flops() / backward.flops_per_s(&rates)]
        };
        let (whole, windowed) = (seconds(Deterministic, None, None), seconds(Deterministic, Some(128), None));
        assert!(windowed[0] < whole[0] / 10.0 && (windowed[1] / whole[1] - 1.0).abs() < 1e-9, "{windowed:?} {whole:?}");
        assert!(seconds(Deterministic, Some(128), Some(512))[1] < whole[1] / 10.0);
        assert!(seconds(AsMeasured, Some(128), None)[1] < whole[1] / 10.0 && seconds(AsMeasured, None, None) == whole);
        let plain = seconds(Plain, None, None);
        assert!(plain.iter().zip(whole).all(|(plain, whole)| plain / whole > 10.0), "{plain:?} {whole:?}");
    }
}
