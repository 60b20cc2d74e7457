//! The forward pass, module by module.

use super::Model;
use super::activations::{LayerActivations, QkNormActivations};
use super::layer_shape::{Act, LayerShape, Mlp, NormSpec};
use super::params::{LinearParams, NormParams};
use super::policy::LayerPolicy;
use super::tensors::Module;
use crate::device::{
    AttentionForward, DeviceSlice, Embed, Gelu, Kernels, LayerNorm, Matmul, MatmulLayout, MatmulShape, QkNorm, RmsNorm, Rope, Sinks, Swiglu,
};
use crate::error::Result;

/// Whether a router chooses, or what it chose is still there.
#[derive(Clone, Copy, PartialEq)]
enum Routing {
    New,
    Kept,
}

impl Model {
    /// Runs the forward pass of `module`: the embedding of `activations.tokens`, a layer, or (for the head) the final norm.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn forward<D: Kernels>(&self, dev: &mut D, module: Module) -> Result<()> {
        let act = &self.activations;
        match module {
            Module::Embed => {
                let (wte, wpe) = (self.embed.wte.value, self.embed.wpe.map(|p| p.value));
                let out = self.acquire_residual(dev, 0)?;
                dev.launch(Embed { tokens: act.tokens, positions: act.positions, wte, wpe, out, channels: self.shape.channels })
            }
            Module::Layer(layer) => self.forward_layer(dev, layer),
            Module::Head => norm(dev, self.shape.final_norm, &self.head.norm, act.final_norm_in, act.final_norm_out, act.final_norm_stats),
        }
    }

    /// Final norm and the logits `[T, vocab]` of the micro-batch, after all layers' forward, into `out`, which the caller owns.
    ///
    /// # Panics
    /// If `out` has another length.
    pub(crate) fn logits<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        assert_eq!(out.elems(), self.activations.tokens.elems() * self.shape.vocab, "logits");
        self.forward(dev, Module::Head)?;
        linear(dev, &self.head.output, self.activations.final_norm_out, None, out)
    }

    fn forward_layer<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        act.host_input.map_or(Ok(()), |input| input.send(dev))?;
        self.forward_attention(dev, layer, act)?;
        self.forward_mlp(dev, layer, act, Routing::New)?;
        let out = self.acquire_residual(dev, layer + 1)?;
        match self.experts(layer) {
            Some(experts) => experts.leave(dev, out),
            None => linear(dev, &params.mlp_out, act.mlp_act, Some(act.mid), out),
        }
    }

    /// Where the residual stream that enters `layer`, or leaves the last one, is written, once no copy reads it.
    fn acquire_residual<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<DeviceSlice> {
        let Some(act) = self.activations.layers.get(layer) else { return Ok(self.activations.final_norm_in) };
        act.host_input.map_or(Ok(()), |input| input.acquire(dev))?;
        Ok(act.input)
    }

    /// Makes what the backward pass of `layer` needs and its policy did not keep.
    pub(super) fn recompute<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let act = &self.activations.layers[layer];
        act.host_input.map_or(Ok(()), |input| input.acquire(dev))?;
        match act.policy {
            LayerPolicy::Keep => Ok(()),
            _ if act.intact => Ok(()),
            LayerPolicy::RecomputeCheap => self.recompute_cheap(dev, layer, act),
            LayerPolicy::RecomputeBlock | LayerPolicy::Host => {
                self.forward_attention(dev, layer, act)?;
                self.forward_mlp(dev, layer, act, Routing::Kept)
            }
        }
    }

    /// Everything into which no matrix product enters.
    fn recompute_cheap<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        let (params, LayerShape { norm: kind, .. }) = (&self.layers[layer], self.shape.layers[layer]);
        norm(dev, kind, &params.attn_norm, act.input, act.attn_norm_out, act.attn_norm_stats)?;
        if act.qk_norm.is_some() {
            self.norm_and_rotate(dev, layer, act)?;
        }
        norm(dev, kind, &params.mlp_norm, act.mid, act.mlp_norm_out, act.mlp_norm_stats)?;
        self.activate(dev, layer, act)
    }

    /// From the layer's input to the residual stream between attention and MLP, into `act`.
    fn forward_attention<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        let params = &self.layers[layer];
        norm(dev, self.shape.layers[layer].norm, &params.attn_norm, act.input, act.attn_norm_out, act.attn_norm_stats)?;
        let projected = act.qk_norm.map_or(act.qkv, |kept| kept.raw);
        linear(dev, &params.qkv, act.attn_norm_out, None, projected)?;
        self.norm_and_rotate(dev, layer, act)?;
        let (documents, shape) = (self.activations.documents, self.attention_shape(layer));
        let LayerActivations { qkv, attn_out: out, lse, .. } = *act;
        dev.launch(AttentionForward { qkv, documents, out, lse, shape })?;
        params.sinks.map_or(Ok(()), |sinks| dev.launch(Sinks { sinks: sinks.value, out, lse, shape }))?;
        linear(dev, &params.attn_out, act.attn_out, Some(act.input), act.mid)
    }

    /// From the residual stream between attention and MLP to what enters the MLP's last matrix, into `act`; of experts to what leaves their
    /// first.
    fn forward_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations, routing: Routing) -> Result<()> {
        let params = &self.layers[layer];
        norm(dev, self.shape.layers[layer].norm, &params.mlp_norm, act.mid, act.mlp_norm_out, act.mlp_norm_stats)?;
        if let Some(experts) = self.experts(layer) {
            if routing == Routing::New {
                experts.route(dev)?;
            }
            return experts.enter(dev);
        }
        linear(dev, &params.mlp_in, act.mlp_norm_out, None, act.mlp_in)?;
        self.activate(dev, layer, act)
    }

    /// Queries and keys as attention sees them, in `act.qkv`: normalised from the raw projections, if the model does that, and rotated.
    fn norm_and_rotate<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        if let (Some((q, k)), Some(kept)) = (self.layers[layer].qk_norm, act.qk_norm) {
            let (eps, shape) = (self.shape.layers[layer].norm.eps, self.qk_norm_shape(layer));
            let QkNormActivations { raw: qkv, rstd } = kept;
            dev.launch(QkNorm { qkv, q_weight: q.value, k_weight: k.value, eps, out: act.qkv, rstd, shape })?;
        }
        self.rotate(dev, layer, act.qkv, false)
    }

    /// Experts do this on their way out.
    fn activate<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        let Mlp::Dense(ffn) = self.shape.layers[layer].mlp else { return Ok(()) };
        let (x, out) = (act.mlp_in, act.mlp_act);
        match ffn.act {
            Act::Swiglu => dev.launch(Swiglu { gate_up: x, out, cols: ffn.width }),
            Act::GeluTanh => dev.launch(Gelu { x, out }),
        }
    }

    /// Rotates queries and keys of `qkv` in place, or back, if the layer does that.
    pub(super) fn rotate<D: Kernels>(&self, dev: &mut D, layer: usize, qkv: DeviceSlice, inverse: bool) -> Result<()> {
        let Some(rope) = self.shape.layers[layer].attn.rope else { return Ok(()) };
        let (positions, table, shape) = (self.activations.positions, self.activations.rope_tables[rope], self.attention_shape(layer));
        dev.launch(Rope { qkv, positions, table, rotary_dim: self.shape.ropes[rope].rotary_dim, inverse, shape })
    }
}

fn norm<D: Kernels>(dev: &mut D, norm: NormSpec, params: &NormParams, x: DeviceSlice, out: DeviceSlice, stats: DeviceSlice) -> Result<()> {
    let (weight, eps) = (params.weight.value, norm.eps);
    match params.bias {
        None => dev.launch(RmsNorm { x, weight, eps, out, rstd: stats }),
        Some(bias) => dev.launch(LayerNorm { x, weight, bias: bias.value, eps, out, stats }),
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
    let shape = MatmulShape { layout: MatmulLayout::Nt, m: x.elems() / params.in_cols, n: params.out_cols, k: params.in_cols };
    dev.launch(Matmul { shape, a: x, b: params.weight.value, bias: params.bias.map(|p| p.value), base, c: out })
}
