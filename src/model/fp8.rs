//! Products of layers in FP8, by one recipe: a scale for each matrix, from the largest magnitude that it has now; E4M3, and E5M2 for gradients
//! of outputs, whose rows lie orders of magnitude apart, so that with one scale for all of them range is worth more than the last bit. That is
//! what Micikevicius et al. (arXiv 2209.05433) found, and what Transformer Engine and torchao do where a matrix has one scale.
//!
//! A library multiplies such matrices only where both lie along the dimension summed over. So a factor is quantized into the orientation that
//! a product reads: forward as it is, backward transposed. Whatever computes a product again, or finds its weights elsewhere, quantizes the same
//! bfloat16 numbers: bits depend neither on what layers keep nor on where weights lie. Layers that keep the outputs of norms and of the activation
//! function keep them in 8 bits, transposed, as the backward pass reads them. All else of 8 bits ends with its product and shares its memory; scales
//! are kept, from the forward to the backward pass.

use super::layer_shape::LayerShape;
use super::shape::ModelShape;
use crate::device::{DeviceSlice, FP8_ALIGN_BYTES, FP8_GRAIN};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// What checkpoints call it: another one gives other bits.
pub(crate) const RECIPE: &str = "fp8: E4M3, gradients of outputs E5M2; a power of two for each matrix, from its largest magnitude";

/// Linear layers of a layer: queries, keys and values; attention's output; what enters the MLP; what leaves it.
pub(super) const LINEARS: usize = 4;
/// Scales of each: of its input, its weight, and the gradient of its output.
const SCALES: usize = 3;
/// Elements from one scale to the next: each begins where products take it.
const SCALE_STRIDE: usize = FP8_ALIGN_BYTES as usize / Dtype::Float32.bytes();

/// Memory of all products in FP8.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Work {
    /// What enters a linear layer, or the gradient of what leaves it, `[T, max]`.
    pub rows: DeviceSlice,
    /// That gradient transposed, `[max, T]`.
    pub transposed: DeviceSlice,
    /// A weight, or what entered, transposed.
    pub factor: DeviceSlice,
    /// fp32 `[layers, LINEARS, SCALES, SCALE_STRIDE]`
    pub scales: DeviceSlice,
}

/// Elements of [`Fp8Work::rows`], `transposed`, `factor` and `scales`.
pub(super) fn work_elems(shape: &ModelShape, tokens: usize) -> [usize; 4] {
    let widest = |elems: &dyn Fn(&(usize, usize)) -> usize| {
        shape.widest(|layer| linears(layer, shape.channels).map(|l| elems(&l)).max().unwrap_or(0))
    };
    let rows = tokens * widest(&|(outs, ins)| *outs.max(ins));
    let (transposed, factor) = (tokens * widest(&|(outs, _)| *outs), widest(&|(outs, ins)| ins * tokens.max(*outs)));
    [rows, transposed, factor, shape.layers.len() * LINEARS * SCALES * SCALE_STRIDE]
}

/// Rows and columns of the weights that are multiplied in FP8: experts and their router are not.
fn linears(layer: &LayerShape, channels: usize) -> impl Iterator<Item = (usize, usize)> {
    let attention = [(layer.attn.qkv_cols(), channels), (channels, layer.attn.out_cols())];
    let (ins, width) = layer.mlp_cols();
    let mlp = layer.mlp.moe().is_none().then_some([(ins, channels), (channels, width)]);
    attention.into_iter().chain(mlp.into_iter().flatten())
}

/// An error unless every product of a micro-batch of `tokens` can be computed in FP8.
///
/// # Errors
/// `Usage` that names the number that does not divide.
pub(crate) fn check(shape: &ModelShape, tokens: usize) -> Result<()> {
    let dims = shape.layers.iter().flat_map(|layer| linears(layer, shape.channels)).flat_map(|(outs, ins)| [outs, ins]);
    let is_odd = |dim: &usize| !dim.is_multiple_of(FP8_GRAIN);
    let remedy = "use --matmul-dtype bfloat16";
    if let Some(dim) = dims.into_iter().find(is_odd) {
        return Err(Error::usage(format!(
            "--matmul-dtype fp8: the model has a matrix of {dim} rows or columns, no multiple of {FP8_GRAIN}; {remedy}"
        )));
    }
    if is_odd(&tokens) {
        return Err(Error::usage(format!(
            "--matmul-dtype fp8: a micro-batch of {tokens} tokens is no multiple of {FP8_GRAIN}; \
             change --per-device-train-batch-size or --seq-length, or {remedy}"
        )));
    }
    Ok(())
}

/// How a linear layer is computed in FP8.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Linear {
    pub work: Fp8Work,
    /// Of its input, its weight, and the gradient of its output, fp32 `[SCALES, SCALE_STRIDE]`.
    scales: DeviceSlice,
    /// Where its input stays, transposed, until the backward pass; `None`: that pass makes it again.
    pub kept: Option<DeviceSlice>,
}

impl Fp8Work {
    /// The part of linear layer `linear` of layer `layer`, by the order of [`linears`].
    pub(super) fn of(self, layer: usize, linear: usize, kept: Option<DeviceSlice>) -> Fp8Linear {
        let elems = SCALES * SCALE_STRIDE;
        Fp8Linear { work: self, scales: self.scales.slice((layer * LINEARS + linear) * elems, elems), kept }
    }
}

impl Fp8Linear {
    /// Scale `which` of [`SCALES`].
    pub(super) fn scale(&self, which: usize) -> DeviceSlice {
        self.scales.slice(which * SCALE_STRIDE, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_of_the_widest_products() {
        // Queries, keys and values of 512 columns, gate and up of 1024, 256 channels, 512 in the middle; of six layers.
        let shape = ModelShape::demo();
        assert_eq!(work_elems(&shape, 128), [128 * 1024, 128 * 1024, 1024 * 256, 6 * 48]);
        assert_eq!(work_elems(&shape, 2048), [2048 * 1024, 2048 * 1024, 2048 * 512, 6 * 48]);
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let mut shape = ModelShape::demo();
        assert!(check(&shape, 48).is_ok());
        let refused = |shape: &ModelShape, tokens| check(shape, tokens).unwrap_err().to_string();
        assert!(refused(&shape, 40).contains("a micro-batch of 40 tokens is no multiple of 16; change --per-device-train-batch-size"));
        shape.channels = 264;
        assert!(refused(&shape, 48).contains("a matrix of 264 rows or columns, no multiple of 16; use --matmul-dtype bfloat16"));
    }
}
