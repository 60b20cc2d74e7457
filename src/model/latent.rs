//! Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434): queries, keys and values are products of matrices with normalised latent
//! vectors.
//!
//! Queries and keys are `[plain, rotated]` by head; the rotated channels of keys are the same for all heads. Attention reads heads of one
//! width, so zeros follow the channels of shorter values, and their columns of the output are dropped. Gradients of fused projections, which
//! have no value during a forward pass, lend their memory to projections before they are assembled and to the output without zeros. The
//! memory of queries, keys and values has the gradients of projections once attention's backward pass has read it.

use super::Model;
use super::activation_arrays::{Activations, LayerActivations, ProjectedQkv};
use super::layer_shape::{NormKind, NormSpec};
use super::linear::{Input, linear, linear_backward};
use super::norm::{norm, norm_backward};
use super::params::{LatentParams, LinearParams, NormParams};
use crate::device::{AssembleHeads, AssembleHeadsBackward, DeviceSlice, Kernels, LatentHeads, ResizeRows, Zero};
use crate::error::Result;

/// Norms of latent vectors. Their epsilon is a constant of `transformers`.
const NORM: NormSpec = NormSpec { kind: NormKind::Rms, plus_one: false, eps: 1e-6 };

/// Latent attention of one layer.
#[derive(Clone, Copy)]
pub(super) struct LatentLayer<'a> {
    params: &'a LatentParams,
    act: &'a LayerActivations,
    projected: ProjectedQkv,
    all: &'a Activations,
    /// Angles of the rotation.
    table: DeviceSlice,
    heads: LatentHeads,
    tokens: usize,
}

/// Successive parts of memory.
struct SuccessiveParts(DeviceSlice);

impl SuccessiveParts {
    fn take(&mut self, elems: usize) -> DeviceSlice {
        let all = self.0;
        self.0 = all.slice(elems, all.elems() - elems);
        all.slice(0, elems)
    }
}

impl Model {
    /// Latent attention of `layer`, if it has latent vectors.
    pub(super) fn latent(&self, layer: usize) -> Option<LatentLayer<'_>> {
        let (all, act) = (&self.activations, &self.activations.layers[layer]);
        let (params, projected) = (self.layers[layer].latent.as_ref()?, act.projected?);
        let (heads, rope) = (self.shape.latent_heads(layer)?, self.shape.layers[layer].attn.rope?);
        Some(LatentLayer { params, act, projected, all, table: all.rope_tables[rope], heads, tokens: all.tokens.elems() })
    }
}

impl<'a> LatentLayer<'a> {
    /// Columns of values without zeros.
    fn value_cols(&self) -> usize {
        self.heads.heads * self.heads.value
    }

    /// Whether zeros follow the channels of values.
    fn has_zeros(&self) -> bool {
        self.heads.value < self.heads.head_dim()
    }

    /// Statistics of the norms of the latent vectors of keys and values, and of queries.
    fn stats(&self) -> [DeviceSlice; 2] {
        let mut parts = SuccessiveParts(self.projected.rstd);
        let of_keys = parts.take(self.tokens);
        [of_keys, parts.0]
    }

    /// Projects the input `x` of attention to the latent vector of keys and values, and to the rotated channels of keys.
    pub(super) fn project<D: Kernels>(&self, dev: &mut D, x: DeviceSlice) -> Result<()> {
        linear(dev, &self.params.latent, x, None, self.act.latent.raw)?;
        linear(dev, &self.params.key, x, None, self.act.latent.key)
    }

    /// Computes queries, keys and values from the projections.
    pub(super) fn assemble<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let Self { params, act, projected, all, table, heads, tokens } = *self;
        let (mut work, [stats, query_stats], latent) = (SuccessiveParts(all.dfused), self.stats(), act.latent);
        norm(dev, NORM, &params.norm, (latent.raw, latent.normed), stats, None)?;
        let kv = work.take(tokens * heads.projected_cols());
        linear(dev, &params.kv, latent.normed, None, kv)?;
        let queries = match &params.queries {
            None => projected.raw,
            Some((of_queries, matrix)) => {
                let queries = work.take(tokens * heads.query_cols());
                norm(dev, NORM, of_queries, (projected.raw, latent.queries), query_stats, None)?;
                linear(dev, matrix, latent.queries, None, queries)?;
                queries
            }
        };
        dev.launch(AssembleHeads { queries, projected: kv, key: latent.key, positions: all.positions, table, qkv: act.qkv, heads })
    }

    /// Attention's output without the zeros of values.
    pub(super) fn output<D: Kernels>(&self, dev: &mut D) -> Result<DeviceSlice> {
        if !self.has_zeros() {
            return Ok(self.act.attn_out);
        }
        let out = SuccessiveParts(self.all.dfused).take(self.tokens * self.value_cols());
        dev.launch(ResizeRows { x: self.act.attn_out, out, from: self.heads.head_dim(), to: self.heads.value })?;
        Ok(out)
    }

    /// Memory for the gradient of [`Self::output`], where the gradient of attention's output shall be `dout`.
    pub(super) fn output_gradient(&self, dout: DeviceSlice) -> DeviceSlice {
        if !self.has_zeros() {
            return dout;
        }
        let (mut parts, elems) = (SuccessiveParts(self.all.dfused), self.tokens * self.value_cols());
        parts.take(elems);
        parts.take(elems)
    }

    /// The gradient `dout` of attention's output, from that of the output without zeros.
    pub(super) fn widen_gradient<D: Kernels>(&self, dev: &mut D, dout: DeviceSlice) -> Result<()> {
        if !self.has_zeros() {
            return Ok(());
        }
        dev.launch(ResizeRows { x: self.output_gradient(dout), out: dout, from: self.heads.value, to: self.heads.head_dim() })
    }

    /// Gradients of queries, of projected keys and values, and of the rotated channels of keys, in the memory of queries, keys and values.
    fn projection_gradients(&self) -> [DeviceSlice; 3] {
        let (heads, mut parts) = (self.heads, SuccessiveParts(self.act.qkv));
        [heads.query_cols(), heads.projected_cols(), heads.rotary].map(|cols| parts.take(self.tokens * cols))
    }

    /// Gradients of latent vectors of keys and values, and of queries, before their norms, and memory for those of the norms' outputs.
    fn vector_gradients(&self) -> [[DeviceSlice; 2]; 2] {
        let (latent, mut parts) = (self.act.latent, SuccessiveParts(self.all.dfused));
        [latent.normed, latent.queries].map(|like| [(); 2].map(|()| parts.take(like.elems())))
    }

    /// Computes the gradients of the projections from the gradient `dqkv` of queries, keys and values. Returns that of the projection to queries
    /// or to their latent vector.
    pub(super) fn backward<D: Kernels>(&self, dev: &mut D, dqkv: DeviceSlice, first: bool) -> Result<DeviceSlice> {
        let Self { params, act, projected, all, table, heads, .. } = *self;
        let ([dqueries, dprojected, dkey], [of_keys, of_queries]) = (self.projection_gradients(), self.vector_gradients());
        let [stats, query_stats] = self.stats();
        dev.launch(AssembleHeadsBackward { dqkv, positions: all.positions, table, dqueries, dprojected, dkey, heads })?;
        let keys = VectorBackward { norm: params.norm, matrix: &params.kv, raw: act.latent.raw, stats, normed: act.latent.normed };
        keys.enqueue(dev, dprojected, of_keys, first)?;
        let Some((norm, matrix)) = &params.queries else { return Ok(dqueries) };
        let queries = VectorBackward { norm: *norm, matrix, raw: projected.raw, stats: query_stats, normed: act.latent.queries };
        queries.enqueue(dev, dqueries, of_queries, first)?;
        Ok(of_queries[0])
    }

    /// The projections beside that to queries, with the gradients of their outputs.
    pub(super) fn gradients(&self) -> [(&'a LinearParams, DeviceSlice); 2] {
        let ([.., dkey], [[dlatent, _], _]) = (self.projection_gradients(), self.vector_gradients());
        [(&self.params.latent, dlatent), (&self.params.key, dkey)]
    }
}

/// A latent vector, its norm and the matrix that reads it.
struct VectorBackward<'a> {
    norm: NormParams,
    matrix: &'a LinearParams,
    raw: DeviceSlice,
    stats: DeviceSlice,
    normed: DeviceSlice,
}

impl VectorBackward<'_> {
    /// Computes the gradient `draw` of the vector before its norm from the gradient `dout` of the product.
    fn enqueue<D: Kernels>(&self, dev: &mut D, dout: DeviceSlice, [draw, dnormed]: [DeviceSlice; 2], first: bool) -> Result<()> {
        linear_backward(dev, self.matrix, self.normed, dout, Input::New(dnormed), first)?;
        dev.launch(Zero { x: draw })?;
        norm_backward(dev, NORM, &self.norm, (self.raw, self.stats), (dnormed, draw), first, None)
    }
}
