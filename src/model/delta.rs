//! Layers with a gated delta rule (Yang et al., arXiv 2412.06464) as in Qwen3.5: a short convolution of queries, keys and values, the rule, and
//! a gated norm of each head.

use super::Model;
use super::activation_arrays::{DeltaWork, LayerActivations, ProjectedQkv};
use super::params::DeltaParams;
use crate::device::{
    DeltaRule, DeltaRuleBackward, DeltaShape, DeviceSlice, GatedNorm, GatedNormBackward, Kernels, ShortConv, ShortConvBackward,
};
use crate::error::Result;

/// The gated delta rule of one layer.
#[derive(Clone, Copy)]
pub(super) struct DeltaLayer<'a> {
    params: &'a DeltaParams,
    act: &'a LayerActivations,
    projected: ProjectedQkv,
    work: DeltaWork,
    shape: DeltaShape,
    documents: Option<DeviceSlice>,
    eps: f32,
}

impl Model {
    /// The gated delta rule of `layer`, if it has one.
    pub(super) fn delta(&self, layer: usize) -> Option<DeltaLayer<'_>> {
        let (all, act) = (&self.activations, &self.activations.layers[layer]);
        let (params, projected) = (self.layers[layer].delta.as_ref()?, act.projected?);
        let work = all.delta?;
        let [ddecay, dstrength] = [work.ddecay, work.dstrength].map(|work| work.slice(0, act.decay.elems()));
        let work = DeltaWork { dqkv: work.dqkv.slice(0, act.qkv.elems()), ddecay, dstrength };
        let (shape, eps) = (self.shape.delta(all.batch, all.seq_length, layer)?, self.shape.layers[layer].norm.eps);
        Some(DeltaLayer { params, act, projected, work, shape, documents: all.documents, eps })
    }
}

impl DeltaLayer<'_> {
    /// Computes the convolution of queries, keys and values.
    pub(super) fn convolve<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let Self { params, act, projected, shape, documents, .. } = *self;
        dev.launch(ShortConv { x: projected.raw, weight: params.conv.value, documents, out: act.qkv, seq_length: shape.seq_length })
    }

    /// Computes the output of the rule.
    pub(super) fn attend<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let Self { params, act, shape, documents, .. } = *self;
        dev.launch(DeltaRule {
            qkv: act.qkv,
            a: act.decay,
            b: act.strength,
            a_log: params.rate.value,
            dt_bias: params.decay_bias.value,
            documents,
            out: act.attn_out,
            shape,
        })
    }

    /// Computes the gated norm of the rule's output.
    pub(super) fn norm<D: Kernels>(&self, dev: &mut D, out: DeviceSlice) -> Result<()> {
        let Self { params, act, eps, .. } = *self;
        dev.launch(GatedNorm { x: act.attn_out, gate: act.attn_gate, weight: params.norm.value, eps, out })
    }

    /// Computes the gradients of the rule's output and of the projection to the gate from that of the gated norm's output.
    pub(super) fn norm_backward<D: Kernels>(
        &self,
        dev: &mut D,
        dout: DeviceSlice,
        (dx, dgate): (DeviceSlice, DeviceSlice),
        first: bool,
    ) -> Result<()> {
        let Self { params, act, eps, .. } = *self;
        let (weight, dweight) = (params.norm.value, params.norm.grad);
        dev.launch(GatedNormBackward { dout, x: act.attn_out, gate: act.attn_gate, weight, eps, dx, dgate, dweight, accumulate: !first })
    }

    /// Computes the gradient `dprojected` of the projections to queries, keys and values from the gradient `dout` of the rule's output, and
    /// the gradients of [`Self::rule_gradients`].
    pub(super) fn backward<D: Kernels>(&self, dev: &mut D, dout: DeviceSlice, dprojected: DeviceSlice, first: bool) -> Result<()> {
        let Self { params, act, projected, work, shape, documents, .. } = *self;
        dev.launch(DeltaRuleBackward {
            dout,
            qkv: act.qkv,
            a: act.decay,
            b: act.strength,
            a_log: params.rate.value,
            dt_bias: params.decay_bias.value,
            documents,
            dqkv: work.dqkv,
            da: work.ddecay,
            db: work.dstrength,
            da_log: params.rate.grad,
            ddt_bias: params.decay_bias.grad,
            accumulate: !first,
            shape,
        })?;
        dev.launch(ShortConvBackward {
            dout: work.dqkv,
            x: projected.raw,
            weight: params.conv.value,
            documents,
            dx: dprojected,
            dweight: params.conv.grad,
            accumulate: !first,
            seq_length: shape.seq_length,
        })
    }

    /// Gradients of the projections to decay and strength.
    pub(super) fn rule_gradients(&self) -> [DeviceSlice; 2] {
        [self.work.ddecay, self.work.dstrength]
    }
}
