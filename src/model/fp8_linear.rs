//! A linear layer in FP8, forward and backward.

use super::Model;
use super::activation_arrays::LayerActivations;
use super::fp8::{self, Fp8Linear, Fp8Work, LastWriter};
use super::params::{LayerParams, LinearParams, MatrixParam};
use super::shape::ModelShape;
use super::tensors::Module;
use crate::device::{AbsMaxScale, DeviceSlice, Kernels, Quantize, ScaleCell, ScaledMatmul, Zero};
use crate::error::Result;

/// Makes the linear layers of `layers` use FP8, except experts.
pub(super) fn give(work: Fp8Work, shape: &ModelShape, activations: &[LayerActivations], layers: &mut [LayerParams]) {
    for (index, layer) in layers.iter_mut().enumerate() {
        let (writers, kept) = (fp8::writers(&shape.layers, index), activations[index].fp8);
        let dense = [&mut layer.mlp_in, &mut layer.mlp_out].into_iter().filter(|_| shape.layers[index].mlp.moe().is_none());
        let linears = [&mut layer.qkv, &mut layer.attn_out].into_iter().chain(dense);
        for (at, linear) in linears.enumerate() {
            linear.fp8 = Some(work.of(index, at, writers[at], kept[at]));
        }
    }
}

/// An 8-bit matrix and its scale.
#[derive(Clone, Copy)]
struct Scaled(DeviceSlice, DeviceSlice);

impl Model {
    /// Begins the forward pass of a micro-batch: the scales of the last one are no longer valid.
    pub(crate) fn forget_scales<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        self.activations.fp8.map_or(Ok(()), |work| dev.launch(Zero { x: work.raised() }))
    }

    /// Computes the scale of the residual stream's gradient above `layer`, if the layer reads it in FP8 and the layer above computed the scale,
    /// in an earlier visit.
    pub(crate) fn scale_residual_gradient<D: Kernels>(&self, dev: &mut D, layer: usize) -> Result<()> {
        let cell = self.layers[layer].mlp_out.gradient_scale(LastWriter::Above);
        cell.map_or(Ok(()), |cell| find_scale(dev, self.activations.dresidual, cell))
    }

    /// Computes the scales of the weights of `module`, if it uses FP8. All products use them until the weights change. The weights must be
    /// on the device.
    pub(crate) fn scale_weights<D: Kernels>(&self, dev: &mut D, module: Module) -> Result<()> {
        let Module::Layer(layer) = module else { return Ok(()) };
        let LayerParams { qkv, attn_out, mlp_in, mlp_out, .. } = &self.layers[layer];
        let scale = |linear: &LinearParams| linear.fp8.map_or(Ok(()), |fp8| find_scale(dev, linear.weight.value, fp8.weight()));
        [qkv, attn_out, mlp_in, mlp_out].into_iter().try_for_each(scale)
    }
}

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
        let (weight, cols, bias) = (params.weight.value, params.in_cols, params.bias.map(|bias| bias.value));
        let [x_cell, weight_cell] = [self.input(), self.weight()];
        find_unless_found(dev, x, x_cell, self.writers[0])?;
        let (a, b) = (self.work.rows.slice(0, x.elems()), self.work.factor.slice(0, weight.elems()));
        dev.launch(Quantize { x, scale: x_cell.scale, out: Some(a), transposed: self.kept, cols })?;
        dev.launch(Quantize { x: weight, scale: weight_cell.scale, out: Some(b), transposed: None, cols })?;
        multiply(dev, [Scaled(a, x_cell.scale), Scaled(b, weight_cell.scale)], cols, (bias, base), out)
    }

    /// `dx = dout * weight` and, unless the weight is frozen, `dweight = dout^T * x`; `add` and `accumulate` add to the present values.
    pub(super) fn backward<D: Kernels>(
        &self,
        dev: &mut D,
        params: &LinearParams,
        (x, dout): (DeviceSlice, DeviceSlice),
        (dx, add): (DeviceSlice, bool),
        accumulate: bool,
    ) -> Result<()> {
        let (MatrixParam { value: weight, grad: dweight }, ins, outs) = (params.weight, params.in_cols, params.out_cols);
        let (tokens, ScaleCell { scale, format }) = (x.elems() / ins, self.gradient());
        find_unless_found(dev, dout, self.gradient(), self.writers[1])?;
        let [rows, columns] = [self.work.rows, self.work.transposed].map(|work| work.view(0, dout.elems(), format));
        let transposed = dweight.map(|_| columns);
        dev.launch(Quantize { x: dout, scale, out: Some(rows), transposed, cols: outs })?;
        let weight = self.transposed(dev, weight, self.weight(), ins)?;
        multiply(dev, [Scaled(rows, scale), weight], outs, (None, add.then_some(dx)), dx)?;
        let Some(dweight) = dweight else { return Ok(()) };
        let x = self.kept.map_or_else(|| self.transposed(dev, x, self.input(), ins), |kept| Ok(Scaled(kept, self.input().scale)))?;
        multiply(dev, [Scaled(columns, scale), x], tokens, (None, accumulate.then_some(dweight)), dweight)
    }

    /// `x` quantized with its known scale, transposed.
    fn transposed<D: Kernels>(&self, dev: &mut D, x: DeviceSlice, ScaleCell { scale, .. }: ScaleCell, cols: usize) -> Result<Scaled> {
        let transposed = self.work.factor.slice(0, x.elems());
        dev.launch(Quantize { x, scale, out: None, transposed: Some(transposed), cols })?;
        Ok(Scaled(transposed, scale))
    }
}

/// Computes the scale of `x`, unless its `writer` has done so.
fn find_unless_found<D: Kernels>(dev: &mut D, x: DeviceSlice, cell: ScaleCell, writer: LastWriter) -> Result<()> {
    if writer == LastWriter::Library { find_scale(dev, x, cell) } else { Ok(()) }
}

/// Computes a scale by a pass over `x`.
fn find_scale<D: Kernels>(dev: &mut D, x: DeviceSlice, ScaleCell { scale, format }: ScaleCell) -> Result<()> {
    dev.launch(AbsMaxScale { x, scale, format })
}

/// The product of `a` and `b`, both with rows of `k`, plus bias and base.
fn multiply<D: Kernels>(
    dev: &mut D,
    [Scaled(a, a_scale), Scaled(b, b_scale)]: [Scaled; 2],
    k: usize,
    (bias, base): (Option<DeviceSlice>, Option<DeviceSlice>),
    c: DeviceSlice,
) -> Result<()> {
    dev.launch(ScaledMatmul { a, a_scale, b, b_scale, bias, base, c, m: a.elems() / k, n: b.elems() / k, k })
}
