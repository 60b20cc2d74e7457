//! Causal attention, forward and backward.

use super::product::fill;
use super::samples::Samples;
use super::timer::Timer;
use crate::device::{AttentionBackward, AttentionForward, AttentionShape, Kernel, Kernels};
use crate::dtype::Dtype;
use crate::error::Result;

/// Shortest sequence that is measured.
const SEQ_MIN: usize = 64;
/// Minimum number of passes in each direction within the time.
const RUNS_MIN: f64 = 16.0;

/// FLOP/s, counted as in [`crate::model::flops::FLOPS_FORMULA`].
#[derive(Clone, Debug)]
pub(crate) struct PassRates {
    pub forward: Samples,
    /// The backward pass, counted as twice the forward pass.
    pub backward: Samples,
}

/// Measures attention in bf16 for about `time_s`, over sequences of at most `seq_limit` tokens. `matmul_flops` is the approximate rate of
/// the device.
pub(crate) fn measure<D: Kernels>(timer: &mut Timer<'_, D>, seq_limit: usize, matmul_flops: f64, time_s: f64) -> Result<PassRates> {
    let fits = |&seq: &usize| seq <= SEQ_MIN || RUNS_MIN * 3.0 * shape(seq).flops() < time_s * matmul_flops;
    let seq = std::iter::successors(Some(seq_limit), |seq| Some(seq / 2)).find(fits).unwrap_or(seq_limit);
    let (shape, dev) = (shape(seq), &mut *timer.dev);
    let bf16 = Dtype::Bfloat16;
    let (qkv_elems, out_elems) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols());
    let (qkv, dqkv) = (dev.alloc("queries, keys, values", qkv_elems, bf16)?, dev.alloc("their gradients", qkv_elems, bf16)?);
    let (out, dout) = (dev.alloc("attention's output", out_elems, bf16)?, dev.alloc("its gradient", out_elems, bf16)?);
    let lse = dev.alloc("log-sum-exp", shape.tokens() * shape.heads, Dtype::Float32)?;
    dev.prepare_attention(shape, bf16, false)?;
    fill(dev, &[qkv, dout])?;
    let forward = AttentionForward { qkv, documents: None, out, lse, shape };
    let backward = AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape, block: None };
    let forward = timer.rates(time_s / 3.0, forward.flops(), |dev| dev.launch(forward))?;
    let backward = timer.rates(time_s / 1.5, backward.flops(), |dev| dev.launch(backward))?;
    Ok(PassRates { forward, backward })
}

/// A layer of a model with some billion parameters.
fn shape(seq_length: usize) -> AttentionShape {
    AttentionShape { batch: 4, seq_length, heads: 32, kv_heads: 8, head_dim: 128, scale: 128f32.powf(-0.5), window: None, softcap: None }
}
