//! Norms of experts beside an MLP, as in Gemma 4.
//!
//! The MLP is the layer's shared expert. With the residual stream `x` between attention and MLP the layer computes
//! `x + post_mlp(post_shared(mlp(n1(x))) + post_experts(experts(n2(x))))`. The router reads a third norm of `x`, whose weight is a factor on each
//! channel, times `channels^-1/2`. The weight of a choice is multiplied by a factor of its expert.
//!
//! The norms of `x` have the same statistics, which each of them writes. The router's input is not saved: memory of the experts' rows has it
//! before they are copied, and again in the backward pass.

use super::Model;
use super::activation_arrays::{Activations, ExpertWork, LayerActivations, RawActivations, RoutedActivations};
use super::layer_shape::NormSpec;
use super::norm::{norm, norm_backward, scale};
use super::params::{MoeNormParams, NormParams};
use crate::device::{DeviceSlice, Kernels, ScaleAdd, ScaleChoices, ScaleChoicesBackward, Zero};
use crate::error::Result;

/// The norms of one layer.
#[derive(Clone, Copy)]
pub(super) struct MoeNorms<'a> {
    kind: NormSpec,
    channels: usize,
    params: MoeNormParams,
    /// Norm of the sum of both branches.
    post: NormParams,
    act: &'a LayerActivations,
    kept: RoutedActivations,
    work: ExpertWork,
    all: &'a Activations,
}

impl Model {
    /// The norms of `layer`, if it has experts beside an MLP; `kept` and `work` are those of its experts.
    pub(super) fn moe_norms(&self, layer: usize, kept: RoutedActivations, work: ExpertWork) -> Option<MoeNorms<'_>> {
        let (layer_params, act, all) = (&self.layers[layer], &self.activations.layers[layer], &self.activations);
        let (params, post) = layer_params.moe_norms.zip(layer_params.post_mlp_norm)?;
        let work = ExpertWork { scaled: work.scaled.slice(0, kept.weights.elems()), ..work };
        Some(MoeNorms { kind: self.shape.layers[layer].norm, channels: self.shape.channels, params, post, act, kept, work, all })
    }
}

impl MoeNorms<'_> {
    /// Memory of `[T, channels]` at the beginning of the experts' rows, which have no values between two products.
    fn row_memory(&self) -> DeviceSlice {
        self.work.rows.slice(0, self.act.mid.elems())
    }

    /// Memory of `[T, channels]` for gradients, which the gradients of activations overwrite.
    fn gradient_memory(&self) -> DeviceSlice {
        self.all.dinner.slice(0, self.act.mid.elems())
    }

    /// `channels^-1/2`.
    fn router_factor(&self) -> f32 {
        (self.channels as f64).sqrt().recip() as f32
    }

    /// Computes the input of the router, into memory of the experts' rows.
    pub(super) fn router_input<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        let out = self.row_memory();
        norm(dev, self.kind, &self.params.router, (self.act.mid, out), self.act.mlp_norm.stats, None)?;
        scale(dev, out, self.router_factor())?;
        Ok(out)
    }

    /// Computes the input of the experts.
    pub(super) fn experts_input<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        let out = self.act.moe_norms.experts;
        norm(dev, self.kind, &self.params.experts, (self.act.mid, out), self.act.mlp_norm.stats, None)?;
        Ok(out)
    }

    /// Computes the weights of all choices, into memory that layers share.
    pub(super) fn weights<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        let (RoutedActivations { weights, experts, .. }, scale, out) = (self.kept, self.params.expert_scale.value, self.work.scaled);
        dev.launch(ScaleChoices { weights, experts, scale, out })?;
        Ok(out)
    }

    /// Normalises the outputs of MLP and experts and adds them. The gradient of a norm's output, which has no value during a forward pass and
    /// before a backward pass, lends its memory.
    pub(super) fn sum<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let (RawActivations { raw: sum, .. }, normed_experts) = (self.act.post_mlp, self.all.dnorm);
        let RawActivations { raw, stats } = self.act.moe_norms.post_shared;
        norm(dev, self.kind, &self.params.post_shared, (raw, sum), stats, None)?;
        let RawActivations { raw, stats } = self.act.moe_norms.post_experts;
        norm(dev, self.kind, &self.params.post_experts, (raw, normed_experts), stats, None)?;
        dev.launch(ScaleAdd { x: sum, scale: 1.0, base: Some(normed_experts), out: sum })
    }

    /// Computes the residual stream `out` from the sum of both branches.
    pub(super) fn join<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        self.normalise_sum(dev, out)?;
        dev.launch(ScaleAdd { x: out, scale: 1.0, base: Some(self.act.mid), out })
    }

    /// Computes the statistics of the sum of both branches, whose norm is not needed.
    pub(super) fn recompute_stats<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        self.normalise_sum(dev, self.all.dnorm)
    }

    fn normalise_sum<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        let RawActivations { raw, stats } = self.act.post_mlp;
        norm(dev, self.kind, &self.post, (raw, out), stats, None)
    }

    /// The gradient of the experts' output, computed from the gradient `dsum` of the sum of both branches.
    pub(super) fn experts_gradient<D: Kernels>(&self, dev: &mut D, dsum: DeviceSlice, first: bool) -> Result<DeviceSlice> {
        self.branch_gradient(dev, (&self.params.post_experts, self.act.moe_norms.post_experts), (dsum, self.gradient_memory()), first)
    }

    /// The gradient of the MLP's output, computed from the gradient `dsum` of the sum of both branches. It lies in memory of the experts' rows.
    pub(super) fn shared_gradient<D: Kernels>(&self, dev: &mut D, dsum: DeviceSlice, first: bool) -> Result<DeviceSlice> {
        self.branch_gradient(dev, (&self.params.post_shared, self.act.moe_norms.post_shared), (dsum, self.row_memory()), first)
    }

    fn branch_gradient<D: Kernels>(
        &self,
        dev: &mut D,
        (params, RawActivations { raw, stats }): (&NormParams, RawActivations),
        (dout, dx): (DeviceSlice, DeviceSlice),
        first: bool,
    ) -> Result<DeviceSlice> {
        dev.launch(Zero { x: dx })?;
        norm_backward(dev, self.kind, params, (raw, stats), (dout, dx), first, None)?;
        Ok(dx)
    }

    /// Computes the gradient of the factors of experts, and turns the gradients of the scaled weights into those of the router's weights.
    pub(super) fn weights_backward<D: Kernels>(&self, dev: &mut D, first: bool) -> Result<()> {
        let (RoutedActivations { weights, entries, bounds, .. }, scale) = (self.kept, self.params.expert_scale);
        let (dweights, accumulate) = (self.work.dweights, !first);
        dev.launch(ScaleChoicesBackward { weights, entries, bounds, scale: scale.value, dweights, dscale: scale.grad, accumulate })
    }

    /// Adds the gradient of the experts' input to that of the residual stream.
    pub(super) fn leave_experts<D: Kernels>(&self, dev: &mut D, dinput: DeviceSlice, first: bool) -> Result<()> {
        self.leave(dev, &self.params.experts, dinput, first)
    }

    /// Memory for the gradient of the router's input.
    pub(super) fn router_gradient(&self) -> DeviceSlice {
        self.gradient_memory()
    }

    /// Adds the gradient of the router's input to that of the residual stream.
    pub(super) fn leave_router<D: Kernels>(&self, dev: &mut D, first: bool) -> Result<()> {
        let dinput = self.router_gradient();
        scale(dev, dinput, self.router_factor())?;
        self.leave(dev, &self.params.router, dinput, first)
    }

    fn leave<D: Kernels>(&self, dev: &mut D, params: &NormParams, dinput: DeviceSlice, first: bool) -> Result<()> {
        norm_backward(dev, self.kind, params, (self.act.mid, self.act.mlp_norm.stats), (dinput, self.all.dresidual), first, None)
    }
}
