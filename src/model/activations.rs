//! The memory of one micro-batch: inputs, everything that the forward pass keeps for the backward, and workspaces. It is
//! planned and named before anything is allocated.

use super::shape::{ModelShape, Norm, Positions};
use crate::device::{Device, DeviceSlice};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;

/// Each layer's part of an allocation starts at a multiple of this many elements.
const LAYER_ALIGN_ELEMS: usize = 128;

/// How many logits exist at once: the loss takes `rows` tokens at a time and runs over the vocabulary in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossTile {
    /// Tokens of one pass; more than there are means all.
    pub rows: usize,
    /// Vocabulary columns of one tile; more than there are means all, and then logits are computed once, not twice.
    pub vocab: usize,
}

/// One planned piece of device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Name for people: `layers.qkv`.
    pub name: &'static str,
    /// Elements.
    pub elems: usize,
    /// Format.
    pub dtype: Dtype,
}

impl Allocation {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }
}

/// What [`Activations`] will need; nothing is allocated yet.
#[derive(Clone, Debug)]
pub struct ActivationPlan {
    shape: ModelShape,
    batch: usize,
    seq_length: usize,
    dtype: Dtype,
    tile: LossTile,
    allocations: Vec<Allocation>,
}

impl ActivationPlan {
    /// Plans a micro-batch of `batch` sequences of `seq_length` tokens, computed in `dtype`.
    ///
    /// # Errors
    /// `Usage` when a size is zero, the sequence is longer than the model's positions, or bytes overflow.
    pub fn new(shape: &ModelShape, batch: usize, seq_length: usize, dtype: Dtype, tile: LossTile) -> Result<Self> {
        if batch == 0 || seq_length == 0 || tile.rows == 0 || tile.vocab == 0 {
            return Err(Error::usage("batch size, sequence length and loss tile must be at least 1"));
        }
        if seq_length > shape.max_positions {
            return Err(Error::usage(format_args!("sequence length {seq_length}: the model has {} positions", shape.max_positions)));
        }
        let rows = batch.checked_mul(seq_length).ok_or_else(too_large)?.min(tile.rows);
        let tile = LossTile { rows, vocab: tile.vocab.min(shape.vocab) };
        let mut plan = Self { shape: shape.clone(), batch, seq_length, dtype, tile, allocations: Vec::new() };
        let mut allocations = Vec::new();
        plan.lay_out(|name, elems, dtype| {
            allocations.push(Allocation { name, elems, dtype });
            Ok(DeviceSlice { addr: 0, elems, dtype })
        })?;
        plan.allocations = allocations;
        Ok(plan)
    }

    /// Every allocation, in order.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// The sum of all allocations.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.allocations.iter().map(|a| a.bytes() as u64).sum())
    }

    /// Allocates what was planned.
    ///
    /// # Errors
    /// The device's, when something does not fit.
    pub fn allocate<D: Device>(&self, dev: &mut D) -> Result<Activations> {
        self.lay_out(|name, elems, dtype| dev.alloc(name, elems, dtype))
    }

    /// The one description of the memory: planning records what it asks for, allocating fulfils it.
    fn lay_out(&self, alloc: impl FnMut(&'static str, usize, Dtype) -> Result<DeviceSlice>) -> Result<Activations> {
        let tokens = self.batch * self.seq_length;
        let mut memory = Memory { alloc, tokens, dtype: self.dtype };
        let ModelShape { channels, ffn, .. } = self.shape;
        let rope = match self.shape.positions {
            Positions::Learned => None,
            Positions::Rope(rope) => Some(memory.new("rope_table", &[self.seq_length, rope.rotary_dim], Dtype::Float32)?),
        };
        Ok(Activations {
            batch: self.batch,
            seq_length: self.seq_length,
            tile: self.tile,
            tokens: memory.new("tokens", &[tokens], Dtype::Int32)?,
            targets: memory.new("targets", &[tokens], Dtype::Int32)?,
            rope_table: rope,
            embed_out: memory.rows("embed_out", channels)?,
            layers: self.layers(&mut memory)?,
            final_norm_out: memory.rows("final_norm_out", channels)?,
            final_norm_stats: memory.new("final_norm_stats", &[tokens, self.stats_cols()], Dtype::Float32)?,
            logits: memory.new("logits_tile", &[self.tile.rows, self.tile.vocab], self.dtype)?,
            loss_stats: memory.new("loss_stats", &[self.tile.rows, 3], Dtype::Float32)?,
            loss: memory.new("loss", &[1], Dtype::Float32)?,
            dresidual: memory.rows("dresidual", channels)?,
            dnorm: memory.rows("dnorm", channels)?,
            dinner: memory.rows("dinner", ffn.max(self.shape.attn_cols()))?,
            dfused: memory.rows("dfused", self.shape.mlp_in_cols().max(self.shape.qkv_cols()))?,
        })
    }

    fn layers<A>(&self, memory: &mut Memory<A>) -> Result<Vec<LayerActivations>>
    where
        A: FnMut(&'static str, usize, Dtype) -> Result<DeviceSlice>,
    {
        let ModelShape { layers, channels, ffn, heads, kv_heads, qk_norm, .. } = self.shape;
        let (qkv_cols, stats_cols) = (self.shape.qkv_cols(), self.stats_cols());
        let mut each = |name, cols, dtype| memory.per_layer(name, layers, cols, dtype);
        let (dtype, fp32) = (self.dtype, Dtype::Float32);
        let attn_norm_out = each("layers.attn_norm_out", channels, dtype)?;
        let attn_norm_stats = each("layers.attn_norm_stats", stats_cols, fp32)?;
        let qkv_raw = if qk_norm { Some(each("layers.qkv_raw", qkv_cols, dtype)?) } else { None };
        let qk_rstd = if qk_norm { Some(each("layers.qk_rstd", heads + kv_heads, fp32)?) } else { None };
        let qkv = each("layers.qkv", qkv_cols, dtype)?;
        let attn_out = each("layers.attn_out", self.shape.attn_cols(), dtype)?;
        let lse = each("layers.lse", heads, fp32)?;
        let mid = each("layers.mid", channels, dtype)?;
        let mlp_norm_out = each("layers.mlp_norm_out", channels, dtype)?;
        let mlp_norm_stats = each("layers.mlp_norm_stats", stats_cols, fp32)?;
        let mlp_in = each("layers.mlp_in", self.shape.mlp_in_cols(), dtype)?;
        let mlp_act = each("layers.mlp_act", ffn, dtype)?;
        let out = each("layers.out", channels, dtype)?;
        let layer = |l: usize| LayerActivations {
            attn_norm_out: attn_norm_out.at(l),
            attn_norm_stats: attn_norm_stats.at(l),
            qk_norm: qkv_raw.zip(qk_rstd).map(|(raw, rstd)| QkNormActivations { raw: raw.at(l), rstd: rstd.at(l) }),
            qkv: qkv.at(l),
            attn_out: attn_out.at(l),
            lse: lse.at(l),
            mid: mid.at(l),
            mlp_norm_out: mlp_norm_out.at(l),
            mlp_norm_stats: mlp_norm_stats.at(l),
            mlp_in: mlp_in.at(l),
            mlp_act: mlp_act.at(l),
            out: out.at(l),
        };
        Ok((0..layers).map(layer).collect())
    }

    /// LayerNorm keeps mean and rstd, RMSNorm only rstd.
    fn stats_cols(&self) -> usize {
        if self.shape.norm == Norm::Layer { 2 } else { 1 }
    }
}

/// Device memory of one micro-batch of T = `batch * seq_length` tokens. The compute format unless said otherwise.
#[derive(Debug)]
pub struct Activations {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Tile of the loss, cut to what there is.
    pub tile: LossTile,
    /// Token ids int32 `[T]`; filled by the caller.
    pub tokens: DeviceSlice,
    /// Next tokens int32 `[T]`; filled by the caller.
    pub targets: DeviceSlice,
    /// fp32 `[seq_length, rotary_dim / 2, 2]`; filled by the caller with [`super::rope::rope_table`].
    pub rope_table: Option<DeviceSlice>,
    /// Mean loss of the optimizer step, fp32 `[1]`; without the loss scale.
    pub loss: DeviceSlice,
    /// Residual stream that enters layer 0, `[T, channels]`.
    pub(super) embed_out: DeviceSlice,
    pub(super) layers: Vec<LayerActivations>,
    pub(super) final_norm_out: DeviceSlice,
    pub(super) final_norm_stats: DeviceSlice,
    pub(super) logits: DeviceSlice,
    pub(super) loss_stats: DeviceSlice,
    /// Gradient of the residual stream, updated in place from the head down to the embeddings, `[T, channels]`.
    pub(super) dresidual: DeviceSlice,
    /// Gradient of a norm's output, `[T, channels]`.
    pub(super) dnorm: DeviceSlice,
    /// Gradient of what enters a second matrix: attention's output or the activation, `[T, max]`.
    pub(super) dinner: DeviceSlice,
    /// Gradient of what leaves a first matrix: qkv or gate and up, `[T, max]`.
    pub(super) dfused: DeviceSlice,
}

/// What one layer keeps, by the order of the forward pass. First dimension T unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerActivations {
    pub attn_norm_out: DeviceSlice,
    pub attn_norm_stats: DeviceSlice,
    pub qk_norm: Option<QkNormActivations>,
    /// Normalised and rotated.
    pub qkv: DeviceSlice,
    pub attn_out: DeviceSlice,
    /// `[batch, heads, seq_length]`
    pub lse: DeviceSlice,
    /// Residual stream after attention.
    pub mid: DeviceSlice,
    pub mlp_norm_out: DeviceSlice,
    pub mlp_norm_stats: DeviceSlice,
    pub mlp_in: DeviceSlice,
    pub mlp_act: DeviceSlice,
    /// Residual stream after the layer.
    pub out: DeviceSlice,
}

/// The projections before the norm of queries and keys, and its statistics.
#[derive(Clone, Copy, Debug)]
pub(super) struct QkNormActivations {
    pub raw: DeviceSlice,
    pub rstd: DeviceSlice,
}

/// Asks for memory with checked sizes.
struct Memory<A> {
    alloc: A,
    tokens: usize,
    dtype: Dtype,
}

impl<A: FnMut(&'static str, usize, Dtype) -> Result<DeviceSlice>> Memory<A> {
    fn new(&mut self, name: &'static str, dims: &[usize], dtype: Dtype) -> Result<DeviceSlice> {
        let elems = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim)).ok_or_else(too_large)?;
        // Sums of all allocations and rounding up must fit as well.
        if elems > 1 << 48 {
            return Err(too_large());
        }
        (self.alloc)(name, elems, dtype)
    }

    fn rows(&mut self, name: &'static str, cols: usize) -> Result<DeviceSlice> {
        self.new(name, &[self.tokens, cols], self.dtype)
    }

    fn per_layer(&mut self, name: &'static str, layers: usize, cols: usize, dtype: Dtype) -> Result<PerLayer> {
        let elems = self.tokens.checked_mul(cols).ok_or_else(too_large)?;
        let stride = elems.checked_next_multiple_of(LAYER_ALIGN_ELEMS).ok_or_else(too_large)?;
        Ok(PerLayer { all: self.new(name, &[layers, stride], dtype)?, elems, stride })
    }
}

/// One allocation cut into equal parts, one a layer.
#[derive(Clone, Copy)]
struct PerLayer {
    all: DeviceSlice,
    elems: usize,
    stride: usize,
}

impl PerLayer {
    fn at(self, layer: usize) -> DeviceSlice {
        self.all.slice(layer * self.stride, self.elems)
    }
}

fn too_large() -> Error {
    Error::usage("activations: this batch size and sequence length overflow")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILE: LossTile = LossTile { rows: 64, vocab: 100 };

    #[test]
    fn the_plan_is_what_gets_allocated() {
        let plan = ActivationPlan::new(&ModelShape::demo(), 2, 48, Dtype::Bfloat16, TILE).unwrap();
        let mut asked = Vec::new();
        let activations = plan.lay_out(|name, elems, dtype| {
            asked.push(Allocation { name, elems, dtype });
            Ok(DeviceSlice { addr: 0x1000, elems, dtype })
        });
        assert_eq!(asked, plan.allocations());
        let activations = activations.unwrap();
        assert_eq!((activations.logits.elems, activations.loss_stats.elems), (64 * 100, 64 * 3));
        // 96 tokens of 512 columns in each layer, one after another.
        let starts = activations.layers.iter().map(|layer| layer.qkv.addr - 0x1000);
        assert!(starts.eq((0..6).map(|l| l * 96 * 512 * 2)));
    }

    #[test]
    fn bytes_are_those_of_a_count_by_hand() {
        let shape = ModelShape::demo();
        let plan = ActivationPlan::new(&shape, 1, 128, Dtype::Bfloat16, LossTile { rows: 999, vocab: 999 }).unwrap();
        let (c, f, t) = (256, 512, 128);
        // Halves: two norms, qkv, attention, mid, gate and up, activation, out. Floats: two rstd, lse of 8 heads.
        let layer = t * (2 * (c + 2 * c + c + c + c + 2 * f + f + c) + 4 * (2 + 8));
        let outside = t * (2 * (c + c) + 4 + 8) + 4 * t * 32;
        let loss = t * (2 * 256 + 4 * 3) + 4;
        let work = 2 * t * (c + c + f + 2 * f);
        assert_eq!(plan.bytes(), Bytes((6 * layer + outside + loss + work) as u64));
    }

    #[test]
    fn impossible_sizes_are_usage_errors() {
        let plan = |batch, seq_length, tile| ActivationPlan::new(&ModelShape::demo(), batch, seq_length, Dtype::Float32, tile);
        assert!(plan(0, 16, TILE).is_err());
        assert!(plan(1, 0, TILE).is_err());
        assert!(plan(1, 16, LossTile { rows: 0, vocab: 1 }).is_err());
        assert!(plan(1, 1025, TILE).unwrap_err().to_string().contains("1024"));
        assert!(plan(usize::MAX, 2, TILE).unwrap_err().to_string().contains("overflow"));
        assert!(plan(usize::MAX / 1024, 1024, TILE).unwrap_err().to_string().contains("overflow"));
    }
}
