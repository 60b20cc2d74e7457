//! A layer of experts: a router chooses experts for every token, and each expert computes its own rows.
//!
//! A row of an expert is a copy of its token, and the result of a token is the sum of its rows in the order of its choices. Sums therefore
//! do not depend on timing, no token is dropped, and the host never needs the routing. The router's choices are always saved, so
//! recomputation uses the same choices.

use super::Model;
use super::activation_arrays::{Activations, ExpertWork, LayerActivations, RoutedActivations};
use super::expert_bounds::bounds_of;
use super::head::MicroStep;
use super::layer_shape::Moe;
use super::linear::weight_product;
use super::params::{LayerParams, LinearParams, Param};
use super::shared_expert::SharedExpert;
use crate::device::{
    BiasBackward, ClampedSwiglu, Combine, DeviceSlice, Dispatch, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot, Geglu,
    GroupedMatmul, GroupedShape, Kernels, Matmul, MatmulLayout, MatmulShape, Route, RouteShape, RouterBackward, RouterBalance,
    RouterLogits, SegmentSums, Segments, Swiglu, Zero,
};
use crate::error::Result;
use std::ops::Range;

/// A layer with experts as its MLP.
pub(super) struct MoeLayer<'a> {
    moe: Moe,
    params: &'a LayerParams,
    router: LinearParams,
    act: &'a LayerActivations,
    /// Saved routing results.
    kept: RoutedActivations,
    /// Workspaces shared by all layers with experts.
    work: ExpertWork,
    shared: Option<SharedExpert<'a>>,
}

impl Model {
    /// The part of the expert bounds that belongs to `layers`.
    pub(crate) fn expert_bounds_of(&self, layers: Range<usize>) -> Range<usize> {
        bounds_of(&self.shape, layers)
    }

    /// Expert bounds of all layers for the last micro-batch, laid out as [`super::expert_bounds::expert_bounds`] describes; `None` without
    /// experts.
    pub(crate) fn expert_bounds(&self) -> Option<DeviceSlice> {
        self.activations.layers.iter().find_map(|layer| layer.routed).map(|routed| routed.all_bounds.0)
    }

    /// Expands the matrices of `layer` that stay in MXFP4, before the products of a pass. The expanded matrices are valid until those of
    /// another layer are expanded.
    pub(super) fn expand_experts<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        self.layers[layer].expansions.iter().try_for_each(|expansion| dev.launch(*expansion))
    }

    /// The MLP of `layer`, if it has experts.
    pub(super) fn experts(&self, layer: usize) -> Option<MoeLayer<'_>> {
        let (params, act) = (&self.layers[layer], &self.activations.layers[layer]);
        let moe = self.shape.layers[layer].mlp.moe()?;
        let (router, kept, work) = (params.router?, act.routed?, self.activations.experts?);
        let tokens = self.activations.tokens.elems();
        let rows = tokens * moe.top_k;
        let work = ExpertWork {
            rows: work.rows.slice(0, rows * self.shape.channels),
            act: work.act.slice(0, rows * moe.ffn.width),
            dweights: work.dweights.slice(0, rows),
            dlogits: work.dlogits.slice(0, tokens * moe.experts),
        };
        Some(MoeLayer { moe, params, router, act, kept, work, shared: self.shared_expert(layer) })
    }
}

impl MoeLayer<'_> {
    fn shape(&self) -> RouteShape {
        let Moe { experts, top_k, rule, .. } = self.moe;
        RouteShape { tokens: self.kept.slots.elems() / top_k, experts, top_k, rule }
    }

    /// Chooses the experts of every token.
    pub(super) fn route<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let RoutedActivations { logits, experts, weights, bounds, slots, entries, .. } = self.kept;
        let LinearParams { weight, bias, in_cols, .. } = self.router;
        let bias = bias.map(|bias| bias.value);
        dev.launch(RouterLogits { x: self.act.mlp_norm.out, weight: weight.value, bias, logits, channels: in_cols })?;
        dev.launch(Route { logits, correction: self.params.correction.map(|parts| parts.value), experts, weights, shape: self.shape() })?;
        dev.launch(Segments { experts, bounds, slots, entries, shape: self.shape() })
    }

    /// Computes the outputs of the experts' first matrices from the router's input.
    pub(super) fn enter<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        self.shared.map_or(Ok(()), |shared| shared.enter(dev))?;
        self.dispatch(dev, self.act.mlp_norm.out)?;
        let (mlp_in, out) = (&self.params.mlp_in, self.act.mlp_in);
        self.product(dev, MatmulLayout::Nt, mlp_in, [self.work.rows, mlp_in.weight.value, out], false)?;
        self.add_bias(dev, mlp_in, out)
    }

    fn add_bias<D: Kernels>(&self, dev: &mut D, params: &LinearParams, x: DeviceSlice) -> Result<()> {
        let RoutedActivations { experts, entries, .. } = self.kept;
        let cols = params.out_cols / self.moe.experts;
        if let Some(bias) = params.bias { dev.launch(ExpertBias { x, bias: bias.value, experts, entries, cols }) } else { Ok(()) }
    }

    /// Computes the residual stream `out` from the outputs of the experts' first matrices.
    pub(super) fn leave<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        let base = self.shared.map_or(Ok(self.act.mid), |shared| shared.leave(dev))?;
        let (ExpertWork { rows, act, .. }, mlp_out) = (self.work, &self.params.mlp_out);
        let gate_up = self.act.mlp_in;
        match self.moe.activation {
            ExpertActivation::Swiglu => dev.launch(Swiglu { gate_up, out: act, cols: self.moe.ffn.width })?,
            ExpertActivation::Geglu => dev.launch(Geglu { gate_up, out: act, cols: self.moe.ffn.width })?,
            ExpertActivation::Clamped { alpha, limit } => dev.launch(ClampedSwiglu { gate_up, out: act, alpha, limit })?,
        }
        self.product(dev, MatmulLayout::Nt, mlp_out, [act, mlp_out.weight.value, rows], false)?;
        self.add_bias(dev, mlp_out, rows)?;
        let RoutedActivations { slots, weights, .. } = self.kept;
        dev.launch(Combine { x: rows, slots, weights: Some(weights), base: Some(base), out, cols: mlp_out.out_cols / self.moe.experts })
    }

    /// Computes the gradients of the experts and of the router. In `all`, `dresidual` is the gradient of the layer's output, and `dnorm`
    /// becomes the gradient of the experts' input.
    pub(super) fn backward<D: Kernels>(&self, dev: &mut D, all: &Activations, micro: MicroStep) -> Result<()> {
        let first = micro.first;
        let (ExpertWork { rows, act, .. }, LayerParams { mlp_in, mlp_out, .. }) = (self.work, self.params);
        let Activations { dresidual, dnorm, .. } = *all;
        let (dinner, dfused) = (all.dinner.slice(0, act.elems()), all.dfused.slice(0, 2 * act.elems()));
        self.dispatch(dev, dresidual)?;
        self.product(dev, MatmulLayout::Nn, mlp_out, [rows, mlp_out.weight.value, dinner], false)?;
        self.activation_backward(dev, dinner, dfused)?;
        self.bias_out_backward(dev, rows, first)?;
        self.weight_product(dev, mlp_out, [rows, act], !first)?;
        self.dispatch(dev, self.act.mlp_norm.out)?;
        self.weight_product(dev, mlp_in, [dfused, rows], !first)?;
        let (RoutedActivations { entries, bounds, .. }, accumulate, cols) = (self.kept, !first, 2 * self.moe.ffn.width);
        mlp_in.bias.map_or(Ok(()), |Param { grad: out, .. }| {
            dev.launch(SegmentSums { x: dfused, weights: None, entries, bounds, out, accumulate, cols })
        })?;
        self.product(dev, MatmulLayout::Nn, mlp_in, [dfused, mlp_in.weight.value, rows], false)?;
        let slots = self.kept.slots;
        dev.launch(Combine { x: rows, slots, weights: None, base: None, out: dnorm, cols: mlp_in.in_cols })?;
        self.router_backward(dev, dnorm, micro)?;
        self.shared.map_or(Ok(()), |shared| shared.backward(dev, first))
    }

    fn activation_backward<D: Kernels>(&self, dev: &mut D, da: DeviceSlice, dgate_up: DeviceSlice) -> Result<()> {
        let RoutedActivations { weights, entries, .. } = self.kept;
        let ExpertWork { act: weighted, dweights, .. } = self.work;
        let (Moe { activation, ffn, .. }, gate_up) = (self.moe, self.act.mlp_in);
        let cols = ffn.width;
        dev.launch(ExpertBackward { da, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols })
    }

    /// Computes the gradient of the second bias, and its term in the gradient of the rows' weights; `dout` has the gradient of each row's
    /// token.
    fn bias_out_backward<D: Kernels>(&self, dev: &mut D, dout: DeviceSlice, first: bool) -> Result<()> {
        let Some(Param { value: bias, grad: out }) = self.params.mlp_out.bias else { return Ok(()) };
        let RoutedActivations { experts, weights, entries, bounds, .. } = self.kept;
        let (dweights, cols) = (self.work.dweights, self.params.mlp_out.out_cols / self.moe.experts);
        dev.launch(ExpertBiasDot { dout, bias, experts, entries, dweights, cols })?;
        dev.launch(SegmentSums { x: dout, weights: Some(weights), entries, bounds, out, accumulate: !first, cols })
    }

    /// Adds the router's contribution to `dnorm`.
    fn router_backward<D: Kernels>(&self, dev: &mut D, dnorm: DeviceSlice, micro: MicroStep) -> Result<()> {
        let RoutedActivations { logits, experts, weights, slots, .. } = self.kept;
        let (ExpertWork { dweights, dlogits, .. }, shape) = (self.work, self.shape());
        dev.launch(RouterBackward { logits, experts, weights, slots, dweights, dlogits, shape })?;
        self.balance(dev, micro)?;
        let first = micro.first;
        if let Some(Param { grad, .. }) = self.params.correction.filter(|_| first) {
            dev.launch(Zero { x: grad })?;
        }
        let LinearParams { weight, bias, out_cols, in_cols, .. } = self.router;
        let to_input = MatmulShape { layout: MatmulLayout::Nn, m: shape.tokens, n: in_cols, k: out_cols };
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: out_cols, n: in_cols, k: shape.tokens };
        dev.launch(Matmul::plain(to_input, [dlogits, weight.value, dnorm]).onto_itself(true))?;
        weight_product(dev, to_weight, [dlogits, self.act.mlp_norm.out], weight, !first)?;
        if let Some(bias) = bias { dev.launch(BiasBackward { dout: dlogits, dbias: bias.grad, accumulate: !first }) } else { Ok(()) }
    }

    /// Adds the gradient of the balancing loss to the gradient of the logits, if there is such a loss. Its means are over all layers.
    fn balance<D: Kernels>(&self, dev: &mut D, micro: MicroStep) -> Result<()> {
        if micro.balance == 0.0 {
            return Ok(());
        }
        let RoutedActivations { logits, experts, all_bounds: (bounds, stride), .. } = self.kept;
        let (dlogits, shape) = (self.work.dlogits, self.shape());
        let rows = (bounds.elems() / stride * shape.tokens) as f64;
        let factor = f64::from(micro.loss_scale) * f64::from(micro.balance) * shape.experts as f64 / (rows * rows);
        dev.launch(RouterBalance { logits, experts, bounds, stride, dlogits, factor: factor as f32, shape })
    }

    /// Copies each row from its token.
    fn dispatch<D: Kernels>(&self, dev: &mut D, x: DeviceSlice) -> Result<()> {
        dev.launch(Dispatch { x, slots: self.kept.slots, out: self.work.rows, cols: self.params.mlp_in.in_cols })
    }

    /// The gradient of the experts' matrices, unless they are frozen.
    fn weight_product<D: Kernels>(&self, dev: &mut D, params: &LinearParams, [dout, x]: [DeviceSlice; 2], accumulate: bool) -> Result<()> {
        let Some(grad) = params.weight.grad else { return Ok(()) };
        self.product(dev, MatmulLayout::Tn, params, [dout, x, grad], accumulate)
    }

    fn product<D: Kernels>(
        &self,
        dev: &mut D,
        layout: MatmulLayout,
        params: &LinearParams,
        [a, b, c]: [DeviceSlice; 3],
        accumulate: bool,
    ) -> Result<()> {
        let (experts, rows) = (self.moe.experts, self.shape().rows());
        let shape = GroupedShape { layout, experts, rows, outs: params.out_cols / experts, ins: params.in_cols };
        dev.launch(GroupedMatmul { shape, a, b, bounds: self.kept.bounds, c, accumulate })
    }
}
