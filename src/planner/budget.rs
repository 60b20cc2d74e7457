//! The memory of a run by class and location, computed before any allocation.

use super::machine::Machine;
use super::protocol::Protocol;
use super::site::Site;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::bucket::slices::Slices;
use crate::data::rows::batch;
use crate::device::footprint::MemoryClass;
use crate::device::footprint::gpu::{self, PAGE_BYTES};
use crate::device::{AttentionShape, DeviceKind};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::memory::{Addressing, DeviceMemory, MemorySpace, RingShape};
use crate::model::activations::{ActivationPlan, LossTile, MicroBatch, bounds_elems};
use crate::model::head_rows;
use crate::model::heads::SequenceRank;
use crate::model::policy::LayerPolicy;
use crate::model::segments::{BoundarySizes, LayerSegments};
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, TensorTable};
use crate::optim::PIECE_ELEMS;
use crate::optim::norm::BLOCK;
use crate::optim::split::Masters;
use crate::optim::state_array::StateArrays;
use crate::planner::rules::Policy;
use crate::ranks::progress::CounterSizes;
use crate::ranks::slice_connections::slices_under_way;
use crate::recipe::{Numerics, Recipe, StepShape};
use crate::trace::Span;
use std::ops::Range;

/// Buckets that may be copied to the host while the next module writes gradients.
const RING_BUCKETS: usize = 8;
/// Buckets whose paged states may be on the device at once: one arrives, one is stepped, one leaves, and one balances their different
/// durations.
pub(crate) const PAGED_WINDOW: usize = 4;
/// Device buffers for gradient sums that are stored on the host: one arrives, one is added to, and one leaves.
pub(crate) const SUM_PLACES: usize = 3;
/// Elements of a pinned buffer for transfers between the device and the host's part of its state.
pub(crate) const BOUNCE_ELEMS: usize = 1 << 18;

/// The bytes of `classes` at `space`.
pub(crate) fn bytes_at(classes: &[MemoryClass], space: MemorySpace) -> u64 {
    classes.iter().filter(|class| class.space == space).map(|class| class.bytes as u64).sum()
}

/// Demand and supply of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    pub space: MemorySpace,
    /// Bytes planned.
    pub needed: u64,
    /// Bytes free before the run.
    pub available: u64,
}

impl Balance {
    /// Missing bytes; 0 if the plan fits.
    pub(crate) fn lacking(&self) -> u64 {
        self.needed.saturating_sub(self.available)
    }

    /// Bytes that stay free; `None` if the plan does not fit or the supply is unknown.
    pub(crate) fn free(&self) -> Option<u64> {
        Some(self.available).filter(|&bytes| bytes < u64::MAX)?.checked_sub(self.needed)
    }
}

/// The balance of each device and of the host. `classes` cover all `ranks` devices. The host needs `transient_bytes` in addition. Devices
/// that share the host's memory need none of their own.
pub(crate) fn balances(
    machine: &Machine,
    classes: &[MemoryClass],
    (ranks, processes): (usize, usize),
    transient_bytes: u64,
) -> [Balance; 2] {
    // Each process runs on its own machine and needs an equal part.
    let of_one = |space| bytes_at(classes, space).div_ceil(processes as u64);
    let (ranks, on_device, on_host) = (ranks / processes, of_one(MemorySpace::Device), of_one(MemorySpace::Host) + transient_bytes);
    let balance = |space, needed, available| Balance { space, needed, available };
    let (device, needed) = match machine.device {
        DeviceMemory::Shared => (balance(MemorySpace::Device, 0, u64::MAX), on_device + on_host),
        DeviceMemory::Own { bytes, .. } => (balance(MemorySpace::Device, on_device.div_ceil(ranks as u64), bytes), on_host),
    };
    [device, balance(MemorySpace::Host, needed, machine.host_bytes)]
}

/// A micro-batch of `recipe` for a model with this `shape`, whose loss has this `tile`.
pub(crate) fn micro_batch<'a>(
    recipe: &Recipe,
    (shape, tile): (&'a ModelShape, LossTile),
    policies: &'a [LayerPolicy],
    segments: &'a LayerSegments,
) -> MicroBatch<'a> {
    let StepShape { micro_batch: batch, seq_length, sequence_ranks, .. } = recipe.step;
    let Numerics { dtype, logits_dtype, fp8, head_rows, mlp_tile, .. } = recipe.numerics;
    let (separates_documents, objective, segments) = (recipe.separates_documents(), recipe.objective, segments.starts());
    MicroBatch {
        shape,
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
    }
}

/// Memory of each of `ranks` ranks for the residual stream between `segments` of the layers of `recipe`.
pub(crate) fn boundaries(recipe: &Recipe, segments: &LayerSegments, ranks: usize) -> BoundarySizes {
    let elems = recipe.step.tokens_of_rank() * recipe.model.channels;
    segments.boundaries(recipe.step.micro_batches_each(ranks), elems, recipe.model.trains_tied_output())
}

/// Whether the device casts, so that fp32 crosses the link. Without the feature `superchip-cast` this is a compile-time constant.
pub(crate) fn device_casts(dtype: Dtype, link_dtype: Dtype) -> bool {
    cfg!(feature = "superchip-cast") && link_dtype != dtype
}

/// Rings and host locations that shorten the flat arrays of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// The ring of gradients, if gradients share memory.
    pub grads: Option<RingShape>,
    /// The ring through which weights stream; `None` if all weights stay on the device.
    pub weights: Option<RingShape>,
    /// Each rank stores only its own slices of the weights. Every fetch also brings the inter-node peers' slices into the ring.
    pub fully_sharded: bool,
    /// Gradient sums are stored next to the optimizer states of their buckets and pass through the device.
    pub sums_on_host: bool,
    /// The ring of gradient sums, if segments of layers share their memory. Its elements are sums.
    pub sums: Option<RingShape>,
    /// Whether the upper halves of the host's masters are the streamed weights. Such masters are split, and stepped after the verdict.
    pub split_masters: bool,
}

/// The own memory of a device of `kind` on one rank of `recipe`: of its driver, its libraries and its kernels.
pub(crate) fn own_memory(recipe: &Recipe, kind: DeviceKind) -> Vec<MemoryClass> {
    let StepShape { micro_batch, seq_length, .. } = recipe.step;
    let (attention, delta) = (attention_shapes(recipe), recipe.model.first_delta(micro_batch, seq_length));
    kind.own_memory(recipe.numerics.attention, &attention, delta.as_ref(), recipe.separates_documents())
}

/// The distinct attention shapes of the layers of `recipe`, that of the first layer with scores first. They are those of the first rank,
/// which has at least as many heads as any other rank.
fn attention_shapes(recipe: &Recipe) -> Vec<AttentionShape> {
    let (shape, step) = (&recipe.model, &recipe.step);
    let first = SequenceRank { rank: 0, ranks: step.sequence_ranks };
    let (mut shapes, mut attentions) = (Vec::new(), Vec::new());
    for layer in shape.layers_with_scores() {
        let attn = &shape.layers[layer].attn;
        // Shapes are computed for few layers, because most layers of a deep model are alike.
        if attentions.contains(&attn) {
            continue;
        }
        attentions.push(attn);
        let attention = shape.attention_of((step.micro_batch, step.seq_length), layer, first);
        if !shapes.contains(&attention) {
            shapes.push(attention);
        }
    }
    shapes
}

/// All inputs of memory and time except the planner's choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) site: &'a Site,
    pub(crate) protocol: &'a Protocol,
    pub(crate) segments: &'a LayerSegments,
    /// Reusable host slots of each kind.
    pub slots: usize,
    /// Additional host memory for loading and saving, which steps do not need.
    pub(crate) transient_bytes: u64,
    pub(crate) frozen: FrozenSizes,
    /// [`own_memory`] of the recipe, which every candidate needs and no choice changes.
    pub(crate) own_memory: &'a [MemoryClass],
}

/// The memory that frozen tensors take on each device: elements unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrozenSizes {
    weights: usize,
    /// Of gradients that nothing reads.
    unused_grads: usize,
    /// Bytes of tensors that stay in MXFP4.
    packed_bytes: usize,
    /// Of the memory into which those tensors are expanded.
    expanded: usize,
}

impl FrozenSizes {
    pub(crate) fn of(table: &TensorTable) -> Self {
        Self {
            weights: table.frozen_elems(),
            unused_grads: table.unused_grad_elems(),
            packed_bytes: table.packed_bytes(),
            expanded: table.expanded_elems(),
        }
    }

    /// The memory of `ranks` devices whose weights have `width` bytes.
    fn classes(self, ranks: usize, width: usize) -> [MemoryClass; 4] {
        let class = |name, bytes| MemoryClass { name, space: MemorySpace::Device, bytes: ranks * bytes };
        [
            class("frozen weights", self.weights * width),
            class("unused gradients", self.unused_grads * width),
            class("packed experts", self.packed_bytes),
            class("expanded experts", self.expanded * width),
        ]
    }
}

impl Workload<'_> {
    pub(crate) fn shape(&self) -> &ModelShape {
        &self.recipe.model
    }

    /// The arrays of a state that the device steps, without the working weights. States in unified memory have float32 masters.
    pub(crate) fn device_arrays(&self, tier: Tier) -> StateArrays {
        let masters = if tier == Tier::Device { self.protocol.masters } else { Masters::Float32 };
        self.recipe.optimizer().device_arrays(masters)
    }

    /// The arrays of a state that the host steps, without the working weights.
    fn host_arrays(&self, rings: Rings) -> StateArrays {
        if rings.split_masters { self.device_arrays(Tier::Device) } else { self.recipe.numerics.moments.arrays() }
    }

    /// Host slots for gradients: one for each offloaded bucket, so that no bucket waits. With deferred updates there are `slots` more,
    /// because each bucket keeps its slot for another step.
    pub(crate) fn grad_slots(&self, layout: &BucketLayout, rings: Rings) -> usize {
        let defers = self.protocol.rules.policy == Policy::Deferred && !rings.split_masters;
        if defers { layout.offloaded() + self.slots } else { layout.offloaded() }
    }

    /// Host slots for working weights: the reusable slots, or one for each offloaded bucket if weights stream from the host.
    pub(crate) fn param_slots(&self, layout: &BucketLayout, rings: Rings) -> usize {
        if rings.weights.is_some() && self.site.ranks == 1 { layout.offloaded() } else { self.slots }
    }

    /// The gradient ring: of offloaded buckets, or of all buckets if several ranks keep slices of the sums. It holds the largest module and
    /// the buckets that are being copied to the host. Between ranks it has room for a second module, because the exchange of a module
    /// starts when its last gradient is written. `None` with gradient accumulation in place, without savings, or if the device shares the
    /// host's memory.
    pub(crate) fn grad_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        if self.site.machine.device == DeviceMemory::Shared {
            return None;
        }
        if !self.segments.is_whole() {
            return self.segment_grad_ring(layout, table);
        }
        if self.recipe.step.micro_batches_each(self.recipe.step.shares) > 1 {
            return None;
        }
        let module_elems_max = table.longest_streamed_module();
        let limit = if self.site.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() };
        let leaving = RING_BUCKETS * layout.bucket_elems();
        let leaving = if self.site.ranks == 1 { leaving } else { leaving.max(module_elems_max) };
        self.ring(limit.min(table.module_range(Module::Embed).start), module_elems_max + leaving, self.recipe.numerics.dtype)
    }

    /// The gradient ring of segments: the longest segment, whose gradients are complete with its last micro-batch, and the buckets that are
    /// being copied to the host. It includes the embeddings, because their gradient is written in the first segment alone. `None` without
    /// savings.
    pub(crate) fn segment_grad_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        let longest = self.longest_segment(table, table.flat_elems()) + RING_BUCKETS * layout.bucket_elems();
        let limit = if self.site.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() };
        self.ring(limit, longest, self.recipe.numerics.dtype)
    }

    /// The ring of gradient sums, which holds the sums of the longest segment. Of several ranks, each has the sums of its slices, in its local
    /// order. `None` if layers are one segment, or without sums or savings.
    pub(crate) fn sum_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        if self.segments.is_whole() {
            return None;
        }
        let each = kept_sums((self.recipe.step.shares, self.recipe.step.group), self.site.ranks);
        let ranks = || (0..self.site.ranks).map(|rank| Slices::new(layout.clone(), rank, self.site.ranks));
        let in_segments = |own: Slices| {
            let ranges = (0..self.segments.count()).map(|segment| self.segments.flat_range(segment, table));
            ranges.map(|range| own.owned_before(range.end) - own.owned_before(range.start)).max().unwrap_or(0)
        };
        let (least, longest) = (ranks().map(|own| own.elems()).min().unwrap_or(0), ranks().map(in_segments).max().unwrap_or(0));
        self.ring(least * each, longest * each, Dtype::Float32)
    }

    /// Elements of the longest segment within the first `limit` elements of the flat order.
    fn longest_segment(&self, table: &TensorTable, limit: usize) -> usize {
        let ranges = (0..self.segments.count()).map(|segment| self.segments.flat_range(segment, table));
        ranges.map(|range| range.end.min(limit) - range.start.min(limit)).max().unwrap_or(0)
    }

    /// Memory of each rank for the residual stream between segments of layers.
    pub(crate) fn boundaries(&self) -> BoundarySizes {
        boundaries(self.recipe, self.segments, self.site.ranks)
    }

    /// Whether gradient sums can be stored on the host: there are sums of the whole model, on a single device with its own memory.
    pub(super) fn may_sum_on_host(&self) -> bool {
        self.recipe.step.shares > 1 && self.site.ranks == 1 && self.site.machine.device != DeviceMemory::Shared && self.segments.is_whole()
    }

    /// The weight ring, which holds a module and the next one: of offloaded buckets if weights stream from the host, of all buckets if they
    /// stream from other ranks. `None` without savings.
    pub(crate) fn weight_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        // Slices of other ranks are stored on their devices, even those of offloaded buckets.
        let limit = if self.site.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() };
        let limit = limit.min(table.module_range(Module::Embed).start);
        let elems = match self.segments.is_whole() {
            true => table.longest_streamed_pair(),
            // While the last micro-batch of a segment is computed, the next segment arrives layer by layer.
            false => self.longest_segment(table, limit) + table.longest_layer(),
        };
        self.ring(limit, elems, self.recipe.numerics.dtype)
    }

    /// A ring of the first `end` elements in flat order, of at least `elems_min` elements. Tied embeddings stay outside: they are also the
    /// output matrix and hold its gradient during the whole backward pass. Paged buckets stay outside, too: the device steps them, and their
    /// gradients stay until the verdict.
    fn ring(&self, end: usize, elems_min: usize, dtype: Dtype) -> Option<RingShape> {
        let grain = self.site.machine.kind.ring_grain_bytes() / dtype.bytes();
        let (ringed_elems, period_elems) = (end / grain * grain, elems_min.next_multiple_of(grain));
        (ringed_elems > period_elems).then_some(RingShape { ringed_elems, period_elems })
    }

    /// Memory of activations, if layers follow `policies`.
    ///
    /// # Errors
    /// `Usage` if batch and sequence length do not suit the model.
    pub(crate) fn activations(&self, policies: &[LayerPolicy], tile: LossTile) -> Result<ActivationPlan> {
        ActivationPlan::new(micro_batch(self.recipe, (self.shape(), tile), policies, self.segments))
    }

    /// All memory classes that are not empty.
    pub(crate) fn classes(&self, layout: &BucketLayout, rings: Rings, activations: &ActivationPlan) -> Vec<MemoryClass> {
        let (flat, ranks, arrays) = (layout.flat_elems(), self.site.ranks, self.recipe.numerics.moments.arrays());
        // Only the optimizer state of a paged bucket crosses the link.
        let [offloaded, paged] = [Tier::Host, Tier::Unified].map(|tier| layout.elems_in(tier).len());
        let slices = || (0..ranks).map(|rank| Slices::new(layout.clone(), rank, ranks));
        let slots: usize = slices().map(|own| own.slice_elems().min(own.elems_in(Tier::Host).len())).sum();
        let slot_bytes = slots * self.protocol.link_dtype.bytes();
        // Devices with their own memory reserve equally much: the need of the device with the longest slices.
        let of_all = |elems: &dyn Fn(&Slices) -> usize| match self.site.machine.device {
            DeviceMemory::Shared => slices().map(|own| elems(&own)).sum::<usize>(),
            DeviceMemory::Own { .. } => ranks * slices().map(|own| elems(&own)).max().unwrap_or(0),
        };
        let (longest, owned, resident) =
            (of_all(&Slices::slice_elems), of_all(&Slices::elems), of_all(&|own| own.elems_in(Tier::Device).len()));
        let staging = if device_casts(self.recipe.numerics.dtype, self.protocol.link_dtype) && offloaded > 0 { 2 * longest * 4 } else { 0 };
        let class = |name, space, bytes| MemoryClass { name, space, bytes };
        let flat_bytes = |ring| ranks * self.site.machine.kind.flat_bytes(flat, self.recipe.numerics.dtype, ring);
        let elems_of = |buckets: Range<usize>| of_all(&|own| own.local_buckets(&buckets).len());
        // With sharded weights the ranks of a process hold all slices among them; with fully sharded weights each rank holds its own.
        let slices_each = if rings.fully_sharded { 1 } else { self.site.processes };
        let shard_elems = ranks * slices_each * Slices::new(layout.clone(), 0, ranks).most_in(&sharded(layout, rings.weights, ranks));
        let kept_elems = elems_of(kept(layout, rings.grads, ranks));
        let params_name = if rings.weights.is_some() && ranks == 1 { "streamed weights" } else { "parameter slots" };
        let sum_bytes = 4 * kept_sums((self.recipe.step.shares, self.recipe.step.group), ranks);
        let [summed_there, passing] = host_sums(layout, rings.sums_on_host);
        let device_sums = match rings.sums {
            Some(_) => of_all(&|own| self.site.machine.kind.flat_bytes(own.elems() * sum_bytes / 4, Dtype::Float32, rings.sums)),
            None => (owned - summed_there) * sum_bytes,
        };
        let (boundaries, width) = (self.boundaries(), self.recipe.numerics.dtype.bytes());
        let pulled = (ranks - 1) * longest * self.recipe.numerics.dtype.bytes();
        let mut classes = vec![class("weights", MemorySpace::Device, flat_bytes(rings.weights))];
        classes.extend(self.frozen.classes(ranks, width));
        classes.extend([
            class("weight slices", MemorySpace::Device, shard_elems * self.recipe.numerics.dtype.bytes()),
            class("gradients", MemorySpace::Device, flat_bytes(rings.grads)),
            class("gradient slices", MemorySpace::Device, kept_elems * self.recipe.numerics.dtype.bytes()),
            class("gradient sums", MemorySpace::Device, device_sums),
            class("passing sums", MemorySpace::Device, passing * sum_bytes),
            class("peers' gradients", MemorySpace::Device, pulled),
            class("NCCL's buffers", MemorySpace::Device, if self.site.by_nccl { ranks * gpu::NCCL_BYTES } else { 0 }),
            class("resident p, m, v", MemorySpace::Device, self.device_arrays(Tier::Device).bytes(resident)),
            class("rounding of states", MemorySpace::Device, self.rounding_of_states(layout)),
            class("paged states here", MemorySpace::Device, self.paged_window_bytes(layout)),
            class("cast staging", MemorySpace::Device, staging),
            class("activations", MemorySpace::Device, ranks * activations.device_bytes().0 as usize),
            class("segment boundaries", MemorySpace::Device, ranks * boundaries.device_elems() * width),
            class("norm partials", MemorySpace::Device, owned / BLOCK * 4 + ranks * 4),
            class("offloaded p, m, v", MemorySpace::Host, self.host_arrays(rings).bytes(offloaded)),
            class("paged p, m, v", MemorySpace::Host, arrays.bytes(paged)),
            class("gradient slots", MemorySpace::Host, self.grad_slots(layout, rings) * slot_bytes),
            class("gradients' sums", MemorySpace::Host, summed_there * sum_bytes),
            class(params_name, MemorySpace::Host, self.param_slots(layout, rings) * slot_bytes),
            class("kept activations", MemorySpace::Host, ranks * activations.host_bytes().0 as usize),
            class("kept boundaries", MemorySpace::Host, ranks * boundaries.host_elems() * width),
            class("batches, norm", MemorySpace::Host, self.driver_bytes(layout)),
            class("exchange", MemorySpace::Host, self.counter_bytes(layout)),
            class("slices under way", MemorySpace::Host, self.under_way_bytes(slices().map(|own| own.slice_elems()).max().unwrap_or(0))),
            class("timeline", MemorySpace::Host, (self.site.threads + driver_tracks(ranks)) * self.site.trace_spans * size_of::<Span>()),
            class("data", MemorySpace::Host, self.site.data_bytes),
        ]);
        let pinned = bytes_at(&classes, MemorySpace::Host) as usize;
        classes.push(class("lists of pinned pages", MemorySpace::Host, ranks * self.site.machine.kind.page_list_bytes(pinned)));
        classes.extend(self.requested_copies_classes(layout));
        // Each rank has its own context, and each process pays its host memory once.
        let count = |space| if space == MemorySpace::Device { ranks } else { self.site.processes };
        classes.extend(self.own_memory.iter().map(|own| class(own.name, own.space, count(own.space) * own.bytes)));
        classes.into_iter().filter(|class| class.bytes > 0).collect()
    }

    /// Bytes that drivers add to the arrays of resident states, each of which is an allocation for each bucket.
    fn rounding_of_states(&self, layout: &BucketLayout) -> usize {
        let (arrays, kind) = (self.device_arrays(Tier::Device), self.site.machine.kind);
        let elems = Slices::new(layout.clone(), 0, self.site.ranks).slice_elems();
        let bucket: usize = arrays.parts().map(|part| kind.rounding_bytes(arrays[part].bytes(elems))).sum();
        self.site.ranks * layout.buckets_in(Tier::Device).len() * bucket
    }

    /// Bytes that `classes` exceed the device and the host by; 0 where they fit.
    pub(crate) fn lacking(&self, classes: &[MemoryClass]) -> (u64, u64) {
        let [device, host] = balances(&self.site.machine, classes, (self.site.ranks, self.site.processes), self.transient_bytes);
        (device.lacking(), host.lacking())
    }

    /// Host buffers of the drivers: all micro-batches of a step, because they are read before the first one runs; partial sums of the norm,
    /// a flag, and the numbers that each partial sum reports; expert rows of each micro-batch; embedding rows that are stepped last; and buffers for
    /// state in transfer; and numbers of a reference.
    fn driver_bytes(&self, layout: &BucketLayout) -> usize {
        let parts = self.recipe.step.micro_batches * self.recipe.step.sequence_ranks;
        let (norm_partials, expert_words) = (layout.flat_elems() / BLOCK, parts * bounds_elems(self.shape()));
        let rows = if layout.early().is_empty() {
            0
        } else {
            batch::distinct(self.recipe.step.micro_batch * self.recipe.step.seq_length, self.shape().vocab)
        };
        let lists = parts * head_rows::list_words(self.recipe.numerics.head_rows, self.recipe.step.tokens_of_rank());
        let of_micro_batch = (self.recipe.step.micro_batch, self.recipe.step.seq_length);
        let reference = self.recipe.objective.map_or(0, |objective| parts * objective.reference_words(of_micro_batch));
        4 * (self.batch_words()
            + lists
            + reference
            + norm_partials
            + self.recipe.step.shares * self.recipe.report_words()
            + expert_words
            + rows
            + self.site.ranks * (1 + BOUNCE_ELEMS))
    }

    /// Words of all micro-batches of a step.
    fn batch_words(&self) -> usize {
        let ranks = self.recipe.step.sequence_ranks;
        self.recipe.step.micro_batches * ranks * self.recipe.batch_words(ranks)
    }

    /// Bytes of the progress counters of all processes; 0 with one rank.
    fn counter_bytes(&self, layout: &BucketLayout) -> usize {
        let steps = (self.recipe.step.shares * self.recipe.report_words(), self.batch_words(), self.shape().experts());
        if self.site.ranks == 1 { 0 } else { self.site.processes * counter_sizes(layout, self.site.ranks, steps).bytes() }
    }

    /// Host buffers for transfers between processes, over all processes. Slices have at most `longest` elements. Each rank has a connection
    /// for weights to each inter-node peer. For gradients it has a connection to every rank of another process, or to the inter-node peers
    /// alone if groups are summed within a process.
    fn under_way_bytes(&self, longest: usize) -> usize {
        let (inter_node_peers, others) = (self.site.processes - 1, self.site.ranks - self.site.ranks / self.site.processes);
        let connections = inter_node_peers
            + if sums_within(self.recipe.step.group, (self.site.ranks, self.site.processes)) { inter_node_peers } else { others };
        if self.site.processes == 1 || self.site.by_nccl {
            0
        } else {
            self.site.ranks * slices_under_way(connections) * longest * self.recipe.numerics.dtype.bytes()
        }
    }

    /// Device memory of the paged window. A bucket shares the first and last page of each array with its neighbours.
    fn paged_window_bytes(&self, layout: &BucketLayout) -> usize {
        let DeviceMemory::Own { addressing: Addressing::Managed, .. } = self.site.machine.device else { return 0 };
        PAGED_WINDOW.min(layout.buckets_in(Tier::Unified).len())
            * (self.recipe.numerics.moments.arrays().bytes(layout.bucket_elems()) + 3 * PAGE_BYTES)
    }
}

/// Timeline tracks of drivers and their streams, without those of workers. A rank with peers has two more streams.
pub(super) fn driver_tracks(ranks: usize) -> usize {
    if ranks == 1 { 4 } else { 6 * ranks }
}

/// Buckets of which each of several ranks stores only its slice of the weights: all buckets that overlap the ring.
pub(super) fn sharded(layout: &BucketLayout, ring: Option<RingShape>, ranks: usize) -> Range<usize> {
    let ringed_elems = ring.filter(|_| ranks > 1).map_or(0, |ring| ring.ringed_elems);
    layout.overlapping(0..ringed_elems)
}

/// Buckets that devices step and whose gradients overlap the ring. Each of several ranks keeps the sum of its slice.
pub(super) fn kept(layout: &BucketLayout, ring: Option<RingShape>, ranks: usize) -> Range<usize> {
    let ringed = sharded(layout, ring, ranks).end;
    layout.offloaded().min(ringed)..ringed
}

/// fp32 sums kept per element if `ranks` ranks add a partial sum each in every round: one of whole groups, and one of an incomplete
/// group.
pub(crate) fn kept_sums((partial_sums, group): (usize, usize), ranks: usize) -> usize {
    if partial_sums == ranks { 0 } else { 1 + usize::from(!ranks.is_multiple_of(group)) }
}

/// Whether each of several processes sums a whole group in each round.
pub(super) fn sums_within(group: usize, (ranks, processes): (usize, usize)) -> bool {
    processes > 1 && group > 1 && group * processes == ranks
}

/// Elements of gradient sums on the host, and of the device buffers through which they pass.
pub(crate) fn host_sums(layout: &BucketLayout, sums_on_host: bool) -> [usize; 2] {
    if !sums_on_host {
        return [0, 0];
    }
    [layout.offloaded_elems(), SUM_PLACES.min(layout.offloaded()) * layout.bucket_elems()]
}

/// Dimensions of the progress counters. Their mail holds the micro-batches of a step, or a piece of state. The tuple has the numbers
/// that a step's partial sums report, the words of its micro-batches, and the experts of all layers.
pub(super) fn counter_sizes(layout: &BucketLayout, ranks: usize, (reported, batch_words, experts): (usize, usize, usize)) -> CounterSizes {
    let flat = layout.flat_elems();
    CounterSizes {
        ranks,
        buckets: layout.count(),
        norm_partials: flat / BLOCK,
        partial_sums: reported,
        experts,
        mail_words: batch_words.max(PIECE_ELEMS.min(flat)),
        on_gpus: false,
    }
}
