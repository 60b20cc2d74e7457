//! The arithmetic that a model needs: the numerator of every FLOP/s that is reported.

use super::shape::ModelShape;
use super::tensors::TensorTable;

/// How [`ModelShape::flops_per_step`] counts.
pub(crate) const FLOPS_FORMULA: &str = "6*N*T + 6*sum_l(heads*head_dim*S_l)*T; N matrix parameters with the output matrix, T tokens, S_l sequence length (2W - W^2/S in a window of W): causal, no recompute";

impl ModelShape {
    /// Model FLOPs of one optimizer step over `sequences` sequences of `seq_length` tokens, forward and backward, by
    /// [`FLOPS_FORMULA`]: nothing for recomputation, norms, activations or the optimizer.
    pub fn flops_per_step(&self, sequences: usize, seq_length: usize) -> f64 {
        let (tokens, s) = (sequences as f64 * seq_length as f64, seq_length as f64);
        let attended = |window: &Option<usize>| match window.map(|w| w as f64) {
            Some(w) if w < s => 2.0 * w - w * w / s,
            _ => s,
        };
        let attention: f64 = self.windows.iter().map(attended).sum::<f64>() * self.attn_cols() as f64;
        6.0 * tokens * (TensorTable::new(self).matmul_params() as f64 + attention)
    }
}
