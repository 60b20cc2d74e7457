//! One decoder for every supported family: a Hugging Face `config.json` becomes a [`shape::ModelShape`], the shape determines a table of
//! tensors, and the same forward and backward pass runs all models.
//!
//! A micro-step is `forward(Embed)`, `forward(Layer(0))` and up, `head`, `backward(Layer(L-1))` and down, `backward(Embed)`. After each
//! backward module the gradients of that module's flat range are complete.

mod activation;
mod activation_arrays;
pub(crate) mod activations;
mod arithmetic;
mod attn_gate;
mod backward;
mod config_json;
pub(crate) mod correction;
mod delta;
mod expert_bounds;
pub(crate) mod family;
pub(crate) mod flops;
mod forward;
pub(crate) mod fp8;
mod fp8_linear;
pub(crate) mod freeze;
mod head;
pub(crate) mod head_rows;
pub(crate) mod heads;
mod host_turns;
pub(crate) mod init;
mod latent;
pub(crate) mod layer_shape;
mod linear;
mod loss_tile;
mod micro_batch;
pub(crate) mod mlp_tile;
mod moe;
mod moe_norms;
mod norm;
mod params;
pub(crate) mod policy;
pub(crate) mod presets;
pub(crate) mod products;
pub(crate) mod rope;
pub(crate) mod segments;
pub(crate) mod sequence;
pub(crate) mod shape;
mod shared_expert;
mod sized_allocator;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;
pub(crate) mod text_part;
pub(crate) mod weights;

use crate::device::{DeviceSlice, Embed, Kernels, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use activation_arrays::Activations;
use params::{EmbedParams, HeadParams, LayerParams};
use shape::ModelShape;
use std::ops::Range;
use tensors::TensorTable;

pub(crate) use head::{HeadGradients, MicroStep};
pub(crate) use params::{FrozenMemory, ParamMemory};

/// A model on a device: its weights, its gradients and the memory of one micro-batch. Names and offsets are resolved at construction; the
/// passes only enqueue kernels and allocate nothing.
///
/// Errors of methods with a device argument are errors of the device.
#[derive(Debug)]
pub(crate) struct Model {
    /// The shape of the model.
    pub shape: ModelShape,
    /// Position of each tensor in `weights` and `grads`.
    pub table: TensorTable,
    /// Flat weights of trained tensors in the compute format, `[table.flat_elems()]`.
    pub weights: DeviceSlice,
    /// Flat gradients in the compute format, `[table.flat_elems()]`; padding is never written.
    pub grads: DeviceSlice,
    /// Inputs, saved activations and workspaces of one micro-batch.
    pub(crate) activations: Activations,
    embed: EmbedParams,
    layers: Vec<LayerParams>,
    head: HeadParams,
}

impl Model {
    /// A model of `shape` with the parameters in `memory`, in the dtype of `activations`.
    ///
    /// # Errors
    /// `Usage` when a length or dtype does not fit.
    pub(crate) fn new(shape: ModelShape, memory: ParamMemory, activations: Activations) -> Result<Self> {
        let table = TensorTable::new(&shape);
        memory.check(&table, activations.final_norm_in.dtype())?;
        let flat = params::Flat { table: &table, memory };
        let embed = flat.embed();
        let mut layers: Vec<_> = (0..shape.layers.len()).map(|layer| flat.layer(layer)).collect();
        if let Some(work) = activations.fp8 {
            fp8_linear::give(work, &shape, &activations.layers, &mut layers);
        }
        let (head, ParamMemory { weights, grads, .. }) = (flat.head(), memory);
        Ok(Self { shape, table, weights, grads, activations, embed, layers, head })
    }

    /// Where a segment that begins with `layer` reads the residual stream.
    pub(crate) fn segment_input(&self, layer: usize) -> DeviceSlice {
        self.activations.layers.get(layer).map_or(self.activations.final_norm_in, |layer| layer.input)
    }

    /// Where a segment leaves the residual stream after its last layer.
    pub(crate) fn segment_output(&self) -> DeviceSlice {
        self.activations.final_norm_in
    }

    /// The output of the final norm, which the output matrix multiplies.
    pub(crate) fn hidden_states(&self) -> DeviceSlice {
        self.activations.final_norm_out
    }

    /// The gradient of the residual stream. The backward pass of a segment reads it before its last layer and leaves it before its first.
    pub(crate) fn residual_gradient(&self) -> DeviceSlice {
        self.activations.dresidual
    }

    /// Gathers rows `ids` (int32) of the embedding's gradient into contiguous memory. The rows and their ids stay valid until the next
    /// forward pass. They are stored in memory that is unused until then: the output of the final norm, and the gradient of a norm.
    pub(crate) fn pack_rows<D: Kernels>(&self, dev: &mut D, ids: PinnedSlice) -> Result<()> {
        let (count, channels) = (ids.bytes() / 4, self.shape.channels);
        let (rows, out) = (self.row_ids(0..count), self.packed_rows(&(0..count * channels)));
        dev.copy_h2d(Stream::Compute, ids, rows)?;
        let wte = self.embed.wte.grad.expect("rows of a trained embedding leave early");
        dev.launch(Embed { tokens: rows, positions: rows, wte, wpe: None, out, channels })
    }

    /// A range of the packed rows.
    pub(crate) fn packed_rows(&self, packed: &Range<usize>) -> DeviceSlice {
        self.activations.final_norm_out.slice(packed.start, packed.len())
    }

    /// Ids of the packed rows.
    pub(crate) fn row_ids(&self, rows: Range<usize>) -> DeviceSlice {
        self.activations.dnorm.view(rows.start * 4, rows.len(), Dtype::Int32)
    }
}
