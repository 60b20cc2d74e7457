//! A plan: the settings resolved for a machine, with every number that the engine needs. It is printed before step 0. Later only placements
//! change.

use super::budget::{
    Balance, balances, boundaries, bytes_at, counter_sizes, device_casts, kept, kept_sums, micro_batch, sharded, sums_within,
};
use super::forecast::Forecast;
use super::placement::Placement;
use super::protocol::Protocol;
use super::site::Site;
use crate::device::DeviceKind;
use crate::hardware::rates::HostFormats;
use crate::host::memory_policy::MemoryPolicy;
use crate::model::activations::MicroBatch;
use crate::model::head_rows;
use crate::model::heads::{self, SequenceRank};
use crate::model::segments::BoundarySizes;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::clip::ClipRule;
use crate::optim::optimizer::Optimizer;
use crate::optim::split::Masters;
use crate::ranks::progress::CounterSizes;
use crate::recipe::{Recipe, StepShape};
use crate::request::choices::{CastSide, LayerOrder};
use crate::request::cut::StepSplit;
use crate::request::wanted::Wanted;
use crate::request::{KernelChoices, Request};
use std::ops::Range;

pub(crate) use crate::memory::MemorySpace;

/// The resolved plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// All choices that decide the bits of results.
    pub recipe: Recipe,
    /// The machine and the processes.
    pub site: Site,
    /// How steps proceed.
    pub protocol: Protocol,
    /// Where states, weights, gradients and activations lie.
    pub placement: Placement,
    /// Expected memory, traffic and step time.
    pub forecast: Forecast,
}

impl Plan {
    /// This plan with the placements of `other`: locations of buckets, weights and activations, and numbers of slots. No bit of a result
    /// depends on them.
    ///
    /// # Panics
    /// If the other plan differs in the cut of buckets, in the steps or in the numerics.
    pub(crate) fn with_placement_of(&self, other: Self) -> Self {
        let formats = |plan: &Self| (plan.protocol.link_dtype, plan.protocol.masters);
        let cut = |plan: &Self| (plan.placement.layout.with_resident(0), plan.site.ranks, formats(plan), plan.protocol.rules);
        assert_eq!(cut(self), cut(&other), "another cut is no other place");
        assert!(self.is_movable() && other.is_movable(), "split masters of the host keep their places");
        // The engine receives the norm with each step.
        let recipe = Recipe { max_grad_norm: self.recipe.max_grad_norm, ..other.recipe };
        assert_eq!(self.recipe.differences(&recipe), [], "another recipe is no other place");
        let forecast = Forecast { usual_tile: self.forecast.usual_tile, ..other.forecast };
        Self { placement: other.placement, forecast, ..self.clone() }
    }

    /// Whether states can move to other places between steps. Split masters of the host cannot: they lie among the streamed weights.
    pub(crate) fn is_movable(&self) -> bool {
        self.host_masters() == Masters::Float32
    }

    /// This plan with `host_memory` as the source of host memory.
    pub fn with_host_memory(mut self, host_memory: MemoryPolicy) -> Self {
        self.site.host_memory = host_memory;
        self
    }

    /// This plan for a machine other than the present one.
    pub(crate) fn for_another_machine(mut self) -> Self {
        self.site.for_other_machine = true;
        self
    }

    /// This plan with a simulated step of `step_ms`.
    pub(crate) fn with_simulated_step(mut self, step_ms: f64) -> Self {
        self.forecast.simulated_step_ms = Some(step_ms);
        self
    }

    /// The rule of clipping.
    pub fn clip(&self) -> ClipRule {
        ClipRule::GlobalNorm { max_norm: self.recipe.max_grad_norm }
    }

    /// The optimizer, with the formats of its state.
    pub fn optimizer(&self) -> Optimizer {
        self.recipe.optimizer()
    }

    /// Parameters of the model, trained and frozen.
    pub fn params(&self) -> usize {
        TensorTable::new(&self.recipe.model).params()
    }

    /// Trained parameters of the model.
    pub fn trained_params(&self) -> usize {
        TensorTable::new(&self.recipe.model).trained_params()
    }

    /// The smallest and the largest number of query heads of a rank, if they differ.
    pub(crate) fn uneven_heads(&self) -> Option<[usize; 2]> {
        heads::uneven(&self.recipe.model.layers, self.recipe.step.sequence_ranks)
    }

    /// Tokens of an optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.recipe.step.tokens()
    }

    /// Micro-batches of a step in which one rank takes part.
    pub(crate) fn micro_batches_of_rank(&self) -> usize {
        self.recipe.step.micro_batches_each(self.site.ranks)
    }

    /// Micro-batches of one partial sum, whole or in part.
    pub(crate) fn micro_batches_per_partial_sum(&self) -> usize {
        self.recipe.step.micro_batches_each(self.recipe.step.shares)
    }

    /// This plan with `each` micro-batches in every partial sum, and the same number of partial sums.
    pub(crate) fn with_micro_batches_per_partial_sum(&self, each: usize) -> Self {
        let micro_batches = self.recipe.step.micro_batches / self.micro_batches_per_partial_sum() * each;
        let recipe = Recipe { step: StepShape { micro_batches, ..self.recipe.step }, ..self.recipe.clone() };
        Self { recipe, ..self.clone() }
    }

    /// Memory of each rank for the residual stream between segments of layers.
    pub(crate) fn boundaries(&self) -> BoundarySizes {
        boundaries(&self.recipe, &self.placement.segments, self.site.ranks)
    }

    /// fp32 sums kept per element between two rounds.
    pub(crate) fn kept_sums(&self) -> usize {
        kept_sums((self.recipe.step.shares, self.recipe.step.group), self.site.ranks)
    }

    /// Whether the ranks of a process compute a whole group in each round. The process then sends only the group's sum.
    pub(crate) fn sums_within(&self) -> bool {
        sums_within(self.recipe.step.group, (self.site.ranks, self.site.processes))
    }

    /// Words of a rank's part of a micro-batch.
    pub(crate) fn batch_words(&self) -> usize {
        self.recipe.batch_words(self.recipe.step.sequence_ranks)
    }

    /// Words of the lists of a micro-batch's selected rows of the head; 0 if the head computes all rows.
    pub(crate) fn head_row_words(&self) -> usize {
        head_rows::list_words(self.recipe.numerics.head_rows, self.recipe.step.tokens_of_rank())
    }

    /// Index of `rank` among the ranks that share its sequences.
    pub(crate) fn sequence_rank(&self, rank: usize) -> SequenceRank {
        SequenceRank { rank: rank % self.recipe.step.sequence_ranks, ranks: self.recipe.step.sequence_ranks }
    }

    /// The split of a step into micro-batches.
    pub(crate) fn split(&self) -> StepSplit {
        StepSplit { micro_batch: self.recipe.step.micro_batch, accumulation: Some(self.micro_batches_of_rank()) }
    }

    /// `request` with everything fixed that a change of placement must not change: the cut of steps and buckets, the side that casts, and
    /// threads.
    pub(crate) fn fixed(&self, request: &Request) -> Request {
        let bucket_bytes = self.placement.layout.bucket_elems() * self.recipe.numerics.dtype.bytes();
        let kernels = KernelChoices {
            loss_tile: Some(self.recipe.numerics.loss_tile),
            experts: self.recipe.numerics.experts.into(),
            long_sums: Some(self.recipe.numerics.long_sums),
            head_rows: self.recipe.numerics.head_rows.into(),
            logits_dtype: self.recipe.numerics.logits_dtype.into(),
            ..request.kernels
        };
        let wanted = Wanted {
            split: if request.cut.tokens.is_some() { self.split() } else { request.wanted.split },
            bucket_mib: Some(bucket_bytes as f64 / f64::from(1 << 20)),
            threads: Some(self.site.threads),
            cast: if self.device_casts() { CastSide::Device } else { CastSide::Host },
            without: self.protocol.techniques.off(),
            layer_order: self.layer_order(),
            masters: self.protocol.masters.into(),
            ..request.wanted.clone()
        };
        Request { kernels, wanted, ..request.clone() }
    }

    /// The order of the segments.
    pub(crate) fn layer_order(&self) -> LayerOrder {
        let segments = &self.placement.segments;
        match segments.count().checked_sub(2) {
            None => LayerOrder::Whole,
            Some(below) => LayerOrder::Segments { layers: segments.layers(below).len(), turn: segments.layers(below + 1).len() },
        }
    }

    /// Dimensions of the progress counters of its ranks.
    pub fn board_sizes(&self) -> CounterSizes {
        let batch_words = self.recipe.step.micro_batches * self.recipe.step.sequence_ranks * self.batch_words();
        let reported = self.recipe.step.shares * self.recipe.report_words();
        let sizes = counter_sizes(&self.placement.layout, self.site.ranks, (reported, batch_words, self.recipe.model.experts()));
        CounterSizes { on_gpus: self.site.machine.kind == DeviceKind::Gpu, ..sizes }
    }

    /// Planned bytes in `space`.
    pub(crate) fn bytes_at(&self, space: MemorySpace) -> u64 {
        bytes_at(&self.forecast.memory, space)
    }

    /// Demand and supply of each device's memory and of the host's.
    pub fn balances(&self) -> [Balance; 2] {
        balances(&self.site.machine, &self.forecast.memory, (self.site.ranks, self.site.processes), self.forecast.transient_bytes)
    }

    /// A micro-batch of a model with this `shape`.
    pub fn micro_batch<'a>(&'a self, shape: &'a ModelShape) -> MicroBatch<'a> {
        let (tile, Placement { layer_policies, segments, .. }) = (self.recipe.numerics.loss_tile, &self.placement);
        micro_batch(&self.recipe, (shape, tile), layer_policies, segments)
    }

    /// Buckets of which every rank stores only its slice of the weights.
    pub(crate) fn sharded(&self) -> Range<usize> {
        sharded(&self.placement.layout, self.placement.rings.weights, self.site.ranks)
    }

    /// Buckets of which every rank keeps the summed gradients of its slice, because the gradients themselves are in a ring.
    pub(crate) fn kept(&self) -> Range<usize> {
        kept(&self.placement.layout, self.placement.rings.grads, self.site.ranks)
    }

    /// Whether weights stream from host memory, module by module.
    pub(crate) fn streams_from_host(&self) -> bool {
        self.placement.rings.weights.is_some() && self.site.ranks == 1
    }

    /// Storage of the masters of buckets that the host steps.
    pub(crate) fn host_masters(&self) -> Masters {
        if self.placement.rings.split_masters { Masters::Split } else { Masters::Float32 }
    }

    /// Formats of the states of buckets that the host steps.
    pub(crate) fn host_formats(&self) -> HostFormats {
        HostFormats { moments: self.recipe.numerics.moments, masters: self.host_masters() }
    }

    /// See [`device_casts`].
    pub(crate) fn device_casts(&self) -> bool {
        device_casts(self.recipe.numerics.dtype, self.protocol.link_dtype)
    }
}
