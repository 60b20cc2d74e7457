//! FP8 products of layers. Each matrix has one scale, computed from its current largest magnitude. The format is E4M3, and E5M2 for
//! gradients of outputs: their rows differ by orders of magnitude, so with one scale the range matters more than the last bit. Micikevicius
//! et al. (arXiv 2209.05433) found this, and Transformer Engine and torchao do the same with one scale for each matrix.
//!
//! cuBLASLt multiplies FP8 matrices only if both are contiguous along the dimension of the sum. A factor is therefore quantized in the
//! orientation that the product reads: unchanged in the forward pass, transposed in the backward pass. A recomputed product, or a product
//! with streamed weights, quantizes the same bfloat16 numbers, so bits depend neither on saved activations nor on the residency of weights.
//! Layers that save the outputs of norms and of the activation function save them in 8 bits, transposed, as the backward pass reads them.
//! All other 8-bit matrices live as long as their product and share memory. Scales are saved from the forward to the backward pass. This
//! program's kernels compute the scale of a matrix while they write it. The output of a library needs a separate pass, and so does a
//! weight, once for each version of it.

use super::layer_shape::{Join, LayerShape};
use super::shape::ModelShape;
use crate::device::{DeviceSlice, FP8_ALIGN_BYTES, FP8_GRAIN, ScaleCell};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Name of the recipe in checkpoints, because another recipe gives other bits.
pub(crate) const RECIPE: &str = "fp8: E4M3, gradients of outputs E5M2; a power of two for each matrix, from its largest magnitude";

/// Linear layers of a layer: queries, keys and values; attention's output; the MLP's first matrix; the MLP's last matrix.
pub(super) const LINEARS: usize = 4;
/// Scales of each linear layer: of its input and of the gradient of its output, which are computed for each micro-batch, and of its weight.
const SCALES: usize = 3;
const OF_MICRO_BATCH: usize = 2;
/// Elements between two scales, so that each scale has the alignment that products require.
const SCALE_STRIDE: usize = FP8_ALIGN_BYTES as usize / Dtype::Float32.bytes();

/// Memory of all FP8 products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Work {
    /// Input of a linear layer, or gradient of its output, `[T, max]`.
    pub rows: DeviceSlice,
    /// Transposed gradient of the output, `[max, T]`.
    pub transposed: DeviceSlice,
    /// Weight, or transposed weight or input.
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

/// Rows and columns of the weights of FP8 products. Experts and their router are excluded.
fn linears(layer: &LayerShape, channels: usize) -> impl Iterator<Item = (usize, usize)> {
    let attention = [(layer.attn.projected_cols(), channels), (channels, layer.attn.value_cols())];
    let (ins, width) = layer.mlp_cols();
    let mlp = layer.mlp.moe().is_none().then_some([(ins, channels), (channels, width)]);
    attention.into_iter().chain(mlp.into_iter().flatten())
}

/// An error unless every product of a micro-batch of `tokens` can be computed in FP8.
///
/// # Errors
/// `Usage` with the size that is not a multiple.
pub(crate) fn check(shape: &ModelShape, tokens: usize) -> Result<()> {
    let dims = shape.layers.iter().flat_map(|layer| linears(layer, shape.channels)).flat_map(|(outs, ins)| [outs, ins]);
    if shape.has_delta() {
        return Err(Error::usage("--matmul-dtype fp8: not supported for models with gated delta rules; use --matmul-dtype bfloat16"));
    }
    if shape.has_latent() {
        return Err(Error::usage("--matmul-dtype fp8: not supported for models with latent attention; use --matmul-dtype bfloat16"));
    }
    let is_odd = |dim: &usize| !dim.is_multiple_of(FP8_GRAIN);
    let remedy = "use --matmul-dtype bfloat16";
    if let Some(dim) = dims.into_iter().find(is_odd) {
        return Err(Error::usage(format!(
            "--matmul-dtype fp8: the model has a matrix of {dim} rows or columns, which is not a multiple of {FP8_GRAIN}; {remedy}"
        )));
    }
    if is_odd(&tokens) {
        return Err(Error::usage(format!(
            "--matmul-dtype fp8: a micro-batch of {tokens} tokens is not a multiple of {FP8_GRAIN}; change \
                --per-device-train-batch-size or --seq-length, or {remedy}"
        )));
    }
    Ok(())
}

/// Last writer of a matrix before a product reads it, which computes its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LastWriter {
    /// A library; a separate pass over the matrix computes the scale.
    Library,
    /// A kernel in the same branch of the residual stream.
    Branch,
    /// In the backward pass, the norm of the branch above, which adds to the gradient of the residual stream.
    Above,
}

/// Last writers of the input of each linear layer, in the order of [`linears`], and of the gradient of its output.
pub(super) fn writers(layers: &[LayerShape], layer: usize) -> [[LastWriter; OF_MICRO_BATCH]; LINEARS] {
    let LayerShape { pre_norm, join, .. } = layers[layer];
    let entry = if pre_norm { LastWriter::Branch } else { LastWriter::Library };
    // A branch that is scaled or normalised before the addition computes its own gradient from that of the residual stream.
    let exit = |norm_above: bool| match join {
        Join::Scale(_) | Join::Norm => LastWriter::Branch,
        Join::Add if norm_above => LastWriter::Above,
        Join::Add => LastWriter::Library,
    };
    // Above the last layer is the final norm.
    let next = layers.get(layer + 1).is_none_or(|next| next.pre_norm);
    [[entry, LastWriter::Library], [LastWriter::Library, exit(pre_norm)], [entry, LastWriter::Branch], [LastWriter::Branch, exit(next)]]
}

/// FP8 parameters of a linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Linear {
    pub work: Fp8Work,
    /// Scales of the input, of the gradient of the output, and of the weight, each fp32 `[1]`.
    scales: [DeviceSlice; SCALES],
    /// Last writers of the input and of the gradient of the output.
    pub writers: [LastWriter; OF_MICRO_BATCH],
    /// Memory of the saved, transposed input; `None`: the backward pass recomputes it.
    pub kept: Option<DeviceSlice>,
}

impl Fp8Work {
    /// The parameters of linear layer `linear` of layer `layer`, in the order of [`linears`].
    pub(super) fn of(self, layer: usize, linear: usize, writers: [LastWriter; OF_MICRO_BATCH], kept: Option<DeviceSlice>) -> Fp8Linear {
        let each = self.scales.elems() / SCALES;
        let scale = |which| self.scales.slice(which * each + (layer * LINEARS + linear) * SCALE_STRIDE, 1);
        Fp8Linear { work: self, scales: std::array::from_fn(scale), writers, kept }
    }

    /// Scales that kernels raise; they must be 0 before a micro-batch.
    pub(super) fn raised(&self) -> DeviceSlice {
        self.scales.slice(0, self.scales.elems() / SCALES * OF_MICRO_BATCH)
    }
}

impl Fp8Linear {
    /// Scale of the input.
    pub(super) fn input(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[0], format: Dtype::Float8E4m3 }
    }

    /// Scale of the gradient of the output.
    pub(super) fn gradient(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[1], format: Dtype::Float8E5m2 }
    }

    /// Scale of the weight.
    pub(super) fn weight(&self) -> ScaleCell {
        ScaleCell { scale: self.scales[2], format: Dtype::Float8E4m3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_of_the_widest_products() {
        // Six layers with 512 columns of queries, keys and values, 1024 columns of gate and up, 256 channels, 512 inside the MLP.
        let shape = ModelShape::demo();
        assert_eq!(work_elems(&shape, 128), [128 * 1024, 128 * 1024, 1024 * 256, 6 * 48]);
        assert_eq!(work_elems(&shape, 2048), [2048 * 1024, 2048 * 1024, 2048 * 512, 6 * 48]);
    }

    #[test]
    fn kernels_write_all_ranges_except_those_of_libraries() {
        use LastWriter::{Above, Branch, Library};
        let mut layers = ModelShape::demo().layers;
        let last = layers.len() - 1;
        let llama = [[Branch, Library], [Library, Above], [Branch, Branch], [Branch, Above]];
        assert_eq!([writers(&layers, 0), writers(&layers, last)], [llama; 2]);
        // Below a layer without norms, the gradient comes from a product.
        layers[1].pre_norm = false;
        assert_eq!(writers(&layers, 0)[3], [Branch, Library]);
        assert_eq!(writers(&layers, 1), [[Library; 2], [Library; 2], [Library, Branch], [Branch, Above]]);
        for join in [Join::Scale(0.5), Join::Norm] {
            layers[1].join = join;
            assert_eq!([1, 3].map(|linear| writers(&layers, 1)[linear][1]), [Branch; 2]);
        }
    }

    #[test]
    fn indivisible_widths_are_named() {
        let mut shape = ModelShape::demo();
        assert!(check(&shape, 48).is_ok());
        let refused = |shape: &ModelShape, tokens| check(shape, tokens).unwrap_err().to_string();
        assert!(refused(&shape, 40).contains("a micro-batch of 40 tokens is not a multiple of 16; change --per-device-train-batch-size"));
        shape.channels = 264;
        assert!(
            refused(&shape, 48).contains("a matrix of 264 rows or columns, which is not a multiple of 16; use --matmul-dtype bfloat16")
        );
    }
}
