//! Gates of attention's output: the sigmoid of a projection of the input, or, after a gated delta rule, a gated norm of each head.

use super::Model;
use super::activation_arrays::{AttnGateWork, LayerActivations};
use super::linear::linear;
use super::params::{LayerParams, LinearParams};
use crate::device::{DeviceSlice, Kernels, SigmoidGate, SigmoidGateBackward};
use crate::error::Result;

impl Model {
    /// Projects the input `x` of attention to the gate of its output, and to the decay and strength of a gated delta rule.
    pub(super) fn project_gates<D: Kernels>(&self, dev: &mut D, layer: usize, act: &LayerActivations, x: DeviceSlice) -> Result<()> {
        let LayerParams { attn_gate, delta, .. } = &self.layers[layer];
        if let Some(gate) = attn_gate {
            linear(dev, gate, x, None, act.attn_gate)?;
        }
        let Some(delta) = delta else { return Ok(()) };
        linear(dev, &delta.decay, x, None, act.decay)?;
        linear(dev, &delta.strength, x, None, act.strength)
    }

    /// Attention's output, after its gate if it has one, without the zeros of latent attention. Layers share the memory of outputs after gates.
    pub(super) fn gate_output<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<DeviceSlice> {
        if let Some(latent) = self.latent(layer) {
            return latent.output(dev);
        }
        let ([_, x], gate) = (self.own_tokens(layer), self.activations.layers[layer].attn_gate);
        let Some(AttnGateWork { out, .. }) = self.attn_gate_work(layer) else { return Ok(x) };
        match self.delta(layer) {
            Some(delta) => delta.norm(dev, out)?,
            None => dev.launch(SigmoidGate { x, gate, out })?,
        }
        Ok(out)
    }

    /// The gradient of attention's output, computed from the gradient `dout` of [`Self::gate_output`]. Also computes the gradient of the
    /// projection to the gate. The gradient of attention's output replaces the gated output.
    pub(super) fn gate_backward<D: Kernels>(&self, dev: &mut D, layer: usize, dout: DeviceSlice, first: bool) -> Result<DeviceSlice> {
        let ([_, x], gate) = (self.own_tokens(layer), self.activations.layers[layer].attn_gate);
        let Some(AttnGateWork { out: dx, dgate }) = self.attn_gate_work(layer) else { return Ok(dout) };
        match self.delta(layer) {
            Some(delta) => delta.norm_backward(dev, dout, (dx, dgate), first)?,
            None => dev.launch(SigmoidGateBackward { dout, x, gate, dx, dgate })?,
        }
        Ok(dx)
    }

    /// The projections beside those to queries, keys and values, with the gradients of their outputs.
    pub(super) fn gate_gradients(&self, layer: usize) -> impl Iterator<Item = (&LinearParams, DeviceSlice)> {
        let LayerParams { attn_gate, delta, .. } = &self.layers[layer];
        let of_gate = attn_gate.as_ref().zip(self.attn_gate_work(layer)).map(|(gate, work)| (gate, work.dgate));
        let of_rule = delta.as_ref().zip(self.delta(layer)).map(|(params, delta)| {
            let [ddecay, dstrength] = delta.rule_gradients();
            [(&params.decay, ddecay), (&params.strength, dstrength)]
        });
        of_gate.into_iter().chain(of_rule.into_iter().flatten())
    }

    /// Workspaces of the gate of `layer`, if it has one.
    fn attn_gate_work(&self, layer: usize) -> Option<AttnGateWork> {
        let elems = self.activations.layers[layer].attn_gate.elems();
        let AttnGateWork { out, dgate } = self.activations.gates.filter(|_| elems > 0)?;
        Some(AttnGateWork { out: out.slice(0, elems), dgate: dgate.slice(0, elems) })
    }
}
