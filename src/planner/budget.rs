//! The memory of a run by class and place, known before anything is allocated.

use super::experts::ExpertEngine;
use super::machine::Machine;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::bucket::slices::Slices;
use crate::data::batch;
use crate::device::footprint::MemoryClass;
use crate::device::footprint::gpu::{self, PAGE_BYTES};
use crate::device::{Attention, AttentionShape};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::memory::{Addressing, DeviceMemory, MemorySpace, RingShape};
use crate::model::activations::{ActivationPlan, LossTile, MicroBatch, bounds_elems};
use crate::model::heads::SequenceRank;
use crate::model::mlp_tile;
use crate::model::policy::LayerPolicy;
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, TensorTable};
use crate::optim::PIECE_ELEMS;
use crate::optim::moments::Moments;
use crate::optim::norm::BLOCK;
use crate::optim::simd::Isa;
use crate::planner::rules::{Policy, Rules};
use crate::ranks::board::Sizes;
use crate::ranks::lanes::slices_under_way;
use crate::trace::Span;
use std::ops::Range;

/// Buckets that may be on their way to the host while the next module writes.
const RING_BUCKETS: usize = 8;
/// Buckets whose paged states may be on the device at once: one comes, one is stepped, one goes, and one for when they do not
/// take equally long.
pub(crate) const PAGED_WINDOW: usize = 4;
/// Places on the device that sums of gradients on the host pass through: one comes, one is added to, and one goes.
pub(crate) const SUM_PLACES: usize = 3;
/// Elements that pass at once between the device and the host's side of its state: a pinned buffer.
pub(crate) const BOUNCE_ELEMS: usize = 1 << 18;

/// The bytes of `classes` at `space`.
pub(crate) fn bytes_at(classes: &[MemoryClass], space: MemorySpace) -> u64 {
    classes.iter().filter(|class| class.space == space).map(|class| class.bytes as u64).sum()
}

/// What is needed of a memory and what there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    pub space: MemorySpace,
    /// Bytes planned.
    pub needed: u64,
    /// Bytes free before the run.
    pub available: u64,
}

impl Balance {
    /// Bytes that are missing; 0 when it fits.
    pub(crate) fn lacking(&self) -> u64 {
        self.needed.saturating_sub(self.available)
    }

    /// Bytes that stay free; `None` when it does not fit or nobody knows.
    pub(crate) fn free(&self) -> Option<u64> {
        Some(self.available).filter(|&bytes| bytes < u64::MAX)?.checked_sub(self.needed)
    }
}

/// The balance of each of `ranks` devices, for all of which `classes` are, and the host's, which needs `transient_bytes` besides. Devices
/// that share the host's memory need nothing of their own.
pub(crate) fn balances(
    machine: &Machine,
    classes: &[MemoryClass],
    (ranks, processes): (usize, usize),
    transient_bytes: u64,
) -> [Balance; 2] {
    // Processes have as much each, on machines of their own.
    let of_one = |space| bytes_at(classes, space).div_ceil(processes as u64);
    let (ranks, on_device, on_host) = (ranks / processes, of_one(MemorySpace::Device), of_one(MemorySpace::Host) + transient_bytes);
    let balance = |space, needed, available| Balance { space, needed, available };
    let (device, needed) = match machine.device {
        DeviceMemory::Shared => (balance(MemorySpace::Device, 0, u64::MAX), on_device + on_host),
        DeviceMemory::Own { bytes, .. } => (balance(MemorySpace::Device, on_device.div_ceil(ranks as u64), bytes), on_host),
    };
    [device, balance(MemorySpace::Host, needed, machine.host_bytes)]
}

/// Whether the device casts and fp32 crosses the link; without the feature `superchip-cast` known at compile time.
pub(crate) fn device_casts(dtype: Dtype, link_dtype: Dtype) -> bool {
    cfg!(feature = "superchip-cast") && link_dtype != dtype
}

/// What of the device's flat memory repeats, or lies elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rings {
    /// The gradients' ring, if they share memory.
    pub grads: Option<RingShape>,
    /// The ring that weights stream through; `None`: they stay.
    pub weights: Option<RingShape>,
    /// Each rank keeps its own slices of them alone, and what it carries for its process comes to the ring with each fetch.
    pub(crate) fully_sharded: bool,
    /// Sums of gradients lie beside the optimizer states of their buckets, and pass through the device.
    pub(crate) sums_on_host: bool,
}

/// Everything that memory and time depend on but the planner's choice.
#[derive(Clone, Debug)]
pub(crate) struct Workload<'a> {
    pub shape: &'a ModelShape,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence, on all ranks that share it.
    pub seq_length: usize,
    /// Rows hold several documents, and attention keeps these apart.
    pub separates_documents: bool,
    /// Micro-batches of a step.
    pub grad_accum_steps: usize,
    /// Shares of a step, whose gradients are summed.
    pub shares: usize,
    /// Consecutive shares whose sum is rounded; 1 where none is.
    pub(crate) group: usize,
    /// Devices that train together; what is planned is for all of them.
    pub ranks: usize,
    /// Devices that share each sequence.
    pub(crate) sequence_ranks: usize,
    /// Processes that these are of.
    pub processes: usize,
    /// NCCL carries what passes between them.
    pub(crate) by_nccl: bool,
    /// Format on the device.
    pub dtype: Dtype,
    /// Products of layers are computed in FP8.
    pub(crate) fp8: bool,
    pub link_dtype: Dtype,
    /// Format of the optimizer's moments.
    pub moments: Moments,
    /// What the coordinator may do.
    pub(crate) rules: Rules,
    /// Slots that are lent, of each kind.
    pub slots: usize,
    /// Room for spans on each track of the timeline.
    pub trace_spans: usize,
    /// Bytes of the data that is kept in memory, and of its order.
    pub data_bytes: usize,
    pub attention: Attention,
    /// Who multiplies by experts.
    pub(super) expert_engine: ExpertEngine,
    /// Optimizer workers.
    pub workers: usize,
    pub isa: Isa,
    /// Where it has to fit.
    pub machine: Machine,
    /// Host memory that is needed besides, but not while steps run: for loading and saving.
    pub(crate) transient_bytes: u64,
}

impl Workload<'_> {
    /// Host slots for gradients: one for each offloaded bucket, so that none waits; `slots` more when each keeps its slot for
    /// one step more.
    pub(crate) fn grad_slots(&self, layout: &BucketLayout) -> usize {
        if self.rules.policy == Policy::Deferred { layout.offloaded() + self.slots } else { layout.offloaded() }
    }

    /// Host slots for working weights: those that are lent, or a place for each bucket whose weights are streamed from there.
    pub(crate) fn param_slots(&self, layout: &BucketLayout, rings: Rings) -> usize {
        if rings.weights.is_some() && self.ranks == 1 { layout.offloaded() } else { self.slots }
    }

    /// The ring that gradients can share: those of offloaded buckets, or of all where several ranks keep their slices of the sums.
    /// Long enough for the largest module and what is on its way to the host, or to other ranks: these begin with a module's gradients when the
    /// last is written, and so get as much room again. None where micro-batches add up in place, or where it would save nothing, and none on a
    /// device that shares the host's memory.
    pub(crate) fn grad_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        if micro_batches_each(self.grad_accum_steps, self.sequence_ranks, self.shares) > 1 || self.machine.device == DeviceMemory::Shared {
            return None;
        }
        let module_elems_max = streamed_modules(table).max().unwrap_or(0);
        let limit = if self.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() };
        let leaving = RING_BUCKETS * layout.bucket_elems();
        let leaving = if self.ranks == 1 { leaving } else { leaving.max(module_elems_max) };
        self.ring(limit, table, module_elems_max + leaving)
    }

    /// Whether sums of gradients can lie on the host: there are some, all on one device, with memory of its own.
    pub(super) fn may_sum_on_host(&self) -> bool {
        self.shares > 1 && self.ranks == 1 && self.machine.device != DeviceMemory::Shared
    }

    /// The ring that weights can stream through, of offloaded buckets from the host, or of all from other ranks: long enough for a module and the next one. None where it
    /// would save nothing.
    pub(crate) fn weight_ring(&self, layout: &BucketLayout, table: &TensorTable) -> Option<RingShape> {
        let next = streamed_modules(table).skip(1).chain([0]);
        let pair_elems_max = streamed_modules(table).zip(next).map(|(module, next)| module + next).max().unwrap_or(0);
        // Slices of other ranks lie on their devices, whoever steps them.
        let limit = if self.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() };
        self.ring(limit, table, pair_elems_max)
    }

    /// The embeddings stay outside: tied ones are the head's matrix, too, and hold its gradient during the whole backward pass.
    /// So do paged buckets, which are stepped here: their gradients stay until the verdict.
    fn ring(&self, limit: usize, table: &TensorTable, elems_min: usize) -> Option<RingShape> {
        let grain = self.machine.kind.ring_grain_bytes() / self.dtype.bytes();
        let end = limit.min(table.module_range(Module::Embed).start);
        let (ringed_elems, period_elems) = (end / grain * grain, elems_min.next_multiple_of(grain));
        (ringed_elems > period_elems).then_some(RingShape { ringed_elems, period_elems })
    }

    /// Activations of layers that keep what `policies` say.
    ///
    /// # Errors
    /// `Usage` when batch and sequence make no sense for the model.
    pub(crate) fn activations(&self, policies: &[LayerPolicy], tile: LossTile) -> Result<ActivationPlan> {
        let Self { shape, batch, seq_length, sequence_ranks, separates_documents, dtype, fp8, .. } = *self;
        let mlp_tile = self.mlp_tile();
        ActivationPlan::new(MicroBatch {
            shape,
            batch,
            seq_length,
            sequence_ranks,
            separates_documents,
            dtype,
            fp8,
            tile,
            mlp_tile,
            policies,
        })
    }

    /// Tokens of a tile of the MLP, where it goes in several.
    pub(crate) fn mlp_tile(&self) -> Option<usize> {
        mlp_tile::tile_tokens(self.batch.saturating_mul(self.seq_length) / self.sequence_ranks, self.fp8)
    }

    /// Every class that is not empty.
    pub(crate) fn classes(&self, layout: &BucketLayout, rings: Rings, activations: &ActivationPlan) -> Vec<MemoryClass> {
        let (flat, ranks, state_bytes) = (layout.flat_elems(), self.ranks, self.moments.state_bytes());
        // Of a paged bucket nothing crosses the link but the state.
        let [offloaded, paged] = [Tier::Host, Tier::Unified].map(|tier| layout.elems_in(tier).len());
        let slices = || (0..ranks).map(|rank| Slices::new(layout.clone(), rank, ranks));
        let slots: usize = slices().map(|own| own.slice_elems().min(own.elems_in(Tier::Host).len())).sum();
        let slot_bytes = slots * self.link_dtype.bytes();
        // Devices with memory of their own have as much each: what the one with the longest slices needs.
        let of_all = |elems: &dyn Fn(&Slices) -> usize| match self.machine.device {
            DeviceMemory::Shared => slices().map(|own| elems(&own)).sum::<usize>(),
            DeviceMemory::Own { .. } => ranks * slices().map(|own| elems(&own)).max().unwrap_or(0),
        };
        let (longest, owned, resident) =
            (of_all(&Slices::slice_elems), of_all(&Slices::elems), of_all(&|own| own.elems_in(Tier::Device).len()));
        let staging = if device_casts(self.dtype, self.link_dtype) && offloaded > 0 { 2 * longest * 4 } else { 0 };
        let class = |name, space, bytes| MemoryClass { name, space, bytes };
        let flat_bytes = |ring| ranks * self.machine.kind.flat_bytes(flat, self.dtype, ring);
        let elems_of = |buckets: Range<usize>| of_all(&|own| own.local_buckets(&buckets).len());
        // A process has all slices, and each of its ranks as many as there are processes; or each rank has its own.
        let slices_each = if rings.fully_sharded { 1 } else { self.processes };
        let shard_elems = ranks * slices_each * Slices::new(layout.clone(), 0, ranks).most_in(&sharded(layout, rings.weights, ranks));
        let kept_elems = elems_of(kept(layout, rings.grads, ranks));
        let params_name = if rings.weights.is_some() && ranks == 1 { "streamed weights" } else { "parameter slots" };
        let sum_bytes = 4 * kept_sums((self.shares, self.group), ranks);
        let [summed_there, passing] = host_sums(layout, rings.sums_on_host);
        let pulled = (ranks - 1) * longest * self.dtype.bytes();
        let mut classes = vec![
            class("weights", MemorySpace::Device, flat_bytes(rings.weights)),
            class("weight slices", MemorySpace::Device, shard_elems * self.dtype.bytes()),
            class("gradients", MemorySpace::Device, flat_bytes(rings.grads)),
            class("gradient slices", MemorySpace::Device, kept_elems * self.dtype.bytes()),
            class("gradient sums", MemorySpace::Device, (owned - summed_there) * sum_bytes),
            class("passing sums", MemorySpace::Device, passing * sum_bytes),
            class("peers' gradients", MemorySpace::Device, pulled),
            class("NCCL's buffers", MemorySpace::Device, if self.by_nccl { ranks * gpu::NCCL_BYTES } else { 0 }),
            class("resident p, m, v", MemorySpace::Device, state_bytes * resident),
            class("paged states here", MemorySpace::Device, self.paged_window_bytes(layout)),
            class("cast staging", MemorySpace::Device, staging),
            class("activations", MemorySpace::Device, ranks * activations.device_bytes().0 as usize),
            class("norm partials", MemorySpace::Device, owned / BLOCK * 4 + ranks * 4),
            class("offloaded p, m, v", MemorySpace::Host, state_bytes * offloaded),
            class("paged p, m, v", MemorySpace::Host, state_bytes * paged),
            class("gradient slots", MemorySpace::Host, self.grad_slots(layout) * slot_bytes),
            class("gradients' sums", MemorySpace::Host, summed_there * sum_bytes),
            class(params_name, MemorySpace::Host, self.param_slots(layout, rings) * slot_bytes),
            class("kept activations", MemorySpace::Host, ranks * activations.host_bytes().0 as usize),
            class("batches, norm", MemorySpace::Host, self.driver_bytes(layout)),
            class("exchange", MemorySpace::Host, self.board_bytes(layout)),
            class("slices under way", MemorySpace::Host, self.under_way_bytes(slices().map(|own| own.slice_elems()).max().unwrap_or(0))),
            class("timeline", MemorySpace::Host, (self.workers + driver_tracks(ranks)) * self.trace_spans * size_of::<Span>()),
            class("data", MemorySpace::Host, self.data_bytes),
        ];
        let own = self.machine.kind.own_memory(self.attention, &self.attention_shapes(), self.separates_documents);
        let pinned = bytes_at(&classes, MemorySpace::Host) as usize;
        classes.push(class("lists of pinned pages", MemorySpace::Host, ranks * self.machine.kind.page_list_bytes(pinned)));
        // A context each; what it takes of the host, a process takes once.
        let count = |space| if space == MemorySpace::Device { ranks } else { self.processes };
        classes.extend(own.into_iter().map(|own| class(own.name, own.space, count(own.space) * own.bytes)));
        classes.retain(|class| class.bytes > 0);
        classes
    }

    /// The ways in which layers attend to the tokens of a micro-batch, each once, the first layer's first; of the first rank, which has no fewer
    /// heads than another.
    pub(crate) fn attention_shapes(&self) -> Vec<AttentionShape> {
        let first = SequenceRank { rank: 0, ranks: self.sequence_ranks };
        let mut shapes = Vec::new();
        for layer in 0..self.shape.layers.len() {
            let shape = self.shape.attention_of((self.batch, self.seq_length), layer, first);
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// Bytes that `classes` lack on the device and on the host; 0 where they fit.
    pub(crate) fn lacking(&self, classes: &[MemoryClass]) -> (u64, u64) {
        let [device, host] = balances(&self.machine, classes, (self.ranks, self.processes), self.transient_bytes);
        (device.lacking(), host.lacking())
    }

    /// What the driver reads and writes: every micro-batch of a step, since all are read before the first one runs; the partial sums of
    /// the norm, a flag and the loss of each share; the rows of experts in each micro-batch; those of an embedding that come last; and state
    /// that it moves.
    fn driver_bytes(&self, layout: &BucketLayout) -> usize {
        let parts = self.grad_accum_steps * self.sequence_ranks;
        let (partials, expert_words) = (layout.flat_elems() / BLOCK, parts * bounds_elems(self.shape));
        let rows = if layout.early().is_empty() { 0 } else { batch::distinct(self.batch * self.seq_length, self.shape.vocab) };
        4 * (self.batch_words() + partials + self.shares + expert_words + rows + self.ranks * (1 + BOUNCE_ELEMS))
    }

    /// Words of all micro-batches of a step.
    fn batch_words(&self) -> usize {
        let of_part = batch::part_words((self.batch, self.seq_length), self.sequence_ranks, self.separates_documents);
        self.grad_accum_steps * self.sequence_ranks * of_part
    }

    /// What ranks tell each other, in each process; nothing where there is one.
    fn board_bytes(&self, layout: &BucketLayout) -> usize {
        let steps = (self.shares, self.batch_words(), self.shape.experts());
        if self.ranks == 1 { 0 } else { self.processes * board_sizes(layout, self.ranks, steps).bytes() }
    }

    /// What passes between processes through host memory, of all of them; slices have at most `longest` elements. Each rank has a way for
    /// weights to each of its namesakes, and one for gradients to every rank of another process; to the namesakes alone where groups are summed
    /// before.
    fn under_way_bytes(&self, longest: usize) -> usize {
        let (namesakes, others) = (self.processes - 1, self.ranks - self.ranks / self.processes);
        let lanes = namesakes + if sums_within(self.group, (self.ranks, self.processes)) { namesakes } else { others };
        if self.processes == 1 || self.by_nccl { 0 } else { self.ranks * slices_under_way(lanes) * longest * self.dtype.bytes() }
    }

    /// A bucket shares its arrays' first and last pages with its neighbours.
    fn paged_window_bytes(&self, layout: &BucketLayout) -> usize {
        let DeviceMemory::Own { addressing: Addressing::Managed, .. } = self.machine.device else { return 0 };
        PAGED_WINDOW.min(layout.buckets_in(Tier::Unified).len()) * (self.moments.state_bytes() * layout.bucket_elems() + 3 * PAGE_BYTES)
    }
}

/// Of a step's `micro_batches`, shared by `sequence_ranks` each, how many each of `parts` has its part of.
pub(super) fn micro_batches_each(micro_batches: usize, sequence_ranks: usize, parts: usize) -> usize {
    micro_batches * sequence_ranks / parts
}

/// Tracks of a timeline beside the workers': drivers and their streams, of which those with peers have two more.
pub(super) fn driver_tracks(ranks: usize) -> usize {
    if ranks == 1 { 4 } else { 6 * ranks }
}

/// Buckets whose weights each of several ranks keeps its slice of alone: all that lie in the ring, if only in part.
pub(super) fn sharded(layout: &BucketLayout, ring: Option<RingShape>, ranks: usize) -> Range<usize> {
    let ringed_elems = ring.filter(|_| ranks > 1).map_or(0, |ring| ring.ringed_elems);
    layout.overlapping(0..ringed_elems)
}

/// Buckets that devices step and whose gradients lie in a ring, if only in part: each of several ranks keeps the sum of its slice.
pub(super) fn kept(layout: &BucketLayout, ring: Option<RingShape>, ranks: usize) -> Range<usize> {
    let ringed = sharded(layout, ring, ranks).end;
    layout.offloaded().min(ringed)..ringed
}

/// Sums in fp32 that are kept of each element where `ranks` add a share each in every round: of whole groups, and of one that is not whole.
pub(crate) fn kept_sums((shares, group): (usize, usize), ranks: usize) -> usize {
    if shares == ranks { 0 } else { 1 + usize::from(!ranks.is_multiple_of(group)) }
}

/// Whether each of several processes sums a group in each round.
pub(super) fn sums_within(group: usize, (ranks, processes): (usize, usize)) -> bool {
    processes > 1 && group > 1 && group * processes == ranks
}

/// Elements of gradients' sums that lie on the host, and of the places on the device that they pass through.
pub(crate) fn host_sums(layout: &BucketLayout, sums_on_host: bool) -> [usize; 2] {
    let elems = if sums_on_host { layout.offloaded_elems() } else { 0 };
    [elems, SUM_PLACES.min(elems.div_ceil(layout.bucket_elems())) * layout.bucket_elems()]
}

/// Sizes of the board at which ranks meet, whose mail takes the micro-batches of a step, or a piece of state. Of a step: its shares, words of
/// its micro-batches, experts of all layers.
pub(super) fn board_sizes(layout: &BucketLayout, ranks: usize, (shares, batch_words, experts): (usize, usize, usize)) -> Sizes {
    let flat = layout.flat_elems();
    Sizes {
        ranks,
        buckets: layout.count(),
        partials: flat / BLOCK,
        shares,
        experts,
        mail_words: batch_words.max(PIECE_ELEMS.min(flat)),
        on_gpus: false,
    }
}

/// Elements of every module that a ring may hold, in flat order.
fn streamed_modules(table: &TensorTable) -> impl Iterator<Item = usize> {
    table.modules().filter(|module| *module != Module::Embed).map(|module| table.module_range(module).len())
}
