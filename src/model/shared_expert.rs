//! The shared expert of a layer with experts: an MLP that every token uses, in some models with a gate. It reads the norm before the MLP.
//!
//! The gate is a router with a single expert: the weight of a token is the sigmoid of its logit. A gated output is therefore a sum of one
//! weighted row, and its gradients are those of an expert whose rows are the tokens.

use super::Model;
use super::activation::{activate, activate_backward};
use super::activation_arrays::{Activations, GateWork, SharedWork};
use super::layer_shape::{Ffn, Moe};
use super::linear::{Input, linear, linear_backward, weight_product};
use super::params::{LinearParams, SharedParams};
use crate::device::{
    Combine, DeviceSlice, ExpertActivation, ExpertBackward, Kernels, Matmul, MatmulLayout, MatmulShape, Route, RouteShape, RouterBackward,
    RouterLogits, RouterRule, Segments, SigmoidRule,
};
use crate::error::Result;

/// The shared expert of one layer.
#[derive(Clone, Copy)]
pub(super) struct SharedExpert<'a> {
    params: &'a SharedParams,
    ffn: Ffn,
    /// Activation of the layer's experts, which is that of `ffn`.
    activation: ExpertActivation,
    /// Output of the norm before the MLP.
    x: DeviceSlice,
    /// Residual stream between attention and MLP.
    mid: DeviceSlice,
    /// Output of the first matrix.
    gate_up: DeviceSlice,
    work: SharedWork,
    all: &'a Activations,
}

impl Model {
    /// The shared expert of `layer`, if it has one.
    pub(super) fn shared_expert(&self, layer: usize) -> Option<SharedExpert<'_>> {
        let (params, act, all) = (self.layers[layer].shared.as_ref()?, &self.activations.layers[layer], &self.activations);
        let (Moe { ffn, activation, .. }, work) = (self.shape.layers[layer].mlp.moe()?, all.shared?);
        let ffn = Ffn { width: params.mlp_out.in_cols, ..ffn };
        let work = SharedWork { act: work.act.slice(0, all.tokens.elems() * params.mlp_out.in_cols), ..work };
        Some(SharedExpert { params, ffn, activation, x: act.mlp_norm.out, mid: act.mid, gate_up: act.shared_in, work, all })
    }
}

impl SharedExpert<'_> {
    /// Computes the output of the first matrix.
    pub(super) fn enter<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        linear(dev, &self.params.mlp_in, self.x, None, self.gate_up)
    }

    /// Adds the output to the residual stream between attention and MLP and returns the sum. The gradients of the residual stream, which
    /// have no values during a forward pass, lend their memory.
    pub(super) fn leave<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        let (Activations { dnorm: sum, dresidual: product, .. }, mlp_out, act) = (self.all, &self.params.mlp_out, self.work.act);
        let Some((gate, work)) = self.gate() else {
            self.project(dev, Some(self.mid), *sum)?;
            return Ok(*sum);
        };
        activate(dev, self.ffn, self.gate_up, act, None)?;
        self.open(dev, gate, work)?;
        linear(dev, mlp_out, act, None, *product)?;
        let GateWork { slots, weights, .. } = work;
        dev.launch(Combine { x: *product, slots, weights: Some(weights), base: Some(self.mid), out: *sum, cols: mlp_out.out_cols })?;
        Ok(*sum)
    }

    /// Computes the output without a gate from that of the first matrix, and adds it to `base`, if there is one.
    pub(super) fn project<D: Kernels>(&self, dev: &mut D, base: Option<DeviceSlice>, out: DeviceSlice) -> Result<()> {
        activate(dev, self.ffn, self.gate_up, self.work.act, None)?;
        linear(dev, &self.params.mlp_out, self.work.act, base, out)
    }

    /// Computes the gradients of the parameters and of the input from the gradient `dout` of the output.
    pub(super) fn backward<D: Kernels>(&self, dev: &mut D, dout: DeviceSlice, dx: Input, first: bool) -> Result<()> {
        let (act, width) = (self.work.act, self.ffn.width);
        let (dact, dgate_up) = (self.all.dinner.slice(0, act.elems()), self.all.dfused.slice(0, 2 * act.elems()));
        let (gate_up, mlp_out) = (self.gate_up, &self.params.mlp_out);
        match self.gate() {
            None => {
                activate(dev, self.ffn, gate_up, act, None)?;
                linear_backward(dev, mlp_out, act, dout, Input::New(dact), first)?;
                activate_backward(dev, self.ffn, dact, gate_up, dgate_up, None)?;
            }
            Some((gate, work)) => {
                // Layers share the memory of the gate.
                self.open(dev, gate, work)?;
                let shape = |layout, m, n, k| MatmulShape { layout, m, n, k };
                let (tokens, channels) = (self.tokens(), mlp_out.out_cols);
                let to_input = shape(MatmulLayout::Nn, tokens, width, channels);
                dev.launch(Matmul::plain(to_input, [dout, mlp_out.weight.value, dact]))?;
                let GateWork { weights, entries, dweights, .. } = work;
                let (activation, weighted) = (self.activation, act);
                dev.launch(ExpertBackward { da: dact, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols: width })?;
                let to_weight = shape(MatmulLayout::Tn, channels, width, tokens);
                weight_product(dev, to_weight, [dout, weighted], mlp_out.weight, !first)?;
            }
        }
        linear_backward(dev, &self.params.mlp_in, self.x, dgate_up, dx, first)?;
        self.gate().map_or(Ok(()), |(gate, work)| self.gate_backward(dev, (gate, work), dx.parts().0, first))
    }

    fn gate(&self) -> Option<(&LinearParams, GateWork)> {
        self.params.gate.as_ref().zip(self.work.gate)
    }

    fn tokens(&self) -> usize {
        self.all.tokens.elems()
    }

    /// A routing of every token to the one expert.
    fn routing(&self) -> RouteShape {
        RouteShape { tokens: self.tokens(), experts: 1, top_k: 1, rule: RouterRule::Sigmoid(SigmoidRule::GATE) }
    }

    /// Computes the weight of every token.
    fn open<D: Kernels>(&self, dev: &mut D, gate: &LinearParams, work: GateWork) -> Result<()> {
        let (GateWork { logits, choices: experts, weights, bounds, slots, entries, .. }, shape) = (work, self.routing());
        dev.launch(RouterLogits { x: self.x, weight: gate.weight.value, bias: None, logits, channels: gate.in_cols })?;
        dev.launch(Route { logits, correction: None, experts, weights, shape })?;
        dev.launch(Segments { experts, bounds, slots, entries, shape })
    }

    fn gate_backward<D: Kernels>(&self, dev: &mut D, (gate, work): (&LinearParams, GateWork), dx: DeviceSlice, first: bool) -> Result<()> {
        let (GateWork { logits, choices: experts, weights, slots, dweights, dlogits, .. }, shape) = (work, self.routing());
        dev.launch(RouterBackward { logits, experts, weights, slots, dweights, dlogits, shape })?;
        let (tokens, channels) = (shape.tokens, gate.in_cols);
        let to_input = MatmulShape { layout: MatmulLayout::Nn, m: tokens, n: channels, k: 1 };
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: 1, n: channels, k: tokens };
        dev.launch(Matmul::plain(to_input, [dlogits, gate.weight.value, dx]).onto_itself(true))?;
        weight_product(dev, to_weight, [dlogits, self.x], gate.weight, !first)
    }
}
