//! The backward pass, module by module. The gradient of the residual stream is one buffer that flows from the head down:
//! a branch adds its part when it joins, which is at the norm that it started with.

use super::Model;
use super::layer_shape::{Act, Ffn};
use super::activations::LayerActivations;
use super::params::{LinearParams, NormParams, Param};
use super::tensors::Module;
use crate::device::{
    AttentionBackward, BiasBackward, DeviceSlice, EmbedBackward, GeluBackward, Kernels, LayerNormBackward, Matmul, MatmulLayout,
    MatmulShape, QkNormBackward, RmsNormBackward, SinksBackward, SwigluBackward, Zero,
};
use crate::error::Result;

impl Model {
    /// Runs the backward pass of `module` after all modules above it; then the module's gradients are complete for this
    /// micro-step. The `first` micro-step overwrites gradients, later ones add to them. The head's own backward is part of
    /// [`Model::head`]; here it stands for the final norm.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn backward<D: Kernels>(&self, dev: &mut D, module: Module, first: bool) -> Result<()> {
        let act = &self.activations;
        match module {
            Module::Embed => self.backward_embed(dev, first),
            Module::Layer(layer) => self.backward_layer(dev, layer, first),
            Module::Head => {
                dev.launch(Zero { x: act.dresidual })?;
                self.norm_backward(dev, &self.head.norm, act.final_norm_in, act.final_norm_stats, first)
            }
        }
    }

    /// A tied embedding already holds the head's gradient, also in the first micro-step.
    fn backward_embed<D: Kernels>(&self, dev: &mut D, first: bool) -> Result<()> {
        let act = &self.activations;
        dev.launch(EmbedBackward {
            tokens: act.tokens,
            positions: act.positions,
            dout: act.dresidual,
            dwte: self.embed.wte.grad,
            accumulate_wte: !first || self.shape.tied,
            dwpe: self.embed.wpe.map(|p| p.grad),
            accumulate_wpe: !first,
            channels: self.shape.channels,
        })
    }

    fn backward_layer<D: Kernels>(&self, dev: &mut D, layer: usize, first: bool) -> Result<()> {
        self.recompute(dev, layer)?;
        self.backward_mlp(dev, layer, first)?;
        self.backward_attention(dev, layer, first)?;
        self.activations.layers[layer].host_input.map_or(Ok(()), |input| input.fetch_next(dev))
    }

    fn backward_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, first: bool) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        match (self.experts(layer), self.shape.layers[layer].mlp) {
            (Some(experts), _) => experts.backward(dev, &self.activations, first)?,
            (None, mlp) => self.backward_dense(dev, layer, mlp.ffn(), first)?,
        }
        self.norm_backward(dev, &params.mlp_norm, act.mid, act.mlp_norm_stats, first)
    }

    fn backward_dense<D: Kernels>(&self, dev: &mut D, layer: usize, ffn: Ffn, first: bool) -> Result<()> {
        let (params, act, all) = (&self.layers[layer], &self.activations.layers[layer], &self.activations);
        let dact = all.dinner.slice(0, act.mlp_act.elems());
        let dmlp_in = all.dfused.slice(0, act.mlp_in.elems());
        linear_backward(dev, &params.mlp_out, act.mlp_act, all.dresidual, dact, first)?;
        match ffn.act {
            Act::Swiglu => dev.launch(SwigluBackward { dout: dact, gate_up: act.mlp_in, dgate_up: dmlp_in, cols: ffn.width })?,
            Act::GeluTanh => dev.launch(GeluBackward { dout: dact, x: act.mlp_in, dx: dmlp_in })?,
        }
        linear_backward(dev, &params.mlp_in, act.mlp_norm_out, dmlp_in, all.dnorm, first)
    }

    fn backward_attention<D: Kernels>(&self, dev: &mut D, layer: usize, first: bool) -> Result<()> {
        let (params, act, all) = (&self.layers[layer], &self.activations.layers[layer], &self.activations);
        let (documents, shape) = (all.documents, self.attention_shape(layer));
        let dattn_out = all.dinner.slice(0, act.attn_out.elems());
        let dqkv = all.dfused.slice(0, act.qkv.elems());
        linear_backward(dev, &params.attn_out, act.attn_out, all.dresidual, dattn_out, first)?;
        let LayerActivations { qkv, attn_out: out, lse, .. } = *act;
        if let Some(Param { value: sinks, grad: dsinks }) = params.sinks {
            dev.launch(SinksBackward { dout: dattn_out, out, lse, sinks, dsinks, accumulate: !first, shape })?;
        }
        dev.launch(AttentionBackward { dout: dattn_out, qkv, documents, out, lse, dqkv, shape })?;
        self.rotate(dev, layer, dqkv, true)?;
        if let (Some((q, k)), Some(kept)) = (params.qk_norm, act.qk_norm) {
            dev.launch(QkNormBackward {
                dqkv,
                qkv: kept.raw,
                q_weight: q.value,
                k_weight: k.value,
                rstd: kept.rstd,
                dq_weight: q.grad,
                dk_weight: k.grad,
                accumulate: !first,
                shape: self.qk_norm_shape(layer),
            })?;
        }
        linear_backward(dev, &params.qkv, act.attn_norm_out, dqkv, all.dnorm, first)?;
        self.norm_backward(dev, &params.attn_norm, act.input, act.attn_norm_stats, first)
    }

    /// From `dnorm` to the norm's parameters, and on into the gradient of the residual stream.
    fn norm_backward<D: Kernels>(&self, dev: &mut D, params: &NormParams, x: DeviceSlice, stats: DeviceSlice, first: bool) -> Result<()> {
        let (dout, dx) = (self.activations.dnorm, self.activations.dresidual);
        let (weight, dweight, accumulate) = (params.weight.value, params.weight.grad, !first);
        match params.bias {
            None => dev.launch(RmsNormBackward { dout, x, weight, rstd: stats, dx, dweight, accumulate }),
            Some(bias) => dev.launch(LayerNormBackward { dout, x, weight, stats, dx, dweight, dbias: bias.grad, accumulate }),
        }
    }
}

/// Gradients of [`super::forward::linear`]: `dx` is overwritten, the parameters' follow `first`.
fn linear_backward<D: Kernels>(
    dev: &mut D,
    params: &LinearParams,
    x: DeviceSlice,
    dout: DeviceSlice,
    dx: DeviceSlice,
    first: bool,
) -> Result<()> {
    let (rows, out_cols, in_cols) = (x.elems() / params.in_cols, params.out_cols, params.in_cols);
    let to_input = MatmulShape { layout: MatmulLayout::Nn, m: rows, n: in_cols, k: out_cols };
    let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: out_cols, n: in_cols, k: rows };
    dev.launch(Matmul::plain(to_input, [dout, params.weight.value, dx]))?;
    dev.launch(Matmul::plain(to_weight, [dout, x, params.weight.grad]).onto_itself(!first))?;
    params.bias.map_or(Ok(()), |bias| dev.launch(BiasBackward { dout, dbias: bias.grad, accumulate: !first }))
}
