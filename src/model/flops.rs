//! FLOPs of a model: the numerator of every reported FLOP/s.

use super::head_rows::HeadRows;
use super::layer_shape::{Attn, LayerShape};
use super::shape::ModelShape;
use super::tensors::{Module, TensorTable};
use std::collections::BTreeMap;
use std::ops::Range;

/// The formula of [`ModelShape::flops_per_step`].
pub(crate) const FLOPS_FORMULA: &str = "6*N*T + 6*sum_l(heads*head_dim*S_l)*T; N matrix parameters with the output matrix, T tokens, S_l sequence length (2W - W^2/S in a window of W, 3*head_dim in a gated delta rule; head_dim is the mean of keys and values): causal, no recompute";

/// The formula where the head computes trained rows alone.
const FLOPS_FORMULA_OF_TRAINED_ROWS: &str = "6*N*T + 6*V*C*T_trained + 6*sum_l(heads*head_dim*S_l)*T; N matrix parameters without the output matrix [V, C], T tokens, T_trained trained tokens, S_l sequence length (2W - W^2/S in a window of W, 3*head_dim in a gated delta rule; head_dim is the mean of keys and values): causal, no recompute";

/// The formula where tensors are frozen.
const FLOPS_FORMULA_OF_FROZEN: &str = "2*(N + N_passed + N_trained)*T + sum_l(p_l*heads*head_dim*S_l)*T; N matrix parameters with the output matrix, N_passed of them not below the lowest trained tensor, N_trained of them trained with trained rows of the output matrix, T tokens, p_l 6 or below the lowest trained tensor 2, S_l sequence length (2W - W^2/S in a window of W, 3*head_dim in a gated delta rule; head_dim is the mean of keys and values): causal, no recompute";

/// The formula where tensors are frozen and the head computes trained rows alone.
const FLOPS_FORMULA_OF_FROZEN_AND_TRAINED_ROWS: &str = "2*(N + N_passed + N_trained)*T + p*V*C*T_trained + sum_l(p_l*heads*head_dim*S_l)*T; N matrix parameters without the output matrix [V, C], N_passed of them not below the lowest trained tensor, N_trained of them trained, T tokens, T_trained trained tokens, p 6 or with a frozen output matrix 4 + 2n/V for n trained rows of it, p_l 6 or below the lowest trained tensor 2, S_l sequence length (2W - W^2/S in a window of W, 3*head_dim in a gated delta rule; head_dim is the mean of keys and values): causal, no recompute";

/// The formula of the FLOPs of a run of `shape`.
pub(crate) fn flops_formula(shape: &ModelShape, head_rows: HeadRows) -> &'static str {
    match (head_rows, shape.frozen.is_empty()) {
        (HeadRows::All, true) => FLOPS_FORMULA,
        (HeadRows::Trained, true) => FLOPS_FORMULA_OF_TRAINED_ROWS,
        (HeadRows::All, false) => FLOPS_FORMULA_OF_FROZEN,
        (HeadRows::Trained, false) => FLOPS_FORMULA_OF_FROZEN_AND_TRAINED_ROWS,
    }
}

impl ModelShape {
    /// Model FLOPs of one optimizer step over `sequences` sequences of `seq_length` tokens, forward and backward, by [`flops_formula`].
    /// Recomputation, norms, activations and the optimizer do not count.
    pub fn flops_per_step(&self, sequences: usize, seq_length: usize) -> f64 {
        self.flops_of(&[(seq_length, sequences)].into())
    }

    /// As [`Self::flops_per_step`], for documents given as the count of each length in tokens. Attention does not cross documents.
    pub(crate) fn flops_of(&self, documents: &BTreeMap<usize, usize>) -> f64 {
        self.flops_by(&TensorTable::new(self), documents)
    }

    /// [`Self::flops_of`] of this model with the table of its tensors.
    pub(crate) fn flops_by(&self, table: &TensorTable, documents: &BTreeMap<usize, usize>) -> f64 {
        let multiplied = 2.0 * table.multiplied_params().iter().sum::<usize>() as f64;
        let flops = |(&length, &count): (&usize, &usize)| multiplied * (count * length) as f64;
        documents.iter().map(flops).sum::<f64>() + self.attention_flops_by(table, documents)
    }

    /// Model FLOPs of the output matrix for a token, forward and backward.
    pub(crate) fn output_flops(&self) -> f64 {
        let trained_rows = if self.trains_output() { self.vocab } else { self.trained_tokens.as_ref().map_or(0, Range::len) };
        (4 * self.vocab + 2 * trained_rows) as f64 * self.channels as f64
    }

    /// Attention's part of [`Self::flops_by`].
    pub(crate) fn attention_flops_by(&self, table: &TensorTable, documents: &BTreeMap<usize, usize>) -> f64 {
        let attended = |attn: &Attn, s: f64| match attn.window.map(|w| w as f64) {
            // A state of head_dim * head_dim decays, changes by one product with a vector, and is read by another.
            _ if attn.is_delta() => 3.0 * attn.head_dim as f64,
            Some(w) if w < s => 2.0 * w - w * w / s,
            _ => s,
        };
        let shares: Vec<f64> =
            (0..self.layers.len()).map(|layer| if table.runs_backward(Module::Layer(layer)) { 1.0 } else { 1.0 / 3.0 }).collect();
        let flops = |(&length, &count): (&usize, &usize)| {
            let (tokens, s) = (count as f64 * length as f64, length as f64);
            let attention = |(layer, share): (&LayerShape, &f64)| share * attended(&layer.attn, s) * layer.attn.score_cols();
            6.0 * tokens * self.layers.iter().zip(&shares).map(attention).sum::<f64>()
        };
        documents.iter().map(flops).sum()
    }
}
