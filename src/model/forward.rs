//! The forward pass, stage by stage.

use super::Model;
use super::params::{LinearParams, NormParams};
use super::shape::{Mlp, Positions};
use super::tensors::Stage;
use crate::device::{DeviceSlice, Kernels, MatmulLayout, MatmulShape};
use crate::error::Result;

impl Model {
    /// Runs the forward pass of `stage`: the embedding of `activations.tokens`, a layer, or (for the head) the final norm.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn forward<D: Kernels>(&self, dev: &mut D, stage: Stage) -> Result<()> {
        let act = &self.activations;
        match stage {
            Stage::Embed => {
                let wpe = self.embed.wpe.map(|p| p.value);
                dev.embed(act.tokens, self.embed.wte.value, wpe, act.embed_out, act.seq_length, self.shape.channels)
            }
            Stage::Layer(layer) => {
                self.forward_attention(dev, layer)?;
                self.forward_mlp(dev, layer)
            }
            Stage::Head => {
                let x = self.residual(self.shape.layers);
                self.norm(dev, &self.head.norm, x, act.final_norm_out, act.final_norm_stats)
            }
        }
    }

    /// The logits `[T, vocab]` of the micro-batch into `out`, which the caller owns: the whole forward pass.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn logits<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        assert_eq!(out.elems, self.activations.tokens.elems * self.shape.vocab, "logits");
        for stage in self.table.stages().rev() {
            self.forward(dev, stage)?;
        }
        linear(dev, &self.head.output, self.activations.final_norm_out, None, out)
    }

    fn forward_attention<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        let (x, shape) = (self.residual(layer), self.attention_shape(layer));
        self.norm(dev, &params.attn_norm, x, act.attn_norm_out, act.attn_norm_stats)?;
        match (params.qk_norm, act.qk_norm) {
            (Some((q, k)), Some(kept)) => {
                linear(dev, &params.qkv, act.attn_norm_out, None, kept.raw)?;
                dev.qk_norm(kept.raw, q.value, k.value, self.shape.eps, act.qkv, kept.rstd, shape)?;
            }
            _ => linear(dev, &params.qkv, act.attn_norm_out, None, act.qkv)?,
        }
        self.rotate(dev, layer, act.qkv, false)?;
        dev.attention(act.qkv, act.attn_out, act.lse, shape)?;
        linear(dev, &params.attn_out, act.attn_out, Some(x), act.mid)
    }

    fn forward_mlp<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        self.norm(dev, &params.mlp_norm, act.mid, act.mlp_norm_out, act.mlp_norm_stats)?;
        linear(dev, &params.mlp_in, act.mlp_norm_out, None, act.mlp_in)?;
        match self.shape.mlp {
            Mlp::Swiglu => dev.swiglu(act.mlp_in, act.mlp_act, self.shape.ffn)?,
            Mlp::GeluTanh => dev.gelu(act.mlp_in, act.mlp_act)?,
        }
        linear(dev, &params.mlp_out, act.mlp_act, Some(act.mid), act.out)
    }

    fn norm<D: Kernels>(&self, dev: &mut D, params: &NormParams, x: DeviceSlice, out: DeviceSlice, stats: DeviceSlice) -> Result<()> {
        let weight = params.weight.value;
        match params.bias {
            None => dev.rms_norm(x, weight, self.shape.eps, out, stats),
            Some(bias) => dev.layer_norm(x, weight, bias.value, self.shape.eps, out, stats),
        }
    }

    /// Rotates queries and keys of `qkv` in place, or back; nothing to do for learned positions.
    pub(super) fn rotate<D: Kernels>(&self, dev: &mut D, layer: usize, qkv: DeviceSlice, inverse: bool) -> Result<()> {
        match (self.shape.positions, self.activations.rope_table) {
            (Positions::Rope(rope), Some(table)) => dev.rope(qkv, table, rope.rotary_dim, inverse, self.attention_shape(layer)),
            _ => Ok(()),
        }
    }
}

/// `out = x * weight^T + bias (+ base)`.
pub(super) fn linear<D: Kernels>(
    dev: &mut D,
    params: &LinearParams,
    x: DeviceSlice,
    base: Option<DeviceSlice>,
    out: DeviceSlice,
) -> Result<()> {
    let shape = MatmulShape { layout: MatmulLayout::Nt, m: x.elems / params.in_cols, n: params.out_cols, k: params.in_cols };
    dev.matmul(shape, x, params.weight.value, params.bias.map(|p| p.value), base, out)
}
