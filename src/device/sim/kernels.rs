//! What each kernel costs: FLOPs of a product or of attention at the rate of its shape, or the bytes that it reads and writes,
//! whichever takes longer, and the least that any kernel takes.

use super::SimDevice;
use super::world::Kind;
use crate::device::{AdamArgs, AttentionShape, DeviceSlice, Kernels, MatmulShape, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

/// FLOPs of attention's backward pass over those of its forward pass, as its rate counts them.
const ATTENTION_BACKWARD_FLOPS: f64 = 2.0;

fn bytes<const N: usize>(slices: [DeviceSlice; N]) -> f64 {
    slices.iter().map(|slice| slice.bytes() as f64).sum()
}

/// FLOPs of the forward pass: two products over the tokens that each token sees.
fn attention_flops(shape: &AttentionShape) -> f64 {
    let s = shape.seq_length as f64;
    let seen = match shape.window.map(|window| window as f64) {
        Some(window) if window < s => window - window * window / (2.0 * s),
        _ => s / 2.0,
    };
    4.0 * shape.tokens() as f64 * seen * (shape.heads * shape.head_dim) as f64
}

impl SimDevice {
    /// A kernel of `flops` at `flops_per_s` that reads and writes `bytes`.
    fn compute(&mut self, name: &'static str, flops: f64, flops_per_s: f64, bytes: f64) -> Result<()> {
        let seconds = (flops / flops_per_s).max(bytes / self.rates.device_bytes_per_s);
        self.enqueue(Stream::Compute, Kind::Compute, name, self.rates.kernel_s + seconds);
        Ok(())
    }

    fn pointwise(&mut self, name: &'static str, bytes: f64) -> Result<()> {
        self.compute(name, 0.0, 1.0, bytes)
    }
}

impl Kernels for SimDevice {
    fn prepare_attention(&mut self, _shape: AttentionShape, _dtype: Dtype) -> Result<()> {
        Ok(())
    }

    fn embed(
        &mut self,
        tokens: DeviceSlice,
        _positions: DeviceSlice,
        _wte: DeviceSlice,
        _wpe: Option<DeviceSlice>,
        out: DeviceSlice,
        _channels: usize,
    ) -> Result<()> {
        self.pointwise("embed", bytes([tokens, out, out]))
    }

    fn embed_backward(
        &mut self,
        tokens: DeviceSlice,
        _positions: DeviceSlice,
        dout: DeviceSlice,
        dwte: DeviceSlice,
        accumulate_wte: bool,
        _dwpe: Option<DeviceSlice>,
        _accumulate_wpe: bool,
        _channels: usize,
    ) -> Result<()> {
        let zeroed = if accumulate_wte { 0.0 } else { bytes([dwte]) };
        self.pointwise("embed_backward", bytes([tokens, dout, dout]) + zeroed)
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
        let flops = 2.0 * shape.m as f64 * shape.n as f64 * shape.k as f64;
        let moved = bytes([a, b, c]) + [bias, base].into_iter().flatten().map(|slice| slice.bytes() as f64).sum::<f64>();
        self.compute("matmul", flops, self.rates.matmul_flops(shape.m.min(shape.n).min(shape.k)), moved)
    }

    fn bias_backward(&mut self, dout: DeviceSlice, _dbias: DeviceSlice, _accumulate: bool) -> Result<()> {
        self.pointwise("bias_backward", bytes([dout]))
    }

    fn rms_norm(&mut self, x: DeviceSlice, _weight: DeviceSlice, _eps: f32, out: DeviceSlice, _rstd: DeviceSlice) -> Result<()> {
        self.pointwise("rms_norm", bytes([x, out]))
    }

    fn rms_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        _weight: DeviceSlice,
        _rstd: DeviceSlice,
        dx: DeviceSlice,
        _dweight: DeviceSlice,
        _accumulate: bool,
    ) -> Result<()> {
        self.pointwise("rms_norm_backward", bytes([dout, x, dx, dx]))
    }

    fn layer_norm(
        &mut self,
        x: DeviceSlice,
        _weight: DeviceSlice,
        _bias: DeviceSlice,
        _eps: f32,
        out: DeviceSlice,
        _stats: DeviceSlice,
    ) -> Result<()> {
        self.pointwise("layer_norm", bytes([x, out]))
    }

    fn layer_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        _weight: DeviceSlice,
        _stats: DeviceSlice,
        dx: DeviceSlice,
        _dweight: DeviceSlice,
        _dbias: DeviceSlice,
        _accumulate: bool,
    ) -> Result<()> {
        self.pointwise("layer_norm_backward", bytes([dout, x, dx, dx]))
    }

    fn qk_norm(
        &mut self,
        qkv: DeviceSlice,
        _q_weight: DeviceSlice,
        _k_weight: DeviceSlice,
        _eps: f32,
        out: DeviceSlice,
        _rstd: DeviceSlice,
        _shape: AttentionShape,
    ) -> Result<()> {
        self.pointwise("qk_norm", bytes([qkv, out]))
    }

    fn qk_norm_backward(
        &mut self,
        dqkv: DeviceSlice,
        qkv: DeviceSlice,
        _q_weight: DeviceSlice,
        _k_weight: DeviceSlice,
        _rstd: DeviceSlice,
        _dq_weight: DeviceSlice,
        _dk_weight: DeviceSlice,
        _accumulate: bool,
        _shape: AttentionShape,
    ) -> Result<()> {
        self.pointwise("qk_norm_backward", bytes([dqkv, dqkv, qkv]))
    }

    fn rope(
        &mut self,
        qkv: DeviceSlice,
        positions: DeviceSlice,
        _table: DeviceSlice,
        _rotary_dim: usize,
        _inverse: bool,
        shape: AttentionShape,
    ) -> Result<()> {
        let rotated = (shape.heads + shape.kv_heads) as f64 / (shape.heads + 2 * shape.kv_heads) as f64;
        self.pointwise("rope", bytes([qkv, qkv]) * rotated + bytes([positions]))
    }

    fn attention(
        &mut self,
        qkv: DeviceSlice,
        _documents: Option<DeviceSlice>,
        out: DeviceSlice,
        _lse: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        self.compute("attention", attention_flops(&shape), self.rates.attention_forward_flops, bytes([qkv, out]))
    }

    fn attention_backward(
        &mut self,
        dout: DeviceSlice,
        qkv: DeviceSlice,
        _documents: Option<DeviceSlice>,
        out: DeviceSlice,
        _lse: DeviceSlice,
        dqkv: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        let flops = ATTENTION_BACKWARD_FLOPS * attention_flops(&shape);
        self.compute("attention_backward", flops, self.rates.attention_backward_flops, bytes([dout, qkv, out, dqkv]))
    }

    fn swiglu(&mut self, gate_up: DeviceSlice, out: DeviceSlice, _cols: usize) -> Result<()> {
        self.pointwise("swiglu", bytes([gate_up, out]))
    }

    fn swiglu_backward(&mut self, dout: DeviceSlice, gate_up: DeviceSlice, dgate_up: DeviceSlice, _cols: usize) -> Result<()> {
        self.pointwise("swiglu_backward", bytes([dout, gate_up, dgate_up]))
    }

    fn gelu(&mut self, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
        self.pointwise("gelu", bytes([x, out]))
    }

    fn gelu_backward(&mut self, dout: DeviceSlice, x: DeviceSlice, dx: DeviceSlice) -> Result<()> {
        self.pointwise("gelu_backward", bytes([dout, x, dx]))
    }

    fn cross_entropy_stats(
        &mut self,
        logits: DeviceSlice,
        _targets: DeviceSlice,
        _stats: DeviceSlice,
        _vocab_start: usize,
        _cols: usize,
        _first: bool,
    ) -> Result<()> {
        self.pointwise("cross_entropy_stats", bytes([logits]))
    }

    fn cross_entropy_grad(
        &mut self,
        logits: DeviceSlice,
        _targets: DeviceSlice,
        _stats: DeviceSlice,
        _vocab_start: usize,
        _cols: usize,
        _scale: f32,
    ) -> Result<()> {
        self.pointwise("cross_entropy_grad", bytes([logits, logits]))
    }

    fn cross_entropy_loss(&mut self, stats: DeviceSlice, _loss: DeviceSlice, _scale: f32, _accumulate: bool) -> Result<()> {
        self.pointwise("cross_entropy_loss", bytes([stats]))
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        self.pointwise("zero", bytes([x]))
    }

    fn cast(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        let seconds = self.rates.kernel_s + bytes([src, dst]) / self.rates.device_bytes_per_s;
        self.enqueue(stream, Kind::Compute, "cast", seconds);
        Ok(())
    }

    fn grad_norm_partials(&mut self, grads: DeviceSlice, partials: DeviceSlice, _nonfinite: DeviceSlice) -> Result<()> {
        self.pointwise("grad_norm_partials", bytes([grads, partials]))
    }

    fn adam_step(&mut self, args: AdamArgs) -> Result<()> {
        let AdamArgs { params, m, v, grads, out, .. } = args;
        self.pointwise("adam_step", 2.0 * bytes([params, m, v]) + bytes([grads, out]))
    }

    fn poke(&mut self, _x: DeviceSlice, _index: usize, _value: f32) -> Result<()> {
        self.pointwise("poke", 0.0)
    }
}
