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
use super::linear::{Input, weight_product};
use super::moe_norms::MoeNorms;
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
    /// Norms of experts beside an MLP, which is the shared expert.
    norms: Option<MoeNorms<'a>>,
}

/// Gradients of the experts: of their output, and memory for that of their input, which may be the same.
#[derive(Clone, Copy)]
struct ExpertGrads {
    dout: DeviceSlice,
    dx: DeviceSlice,
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
            scaled: work.scaled,
        };
        let (shared, norms) = (self.shared_expert(layer), self.moe_norms(layer, kept, work));
        Some(MoeLayer { moe, params, router, act, kept, work, shared, norms })
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
        let (x, bias) = (self.router_input(dev)?, bias.map(|bias| bias.value));
        dev.launch(RouterLogits { x, weight: weight.value, bias, logits, channels: in_cols })?;
        dev.launch(Route { logits, correction: self.params.correction.map(|parts| parts.value), experts, weights, shape: self.shape() })?;
        dev.launch(Segments { experts, bounds, slots, entries, shape: self.shape() })
    }

    /// The router's input; with norms of its own it is computed.
    fn router_input<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        self.norms.map_or(Ok(self.act.mlp_norm.out), |norms| norms.router_input(dev))
    }

    /// The input of the experts; with norms of their own it is computed.
    pub(super) fn normalise<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        self.norms.map_or(Ok(self.act.mlp_norm.out), |norms| norms.experts_input(dev))
    }

    /// The input of the experts after the forward pass.
    fn input(&self) -> DeviceSlice {
        if self.norms.is_some() { self.act.moe_norms.experts } else { self.act.mlp_norm.out }
    }

    /// Computes the outputs of the experts' first matrices from the norm before the MLP or, with norms of their own, from the residual stream.
    pub(super) fn enter<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        self.shared.map_or(Ok(()), |shared| shared.enter(dev))?;
        let x = self.normalise(dev)?;
        self.dispatch(dev, x)?;
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
        if let Some(norms) = self.norms {
            self.add_branches(dev, &norms)?;
            return norms.join(dev, out);
        }
        let base = self.shared.map_or(Ok(self.act.mid), |shared| shared.leave(dev))?;
        self.combine(dev, self.kept.weights, Some(base), out)
    }

    /// Recomputes the outputs of the experts and of the MLP beside them, and their sum. Without norms of these outputs nothing needs them.
    pub(super) fn recompute_sum<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let Some(norms) = self.norms else { return Ok(()) };
        self.add_branches(dev, &norms)?;
        norms.recompute_stats(dev)
    }

    /// Computes the outputs of the experts and of the MLP beside them, and the sum of their norms.
    fn add_branches<D: Kernels>(&self, dev: &mut D, norms: &MoeNorms<'_>) -> Result<()> {
        self.shared.map_or(Ok(()), |shared| shared.project(dev, None, self.act.moe_norms.post_shared.raw))?;
        let weights = norms.weights(dev)?;
        self.combine(dev, weights, None, self.act.moe_norms.post_experts.raw)?;
        norms.sum(dev)
    }

    /// Computes the weighted sums of the experts' outputs from the outputs of their first matrices, and adds `base`, if there is one.
    fn combine<D: Kernels>(&self, dev: &mut D, weights: DeviceSlice, base: Option<DeviceSlice>, out: DeviceSlice) -> Result<()> {
        let (ExpertWork { rows, act, .. }, mlp_out) = (self.work, &self.params.mlp_out);
        let gate_up = self.act.mlp_in;
        match self.moe.activation {
            ExpertActivation::Swiglu => dev.launch(Swiglu { gate_up, out: act, cols: self.moe.ffn.width })?,
            ExpertActivation::Geglu => dev.launch(Geglu { gate_up, out: act, cols: self.moe.ffn.width })?,
            ExpertActivation::Clamped { alpha, limit } => dev.launch(ClampedSwiglu { gate_up, out: act, alpha, limit })?,
        }
        self.product(dev, MatmulLayout::Nt, mlp_out, [act, mlp_out.weight.value, rows], false)?;
        self.add_bias(dev, mlp_out, rows)?;
        let slots = self.kept.slots;
        dev.launch(Combine { x: rows, slots, weights: Some(weights), base, out, cols: mlp_out.out_cols / self.moe.experts })
    }

    /// Computes the gradients of the experts, of the shared expert and of the router. `dout` is the gradient of their output. The gradient of
    /// the output of the norm before the MLP becomes `dnorm` in `all`. Other norms of the layer add theirs to `dresidual`.
    pub(super) fn backward<D: Kernels>(&self, dev: &mut D, all: &Activations, dout: DeviceSlice, micro: MicroStep) -> Result<()> {
        let (dnorm, first) = (all.dnorm, micro.first);
        if let Some(norms) = self.norms {
            return self.backward_branches(dev, &norms, all, dout, micro);
        }
        self.experts_backward(dev, all, ExpertGrads { dout, dx: dnorm }, self.kept.weights, first)?;
        self.router_backward(dev, self.act.mlp_norm.out, Input::Added(dnorm), micro)?;
        self.shared.map_or(Ok(()), |shared| shared.backward(dev, dout, Input::Added(dnorm), first))
    }

    /// As [`MoeLayer::backward`], of experts beside an MLP. `dsum`, the gradient of the sum of both, may be `dnorm`.
    fn backward_branches<D: Kernels>(
        &self,
        dev: &mut D,
        norms: &MoeNorms<'_>,
        all: &Activations,
        dsum: DeviceSlice,
        micro: MicroStep,
    ) -> Result<()> {
        let first = micro.first;
        let dout = norms.experts_gradient(dev, dsum, first)?;
        let weights = norms.weights(dev)?;
        self.experts_backward(dev, all, ExpertGrads { dout, dx: dout }, weights, first)?;
        norms.leave_experts(dev, dout, first)?;
        norms.weights_backward(dev, first)?;
        let x = self.router_input(dev)?;
        self.router_backward(dev, x, Input::New(norms.router_gradient()), micro)?;
        norms.leave_router(dev, first)?;
        let dout = norms.shared_gradient(dev, dsum, first)?;
        self.shared.map_or(Ok(()), |shared| shared.backward(dev, dout, Input::New(all.dnorm), first))
    }

    /// Computes the gradients of the experts' parameters, of their input and of the `weights` of their rows.
    fn experts_backward<D: Kernels>(
        &self,
        dev: &mut D,
        all: &Activations,
        ExpertGrads { dout, dx }: ExpertGrads,
        weights: DeviceSlice,
        first: bool,
    ) -> Result<()> {
        let (ExpertWork { rows, act, .. }, LayerParams { mlp_in, mlp_out, .. }) = (self.work, self.params);
        let (dinner, dfused) = (all.dinner.slice(0, act.elems()), all.dfused.slice(0, 2 * act.elems()));
        self.dispatch(dev, dout)?;
        self.product(dev, MatmulLayout::Nn, mlp_out, [rows, mlp_out.weight.value, dinner], false)?;
        self.activation_backward(dev, weights, dinner, dfused)?;
        self.bias_out_backward(dev, rows, first)?;
        self.weight_product(dev, mlp_out, [rows, act], !first)?;
        self.dispatch(dev, self.input())?;
        self.weight_product(dev, mlp_in, [dfused, rows], !first)?;
        let (RoutedActivations { entries, bounds, .. }, accumulate, cols) = (self.kept, !first, 2 * self.moe.ffn.width);
        mlp_in.bias.map_or(Ok(()), |Param { grad: out, .. }| {
            dev.launch(SegmentSums { x: dfused, weights: None, entries, bounds, out, accumulate, cols })
        })?;
        self.product(dev, MatmulLayout::Nn, mlp_in, [dfused, mlp_in.weight.value, rows], false)?;
        let slots = self.kept.slots;
        dev.launch(Combine { x: rows, slots, weights: None, base: None, out: dx, cols: mlp_in.in_cols })
    }

    fn activation_backward<D: Kernels>(&self, dev: &mut D, weights: DeviceSlice, da: DeviceSlice, dgate_up: DeviceSlice) -> Result<()> {
        let entries = self.kept.entries;
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

    /// Computes the gradients of the router and of its input `x`.
    fn router_backward<D: Kernels>(&self, dev: &mut D, x: DeviceSlice, dx: Input, micro: MicroStep) -> Result<()> {
        let RoutedActivations { logits, experts, weights, slots, .. } = self.kept;
        let (ExpertWork { dweights, dlogits, .. }, shape) = (self.work, self.shape());
        dev.launch(RouterBackward { logits, experts, weights, slots, dweights, dlogits, shape })?;
        self.balance(dev, micro)?;
        let (first, (dx, add)) = (micro.first, dx.parts());
        if let Some(Param { grad, .. }) = self.params.correction.filter(|_| first) {
            dev.launch(Zero { x: grad })?;
        }
        let LinearParams { weight, bias, out_cols, in_cols, .. } = self.router;
        let to_input = MatmulShape { layout: MatmulLayout::Nn, m: shape.tokens, n: in_cols, k: out_cols };
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: out_cols, n: in_cols, k: shape.tokens };
        dev.launch(Matmul::plain(to_input, [dlogits, weight.value, dx]).onto_itself(add))?;
        weight_product(dev, to_weight, [dlogits, x], weight, !first)?;
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
