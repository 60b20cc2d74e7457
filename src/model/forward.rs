//! The forward pass, module by module.

use super::Model;
use super::activation::activate;
use super::activation_arrays::{LayerActivations, NormActivations, ProjectedQkv, RawActivations};
use super::layer_shape::{Attn, Join, LayerShape, Mlp, NormSpec, Values};
use super::linear::linear;
use super::mlp_tile::MlpTile;
use super::norm::{norm, scale};
use super::params::{LinearParams, NormParams, TokenRows};
use super::policy::LayerPolicy;
use super::sequence::{Handover, PassRunner};
use super::shape::RopeConfig;
use super::tensors::Module;
use crate::device::{
    AttentionForward, Cast, DeviceSlice, Embed, Kernels, Launch, NormedHeads, QkNorm, QkvNorm, Rope, ScaleAdd, ScaleBy, Sinks, Stream,
};
use crate::error::Result;

/// Whether to compute attention or to reuse its saved output.
#[derive(Clone, Copy, PartialEq)]
enum Attending {
    New,
    Kept,
}

/// Whether to run the router or to reuse its saved choices.
#[derive(Clone, Copy, PartialEq)]
enum Routing {
    New,
    Kept,
}

/// Copies trained rows of a frozen table, if there are any, to their place in the table. The optimizer may have changed them since the last
/// pass.
fn place_rows<D: Kernels>(dev: &mut D, rows: Option<&TokenRows>) -> Result<()> {
    let Some(TokenRows { value, place, .. }) = rows else { return Ok(()) };
    dev.launch(Cast { stream: Stream::Compute, src: *value, dst: *place })
}

impl Model {
    /// Runs the forward pass of `module`: the embedding of `activations.tokens`, a layer, or (for the head) the final norm.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn forward<P: PassRunner>(&self, run: &mut P, module: Module) -> Result<()> {
        let act = &self.activations;
        match module {
            Module::Embed => {
                let dev = run.dev();
                let (wte, wpe) = (self.embed.wte.value, self.embed.wpe.map(|p| p.value));
                let out = self.acquire_residual(dev, 0)?;
                self.forget_scales(dev)?;
                place_rows(dev, self.embed.rows.as_ref())?;
                dev.launch(Embed { tokens: act.tokens, positions: act.positions, wte, wpe, out, channels: self.shape.channels })?;
                scale(dev, out, self.shape.embed_scale.on(out.dtype()))
            }
            Module::Layer(layer) => self.forward_layer(run, layer),
            Module::Head => {
                let dev = run.dev();
                if !self.shape.tied {
                    place_rows(dev, self.head.rows.as_ref())?;
                }
                norm(dev, self.shape.final_norm, &self.head.norm, (act.final_norm_in, act.final_norm_out), act.final_norm_stats, None)?;
                // Equivalent to a factor on the logits.
                scale(dev, act.final_norm_out, self.shape.logit_scale)
            }
        }
    }

    /// Computes the final norm and the logits `[T, vocab]` of the micro-batch, after the forward pass of all layers, into `out`, which the
    /// caller owns.
    ///
    /// # Panics
    /// If `out` has another length.
    pub(crate) fn logits<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        assert_eq!(out.elems(), self.activations.tokens.elems() * self.shape.vocab, "logits");
        self.forward(dev, Module::Head)?;
        linear(dev, &self.head.output, self.activations.final_norm_out, None, out)
    }

    /// Copies the residual stream to the input of `layer` if a segment begins with it, in a pass that goes from segment to segment.
    pub(crate) fn enter_segment<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        if !self.activations.layers[layer].begins_segment {
            return Ok(());
        }
        dev.launch(Cast { stream: Stream::Compute, src: self.segment_output(), dst: self.segment_input(layer) })
    }

    fn forward_layer<P: PassRunner>(&self, run: &mut P, layer: usize) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        if let Some(input) = act.host_input {
            input.send(run.dev())?;
        }
        self.forward_attention(run, layer, act, Attending::New)?;
        let dev = run.dev();
        self.expand_experts(dev, layer)?;
        for tile in self.mlp_tiles(layer) {
            let act = &tile.act;
            self.forward_mlp(dev, layer, act, Routing::New)?;
            let out = tile.rows(self.acquire_residual(dev, layer + 1)?);
            match self.experts(layer) {
                Some(experts) => experts.leave(dev, out)?,
                None => {
                    let post = params.post_mlp_norm.map(|norm| (norm, act.post_mlp));
                    self.join(dev, layer, (&params.mlp_out, act.mlp_act), post, (act.mid, out))?;
                }
            }
            params.scale.map_or(Ok(()), |scale| dev.launch(ScaleBy { x: out, factor: scale.value }))?;
        }
        Ok(())
    }

    /// Runs the forward pass of the last layer of a segment before its backward pass, which does not need the layer's output.
    pub(crate) fn forward_last<P: PassRunner>(&self, run: &mut P, layer: usize) -> Result<()> {
        // In FP8, the product that computes the output also saves its input.
        if self.experts(layer).is_some() || self.activations.fp8.is_some() {
            return self.forward_layer(run, layer);
        }
        self.forward_attention(run, layer, &self.activations.layers[layer], Attending::New)?;
        self.mlp_tiles(layer).try_for_each(|tile| {
            self.forward_mlp(run.dev(), layer, &tile.act, Routing::New)?;
            self.recompute_post_mlp(run.dev(), layer, &tile)
        })
    }

    /// Adds the product of a branch's last matrix with `x` to the residual stream `base` and writes the sum to `out`; `post` is the norm of
    /// the product.
    fn join<D: Kernels>(
        &self,
        dev: &mut D,
        layer: usize,
        (params, x): (&LinearParams, DeviceSlice),
        post: Option<(NormParams, RawActivations)>,
        (base, out): (DeviceSlice, DeviceSlice),
    ) -> Result<()> {
        let (LayerShape { join, norm: kind, .. }, base) = (self.shape.layers[layer], Some(base));
        if let Some((post, act)) = post {
            linear(dev, params, x, None, act.raw)?;
            norm(dev, kind, &post, (act.raw, out), act.stats, None)?;
            return dev.launch(ScaleAdd { x: out, scale: 1.0, base, out });
        }
        let Join::Scale(scale) = join else { return linear(dev, params, x, base, out) };
        linear(dev, params, x, None, out)?;
        dev.launch(ScaleAdd { x: out, scale, base, out })
    }

    /// The slice in which the module below `layer` leaves the residual stream, also after the last layer. Waits until no copy reads it.
    fn acquire_residual<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<DeviceSlice> {
        let Some(act) = self.activations.layers.get(layer).filter(|act| !act.begins_segment) else {
            return Ok(self.activations.final_norm_in);
        };
        if let Some(input) = act.host_input {
            input.acquire(dev)?;
        }
        Ok(act.input)
    }

    /// Recomputes the activations that attention's backward pass in `layer` needs and that the policy did not save, and the input of the
    /// MLP.
    pub(super) fn recompute_attention<P: PassRunner>(&self, run: &mut P, layer: usize) -> Result<()> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        act.on_host().try_for_each(|turn| turn.acquire(run.dev()))?;
        match act.policy {
            LayerPolicy::Keep => Ok(()),
            _ if act.intact => Ok(()),
            LayerPolicy::RecomputeCheap => {
                self.enter(run.dev(), layer, (params.attn_norm, &params.qkv), act.input, act.attn_norm)?;
                act.projected.map_or(Ok(()), |_| {
                    self.change_qkv(run.dev(), layer, act)?;
                    run.hand_over(Handover::Qkv, layer)
                })
            }
            LayerPolicy::RecomputeBlock | LayerPolicy::HostAttention | LayerPolicy::Host => {
                let attending = if act.policy.sends_attention() { Attending::Kept } else { Attending::New };
                self.forward_attention(run, layer, act, attending)
            }
        }
    }

    /// Recomputes the activations that the backward pass of an MLP tile needs and that the layer's policy did not save.
    pub(super) fn recompute_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, tile: &MlpTile) -> Result<()> {
        let (params, act) = (&self.layers[layer], &tile.act);
        match act.policy {
            LayerPolicy::Keep => Ok(()),
            _ if act.intact && tile.is_whole() => Ok(()),
            LayerPolicy::RecomputeCheap => {
                self.enter(dev, layer, (params.mlp_norm, &params.mlp_in), act.mid, act.mlp_norm)?;
                match self.experts(layer) {
                    Some(experts) => experts.normalise(dev).map(|_| ()),
                    None => self.activate(dev, layer, act),
                }
            }
            LayerPolicy::RecomputeBlock | LayerPolicy::HostAttention | LayerPolicy::Host => {
                self.forward_mlp(dev, layer, act, Routing::Kept)?;
                self.recompute_post_mlp(dev, layer, tile)
            }
        }
    }

    /// Recomputes the input of the norm after the MLP, if there is one. The norm's output is not needed, because the next layer's residual
    /// stream includes it.
    fn recompute_post_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, tile: &MlpTile) -> Result<()> {
        let (params, act, LayerShape { norm: kind, .. }) = (&self.layers[layer], &tile.act, self.shape.layers[layer]);
        if let Some(experts) = self.experts(layer) {
            return experts.recompute_sum(dev);
        }
        let Some(post) = &params.post_mlp_norm else { return Ok(()) };
        linear(dev, &params.mlp_out, act.mlp_act, None, act.post_mlp.raw)?;
        norm(dev, kind, post, (act.post_mlp.raw, tile.rows(self.activations.dnorm)), act.post_mlp.stats, None)
    }

    /// The input of a branch's first matrix: the norm of the residual stream `x` if the layer has one here, else `x`.
    fn enter<D: Kernels>(
        &self,
        dev: &mut D,
        layer: usize,
        (params, first): (Option<NormParams>, &LinearParams),
        x: DeviceSlice,
        act: NormActivations,
    ) -> Result<DeviceSlice> {
        let Some(params) = params else { return Ok(x) };
        norm(dev, self.shape.layers[layer].norm, &params, (x, act.out), act.stats, first.input_scale())?;
        Ok(act.out)
    }

    /// Computes the residual stream between attention and MLP from the layer's input, into `act`.
    fn forward_attention<P: PassRunner>(&self, run: &mut P, layer: usize, act: &LayerActivations, attending: Attending) -> Result<()> {
        let (params, dev, [qkv, _]) = (&self.layers[layer], run.dev(), self.own_tokens(layer));
        let x = self.enter(dev, layer, (params.attn_norm, &params.qkv), act.input, act.attn_norm)?;
        linear(dev, &params.qkv, x, None, act.projected.map_or(qkv, |kept| kept.raw))?;
        self.project_gates(dev, layer, act, x)?;
        self.latent(layer).map_or(Ok(()), |latent| latent.project(dev, x))?;
        self.change_qkv(dev, layer, act)?;
        self.attend(run, layer, act, attending)?;
        let attn_out = self.gate_output(run.dev(), layer)?;
        let post = params.post_attn_norm.map(|norm| (norm, act.post_attn));
        self.join(run.dev(), layer, (&params.attn_out, attn_out), post, (act.input, act.mid))
    }

    /// Computes attention's output from its input, both for this rank's tokens. If this rank's output has returned from the host, so have
    /// the outputs of all other ranks, because each waited for its own before it handed over its input of attention.
    fn attend<P: PassRunner>(&self, run: &mut P, layer: usize, act: &LayerActivations, attending: Attending) -> Result<()> {
        run.hand_over(Handover::Qkv, layer)?;
        if attending == Attending::Kept {
            return run.hand_over(Handover::KeptOut, layer);
        }
        self.attend_to_heads(run.dev(), layer, act)?;
        run.hand_over(Handover::Out, layer)
    }

    /// Computes attention's output and log-sum-exp, and sends them to the host if they are offloaded.
    fn attend_to_heads<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        act.host_attention.iter().flatten().try_for_each(|turn| turn.acquire(dev))?;
        match self.delta(layer) {
            Some(delta) => delta.attend(dev)?,
            None => self.attend_by_scores(dev, layer)?,
        }
        act.host_attention.iter().flatten().try_for_each(|turn| turn.send(dev))
    }

    fn attend_by_scores<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let (documents, shape) = (self.activations.documents, self.heads_shape(layer));
        let [qkv, out, lse] = self.own_heads(layer);
        dev.launch(AttentionForward { qkv, documents, out, lse, shape })?;
        let Some(sinks) = self.layers[layer].sinks else { return Ok(()) };
        dev.launch(Sinks { sinks: self.own_sinks(layer, sinks.value), out, lse, shape })
    }

    /// Computes the input of the MLP's last matrix from the residual stream between attention and MLP, into `act`; with experts, the output
    /// of their first matrices.
    fn forward_mlp<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations, routing: Routing) -> Result<()> {
        let params = &self.layers[layer];
        let x = self.enter(dev, layer, (params.mlp_norm, &params.mlp_in), act.mid, act.mlp_norm)?;
        if let Some(experts) = self.experts(layer) {
            if routing == Routing::New {
                experts.route(dev)?;
            }
            return experts.enter(dev);
        }
        linear(dev, &params.mlp_in, x, None, act.mlp_in)?;
        self.activate(dev, layer, act)
    }

    /// Computes the input of attention for this rank's tokens: normalised, if the model has such norms, and rotated queries and keys, the
    /// convolution before a gated delta rule, or queries, keys and values from latent vectors.
    fn change_qkv<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        if let Some(delta) = self.delta(layer) {
            return delta.convolve(dev);
        }
        if let Some(latent) = self.latent(layer) {
            return latent.assemble(dev);
        }
        let [out, _] = self.own_tokens(layer);
        if let (Some((q, k)), Some(kept)) = (self.layers[layer].qk_norm, act.projected) {
            let (NormSpec { eps, plus_one, .. }, shape) = (self.shape.layers[layer].norm, self.attention_shape(layer));
            let (ProjectedQkv { raw: qkv, rstd }, tokens, [q_weight, k_weight]) = (kept, shape.tokens(), [q.value, k.value]);
            match self.normed_heads(layer) {
                Some(heads) => dev.launch(QkvNorm { qkv, q_weight, k_weight, eps, out, rstd, tokens, heads })?,
                None => dev.launch(QkNorm { qkv, q_weight, k_weight, plus_one, eps, out, rstd, shape })?,
            }
        }
        self.rotate(dev, layer, out, false)
    }

    /// Heads of queries, keys and values, if all of them are normalised.
    pub(super) fn normed_heads(&self, layer: usize) -> Option<NormedHeads> {
        let Attn { values, .. } = self.shape.layers[layer].attn;
        let values_are_keys = match values {
            Values::Projected => return None,
            Values::Normed => false,
            Values::NormedKeys => true,
        };
        Some(NormedHeads::of(&self.attention_shape(layer), values_are_keys))
    }

    /// Applies the activation of a dense MLP. Experts apply theirs in `MoeLayer::leave`.
    fn activate<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations) -> Result<()> {
        let Mlp::Dense(ffn) = self.shape.layers[layer].mlp else { return Ok(()) };
        activate(dev, ffn, act.mlp_in, act.mlp_act, self.layers[layer].mlp_out.input_scale())
    }

    /// Rotates queries and keys of `qkv` in place, or back, if the layer has a rotation.
    pub(super) fn rotate<D: Kernels>(&self, dev: &mut D, layer: usize, qkv: DeviceSlice, inverse: bool) -> Result<()> {
        let Some(rope) = self.shape.layers[layer].attn.rope else { return Ok(()) };
        let (positions, table, shape) = (self.activations.positions, self.activations.rope_tables[rope], self.attention_shape(layer));
        let RopeConfig { rotary_dim, interleaved, .. } = self.shape.ropes[rope];
        dev.launch(Rope { qkv, positions, table, rotary_dim, interleaved, inverse, shape })
    }
}
