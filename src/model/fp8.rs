//! Products of layers in FP8, by one recipe: a scale for each matrix, from the largest magnitude that it has now; E4M3, and E5M2 for gradients
//! of outputs, whose rows lie orders of magnitude apart, so that with one scale for all of them range is worth more than the last bit. That is
//! what Micikevicius et al. (arXiv 2209.05433) found, and what Transformer Engine and torchao do where a matrix has one scale.
//!
//! A library multiplies such matrices only where both lie along the dimension summed over. So a factor is quantized into the orientation that
//! a product reads: forward as it is, backward transposed. Whatever computes a product again, or finds its weights elsewhere, quantizes the same
//! bfloat16 numbers: bits depend neither on what layers keep nor on where weights lie. Layers that keep the outputs of norms and of the activation
//! function keep them in 8 bits, transposed, as the backward pass reads them. All else of 8 bits ends with its product and shares its memory; scales
//! are kept, from the forward to the backward pass. A kernel of ours that writes what a product reads finds its scale on the way; what a library
//! writes takes a pass, and so does a weight, once for each version of it.

use super::layer_shape::{Join, LayerShape};
use super::shape::ModelShape;
use crate::device::{DeviceSlice, FP8_ALIGN_BYTES, FP8_GRAIN, ScaleCell};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// What checkpoints call it: another one gives other bits.
pub(crate) const RECIPE: &str = "fp8: E4M3, gradients of outputs E5M2; a power of two for each matrix, from its largest magnitude";

/// Linear layers of a layer: queries, keys and values; attention's output; what enters the MLP; what leaves it.
pub(super) const LINEARS: usize = 4;
/// Scales of each: of its input and of the gradient of its output, which each micro-batch has anew, and of its weight.
const SCALES: usize = 3;
const OF_MICRO_BATCH: usize = 2;
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
    /// fp32 `[SCALES, layers, LINEARS, SCALE_STRIDE]`
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

/// Who writes a matrix last before a product reads it, and so finds its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LastWriter {
    /// A library: a pass over the matrix finds it.
    Library,
    /// A kernel within the same branch of the residual stream.
    Branch,
    /// Backward, the norm of the branch above, which adds to the gradient of the residual stream.
    Above,
}

/// Of the input of each linear layer of a layer, by the order of [`linears`], and of the gradient of its output.
pub(super) fn writers(layers: &[LayerShape], layer: usize) -> [[LastWriter; OF_MICRO_BATCH]; LINEARS] {
    let LayerShape { pre_norm, join, .. } = layers[layer];
    let entry = if pre_norm { LastWriter::Branch } else { LastWriter::Library };
    // A branch that is scaled or normalised before it joins makes its own gradient of that of the residual stream.
    let exit = |norm_above: bool| match join {
        Join::Scale(_) | Join::Norm => LastWriter::Branch,
        Join::Add if norm_above => LastWriter::Above,
        Join::Add => LastWriter::Library,
    };
    // Above the last layer is the norm before the output matrix.
    let next = layers.get(layer + 1).is_none_or(|next| next.pre_norm);
    [[entry, LastWriter::Library], [LastWriter::Library, exit(pre_norm)], [entry, LastWriter::Branch], [LastWriter::Branch, exit(next)]]
}

/// How a linear layer is computed in FP8.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Linear {
    pub work: Fp8Work,
    /// Of its input, of the gradient of its output, and of its weight, each fp32 `[1]`.
    scales: [DeviceSlice; SCALES],
    /// Of its input and of the gradient of its output.
    pub writers: [LastWriter; OF_MICRO_BATCH],
    /// Where its input stays, transposed, until the backward pass; `None`: that pass makes it again.
    pub kept: Option<DeviceSlice>,
}

impl Fp8Work {
    /// The part of linear layer `linear` of layer `layer`, by the order of [`linears`].
    pub(super) fn of(self, layer: usize, linear: usize, writers: [LastWriter; OF_MICRO_BATCH], kept: Option<DeviceSlice>) -> Fp8Linear {
        let each = self.scales.elems() / SCALES;
        let scale = |which| self.scales.slice(which * each + (layer * LINEARS + linear) * SCALE_STRIDE, 1);
        Fp8Linear { work: self, scales: std::array::from_fn(scale), writers, kept }
    }

    /// The scales that kernels raise: 0 before a micro-batch.
    pub(super) fn raised(&self) -> DeviceSlice {
        self.scales.slice(0, self.scales.elems() / SCALES * OF_MICRO_BATCH)
    }
}

impl Fp8Linear {
    /// The scale of its input.
    pub(super) fn input(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[0], format: Dtype::Float8E4m3 }
    }

    /// The scale of the gradient of its output.
    pub(super) fn gradient(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[1], format: Dtype::Float8E5m2 }
    }

    /// The scale of its weight.
    pub(super) fn weight(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[2], format: Dtype::Float8E4m3 }
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
    fn kernels_write_all_but_what_libraries_do() {
        use LastWriter::{Above, Branch, Library};
        let mut layers = ModelShape::demo().layers;
        let last = layers.len() - 1;
        let llama = [[Branch, Library], [Library, Above], [Branch, Branch], [Branch, Above]];
        assert_eq!([writers(&layers, 0), writers(&layers, last)], [llama; 2]);
        // What is below a layer that normalises nothing has the gradient from a product.
        layers[1].pre_norm = false;
        assert_eq!(writers(&layers, 0)[3], [Branch, Library]);
        assert_eq!(writers(&layers, 1), [[Library; 2], [Library; 2], [Library, Branch], [Branch, Above]]);
        for join in [Join::Scale(0.5), Join::Norm] {
            layers[1].join = join;
            assert_eq!([1, 3].map(|linear| writers(&layers, 1)[linear][1]), [Branch; 2]);
        }
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
