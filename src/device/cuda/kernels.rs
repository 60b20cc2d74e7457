//! [`Kernels`] for the GPU: each method is the launcher of the same name in one of the groups below.

pub(super) mod attention;
pub(super) mod bias;
pub(super) mod cross_entropy;
pub(super) mod embed;
#[cfg(test)]
mod emulator;
mod grid;
#[cfg(test)]
mod launch_tests;
pub(super) mod norm;
pub(super) mod pointwise;
pub(super) mod rope;
pub(super) mod transfer;

use super::launch::Queue;
use super::modules::PtxSource;
use super::{CudaDevice, sdpa};
use crate::device::{AdamArgs, AttentionShape, DeviceSlice, Kernels, MatmulShape, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Every PTX file, with what it exports.
pub(super) fn sources() -> impl Iterator<Item = &'static PtxSource> {
    let transformer =
        [&attention::SOURCE, &bias::SOURCE, &cross_entropy::SOURCE, &embed::SOURCE, &norm::SOURCE, &pointwise::SOURCE, &rope::SOURCE];
    transfer::SOURCES.iter().chain(transformer)
}

impl Kernels for CudaDevice {
    fn prepare_attention(&mut self, shape: AttentionShape, dtype: Dtype) -> Result<()> {
        self.sdpa.as_mut().map_or(Ok(()), |sdpa| sdpa.prepare(&shape, dtype))
    }

    fn embed(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        wte: DeviceSlice,
        wpe: Option<DeviceSlice>,
        out: DeviceSlice,
        channels: usize,
    ) -> Result<()> {
        embed::embed(self, tokens, positions, wte, wpe, out, channels)
    }

    fn embed_backward(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        dout: DeviceSlice,
        dwte: DeviceSlice,
        accumulate_wte: bool,
        dwpe: Option<DeviceSlice>,
        accumulate_wpe: bool,
        channels: usize,
    ) -> Result<()> {
        embed::embed_backward(self, tokens, positions, dout, dwte, accumulate_wte, dwpe, accumulate_wpe, channels)
    }

    fn matmul(
        &mut self,
        shape: MatmulShape,
        a: DeviceSlice,
        b: DeviceSlice,
        bias: Option<DeviceSlice>,
        base: Option<DeviceSlice>,
        c: DeviceSlice,
    ) -> Result<()> {
        let product = self.gemm.product(shape, a, b, bias, base, c)?;
        product.map_or(Ok(()), |product| self.timed(Stream::Compute, "matmul", product))
    }

    fn bias_backward(&mut self, dout: DeviceSlice, dbias: DeviceSlice, accumulate: bool) -> Result<()> {
        bias::bias_backward(self, dout, dbias, accumulate)
    }

    fn rms_norm(&mut self, x: DeviceSlice, weight: DeviceSlice, eps: f32, out: DeviceSlice, rstd: DeviceSlice) -> Result<()> {
        norm::rms_norm(self, x, weight, eps, out, rstd)
    }

    fn rms_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        rstd: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        accumulate: bool,
    ) -> Result<()> {
        norm::rms_norm_backward(self, dout, x, weight, rstd, dx, dweight, accumulate)
    }

    fn layer_norm(
        &mut self,
        x: DeviceSlice,
        weight: DeviceSlice,
        bias: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        stats: DeviceSlice,
    ) -> Result<()> {
        norm::layer_norm(self, x, weight, bias, eps, out, stats)
    }

    fn layer_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        stats: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        dbias: DeviceSlice,
        accumulate: bool,
    ) -> Result<()> {
        norm::layer_norm_backward(self, dout, x, weight, stats, dx, dweight, dbias, accumulate)
    }

    fn qk_norm(
        &mut self,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        rstd: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        rope::qk_norm(self, qkv, q_weight, k_weight, eps, out, rstd, shape)
    }

    fn qk_norm_backward(
        &mut self,
        dqkv: DeviceSlice,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        rstd: DeviceSlice,
        dq_weight: DeviceSlice,
        dk_weight: DeviceSlice,
        accumulate: bool,
        shape: AttentionShape,
    ) -> Result<()> {
        rope::qk_norm_backward(self, dqkv, qkv, q_weight, k_weight, rstd, dq_weight, dk_weight, accumulate, shape)
    }

    fn rope(
        &mut self,
        qkv: DeviceSlice,
        positions: DeviceSlice,
        table: DeviceSlice,
        rotary_dim: usize,
        inverse: bool,
        shape: AttentionShape,
    ) -> Result<()> {
        rope::rope(self, qkv, positions, table, rotary_dim, inverse, shape)
    }

    fn attention(
        &mut self,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        match (&self.sdpa, documents) {
            (Some(_), Some(_)) => Err(sdpa::no_documents()),
            (Some(_), None) => fused_attention(self, sdpa::AttentionCall::forward(qkv, out, lse, shape)?),
            (None, _) => attention::attention(self, qkv, documents, out, lse, shape),
        }
    }

    fn attention_backward(
        &mut self,
        dout: DeviceSlice,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        dqkv: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        match (&self.sdpa, documents) {
            (Some(_), Some(_)) => Err(sdpa::no_documents()),
            (Some(_), None) => fused_attention(self, sdpa::AttentionCall::backward(dout, qkv, out, lse, dqkv, shape)?),
            (None, _) => attention::attention_backward(self, dout, qkv, documents, out, lse, dqkv, shape),
        }
    }

    fn swiglu(&mut self, gate_up: DeviceSlice, out: DeviceSlice, cols: usize) -> Result<()> {
        pointwise::swiglu(self, gate_up, out, cols)
    }

    fn swiglu_backward(&mut self, dout: DeviceSlice, gate_up: DeviceSlice, dgate_up: DeviceSlice, cols: usize) -> Result<()> {
        pointwise::swiglu_backward(self, dout, gate_up, dgate_up, cols)
    }

    fn gelu(&mut self, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
        pointwise::gelu(self, x, out)
    }

    fn gelu_backward(&mut self, dout: DeviceSlice, x: DeviceSlice, dx: DeviceSlice) -> Result<()> {
        pointwise::gelu_backward(self, dout, x, dx)
    }

    fn cross_entropy_stats(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        first: bool,
    ) -> Result<()> {
        cross_entropy::cross_entropy_stats(self, logits, targets, stats, vocab_start, cols, first)
    }

    fn cross_entropy_grad(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        scale: f32,
    ) -> Result<()> {
        cross_entropy::cross_entropy_grad(self, logits, targets, stats, vocab_start, cols, scale)
    }

    fn cross_entropy_loss(&mut self, stats: DeviceSlice, loss: DeviceSlice, scale: f32, accumulate: bool) -> Result<()> {
        cross_entropy::cross_entropy_loss(self, stats, loss, scale, accumulate)
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        Queue::zero(self, x)
    }

    fn cast(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        transfer::cast(self, stream, src, dst)
    }

    fn grad_norm_partials(&mut self, grads: DeviceSlice, partials: DeviceSlice, nonfinite: DeviceSlice) -> Result<()> {
        transfer::grad_norm_partials(self, grads, partials, nonfinite)
    }

    fn adam_step(&mut self, args: AdamArgs) -> Result<()> {
        transfer::adam_step(self, args)
    }

    fn poke(&mut self, x: DeviceSlice, index: usize, value: f32) -> Result<()> {
        transfer::poke(self, x, index, value)
    }
}

/// Enqueues `call` by cuDNN.
fn fused_attention(dev: &mut CudaDevice, call: sdpa::AttentionCall) -> Result<()> {
    // Taken out while it runs: the span around it needs the device.
    let mut sdpa = dev.sdpa.take().ok_or_else(|| Error::Unsupported("fused attention on a device opened without cuDNN".into()))?;
    let result = dev.timed(Stream::Compute, call.name, |_| sdpa.enqueue(&call));
    dev.sdpa = Some(sdpa);
    result
}
