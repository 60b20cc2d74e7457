//! The memory of one micro-batch: inputs, activations that the forward pass saves for the backward pass, and workspaces. It is planned and
//! named before anything is allocated.
//!
//! The [`LayerPolicy`] of a layer determines its saved activations. All other activations lie in buffers shared by all layers, whose passes
//! run one after another, on one stream.

mod latent;
pub(crate) use super::activation_arrays::Activations;
use super::activation_arrays::{
    AttnGateWork, DeltaWork, ExpertWork, GateWork, HeadRowsWork, LayerActivations, LossWork, MoeNormActivations, NormActivations,
    ObjectiveWork, ProjectedQkv, RawActivations, RoutedActivations, SequenceWork, SharedWork,
};
use super::expert_bounds::bounds_stride;
pub(crate) use super::expert_bounds::{bounds_elems, expert_bounds};
use super::fp8::{self, Fp8Work, LINEARS};
use super::head_rows::{self, HeadRows};
use super::heads::{SequenceRank, shared_cols, widest_cols};
use super::host_turns::{BUFFERS, give_turns, host_slots};
use super::layer_shape::{Attn, LayerShape, Moe, NormKind, NormSpec};
pub use super::loss_tile::LossTile;
use super::policy::LayerPolicy;
use super::shape::ModelShape;
use super::sized_allocator::{Alloc, ByLayer, LayerParts, SizedAllocator, product, too_large};
use crate::data::rows::batch;
use crate::device::{Device, DeviceSlice, Lease};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::pinned::HostMemory;
use crate::memory::MemorySpace;
use crate::objective::{Objective, REPORT_WORDS};
use crate::pair_loss::{PAIR_WORDS, SUM_WORDS};
use crate::units::Bytes;

/// One planned allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Name for people: `layers.qkv`.
    pub name: &'static str,
    pub space: MemorySpace,
    /// Elements.
    pub elems: usize,
    pub dtype: Dtype,
}

impl Allocation {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }
}

/// A micro-batch whose memory is planned.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    pub shape: &'a ModelShape,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence, over all ranks that share it.
    pub seq_length: usize,
    /// Ranks that share each sequence.
    pub(crate) sequence_ranks: usize,
    /// Whether a sequence may hold several documents.
    pub separates_documents: bool,
    /// The loss of pairs, completions or a teacher; `None` for the cross-entropy of tokens.
    pub objective: Option<Objective>,
    /// Compute format.
    pub dtype: Dtype,
    /// Format of the logits: the compute format or fp32.
    pub logits_dtype: Dtype,
    /// Whether products of layers are computed in FP8.
    pub fp8: bool,
    /// Rows that the head computes.
    pub head_rows: HeadRows,
    /// Size of the logits that exist at once.
    pub tile: LossTile,
    /// Tokens of a tile of the MLP; `None`: the MLP is not divided.
    pub(crate) mlp_tile: Option<usize>,
    pub(crate) policies: &'a [LayerPolicy],
    /// First layer of each segment: see [`super::segments::LayerSegments`]. Segments use the same memory for activations.
    pub(crate) segments: &'a [usize],
}

/// The memory plan of [`Activations`]; nothing is allocated yet.
#[derive(Clone, Debug)]
pub struct ActivationPlan {
    shape: ModelShape,
    batch: usize,
    seq_length: usize,
    sequence_ranks: usize,
    separates_documents: bool,
    objective: Option<Objective>,
    dtype: Dtype,
    logits_dtype: Dtype,
    fp8: bool,
    head_rows: HeadRows,
    tile: LossTile,
    mlp_tile: usize,
    policies: Vec<LayerPolicy>,
    segments: Vec<usize>,
    allocations: Vec<Allocation>,
    /// Sums of the allocations on the device and in host memory.
    device_bytes: Bytes,
    host_bytes: Bytes,
}

impl ActivationPlan {
    /// Plans the memory of a micro-batch.
    ///
    /// # Errors
    /// `Usage` when a size is zero, when the sequence is longer than the model allows, when the number of policies
    /// differs from the number of layers, or when bytes overflow.
    pub fn new(micro_batch: MicroBatch<'_>) -> Result<Self> {
        let MicroBatch { shape, batch, seq_length, sequence_ranks, separates_documents, objective, dtype, fp8, .. } = micro_batch;
        let MicroBatch { logits_dtype, head_rows, tile, mlp_tile, policies, segments, .. } = micro_batch;
        if batch == 0 || seq_length == 0 || tile.rows == 0 || tile.vocab == 0 {
            return Err(Error::usage("batch size, sequence length and loss tile must be at least 1"));
        }
        if shape.limits_sequences() && seq_length > shape.max_positions {
            return Err(Error::usage(format_args!("sequence length {seq_length}: the model has {} positions", shape.max_positions)));
        }
        let layers = shape.layers.len();
        if policies.len() != layers {
            return Err(Error::usage(format_args!("{} activation policies: the model has {layers} layers", policies.len())));
        }
        let tokens = batch.checked_mul(seq_length).ok_or_else(too_large)? / sequence_ranks;
        let tail = if tile.vocab == shape.vocab && tile.tail < shape.vocab { tile.tail } else { 0 };
        let tile = LossTile { rows: tokens.min(tile.rows), vocab: tile.vocab.min(shape.vocab), tail };
        let mlp_tile = mlp_tile.map_or(tokens, |tile| tile.clamp(1, tokens));
        let (policies, segments) = (policies.to_vec(), segments.to_vec());
        let mut plan = Self {
            shape: shape.clone(),
            batch,
            seq_length,
            sequence_ranks,
            separates_documents,
            objective,
            dtype,
            logits_dtype,
            fp8,
            head_rows,
            tile,
            mlp_tile,
            policies,
            segments,
            allocations: Vec::new(),
            device_bytes: Bytes(0),
            host_bytes: Bytes(0),
        };
        let mut allocations = Vec::new();
        plan.lay_out(&mut |name, elems, dtype| {
            allocations.push(Allocation { name, space: MemorySpace::Device, elems, dtype });
            Ok(DeviceSlice::at(0, elems, dtype))
        })?;
        plan.allocations = allocations;
        plan.allocations.extend(plan.host_allocations()?.into_iter().filter(|slots| slots.elems > 0));
        [plan.device_bytes, plan.host_bytes] = [MemorySpace::Device, MemorySpace::Host].map(|space| plan.bytes_at(space));
        Ok(plan)
    }

    /// Every allocation, in order.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// The sum of all allocations on the device.
    pub(crate) fn device_bytes(&self) -> Bytes {
        self.device_bytes
    }

    /// The sum of all allocations in host memory.
    pub(crate) fn host_bytes(&self) -> Bytes {
        self.host_bytes
    }

    /// A plan that takes no host memory, as a lower bound of plans with at least this device memory.
    pub(crate) fn without_host_memory(self) -> Self {
        Self { host_bytes: Bytes(0), ..self }
    }

    fn bytes_at(&self, space: MemorySpace) -> Bytes {
        Bytes(self.allocations.iter().filter(|a| a.space == space).map(|a| a.bytes() as u64).sum())
    }

    /// Allocates the planned memory; `lease` holds it, including partial allocations after an error.
    ///
    /// # Errors
    /// Errors of the device or of the system, when there is not enough memory or memory cannot be locked.
    pub(crate) fn allocate<D: Device>(&self, dev: &mut D, host: &mut HostMemory, lease: &mut Lease) -> Result<Activations> {
        let mut activations = self.lay_out(&mut |name, elems, dtype| lease.alloc(dev, name, elems, dtype))?;
        let mut memory = |slots: &Allocation| lease.alloc_pinned((dev, host), slots.name, slots.bytes(), slots.bytes());
        let [inputs, outs, lses] = self.host_allocations()?;
        let [inputs, outs, lses] = [memory(&inputs)?, memory(&outs)?, memory(&lses)?];
        let layers = &mut activations.layers;
        let sends = layers.iter_mut().filter(|layer| layer.policy.sends_input());
        give_turns(dev, sends.map(|layer| (layer.input, &mut layer.host_input)), inputs)?;
        let sends = layers.iter_mut().filter(|layer| layer.policy.sends_attention());
        give_turns(dev, sends.map(|layer| (layer.attn_out, &mut layer.host_attention[0])), outs)?;
        let sends = layers.iter_mut().filter(|layer| layer.policy.sends_attention() && layer.lse.elems() > 0);
        give_turns(dev, sends.map(|layer| (layer.lse, &mut layer.host_attention[1])), lses)?;
        Ok(activations)
    }

    /// Offloaded activations: inputs of layers, attention's outputs, and log-sum-exps.
    fn host_allocations(&self) -> Result<[Allocation; 3]> {
        let slots = |name, sends: fn(LayerPolicy) -> bool, cols: &dyn Fn(&LayerShape) -> usize, dtype| {
            let layers = || self.policies.iter().zip(&self.shape.layers).filter(|(policy, layer)| sends(**policy) && cols(layer) > 0);
            let widest = layers().map(|(_, layer)| cols(layer)).max().unwrap_or(0);
            let elems = product(&[host_slots(layers().count()), self.tokens(), widest])?;
            Ok(Allocation { name, space: MemorySpace::Host, elems, dtype })
        };
        Ok([
            slots("layers.input", LayerPolicy::sends_input, &|_| self.shape.channels, self.dtype)?,
            slots("layers.attn_out", LayerPolicy::sends_attention, &|layer| self.own_heads_cols(layer)[1], self.dtype)?,
            slots("layers.lse", LayerPolicy::sends_attention, &|layer| self.lse_cols(layer), Dtype::Float32)?,
        ])
    }

    /// The single description of device memory: planning records the requests, allocating fulfils them.
    fn lay_out(&self, alloc: &mut Alloc<'_>) -> Result<Activations> {
        let tokens = self.tokens();
        let mut memory = SizedAllocator { alloc, tokens, dtype: self.dtype };
        let ModelShape { channels, final_norm, ref ropes, .. } = self.shape;
        let mut rope_table = |rotary_dim| memory.matrix("rope_table", &[self.seq_length, rotary_dim], Dtype::Float32);
        let rope_tables = ropes.iter().map(|rope| rope_table(rope.rotary_dim)).collect::<Result<_>>()?;
        let own = product(&[batch::arrays(false), tokens])?;
        let documents = if self.separates_documents { product(&[self.batch, self.seq_length])? } else { 0 };
        let lists = head_rows::list_words(self.head_rows, tokens);
        let numbers = self.objective.map_or(0, |objective| objective.list_words((self.batch, self.seq_length)));
        let inputs = memory.matrix("inputs", &[own + documents + numbers + lists], Dtype::Int32)?;
        let input = |index: usize| inputs.slice(index * tokens, tokens);
        Ok(Activations {
            batch: self.batch,
            seq_length: self.seq_length,
            sequence: SequenceRank { rank: 0, ranks: self.sequence_ranks },
            tile: self.tile,
            mlp_tile: self.mlp_tile,
            inputs,
            tokens: input(0),
            targets: input(1),
            positions: input(2),
            documents: self.separates_documents.then(|| inputs.slice(own, documents)),
            rope_tables,
            head_rows: self.head_rows_work(&mut memory, inputs.slice(own + documents + numbers, lists))?,
            layers: self.layers(&mut memory)?,
            final_norm_in: memory.rows("final_norm_in", channels)?,
            final_norm_out: memory.rows("final_norm_out", channels)?,
            final_norm_stats: memory.matrix("final_norm_stats", &[tokens, stats_cols(final_norm)], Dtype::Float32)?,
            logits: memory.matrix("logits_tile", &[self.tile.rows, self.tile.vocab], self.logits_dtype)?,
            loss_stats: memory.matrix("loss_stats", &[self.tile.rows, 3], Dtype::Float32)?,
            objective: self.objective_work(&mut memory, inputs.slice(own + documents, numbers))?,
            loss: memory.matrix("loss", &[self.objective.map_or(1, |_| REPORT_WORDS)], Dtype::Float32)?,
            dresidual: memory.rows("dresidual", channels)?,
            dnorm: memory.rows("dnorm", channels)?,
            sequence_work: self.sequence_work(&mut memory)?,
            experts: self.expert_work(&mut memory)?,
            shared: self.shared_work(&mut memory)?,
            fp8: self.fp8_work(&mut memory)?,
            gates: self.attn_gate_work(&mut memory)?,
            delta: self.delta_work(&mut memory)?,
            dinner: memory.matrix("dinner", &[self.widest(|layer| [layer.attn.out_cols(), self.dinner_cols(layer)])?], self.dtype)?,
            dfused: memory.matrix(
                "dfused",
                &[self.widest(|layer| [layer.attn.gradient_cols(), layer.widest_mlp_cols().0])?],
                self.dtype,
            )?,
        })
    }

    fn layers(&self, memory: &mut SizedAllocator<'_>) -> Result<Vec<LayerActivations>> {
        let (channels, changes_qkv) = (|_: &LayerShape| self.shape.channels, self.shape.widest(|layer| layer.attn.raw_qkv_cols()) > 0);
        let when = |present: bool, cols: usize| if present { cols } else { 0 };
        let normed = |layer: &LayerShape| when(layer.pre_norm, self.shape.channels);
        let normed_stats = |layer: &LayerShape| when(layer.pre_norm, stats_cols(layer.norm));
        let raw = |layer: &LayerShape| when(layer.post_norm(), self.shape.channels);
        let raw_stats = |layer: &LayerShape| when(layer.post_norm(), stats_cols(layer.norm));
        let is = |of: fn(LayerPolicy) -> bool| move |l: usize| of(self.policies[l]);
        let (costly, cheap) = (self.parts(is(LayerPolicy::keeps_costly)), self.parts(is(LayerPolicy::keeps_cheap)));
        let inputs = self.parts_by_turns(is(|policy| !policy.sends_input()), is(LayerPolicy::sends_input));
        // Activations that are saved in 8 bits are not saved in 16 bits. That of experts is recomputed into a workspace of all layers.
        let attn_cheap = self.parts(|l| self.policies[l].keeps_cheap() && !self.fp8);
        let mlp_cheap = self.parts(|l| self.policies[l].keeps_cheap() && !(self.fp8 && self.shape.layers[l].mlp.moe().is_none()));
        let (wide_costly, wide_cheap) = (self.in_mlp_tiles(&costly), self.in_mlp_tiles(&mlp_cheap));
        let mut each = |name, parts, cols: &dyn Fn(&LayerShape) -> usize, dtype| {
            memory.by_layer(name, parts, self.shape.layers.iter().map(cols).collect(), dtype)
        };
        let (dtype, fp32) = (self.dtype, Dtype::Float32);
        let input = each("layers.input", &inputs, &channels, dtype)?;
        let attn_norm_out = each("layers.attn_norm_out", &attn_cheap, &normed, dtype)?;
        let attn_norm_stats = each("layers.attn_norm_stats", &costly, &normed_stats, fp32)?;
        let qkv_raw = each("layers.qkv_raw", &costly, &|layer| layer.attn.raw_qkv_cols(), dtype)?;
        let qk_rstd = each("layers.qk_rstd", &costly, &|layer| layer.attn.qk_stats_cols(), fp32)?;
        let attn_gate = each("layers.attn_gate", &costly, &|layer| layer.attn.gate_cols(), dtype)?;
        let decay = each("layers.decay", &costly, &|layer| layer.attn.rule_cols(), dtype)?;
        let strength = each("layers.strength", &costly, &|layer| layer.attn.rule_cols(), dtype)?;
        let qkv = each("layers.qkv", if changes_qkv { &cheap } else { &costly }, &|layer| self.own_heads_cols(layer)[0], dtype)?;
        let (attended, scored) = (self.attended_parts(|_| true), self.attended_parts(|attn| attn.lse_cols() > 0));
        let attn_out = each("layers.attn_out", &attended, &|layer| self.own_heads_cols(layer)[1], dtype)?;
        let lse = each("layers.lse", &scored, &|layer| self.lse_cols(layer), fp32)?;
        let attn_raw = each("layers.attn_raw", &costly, &raw, dtype)?;
        let attn_raw_stats = each("layers.attn_raw_stats", &costly, &raw_stats, fp32)?;
        let mid = each("layers.mid", &costly, &channels, dtype)?;
        let mlp_norm_out = each("layers.mlp_norm_out", &mlp_cheap, &normed, dtype)?;
        let mlp_norm_stats = each("layers.mlp_norm_stats", &costly, &normed_stats, fp32)?;
        let mlp_in = each("layers.mlp_in", &wide_costly, &|layer| layer.mlp_cols().0, dtype)?;
        let mlp_act = each("layers.mlp_act", &wide_cheap, &|layer| layer.mlp.moe().map_or(layer.mlp_cols().1, |_| 0), dtype)?;
        let shared_in = each("layers.shared_in", &costly, &|layer| layer.mlp.shared().map_or(0, |shared| 2 * shared.width), dtype)?;
        let mlp_raw = each("layers.mlp_raw", &costly, &raw, dtype)?;
        let mlp_raw_stats = each("layers.mlp_raw_stats", &costly, &raw_stats, fp32)?;
        let (routed, latent, fp8, norms) = (self.routed(memory)?, self.latent(memory)?, self.fp8_inputs(memory)?, self.moe_norms(memory)?);
        let layer = |l: usize, policy: LayerPolicy| LayerActivations {
            policy,
            intact: self.is_last_sharing(l),
            begins_segment: self.begins_segment(l),
            input: input.at(l),
            host_input: None,
            host_attention: [None; 2],
            attn_norm: NormActivations { out: attn_norm_out.at(l), stats: attn_norm_stats.at(l) },
            projected: ProjectedQkv::of(qkv_raw.at(l), qk_rstd.at(l)),
            attn_gate: attn_gate.at(l),
            decay: decay.at(l),
            strength: strength.at(l),
            latent: latent[l],
            qkv: qkv.at(l),
            attn_out: attn_out.at(l),
            lse: lse.at(l),
            post_attn: RawActivations { raw: attn_raw.at(l), stats: attn_raw_stats.at(l) },
            mid: mid.at(l),
            moe_norms: norms[l],
            mlp_norm: NormActivations { out: mlp_norm_out.at(l), stats: mlp_norm_stats.at(l) },
            mlp_in: mlp_in.at(l),
            mlp_act: mlp_act.at(l),
            shared_in: shared_in.at(l),
            post_mlp: RawActivations { raw: mlp_raw.at(l), stats: mlp_raw_stats.at(l) },
            routed: routed[l],
            fp8: fp8[l],
        };
        Ok(self.policies.iter().enumerate().map(|(l, policy)| layer(l, *policy)).collect())
    }

    /// Whether `layer` is the last of its segment that uses the shared buffers. In FP8, layers with policy `Keep` use them, too.
    fn is_last_sharing(&self, layer: usize) -> bool {
        let shares = |l: usize| self.policies[l] != LayerPolicy::Keep || self.fp8;
        let mut above = (layer + 1..self.policies.len()).take_while(|above| !self.begins_segment(*above));
        shares(layer) && !above.any(shares)
    }

    /// Whether a segment other than the first begins with `layer`.
    fn begins_segment(&self, layer: usize) -> bool {
        layer > 0 && self.segments.contains(&layer)
    }

    /// Saved inputs of the linear layers of each layer, transposed, in 8 bits. Attention's output is not among them, because attention's
    /// backward pass reads it in 16 bits; neither is the residual stream.
    fn fp8_inputs(&self, memory: &mut SizedAllocator<'_>) -> Result<Vec<[Option<DeviceSlice>; LINEARS]>> {
        let keeps = |l: usize| self.fp8 && self.policies[l].keeps_cheap();
        let parts = self.parts(keeps);
        let mut each = |name, cols: &dyn Fn(&LayerShape) -> usize| {
            let cols = self.shape.layers.iter().enumerate().map(|(l, layer)| if keeps(l) { cols(layer) } else { 0 }).collect();
            memory.by_layer(name, &parts, cols, Dtype::Float8E4m3)
        };
        let channels = self.shape.channels;
        let normed = |layer: &LayerShape| if layer.pre_norm { channels } else { 0 };
        let dense = |layer: &LayerShape, cols: usize| if layer.mlp.moe().is_none() { cols } else { 0 };
        let attn_norm = each("layers.fp8_attn_norm", &normed)?;
        let mlp_norm = each("layers.fp8_mlp_norm", &|layer| dense(layer, normed(layer)))?;
        let mlp_act = each("layers.fp8_mlp_act", &|layer| dense(layer, layer.mlp_cols().1))?;
        let at = |of: &ByLayer, l: usize| Some(of.at(l)).filter(|slice| slice.elems() > 0);
        Ok((0..self.policies.len()).map(|l| [at(&attn_norm, l), None, at(&mlp_norm, l), at(&mlp_act, l)]).collect())
    }

    /// Norms of experts beside an MLP, in each layer.
    fn moe_norms(&self, memory: &mut SizedAllocator<'_>) -> Result<Vec<MoeNormActivations>> {
        let costly = self.parts(|l| self.policies[l].keeps_costly());
        let cheap = self.parts(|l| self.policies[l].keeps_cheap());
        let mut each = |name, parts, cols: &dyn Fn(&LayerShape) -> usize, dtype| {
            let cols = self.shape.layers.iter().map(|layer| if layer.mlp.own_norms() { cols(layer) } else { 0 }).collect();
            memory.by_layer(name, parts, cols, dtype)
        };
        let (channels, stats) = (|_: &LayerShape| self.shape.channels, |layer: &LayerShape| stats_cols(layer.norm));
        let experts = each("layers.experts_norm_out", &cheap, &channels, self.dtype)?;
        let experts_raw = each("layers.experts_raw", &costly, &channels, self.dtype)?;
        let experts_raw_stats = each("layers.experts_raw_stats", &costly, &stats, Dtype::Float32)?;
        let shared_raw = each("layers.shared_raw", &costly, &channels, self.dtype)?;
        let shared_raw_stats = each("layers.shared_raw_stats", &costly, &stats, Dtype::Float32)?;
        let layer = |l: usize| MoeNormActivations {
            experts: experts.at(l),
            post_experts: RawActivations { raw: experts_raw.at(l), stats: experts_raw_stats.at(l) },
            post_shared: RawActivations { raw: shared_raw.at(l), stats: shared_raw_stats.at(l) },
        };
        Ok((0..self.policies.len()).map(layer).collect())
    }

    /// Routing results of each layer with experts, which are always saved.
    fn routed(&self, memory: &mut SizedAllocator<'_>) -> Result<Vec<Option<RoutedActivations>>> {
        let (layers, tokens) = (&self.shape.layers, memory.tokens);
        let mut own = 0..;
        let parts = layers.iter().map(|layer| (layer.mlp.moe().and_then(|_| own.next()).unwrap_or(0), tokens)).collect();
        let parts = LayerParts { of_layers: parts, shared: layers.len() };
        let mut each = |name, cols: &dyn Fn(Moe) -> usize, dtype| {
            let cols = layers.iter().map(|layer| layer.mlp.moe().map_or(0, cols)).collect();
            memory.by_layer(name, &parts, cols, dtype)
        };
        let logits = each("layers.router_logits", &|moe| moe.experts, Dtype::Float32)?;
        let weights = each("layers.expert_weights", &|moe| moe.top_k, Dtype::Float32)?;
        let choices = each("layers.choices", &|moe| CHOICE_ARRAYS * moe.top_k, Dtype::Int32)?;
        let total = bounds_elems(&self.shape);
        let bounds = if total == 0 { None } else { Some(memory.matrix("layers.expert_bounds", &[total], Dtype::Int32)?) };
        let mut bounds_of = expert_bounds(&self.shape);
        let layer = |(l, layer): (usize, &LayerShape)| {
            let (moe, all) = (layer.mlp.moe()?, bounds?);
            let (range, stride) = (bounds_of.next()?, bounds_stride(moe));
            let (bounds, all_bounds) = (all.slice(range.start, range.len()), (all, stride));
            let choice = |array: usize| choices.at(l).slice(array * tokens * moe.top_k, tokens * moe.top_k);
            let [experts, slots, entries] = [0, 1, 2].map(choice);
            Some(RoutedActivations { logits: logits.at(l), experts, weights: weights.at(l), bounds, all_bounds, slots, entries })
        };
        Ok(layers.iter().enumerate().map(layer).collect())
    }

    /// The `lists` of the head's selected rows and their workspaces; `None` if the head computes all rows.
    fn head_rows_work(&self, memory: &mut SizedAllocator<'_>, lists: DeviceSlice) -> Result<Option<HeadRowsWork>> {
        if self.head_rows == HeadRows::All {
            return Ok(None);
        }
        let [rows, targets] = [0, 1].map(|list| lists.slice(list * lists.elems() / 2, lists.elems() / 2));
        let mut work = |name| memory.matrix(name, &[self.tile.rows, self.shape.channels], self.dtype);
        Ok(Some(HeadRowsWork { rows, targets, hidden: work("head_rows")?, dhidden: work("dhead_rows")? }))
    }

    /// Arrays of the loss with the numbers in `list`; `None` for the cross-entropy of tokens.
    fn objective_work(&self, memory: &mut SizedAllocator<'_>, list: DeviceSlice) -> Result<Option<ObjectiveWork>> {
        let Some(loss) = self.objective else { return Ok(None) };
        let loss = match loss {
            Objective::Pairs(loss) => {
                let sums = memory.matrix("pair_sums", &[list.elems() / PAIR_WORDS * SUM_WORDS], Dtype::Int32)?;
                LossWork::Pairs { loss, sums }
            }
            Objective::Policy(loss) => LossWork::Policy(loss),
            Objective::Teacher(loss) => {
                let entries = memory.matrix("teacher_entries", &[self.tokens(), loss.top_k + 1], Dtype::Float32)?;
                LossWork::Teacher { loss, entries }
            }
        };
        Ok(Some(ObjectiveWork {
            loss,
            list,
            stats: memory.matrix("row_stats", &[self.tokens(), 3], Dtype::Float32)?,
            scales: memory.matrix("row_scales", &[self.tokens()], Dtype::Float32)?,
            totals: memory.matrix("report_totals", &[2 * REPORT_WORDS], Dtype::Int32)?,
        }))
    }

    /// Workspaces of experts; `None` without experts.
    fn expert_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<ExpertWork>> {
        let widest = |cols: &dyn Fn(Moe) -> usize| self.shape.widest(|layer| layer.mlp.moe().map_or(0, cols));
        let (taken, tokens) = (widest(&|moe| moe.top_k), memory.tokens);
        if taken == 0 {
            return Ok(None);
        }
        Ok(Some(ExpertWork {
            rows: memory.rows("expert_rows", taken * self.shape.channels)?,
            act: memory.rows("expert_act", widest(&|moe| moe.top_k * moe.ffn.width))?,
            dweights: memory.matrix("dexpert_weights", &[tokens, taken], Dtype::Float32)?,
            dlogits: memory.rows("drouter_logits", widest(&|moe| moe.experts))?,
            scaled: match widest(&|moe| if moe.own_norms { moe.top_k } else { 0 }) {
                0 => DeviceSlice::at(0, 0, Dtype::Float32),
                scaled => memory.matrix("scaled_expert_weights", &[tokens, scaled], Dtype::Float32)?,
            },
        }))
    }

    /// Workspaces of shared experts; `None` without them.
    fn shared_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<SharedWork>> {
        let width = self.shape.widest(|layer| layer.mlp.shared().map_or(0, |shared| shared.width));
        if width == 0 {
            return Ok(None);
        }
        let is_gated = |layer: &LayerShape| layer.mlp.shared().is_some_and(|shared| shared.gated);
        let act = memory.rows("shared_act", width)?;
        let gate = if self.shape.layers.iter().any(is_gated) { Some(self.gate_work(memory)?) } else { None };
        Ok(Some(SharedWork { act, gate }))
    }

    fn gate_work(&self, memory: &mut SizedAllocator<'_>) -> Result<GateWork> {
        let tokens = memory.tokens;
        let floats = memory.matrix("shared_gate", &[3, tokens], Dtype::Float32)?;
        let choices = memory.matrix("shared_gate_choices", &[CHOICE_ARRAYS, tokens], Dtype::Int32)?;
        let bounds = memory.matrix("shared_gate_bounds", &[2], Dtype::Int32)?;
        let [logits, weights, dweights] = [0, 1, 2].map(|array| floats.slice(array * tokens, tokens));
        let [choices, slots, entries] = [0, 1, 2].map(|array| choices.slice(array * tokens, tokens));
        let dlogits = memory.rows("dshared_gate", 1)?;
        Ok(GateWork { logits, weights, dweights, dlogits, choices, slots, entries, bounds })
    }

    /// Maximum elements over all layers. `cols` returns the columns of a layer's attention and of its MLP.
    fn widest(&self, cols: impl Fn(&LayerShape) -> [usize; 2]) -> Result<usize> {
        let elems = |layer: &LayerShape| {
            let [attn, mlp] = cols(layer);
            Ok(product(&[self.tokens(), attn])?.max(product(&[self.mlp_tokens(layer), mlp])?))
        };
        self.shape.layers.iter().map(elems).try_fold(0, |most, elems| Ok(most.max(elems?)))
    }

    /// Columns of the gradients that the backward pass of a layer's MLP stores in [`Activations::dinner`]. With experts beside an MLP these
    /// are gradients of norms, too.
    fn dinner_cols(&self, layer: &LayerShape) -> usize {
        let of_norms = if layer.mlp.own_norms() { self.shape.channels } else { 0 };
        layer.widest_mlp_cols().1.max(of_norms)
    }

    /// Tokens that the MLP of a layer processes at once.
    fn mlp_tokens(&self, layer: &LayerShape) -> usize {
        if layer.mlp.moe().is_none() { self.mlp_tile } else { self.tokens() }
    }

    /// Columns of attention's input and output for each of this rank's tokens. With sequence parallelism these arrays hold all tokens and
    /// this rank's heads.
    fn own_heads_cols(&self, layer: &LayerShape) -> [usize; 2] {
        widest_cols(&layer.attn, self.sequence_ranks).map(|cols| self.sequence_ranks * cols)
    }

    /// Log-sum-exps for each of this rank's tokens; see [`Self::own_heads_cols`].
    fn lse_cols(&self, layer: &LayerShape) -> usize {
        if layer.attn.is_delta() { 0 } else { self.own_heads_cols(layer)[1] / layer.attn.head_dim }
    }

    /// Tokens of the micro-batch on one rank.
    fn tokens(&self) -> usize {
        self.batch * self.seq_length / self.sequence_ranks
    }

    /// Workspaces of sequence parallelism; `None` without it.
    fn sequence_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<SequenceWork>> {
        let ranks = self.sequence_ranks;
        if ranks == 1 {
            return Ok(None);
        }
        let own_heads = |which: usize| self.shape.widest(|layer| self.own_heads_cols(layer)[which]);
        Ok(Some(SequenceWork {
            qkv: memory.rows("sequence_qkv", self.shape.widest(|layer| layer.attn.qkv_cols()))?,
            out: memory.rows("sequence_out", self.shape.widest(|layer| layer.attn.out_cols()))?,
            dqkv: memory.rows("sequence_dqkv", own_heads(0))?,
            dout: memory.rows("sequence_dout", own_heads(1))?,
            parts: memory.rows("sequence_parts", self.shape.widest(|layer| shared_cols(&layer.attn, ranks)))?,
        }))
    }

    /// Workspaces of gates of attention's output; `None` without them.
    fn attn_gate_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<AttnGateWork>> {
        let cols = self.shape.widest(|layer| layer.attn.gate_cols());
        if cols == 0 {
            return Ok(None);
        }
        Ok(Some(AttnGateWork { out: memory.rows("attn_gated", cols)?, dgate: memory.rows("dattn_gate", cols)? }))
    }

    /// Workspaces of gated delta rules; `None` without them.
    fn delta_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<DeltaWork>> {
        let widest = |cols: fn(&Attn) -> usize| self.shape.widest(|layer| if layer.attn.is_delta() { cols(&layer.attn) } else { 0 });
        if !self.shape.has_delta() {
            return Ok(None);
        }
        Ok(Some(DeltaWork {
            dqkv: memory.rows("delta_dqkv", widest(Attn::qkv_cols))?,
            ddecay: memory.rows("ddecay", widest(Attn::rule_cols))?,
            dstrength: memory.rows("dstrength", widest(Attn::rule_cols))?,
        }))
    }

    /// Workspaces of FP8 products; `None` without FP8.
    fn fp8_work(&self, memory: &mut SizedAllocator<'_>) -> Result<Option<Fp8Work>> {
        if !self.fp8 {
            return Ok(None);
        }
        let [rows, transposed, factor, scales] = fp8::work_elems(&self.shape, memory.tokens);
        Ok(Some(Fp8Work {
            rows: memory.matrix("fp8_rows", &[rows], Dtype::Float8E4m3)?,
            transposed: memory.matrix("fp8_transposed", &[transposed], Dtype::Float8E4m3)?,
            factor: memory.matrix("fp8_factor", &[factor], Dtype::Float8E4m3)?,
            scales: memory.matrix("fp8_scales", &[scales], Dtype::Float32)?,
        }))
    }

    /// Parts of a buffer: layers for which `keeps` holds have their own part, all others share the last part.
    fn parts(&self, keeps: impl Fn(usize) -> bool) -> LayerParts {
        self.parts_by_turns(keeps, |_| false)
    }

    /// As [`Self::parts`]; in addition, layers whose array is offloaded to host memory alternate between shared buffers.
    fn parts_by_turns(&self, keeps: impl Fn(usize) -> bool, sends: impl Fn(usize) -> bool) -> LayerParts {
        LayerParts::new(self.policies.len(), &self.segments, (self.tokens(), BUFFERS), keeps, sends)
    }

    /// Parts of an array of attention's results, of layers whose attention `has` such an array.
    fn attended_parts(&self, has: impl Fn(&Attn) -> bool) -> LayerParts {
        let of = |holds: fn(LayerPolicy) -> bool| {
            let has = &has;
            move |l: usize| holds(self.policies[l]) && has(&self.shape.layers[l].attn)
        };
        self.parts_by_turns(of(LayerPolicy::keeps_costly), of(LayerPolicy::sends_attention))
    }

    /// These parts, with a shared part as long as the tokens that MLPs process at once.
    fn in_mlp_tiles(&self, parts: &LayerParts) -> LayerParts {
        parts.with_shared(self.shape.layers.iter().map(|layer| self.mlp_tokens(layer)))
    }
}

/// LayerNorm saves mean and rstd, RMSNorm only rstd.
fn stats_cols(norm: NormSpec) -> usize {
    if norm.kind == NormKind::Layer { 2 } else { 1 }
}

/// Arrays of `layers.choices`: the experts, and two orders of the choices.
const CHOICE_ARRAYS: usize = 3;

#[cfg(test)]
mod tests {
    use super::super::layer_shape::QkSpan;
    use super::*;

    const TILE: LossTile = LossTile { rows: 64, vocab: 100, tail: 0 };

    use LayerPolicy::{Host, HostAttention, Keep, RecomputeBlock, RecomputeCheap};

    fn demo(seq_length: usize, dtype: Dtype, policies: &[LayerPolicy]) -> ActivationPlan {
        let tile = LossTile { rows: 999, vocab: 999, tail: 0 };
        ActivationPlan::new(MicroBatch { batch: 1, seq_length, dtype, tile, ..pair(&ModelShape::demo(), policies) }).unwrap()
    }

    /// Two sequences of 48 tokens.
    fn pair<'a>(shape: &'a ModelShape, policies: &'a [LayerPolicy]) -> MicroBatch<'a> {
        MicroBatch {
            mlp_tile: None,
            shape,
            batch: 2,
            seq_length: 48,
            sequence_ranks: 1,
            separates_documents: false,
            objective: None,
            dtype: Dtype::Bfloat16,
            logits_dtype: Dtype::Bfloat16,
            fp8: false,
            head_rows: HeadRows::All,
            tile: TILE,
            policies,
            segments: &[0],
        }
    }

    fn addressed(plan: &ActivationPlan) -> Activations {
        plan.lay_out(&mut |_, elems, dtype| Ok(DeviceSlice::at(0, elems, dtype))).unwrap()
    }

    #[test]
    fn allocations_match_the_plan() {
        let plan = ActivationPlan::new(pair(&ModelShape::demo(), &[Keep; 6])).unwrap();
        let mut requested = Vec::new();
        let activations = plan.lay_out(&mut |name, elems, dtype| {
            requested.push(Allocation { name, space: MemorySpace::Device, elems, dtype });
            Ok(DeviceSlice::at(0x1000, elems, dtype))
        });
        assert_eq!(requested, plan.allocations());
        let activations = activations.unwrap();
        assert_eq!((activations.logits.elems(), activations.loss_stats.elems()), (64 * 100, 64 * 3));
        // 96 tokens of 512 columns for each layer, contiguous.
        let starts = activations.layers.iter().map(|layer| layer.qkv.addr() - 0x1000);
        assert!(starts.eq((0..6).map(|l| l * 96 * 512 * 2)));
    }

    #[test]
    fn each_layer_starts_aligned() {
        let activations = addressed(&demo(3, Dtype::Float32, &[Keep; 6]));
        // 3 tokens of 8 heads are 24 elements; the next layer's begin at element 128.
        assert_eq!((activations.layers[1].lse.addr(), activations.layers[1].lse.elems()), (128 * 4, 24));
    }

    #[test]
    fn recomputing_layers_share_the_part_after_keeping_layers() {
        let policies = [RecomputeBlock, Keep, Host, RecomputeCheap, Host, Host];
        let layers = addressed(&demo(1, Dtype::Float32, &policies)).layers;
        let parts = |of: fn(&LayerActivations) -> DeviceSlice| -> Vec<u64> {
            let bytes = of(&layers[0]).bytes().next_multiple_of(128 * 4) as u64;
            layers.iter().map(|layer| of(layer).addr() / bytes).collect()
        };
        assert_eq!(parts(|layer| layer.input), [0, 1, 3, 2, 4, 3]);
        assert_eq!(parts(|layer| layer.mlp_in), [2, 0, 2, 1, 2, 2]);
        assert_eq!(parts(|layer| layer.mlp_act), [1, 0, 1, 1, 1, 1]);
        let intact: Vec<bool> = layers.iter().map(|layer| layer.intact).collect();
        assert_eq!(intact, [false, false, false, false, false, true]);
    }

    #[test]
    fn bytes_are_those_of_a_count_by_hand() {
        let (c, f, t) = (256, 512, 128);
        // 16-bit arrays: qkv, attention, mid, gate and up. fp32 arrays: two rstd, lse of 8 heads. Then 16-bit arrays: two norms,
        // activation.
        let costly = t * (2 * (2 * c + c + c + 2 * f) + 4 * (2 + 8));
        let cheap = t * 2 * (c + c + f);
        let input = t * 2 * c;
        let attended = t * (2 * c + 4 * 8);
        let outside = t * (2 * (c + c) + 4 + 12) + 4 * t * 32;
        let loss = t * (2 * 256 + 4 * 3) + 4;
        let work = 2 * t * (c + c + f + 2 * f);
        let cases = [
            ([Keep; 6], 6 * (costly + cheap + input), 0),
            ([RecomputeCheap; 6], 6 * (costly + input) + cheap, 0),
            ([RecomputeBlock; 6], costly + cheap + 6 * input, 0),
            ([Host; 6], costly + cheap + 2 * input, 4 * input),
            ([HostAttention; 6], costly + cheap + 2 * input + attended, 4 * (input + attended)),
            // Two buffers for attention and the shared part of the block. Four of six inputs are on the host, and one of three attention
            // outputs.
            (
                [Host, HostAttention, HostAttention, Host, HostAttention, Host],
                costly + cheap + 2 * input + 2 * attended,
                4 * input + attended,
            ),
            ([Keep, Host, RecomputeCheap, Host, Host, RecomputeBlock], 3 * costly + 2 * cheap + 5 * input, input),
            ([Host, Keep, Keep, Keep, Keep, Keep], 6 * (costly + cheap + input), 0),
        ];
        for (policies, layers, host) in cases {
            let plan = demo(t, Dtype::Bfloat16, &policies);
            assert_eq!(plan.device_bytes(), Bytes((layers + outside + loss + work) as u64), "{policies:?}");
            assert_eq!(plan.host_bytes(), Bytes(host as u64), "{policies:?}");
        }
    }

    #[test]
    fn in_fp8_layers_that_keep_share_16_bits_and_have_8_of_their_own() {
        let policies = [Keep, RecomputeCheap, Keep, Host, Keep, Keep];
        let plan = |fp8| ActivationPlan::new(MicroBatch { fp8, ..pair(&ModelShape::demo(), &policies) }).unwrap();
        let (in_fp8, plain) = (addressed(&plan(true)).layers, addressed(&plan(false)).layers);
        let starts = |of: &dyn Fn(&LayerActivations) -> DeviceSlice| in_fp8.iter().map(|layer| of(layer).addr()).collect::<Vec<_>>();
        for of in [|l: &LayerActivations| l.attn_norm.out, |l: &LayerActivations| l.mlp_norm.out, |l: &LayerActivations| l.mlp_act] {
            assert_eq!(starts(&of), [0; 6]);
        }
        // 96 tokens; 256 channels, 512 inside the MLP.
        for (linear, elems) in [(0, 96 * 256), (2, 96 * 256), (3, 96 * 512)] {
            let kept = in_fp8.iter().map(|layer| layer.fp8[linear].map(|kept| (kept.addr(), kept.elems())));
            let part = |index: u64| Some((index * elems as u64, elems));
            assert!(kept.eq([part(0), None, part(1), None, part(2), part(3)]), "{linear}");
        }
        assert!(in_fp8.iter().all(|layer| layer.fp8[1].is_none()) && plain.iter().all(|layer| layer.fp8 == [None; LINEARS]));
        // Only the last layer finds its own values in the shared buffers.
        assert!(in_fp8.iter().map(|layer| layer.intact).eq([false, false, false, false, false, true]));
        assert!(plain.iter().map(|layer| layer.intact).eq([false, false, false, true, false, false]));
    }

    #[test]
    fn an_mlp_in_tiles_is_as_wide_as_it_is_for_one_of_them() {
        let plan = |policies: &[LayerPolicy], mlp_tile| {
            ActivationPlan::new(MicroBatch { batch: 1, seq_length: 256, mlp_tile, ..pair(&ModelShape::demo(), policies) }).unwrap()
        };
        let saved = |policies: &[LayerPolicy]| plan(policies, None).device_bytes().0 - plan(policies, Some(64)).device_bytes().0;
        // 16-bit arrays: gate, up and activation of 192 tokens in the shared part; of the gradients, the columns beyond those of attention,
        // 512 and 256.
        let (shared, gradients) = (192 * 2 * (2 * 512 + 512), 256 * 2 * (2 * 512 - 512 + 512 - 256));
        assert_eq!(saved(&[RecomputeBlock; 6]), shared + gradients);
        assert_eq!(saved(&[Keep, Host, RecomputeBlock, Keep, HostAttention, Keep]), shared + gradients);
        assert_eq!(saved(&[Keep; 6]), gradients);
        let [kept, shared] = [0, 1].map(|l| addressed(&plan(&[Keep, Host, Host, Host, Host, Host], Some(64))).layers[l].mlp_in.elems());
        assert_eq!((kept, shared), (256 * 2 * 512, 64 * 2 * 512));
    }

    #[test]
    fn bounds_of_documents_take_4_bytes_a_token() {
        let plan =
            |separates_documents| ActivationPlan::new(MicroBatch { separates_documents, ..pair(&ModelShape::demo(), &[Keep; 6]) }).unwrap();
        assert_eq!(plan(true).device_bytes().0 - plan(false).device_bytes().0, 2 * 48 * 4);
        let activations = addressed(&plan(true));
        assert_eq!(activations.documents.map(|documents| (documents.addr(), documents.elems())), Some((3 * 96 * 4, 96)));
        assert!(addressed(&plan(false)).documents.is_none());
    }

    #[test]
    fn a_qk_norm_keeps_raw_projections_and_shares_the_rotated() {
        let mut shape = ModelShape::demo();
        shape.layers.iter_mut().for_each(|layer| layer.attn.qk_norm = Some(QkSpan::Head));
        let bytes = |policies: &[LayerPolicy]| {
            ActivationPlan::new(MicroBatch { batch: 1, seq_length: 128, ..pair(&shape, policies) }).unwrap().device_bytes().0
        };
        // 16-bit arrays: two norms, activation, rotated qkv.
        assert_eq!(bytes(&[Keep; 6]) - bytes(&[RecomputeCheap; 6]), 5 * 128 * 2 * (256 + 256 + 512 + 512));
    }

    #[test]
    fn impossible_sizes_are_usage_errors() {
        let plan =
            |batch, seq_length, tile| ActivationPlan::new(MicroBatch { batch, seq_length, tile, ..pair(&ModelShape::demo(), &[Host; 6]) });
        assert!(plan(0, 16, TILE).is_err());
        assert!(plan(1, 0, TILE).is_err());
        assert!(plan(1, 16, LossTile { rows: 0, vocab: 1, tail: 0 }).is_err());
        assert!(plan(1, 1025, TILE).is_ok(), "rotary positions do not end at the model's 1024");
        assert!(plan(usize::MAX, 2, TILE).unwrap_err().to_string().contains("overflow"));
        assert!(plan(usize::MAX / 1024, 1024, TILE).unwrap_err().to_string().contains("overflow"));
        let five = ActivationPlan::new(pair(&ModelShape::demo(), &[Keep; 5]));
        assert!(five.unwrap_err().to_string().contains("5 activation policies: the model has 6 layers"));
    }
}
