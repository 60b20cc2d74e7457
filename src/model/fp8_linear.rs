//! A linear layer in FP8, forward and backward.

use super::activations::LayerActivations;
use super::fp8::{Fp8Linear, Fp8Work};
use super::params::{LayerParams, LinearParams};
use super::shape::ModelShape;
use crate::device::{AbsMaxScale, DeviceSlice, Kernels, Quantize, ScaledMatmul};
use crate::dtype::Dtype;
use crate::error::Result;

/// Has the linear layers of `layers` computed in FP8, but for experts.
pub(super) fn give(work: Fp8Work, shape: &ModelShape, activations: &[LayerActivations], layers: &mut [LayerParams]) {
    for (index, layer) in layers.iter_mut().enumerate() {
        let dense = [&mut layer.mlp_in, &mut layer.mlp_out].into_iter().filter(|_| shape.layers[index].mlp.moe().is_none());
        let linears = [&mut layer.qkv, &mut layer.attn_out].into_iter().chain(dense);
        linears.enumerate().for_each(|(at, linear)| linear.fp8 = Some(work.of(index, at, activations[index].fp8[at])));
    }
}

/// A matrix of 8 bits and its scale.
#[derive(Clone, Copy)]
struct Scaled(DeviceSlice, DeviceSlice);

impl Fp8Linear {
    /// `out = x * weight^T + bias (+ base)`.
    pub(super) fn forward<D: Kernels>(
        &self,
        dev: &mut D,
        params: &LinearParams,
        x: DeviceSlice,
        base: Option<DeviceSlice>,
        out: DeviceSlice,
    ) -> Result<()> {
        let (weight, cols) = (params.weight.value, params.in_cols);
        let (x_scale, weight_scale) = (self.scale(0), self.scale(1));
        dev.launch(AbsMaxScale { x, scale: x_scale, format: Dtype::Float8E4m3 })?;
        dev.launch(AbsMaxScale { x: weight, scale: weight_scale, format: Dtype::Float8E4m3 })?;
        let (a, b) = (self.work.rows.slice(0, x.elems()), self.work.factor.slice(0, weight.elems()));
        dev.launch(Quantize { x, scale: x_scale, out: Some(a), transposed: self.kept, cols })?;
        dev.launch(Quantize { x: weight, scale: weight_scale, out: Some(b), transposed: None, cols })?;
        let bias = params.bias.map(|bias| bias.value);
        multiply(dev, [Scaled(a, x_scale), Scaled(b, weight_scale)], cols, (bias, base), out)
    }

    /// `dx = dout * weight` and `dweight = dout^T * x`, each added to what there is if it is to `add`.
    pub(super) fn backward<D: Kernels>(
        &self,
        dev: &mut D,
        params: &LinearParams,
        (x, dout): (DeviceSlice, DeviceSlice),
        (dx, add): (DeviceSlice, bool),
        accumulate: bool,
    ) -> Result<()> {
        let (weight, dweight, ins, outs) = (params.weight.value, params.weight.grad, params.in_cols, params.out_cols);
        let (tokens, scale) = (x.elems() / ins, self.scale(2));
        dev.launch(AbsMaxScale { x: dout, scale, format: Dtype::Float8E5m2 })?;
        let [rows, columns] = [self.work.rows, self.work.transposed].map(|work| work.view(0, dout.elems(), Dtype::Float8E5m2));
        dev.launch(Quantize { x: dout, scale, out: Some(rows), transposed: Some(columns), cols: outs })?;
        let weight = self.transposed(dev, weight, self.scale(1), ins)?;
        multiply(dev, [Scaled(rows, scale), weight], outs, (None, add.then_some(dx)), dx)?;
        let x = self.kept.map_or_else(|| self.transposed(dev, x, self.scale(0), ins), |kept| Ok(Scaled(kept, self.scale(0))))?;
        multiply(dev, [Scaled(columns, scale), x], tokens, (None, accumulate.then_some(dweight)), dweight)
    }

    /// `x`, whose scale the forward pass left, transposed.
    fn transposed<D: Kernels>(&self, dev: &mut D, x: DeviceSlice, scale: DeviceSlice, cols: usize) -> Result<Scaled> {
        let transposed = self.work.factor.slice(0, x.elems());
        dev.launch(Quantize { x, scale, out: None, transposed: Some(transposed), cols })?;
        Ok(Scaled(transposed, scale))
    }
}

/// The product of `a` and `b`, both in rows of `k`, with what is added to it.
fn multiply<D: Kernels>(
    dev: &mut D,
    [Scaled(a, a_scale), Scaled(b, b_scale)]: [Scaled; 2],
    k: usize,
    (bias, base): (Option<DeviceSlice>, Option<DeviceSlice>),
    c: DeviceSlice,
) -> Result<()> {
    dev.launch(ScaledMatmul { a, a_scale, b, b_scale, bias, base, c, m: a.elems() / k, n: b.elems() / k, k })
}
