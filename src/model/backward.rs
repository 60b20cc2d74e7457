//! The backward pass, module by module. The gradient of the residual stream is one buffer, which is updated from the head down: the
//! gradient of each branch is added at the norm with which the branch begins.

use super::Model;
use super::activation::activate_backward;
use super::activation_arrays::{Activations, NormActivations, ProjectedQkv, RawActivations};
use super::fp8::LastWriter;
use super::head::MicroStep;
use super::layer_shape::Join;
use super::linear::{Input, linear_backward};
use super::mlp_tile::MlpTile;
use super::moe::MoeLayer;
use super::norm::{norm_backward, scale};
use super::params::{LinearParams, NormParams, Param};
use super::sequence::{Handover, PassRunner};
use super::tensors::Module;
use crate::device::{
    AttentionBackward, DeviceSlice, EmbedBackward, Kernels, Launch, QkNormBackward, QkvNormBackward, ScaleAdd, ScaleBy, ScaleCell,
    SinksBackward, WithScale, Zero,
};
use crate::error::Result;
use std::iter::once;

/// Gradients of the residual stream and of a norm's output, for the tokens of a branch.
#[derive(Clone, Copy)]
struct ResidualGrads {
    dresidual: DeviceSlice,
    dnorm: DeviceSlice,
    /// Destination of the scale of `dresidual` after the branch's norm has added to it, if a product below reads it in 8 bits.
    scale: Option<ScaleCell>,
}

impl Model {
    /// Runs the backward pass of `module` after all modules above it, which completes the module's gradients for this micro-step. The first
    /// micro-step overwrites gradients, later ones add to them. The backward pass of the head itself is part of [`Model::head`]; here the
    /// head stands for the final norm. Below the lowest module with trained tensors there is nothing to compute.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn backward<P: PassRunner>(&self, run: &mut P, module: Module, micro: MicroStep) -> Result<()> {
        let (act, first) = (&self.activations, micro.first);
        match module {
            module if !self.table.runs_backward(module) => Ok(()),
            Module::Embed => self.backward_embed(run.dev(), first),
            Module::Layer(layer) => self.backward_layer(run, layer, micro),
            Module::Head => {
                let dev = run.dev();
                scale(dev, act.dnorm, self.shape.logit_scale)?;
                dev.launch(Zero { x: act.dresidual })?;
                norm_backward(
                    dev,
                    self.shape.final_norm,
                    &self.head.norm,
                    (act.final_norm_in, act.final_norm_stats),
                    (act.dnorm, act.dresidual),
                    first,
                    self.scale_below(self.layers.len()),
                )
            }
        }
    }

    /// The gradient of a tied embedding already holds the head's gradient, also in the first micro-step.
    fn backward_embed<D: Kernels>(&self, dev: &mut D, first: bool) -> Result<()> {
        let rows = self.embed.rows.as_ref().map(|rows| (rows.grad, rows.tokens.start));
        let (act, Some((dwte, first_token))) = (&self.activations, self.embed.wte.grad.map(|grad| (grad, 0)).or(rows)) else {
            return Ok(());
        };
        scale(dev, act.dresidual, self.shape.embed_scale.on(act.dresidual.dtype()))?;
        dev.launch(EmbedBackward {
            tokens: act.tokens,
            positions: act.positions,
            dout: act.dresidual,
            dwte,
            first_token,
            accumulate_wte: !first || self.shape.tied,
            dwpe: self.embed.wpe.and_then(|wpe| wpe.grad),
            accumulate_wpe: !first,
            channels: self.shape.channels,
        })
    }

    fn backward_layer<P: PassRunner>(&self, run: &mut P, layer: usize, micro: MicroStep) -> Result<()> {
        self.recompute_attention(run, layer)?;
        self.backward_scale(run.dev(), layer, micro.first)?;
        self.backward_mlp(run.dev(), layer, micro)?;
        self.backward_attention(run, layer, micro.first)?;
        self.activations.layers[layer].on_host().try_for_each(|turn| turn.fetch_next(run.dev()))
    }

    /// The gradient of the residual stream before the layer's factor, which has no gradient itself.
    fn backward_scale<D: Kernels>(&self, dev: &mut D, layer: usize, first: bool) -> Result<()> {
        let Some(Param { value, grad }) = self.layers[layer].scale else { return Ok(()) };
        if first {
            dev.launch(Zero { x: grad })?;
        }
        dev.launch(ScaleBy { x: self.activations.dresidual, factor: value })
    }

    fn backward_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, micro: MicroStep) -> Result<()> {
        self.expand_experts(dev, layer)?;
        for (nth, tile) in self.mlp_tiles(layer).enumerate() {
            self.recompute_mlp(dev, layer, &tile)?;
            match self.experts(layer) {
                Some(experts) => self.backward_experts(dev, layer, &experts, micro)?,
                None => self.backward_dense(dev, layer, &tile, micro.first && nth == 0)?,
            }
        }
        Ok(())
    }

    fn backward_experts<D: Kernels>(&self, dev: &mut D, layer: usize, experts: &MoeLayer<'_>, micro: MicroStep) -> Result<()> {
        let (params, act, all) = (&self.layers[layer], &self.activations.layers[layer], &self.activations);
        let grads = ResidualGrads { dresidual: all.dresidual, dnorm: all.dnorm, scale: None };
        let last = (&params.mlp_out, params.post_mlp_norm.map(|norm| (norm, act.post_mlp)));
        let dout = self.branch_gradient(dev, layer, grads, last, micro.first)?;
        experts.backward(dev, all, dout, micro)?;
        let Some(norm) = &params.mlp_norm else { return Ok(()) };
        let (kind, input) = (self.shape.layers[layer].norm, (act.mid, act.mlp_norm.stats));
        norm_backward(dev, kind, norm, input, (all.dnorm, all.dresidual), micro.first, params.attn_out.gradient_scale(LastWriter::Above))
    }

    fn backward_dense<D: Kernels>(&self, dev: &mut D, layer: usize, tile: &MlpTile, first: bool) -> Result<()> {
        let (params, act, all) = (&self.layers[layer], &tile.act, &self.activations);
        let scale = params.attn_out.gradient_scale(LastWriter::Above);
        let grads = ResidualGrads { dresidual: tile.rows(all.dresidual), dnorm: tile.rows(all.dnorm), scale };
        let ffn = self.shape.layers[layer].mlp.ffn();
        let dact = all.dinner.slice(0, act.mlp_act.elems());
        let dmlp_in = all.dfused.slice(0, act.mlp_in.elems());
        let last = (&params.mlp_out, params.post_mlp_norm.map(|norm| (norm, act.post_mlp)));
        let dout = self.branch_gradient(dev, layer, grads, last, first)?;
        linear_backward(dev, &params.mlp_out, act.mlp_act, dout, Input::New(dact), first)?;
        activate_backward(dev, ffn, dact, act.mlp_in, dmlp_in, params.mlp_in.gradient_scale(LastWriter::Branch))?;
        self.leave(dev, layer, grads, once((&params.mlp_in, dmlp_in)), (params.mlp_norm.map(|norm| (norm, act.mlp_norm)), act.mid), first)
    }

    /// The gradient of the output of a branch's last matrix, computed from the gradient of the residual stream.
    fn branch_gradient<D: Kernels>(
        &self,
        dev: &mut D,
        layer: usize,
        ResidualGrads { dresidual, dnorm, .. }: ResidualGrads,
        (last, post): (&LinearParams, Option<(NormParams, RawActivations)>),
        first: bool,
    ) -> Result<DeviceSlice> {
        let cell = last.gradient_scale(LastWriter::Branch);
        if let Join::Scale(scale) = self.shape.layers[layer].join {
            dev.launch(WithScale { kernel: ScaleAdd { x: dresidual, scale, base: None, out: dnorm }, cell })?;
            return Ok(dnorm);
        }
        let Some((params, act)) = post else { return Ok(dresidual) };
        dev.launch(Zero { x: dnorm })?;
        norm_backward(dev, self.shape.layers[layer].norm, &params, (act.raw, act.stats), (dresidual, dnorm), first, cell)?;
        Ok(dnorm)
    }

    /// Destination of the scale of the output gradient of the MLP below `layer`, if that gradient is the residual stream's gradient as a
    /// norm leaves it.
    fn scale_below(&self, layer: usize) -> Option<ScaleCell> {
        self.layers[..layer].last().and_then(|below| below.mlp_out.gradient_scale(LastWriter::Above))
    }

    /// Computes the gradient of the residual stream `x` from the output gradients of a branch's first matrices, through the norm with which
    /// the branch begins.
    fn leave<'a, D: Kernels>(
        &self,
        dev: &mut D,
        layer: usize,
        ResidualGrads { dresidual, dnorm, scale }: ResidualGrads,
        matrices: impl Iterator<Item = (&'a LinearParams, DeviceSlice)>,
        (norm, x): (Option<(NormParams, NormActivations)>, DeviceSlice),
        first: bool,
    ) -> Result<()> {
        let Some((norm, act)) = norm else {
            let mut matrices = matrices;
            return matrices.try_for_each(|(params, dout)| linear_backward(dev, params, x, dout, Input::Added(dresidual), first));
        };
        for (nth, (params, dout)) in matrices.enumerate() {
            let input = if nth == 0 { Input::New(dnorm) } else { Input::Added(dnorm) };
            linear_backward(dev, params, act.out, dout, input, first)?;
        }
        norm_backward(dev, self.shape.layers[layer].norm, &norm, (x, act.stats), (dnorm, dresidual), first, scale)
    }

    fn backward_attention<P: PassRunner>(&self, run: &mut P, layer: usize, first: bool) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        let [dattn_out, dqkv] = self.own_tokens_gradients(layer);
        run.hand_over(Handover::KeptOut, layer)?;
        let dev = run.dev();
        let attn_out = self.gate_output(dev, layer)?;
        let Activations { dresidual, dnorm, .. } = self.activations;
        let grads = ResidualGrads { dresidual, dnorm, scale: self.scale_below(layer) };
        let last = (&params.attn_out, params.post_attn_norm.map(|norm| (norm, act.post_attn)));
        let dbranch = self.branch_gradient(dev, layer, grads, last, first)?;
        let dout = self.latent(layer).map_or(dattn_out, |latent| latent.output_gradient(dattn_out));
        linear_backward(dev, &params.attn_out, attn_out, dbranch, Input::New(dout), first)?;
        self.latent(layer).map_or(Ok(()), |latent| latent.widen_gradient(dev, dattn_out))?;
        run.hand_over(Handover::OutGrad, layer)?;
        self.backward_heads(run.dev(), layer, first)?;
        run.hand_over(Handover::QkvGrad, layer)?;
        let dev = run.dev();
        let dqkv = match self.latent(layer) {
            Some(latent) => latent.backward(dev, dqkv, first)?,
            None => {
                self.rotate(dev, layer, dqkv, true)?;
                self.backward_qk_norm(dev, layer, dqkv, first)?
            }
        };
        let of_latent = self.latent(layer).into_iter().flat_map(|latent| latent.gradients());
        let matrices = once((&params.qkv, dqkv)).chain(self.gate_gradients(layer)).chain(of_latent);
        self.leave(dev, layer, grads, matrices, (params.attn_norm.map(|norm| (norm, act.attn_norm)), act.input), first)
    }

    /// The gradient of the projections to queries, keys and values, from that of the queries, keys and values before the rotation. With normed
    /// values it takes the place of the projections.
    fn backward_qk_norm<D: Kernels>(&self, dev: &mut D, layer: usize, dqkv: DeviceSlice, first: bool) -> Result<DeviceSlice> {
        let (params, act, shape) = (&self.layers[layer], &self.activations.layers[layer], self.attention_shape(layer));
        let (Some((q, k)), Some(kept)) = (params.qk_norm, act.projected) else { return Ok(dqkv) };
        let [q_weight, k_weight, dq_weight, dk_weight] = [q.value, k.value, q.grad, k.grad];
        let (ProjectedQkv { raw: qkv, rstd }, accumulate) = (kept, !first);
        if let Some(heads) = self.normed_heads(layer) {
            let (dout, tokens) = (dqkv, shape.tokens());
            dev.launch(QkvNormBackward { dout, qkv, q_weight, k_weight, rstd, dq_weight, dk_weight, accumulate, tokens, heads })?;
            return Ok(qkv);
        }
        let plus_one = self.shape.layers[layer].norm.plus_one;
        dev.launch(QkNormBackward { dqkv, qkv, q_weight, k_weight, plus_one, rstd, dq_weight, dk_weight, accumulate, shape })?;
        Ok(dqkv)
    }

    /// Computes the gradient of queries, keys and values from the gradient of attention's output: all tokens of this rank's heads. After a
    /// convolution, these are the gradients of its input.
    fn backward_heads<D: Kernels>(&self, dev: &mut D, layer: usize, first: bool) -> Result<()> {
        let [dout, dqkv] = self.own_heads_gradients(layer);
        let dout = self.gate_backward(dev, layer, dout, first)?;
        if let Some(delta) = self.delta(layer) {
            return delta.backward(dev, dout, dqkv, first);
        }
        let (documents, shape, [qkv, out, lse]) = (self.activations.documents, self.heads_shape(layer), self.own_heads(layer));
        if let Some(Param { value, grad }) = self.layers[layer].sinks {
            let [sinks, dsinks] = [value, grad].map(|all| self.own_sinks(layer, all));
            if first && dsinks.elems() < grad.elems() {
                // The gradients of other heads are computed by other ranks.
                dev.launch(Zero { x: grad })?;
            }
            dev.launch(SinksBackward { dout, out, lse, sinks, dsinks, accumulate: !first, shape })?;
        }
        dev.launch(AttentionBackward { dout, qkv, documents, out, lse, dqkv, shape, block: None })
    }
}
