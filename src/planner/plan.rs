//! A plan: the settings resolved for a machine, with every number that the engine needs. It is printed before step 0. Later only placements
//! change.

use crate::bucket::layout::{BucketLayout, Tier};
use crate::config::options::{
    AttentionChoice, CastSide, HostMemoryKind, Injection, IsaChoice, MatmulDtype, RankFault, ResidentBuckets, Rollback, Strategy,
    Technique, TrainDtype, Transport, WeightsChoice,
};
use crate::config::settings::Settings;
use crate::data::rows::batch;
use crate::data::rows::row_table::Packing;
use crate::device::footprint::MemoryClass;
use crate::device::{Attention, DeviceKind, ExpertProducts};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::memory_policy::MemoryPolicy;
use crate::memory::RingShape;
use crate::model::activations::{LossTile, MicroBatch};
use crate::model::fp8;
use crate::model::heads::{self, SequenceRank};
use crate::model::policy::LayerPolicy;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use crate::optim::adam::AdamHyper;
use crate::optim::moments::Moments;
use crate::optim::norm::BLOCK;
use crate::optim::simd::Isa;
use crate::planner::budget::{
    Balance, Rings, Workload, balances, bytes_at, counter_sizes, device_casts, driver_tracks, kept, kept_sums, micro_batches_each, sharded,
    sums_within,
};
use crate::planner::choice::{Request, Residency, choose};
use crate::planner::early::{check_early, early_table};
use crate::planner::experts::ExpertEngine;
use crate::planner::machine::Machine;
use crate::planner::peer_traffic::PeerTraffic;
use crate::planner::predict::Prediction;
use crate::planner::rules::{Policy, Rules};
use crate::ranks::progress::CounterSizes;
use crate::recipe::{Numerics, Recipe, StepShape};
use crate::trace::spans_per_track;
use clap::ValueEnum;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use crate::memory::MemorySpace;

/// Maximum bytes of working weights in a bucket: the size at which the paper's link saturates (section 4.3).
const BUCKET_BYTES_MAX: usize = 64 << 20;
/// Minimum number of buckets, so that small models are pipelined, too.
const BUCKETS_MIN: usize = 16;
/// Default number of slots.
pub(crate) const SLOTS: usize = 8;

/// The techniques of a run: those that are compiled in, part of the strategy, and not turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Techniques {
    /// Speculation-then-validation.
    pub stv: bool,
    /// No speculation while clips are frequent.
    pub adaptive: bool,
    /// Writes known updates between two backward passes.
    pub(crate) early_commit: bool,
    /// Earliest deadline first.
    pub(crate) deadline_order: bool,
    /// Resident tail buckets.
    pub repartition: bool,
    /// Casts on the device with fp32 on the link, if the settings request it.
    pub(crate) superchip_cast: bool,
    /// Vector CPU Adam.
    pub(crate) grace_adam: bool,
    /// Core affinity and partitions.
    pub(crate) mpam: bool,
    /// Streams weights layer by layer, if the model does not fit otherwise or the settings request it.
    pub weight_flow: bool,
}

impl Techniques {
    fn new(settings: &Settings) -> Self {
        let on = |compiled: bool, technique| compiled && !settings.without.contains(&technique);
        let superoffload = settings.strategy == Strategy::Superoffload;
        // Buckets that the device steps wait for the verdict.
        let stv = superoffload && settings.memory == HostMemoryKind::Pinned && on(cfg!(feature = "stv"), Technique::Stv);
        Self {
            stv,
            adaptive: stv && on(true, Technique::Adaptive),
            early_commit: stv && on(true, Technique::EarlyCommit),
            deadline_order: superoffload && on(cfg!(feature = "deadline-order"), Technique::DeadlineOrder),
            repartition: superoffload && on(cfg!(feature = "repartition"), Technique::Repartition),
            superchip_cast: on(cfg!(feature = "superchip-cast"), Technique::SuperchipCast),
            grace_adam: on(cfg!(feature = "grace-adam"), Technique::GraceAdam),
            mpam: on(cfg!(feature = "mpam"), Technique::Mpam),
            weight_flow: on(cfg!(feature = "weight-flow"), Technique::WeightFlow),
        }
    }

    fn all(self) -> [(Technique, bool); 9] {
        [
            (Technique::Stv, self.stv),
            (Technique::Adaptive, self.adaptive),
            (Technique::EarlyCommit, self.early_commit),
            (Technique::DeadlineOrder, self.deadline_order),
            (Technique::Repartition, self.repartition),
            (Technique::SuperchipCast, self.superchip_cast),
            (Technique::GraceAdam, self.grace_adam),
            (Technique::Mpam, self.mpam),
            (Technique::WeightFlow, self.weight_flow),
        ]
    }

    fn off(self) -> Vec<Technique> {
        self.all().into_iter().filter(|(_, on)| !on).map(|(technique, _)| technique).collect()
    }

    pub(super) fn names(self) -> String {
        let on = self.all().into_iter().filter(|(_, on)| *on);
        let names = on.filter_map(|(technique, _)| Some(technique.to_possible_value()?.get_name().to_string()));
        let names: Vec<_> = names.collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}

/// The resolved plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// All choices that decide the bits of results.
    pub recipe: Recipe,
    /// Named set of techniques.
    pub strategy: Strategy,
    /// Techniques in force.
    pub techniques: Techniques,
    /// Permissions of the coordinator.
    pub rules: Rules,
    /// The next forward waits for all parameters, not per bucket (ZeRO-Offload).
    pub barrier: bool,
    /// Format of gradients and parameters on the link; fp32 when the device casts.
    pub link_dtype: Dtype,
    /// Instruction set of the optimizer.
    pub isa: Isa,
    /// Number of compute threads, and of optimizer workers.
    pub threads: usize,
    /// Cut of the flat order into buckets, and the tier of each bucket.
    pub layout: BucketLayout,
    /// The ring of gradients on the device; `None` if every gradient has its own memory.
    pub grad_ring: Option<RingShape>,
    /// The ring through which weights stream; `None`: they stay on the device.
    pub weight_ring: Option<RingShape>,
    /// Whether each rank of several processes stores only its own slices of the ringed weights.
    pub fully_sharded: bool,
    /// Whether gradient sums are stored next to the optimizer states of their buckets and pass through the device.
    pub sums_on_host: bool,
    /// Host slots for gradients: one for each offloaded bucket, plus the reusable ones.
    pub grad_slots: usize,
    /// Host slots for working weights. With streamed weights each offloaded bucket has a permanent slot.
    pub param_slots: usize,
    /// Devices that train together. Each computes its shares and owns its slice of every bucket.
    pub ranks: usize,
    /// The smallest and the largest number of query heads of a rank, if they differ.
    pub uneven_heads: Option<[usize; 2]>,
    /// Processes of the run. All have equally many ranks.
    pub processes: usize,
    /// Whether NCCL transfers the data between processes.
    pub by_nccl: bool,
    /// Bytes that ranks exchange in a step.
    pub peer_traffic: PeerTraffic,
    /// The tile of the loss with unlimited memory: a function of the model and the micro-batch.
    pub usual_tile: LossTile,
    /// Activations that each layer keeps for its backward pass.
    pub layer_policies: Vec<LayerPolicy>,
    /// Whether the model soft-caps attention scores.
    pub caps_scores: bool,
    /// Number of experts of all layers together.
    pub experts: usize,
    /// A line about the implementation of expert products and its reason; `None` without experts.
    pub expert_products_note: Option<String>,
    /// Directories that are searched first for NVIDIA's libraries.
    pub cuda_libraries: Vec<PathBuf>,
    /// Faults to inject.
    pub inject: Vec<Injection>,
    /// Ranks with an injected fault.
    pub rank_faults: Vec<RankFault>,
    /// Reorder events with this seed (cpu device).
    pub adversary: Option<u64>,
    /// Capacity of each timeline track in spans; 0 records none.
    pub trace_spans: usize,
    /// Source of host memory. The caller that starts the engine sets it, because it knows the machine.
    pub host_memory: MemoryPolicy,
    /// The machine of the plan, with the limits of the settings.
    pub machine: Machine,
    /// All memory classes.
    pub memory: Vec<MemoryClass>,
    /// Additional host memory for loading and saving, which steps do not need.
    pub transient_bytes: u64,
    /// The predicted step time, if rates are known.
    pub predicted: Option<Prediction>,
    /// The simulated step time, if a simulation chose the plan.
    pub simulated_step_ms: Option<f64>,
    /// Whether the plan is for another machine. Its instruction set is unknown.
    pub elsewhere: bool,
    /// Parameters of the model.
    pub params: usize,
}

impl Plan {
    /// Resolves `settings` for a model on `machine`, with memory for a timeline if `trace`. [`Plan::check_fits`] checks whether the plan
    /// fits.
    ///
    /// # Errors
    /// `Usage` if a setting needs a technique that is not compiled in, or does not suit this model or machine.
    pub fn new(settings: &Settings, shape: &ModelShape, machine: &Machine, trace: bool) -> Result<Self> {
        let (techniques, table) = (Techniques::new(settings), TensorTable::new(shape));
        check(settings, (shape, &table), machine.kind)?;
        let workload = workload(settings, techniques, (shape, &table), machine, trace)?;
        let request = request(settings, techniques)?;
        let cut = cut(settings, &table, workload.dtype).with_early(early_table(settings.early_rows, &workload, &table)?);
        check_ranks(settings, &cut)?;
        let choice = choose(&workload, &table, &cut, request)?;
        check_streams(settings, choice.rings)?;
        check_early(settings.early_rows, &choice.layout)?;
        Ok(Self {
            recipe: recipe(settings, shape, &workload, choice.tile),
            strategy: settings.strategy,
            techniques,
            rules: workload.rules,
            barrier: settings.strategy == Strategy::ZeroOffload,
            link_dtype: workload.link_dtype,
            isa: workload.isa,
            threads: workload.workers,
            grad_ring: choice.rings.grads,
            weight_ring: choice.rings.weights,
            fully_sharded: choice.rings.fully_sharded,
            sums_on_host: choice.rings.sums_on_host,
            grad_slots: workload.grad_slots(&choice.layout),
            param_slots: workload.param_slots(&choice.layout, choice.rings),
            layout: choice.layout,
            ranks: workload.ranks,
            uneven_heads: heads::uneven(&shape.layers, workload.sequence_ranks),
            processes: workload.processes,
            by_nccl: workload.by_nccl,
            peer_traffic: PeerTraffic::of(&workload, &table, choice.rings),
            usual_tile: choice.usual_tile,
            layer_policies: choice.policies,
            caps_scores: workload.shape.caps_scores(),
            experts: workload.shape.experts(),
            cuda_libraries: settings.cuda_libraries.iter().cloned().collect(),
            inject: settings.inject.clone(),
            rank_faults: settings.faults.clone(),
            adversary: settings.adversary,
            trace_spans: workload.trace_spans,
            host_memory: MemoryPolicy::default(),
            machine: workload.machine,
            expert_products_note: workload.expert_engine.note,
            memory: choice.memory,
            transient_bytes: workload.transient_bytes,
            predicted: choice.predicted,
            simulated_step_ms: None,
            elsewhere: false,
            params: table.params(),
        })
    }

    /// This plan with the placements of `other`: locations of buckets, weights and activations, and numbers of slots. No bit of a result
    /// depends on them.
    ///
    /// # Panics
    /// If the other plan differs in the cut of buckets, in the steps or in the numerics.
    pub(crate) fn with_placement_of(&self, other: Self) -> Self {
        let cut = |plan: &Self| (plan.layout.with_resident(0), plan.ranks, plan.link_dtype, plan.rules);
        assert_eq!(cut(self), cut(&other), "another cut is no other place");
        // The engine receives the norm with each step.
        let recipe = Recipe { max_grad_norm: self.recipe.max_grad_norm, ..other.recipe };
        assert_eq!(self.recipe.differences(&recipe), [], "another recipe is no other place");
        Self {
            layout: other.layout,
            grad_ring: other.grad_ring,
            weight_ring: other.weight_ring,
            fully_sharded: other.fully_sharded,
            peer_traffic: other.peer_traffic,
            sums_on_host: other.sums_on_host,
            grad_slots: other.grad_slots,
            param_slots: other.param_slots,
            layer_policies: other.layer_policies,
            memory: other.memory,
            predicted: other.predicted,
            simulated_step_ms: other.simulated_step_ms,
            ..self.clone()
        }
    }

    /// Tokens of an optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.recipe.step.tokens()
    }

    /// Micro-batches of a step in which one rank takes part.
    pub(crate) fn micro_batches_of_rank(&self) -> usize {
        self.recipe.step.micro_batches_each(self.ranks)
    }

    /// Micro-batches of one gradient share, whole or in part.
    pub(crate) fn micro_batches_per_partial_sum(&self) -> usize {
        self.recipe.step.micro_batches_each(self.recipe.step.shares)
    }

    /// This plan with `each` micro-batches in every gradient share, and the same number of shares.
    pub(crate) fn with_micro_batches_per_partial_sum(&self, each: usize) -> Self {
        let micro_batches = self.recipe.step.micro_batches / self.micro_batches_per_partial_sum() * each;
        let recipe = Recipe { step: StepShape { micro_batches, ..self.recipe.step }, ..self.recipe.clone() };
        Self { recipe, ..self.clone() }
    }

    /// fp32 sums kept per element between two rounds.
    pub(crate) fn kept_sums(&self) -> usize {
        kept_sums((self.recipe.step.shares, self.recipe.step.group), self.ranks)
    }

    /// Whether the ranks of a process compute a whole group in each round. The process then sends only the group's sum.
    pub(crate) fn sums_within(&self) -> bool {
        sums_within(self.recipe.step.group, (self.ranks, self.processes))
    }

    /// Words of a rank's part of a micro-batch.
    pub(crate) fn batch_words(&self) -> usize {
        batch::part_words(
            (self.recipe.step.micro_batch, self.recipe.step.seq_length),
            self.recipe.step.sequence_ranks,
            self.recipe.separates_documents(),
        )
    }

    /// Index of `rank` among the ranks that share its sequences.
    pub(crate) fn sequence_rank(&self, rank: usize) -> SequenceRank {
        SequenceRank { rank: rank % self.recipe.step.sequence_ranks, ranks: self.recipe.step.sequence_ranks }
    }

    /// `settings` with the micro-batches of this plan, if `settings` leave them to the plan.
    pub(crate) fn settle(&self, settings: &Settings) -> Settings {
        if settings.tokens_per_step.is_none() {
            return settings.clone();
        }
        let gradient_accumulation_steps = Some(self.micro_batches_of_rank());
        Settings { per_device_train_batch_size: self.recipe.step.micro_batch, gradient_accumulation_steps, ..settings.clone() }
    }

    /// `settings` with everything fixed that a change of placement must not change: the cut of steps and buckets, the side that casts, and
    /// threads.
    pub(crate) fn fixed(&self, settings: &Settings) -> Settings {
        let bucket_bytes = self.layout.bucket_elems() * self.recipe.numerics.dtype.bytes();
        Settings {
            bucket_mib: Some(bucket_bytes as f64 / f64::from(1 << 20)),
            threads: Some(self.threads),
            cast: if self.device_casts() { CastSide::Device } else { CastSide::Host },
            without: self.techniques.off(),
            loss_tile: Some(self.recipe.numerics.loss_tile),
            expert_products: self.recipe.numerics.experts.into(),
            ..self.settle(settings)
        }
    }

    /// Dimensions of the progress counters of its ranks.
    pub fn board_sizes(&self) -> CounterSizes {
        let batch_words = self.recipe.step.micro_batches * self.recipe.step.sequence_ranks * self.batch_words();
        let sizes = counter_sizes(&self.layout, self.ranks, (self.recipe.step.shares, batch_words, self.experts));
        CounterSizes { on_gpus: self.machine.kind == DeviceKind::Gpu, ..sizes }
    }

    /// Planned bytes in `space`.
    pub(crate) fn bytes_at(&self, space: MemorySpace) -> u64 {
        bytes_at(&self.memory, space)
    }

    /// Demand and supply of each device's memory and of the host's.
    pub fn balances(&self) -> [Balance; 2] {
        balances(&self.machine, &self.memory, (self.ranks, self.processes), self.transient_bytes)
    }

    /// A micro-batch of a model with this `shape`.
    pub fn micro_batch<'a>(&'a self, shape: &'a ModelShape) -> MicroBatch<'a> {
        let StepShape { micro_batch: batch, seq_length, sequence_ranks, .. } = self.recipe.step;
        let Numerics { dtype, fp8, loss_tile: tile, mlp_tile, .. } = self.recipe.numerics;
        let (separates_documents, policies) = (self.recipe.separates_documents(), &self.layer_policies);
        MicroBatch { shape, batch, seq_length, sequence_ranks, separates_documents, dtype, fp8, tile, mlp_tile, policies }
    }

    /// Buckets of which every rank stores only its slice of the weights.
    pub(crate) fn sharded(&self) -> Range<usize> {
        sharded(&self.layout, self.weight_ring, self.ranks)
    }

    /// Buckets of which every rank keeps the summed gradients of its slice, because the gradients themselves are in a ring.
    pub(crate) fn kept(&self) -> Range<usize> {
        kept(&self.layout, self.grad_ring, self.ranks)
    }

    /// Whether weights stream from host memory, module by module.
    pub(crate) fn streams_from_host(&self) -> bool {
        self.weight_ring.is_some() && self.ranks == 1
    }

    /// See [`device_casts`].
    pub(crate) fn device_casts(&self) -> bool {
        device_casts(self.recipe.numerics.dtype, self.link_dtype)
    }
}

/// The part of `settings` in which the planner has no choice.
fn workload<'a>(
    settings: &Settings,
    techniques: Techniques,
    (shape, table): (&'a ModelShape, &TensorTable),
    machine: &Machine,
    trace: bool,
) -> Result<Workload<'a>> {
    let dtype = compute_dtype(settings.dtype);
    let link_dtype = if cast_on_device(settings, techniques)? { Dtype::Float32 } else { dtype };
    let (policy, fp8) = (policy(settings, techniques)?, settings.matmul_dtype == Some(MatmulDtype::Fp8));
    if fp8 {
        fp8::check(shape, settings.per_device_train_batch_size * settings.seq_length / settings.sequence_ranks)?;
    }
    let workers = settings.threads.unwrap_or(machine.workers());
    let expert_engine = ExpertEngine::of(settings, shape, dtype, machine)?;
    Ok(Workload {
        shape,
        batch: settings.per_device_train_batch_size,
        seq_length: settings.seq_length,
        separates_documents: settings.packing == Packing::Bfd,
        grad_accum_steps: settings.micro_batches(),
        partial_sums: settings.partial_sums(),
        gradient_group: settings.group(),
        ranks: settings.ranks(),
        sequence_ranks: settings.sequence_ranks,
        processes: settings.processes,
        by_nccl: match settings.transport {
            Transport::Nccl => true,
            Transport::Tcp => false,
            // The machines are remote. For a run, the processes have already agreed on a transport.
            Transport::Auto => settings.processes > 1 && machine.kind == DeviceKind::Gpu,
        },
        dtype,
        fp8,
        link_dtype,
        moments: settings.moments,
        rules: Rules {
            policy,
            adaptive: techniques.adaptive,
            deadline_order: techniques.deadline_order,
            early_commit: techniques.early_commit,
        },
        slots: settings.slots.unwrap_or(SLOTS),
        trace_spans: if trace { spans_per_track(workers + 1 + driver_tracks(settings.ranks())) } else { 0 },
        data_bytes: settings.data_bytes as usize,
        attention: attention(settings, shape, dtype, machine.kind)?,
        workers,
        isa: isa(settings, techniques)?,
        machine: machine.limited(settings).multiplying_experts_by(expert_engine.by),
        expert_engine,
        transient_bytes: transient_bytes(table),
    })
}

/// The requests of `settings` for the planner's choice.
fn request(settings: &Settings, techniques: Techniques) -> Result<Request> {
    let (residency, weights) = (residency(settings, techniques)?, weights(settings, techniques)?);
    Ok(Request { residency, activations: settings.activations, weights, tile: settings.loss_tile })
}

fn compute_dtype(dtype: TrainDtype) -> Dtype {
    match dtype {
        TrainDtype::Bfloat16 => Dtype::Bfloat16,
        TrainDtype::Float16 => Dtype::Float16,
        TrainDtype::Float32 => Dtype::Float32,
    }
}

fn wanted_isa(choice: IsaChoice) -> Option<Isa> {
    match choice {
        IsaChoice::Auto => None,
        IsaChoice::Scalar => Some(Isa::Scalar),
        IsaChoice::Avx2 => Some(Isa::Avx2),
        IsaChoice::Avx512 => Some(Isa::Avx512),
        IsaChoice::Neon => Some(Isa::Neon),
        IsaChoice::Sve2 => Some(Isa::Sve2),
    }
}

fn policy(settings: &Settings, techniques: Techniques) -> Result<Policy> {
    match settings.rollback {
        Rollback::Inverse if !techniques.stv => {
            Err(Error::usage("--rollback inverse needs --strategy superoffload with the technique stv"))
        }
        _ if !techniques.stv => Ok(Policy::ValidateFirst),
        Rollback::Deferred => Ok(Policy::Deferred),
        Rollback::Inverse => Ok(Policy::Inverse),
    }
}

/// Cuts the flat order into buckets, none of them resident.
fn cut(settings: &Settings, table: &TensorTable, dtype: Dtype) -> BucketLayout {
    let flat = table.flat_elems();
    let least_bytes = if settings.ranks() > 1 { settings.ranks() * BLOCK * dtype.bytes() } else { 0 };
    let bucket_bytes = match settings.bucket_mib {
        Some(mib) => (mib * f64::from(1 << 20)) as usize,
        // Each GPU owns at least one block of every bucket.
        None => BUCKET_BYTES_MAX.min(flat * dtype.bytes() / BUCKETS_MIN).max(least_bytes),
    };
    let away = if settings.memory == HostMemoryKind::Unified { Tier::Unified } else { Tier::Host };
    BucketLayout::new(flat, bucket_bytes / dtype.bytes(), away)
}

fn residency(settings: &Settings, techniques: Techniques) -> Result<Residency> {
    let requested = settings.resident_buckets;
    match requested {
        _ if settings.strategy == Strategy::NoOffload => Ok(Residency::Exactly(usize::MAX)),
        ResidentBuckets::All | ResidentBuckets::Count(1..) if !techniques.repartition => {
            Err(Error::usage(format!("--resident-buckets {requested} needs --strategy superoffload with the technique repartition")))
        }
        ResidentBuckets::All => Ok(Residency::Exactly(usize::MAX)),
        ResidentBuckets::Count(count) => Ok(Residency::Exactly(count)),
        ResidentBuckets::Auto if techniques.repartition => Ok(Residency::Largest),
        ResidentBuckets::Auto => Ok(Residency::Exactly(0)),
    }
}

/// The permitted locations of weights. Only weights whose optimizer runs in the pool are streamed from the host, and they cross the link in
/// the compute format.
fn weights(settings: &Settings, techniques: Techniques) -> Result<WeightsChoice> {
    let obstacle = match settings {
        _ if !techniques.weight_flow => Some("needs the technique weight-flow, which is off"),
        // Weights stream from other ranks.
        Settings { weights, .. } if settings.ranks() > 1 && *weights != WeightsChoice::Flow => None,
        Settings { strategy: Strategy::NoOffload, .. } => Some("needs a strategy that offloads"),
        Settings { cast: CastSide::Device, .. } => Some("cannot be combined with --cast device: weights cross the link in --dtype"),
        Settings { memory: HostMemoryKind::Unified, .. } => Some("cannot be combined with --memory unified: nothing is offloaded"),
        _ => None,
    };
    match (settings.weights, obstacle) {
        (WeightsChoice::Sharded, _) if settings.gpus == 1 => Err(Error::usage(
            "--weights sharded needs several devices in each process: use --weights replicated, a larger --gpus, or with several processes \
             --weights fully-sharded",
        )),
        (WeightsChoice::FullySharded, _) if settings.ranks() == 1 => {
            Err(Error::usage("--weights fully-sharded needs several devices: use --weights replicated, or a larger --gpus"))
        }
        (WeightsChoice::Auto, Some(_)) => Ok(WeightsChoice::Replicated),
        (WeightsChoice::Auto | WeightsChoice::Replicated, _) | (_, None) => Ok(settings.weights),
        (choice, Some(obstacle)) => Err(Error::usage(format!("--weights {} {obstacle}", name(choice)))),
    }
}

/// The value of the flag `--weights`.
fn name(weights: WeightsChoice) -> String {
    weights.to_possible_value().map_or(String::new(), |value| value.get_name().to_string())
}

/// Checks that a requested weight ring is shorter than the weights.
fn check_streams(settings: &Settings, rings: Rings) -> Result<()> {
    if matches!(settings.weights, WeightsChoice::Sharded | WeightsChoice::FullySharded) && rings.weights.is_none() {
        return Err(Error::usage(format!(
            "--weights {}: no memory would be saved: the model has too few layers besides the two that each device holds, or its layers \
                are small compared with the device's pages; use --weights replicated",
            name(settings.weights)
        )));
    }
    if settings.weights == WeightsChoice::Flow && rings.weights.is_none() {
        return Err(Error::usage(
            "--weights flow: no memory would be saved: too few layers are offloaded, or they are small compared with the device's pages",
        ));
    }
    Ok(())
}

/// Checks that the model and the device support `settings`.
fn check(settings: &Settings, (shape, table): (&ModelShape, &TensorTable), kind: DeviceKind) -> Result<()> {
    if kind == DeviceKind::Cpu {
        settings.check_needs_no_gpu()?;
    }
    check_inject(settings, table)?;
    check_balance(settings, shape)?;
    check_sequences(settings, shape)
}

/// Checks that the model has experts if a load-balancing loss is requested.
fn check_balance(settings: &Settings, shape: &ModelShape) -> Result<()> {
    let coefficient = settings.router_aux_loss_coef;
    if coefficient == 0.0 || shape.experts() > 0 {
        return Ok(());
    }
    Err(Error::usage(format!("--router-aux-loss-coef {coefficient}: the model has no experts to balance; leave it out")))
}

/// Checks that ranks can share sequences. The search may try lengths and numbers of devices for which they cannot.
fn check_sequences(settings: &Settings, shape: &ModelShape) -> Result<()> {
    settings.check_sequence_ranks()?;
    heads::check_degree(&shape.layers, settings.sequence_ranks).map_err(Error::usage)
}

/// Checks the limits of several devices.
fn check_ranks(settings: &Settings, layout: &BucketLayout) -> Result<()> {
    let (ranks, all) = (settings.ranks(), settings.ranks_in_words());
    match settings.weights {
        _ if ranks == 1 => Ok(()),
        WeightsChoice::Flow => Err(Error::usage(format!("--weights flow cannot be combined with {all}: use --weights sharded"))),
        _ if layout.bucket_elems() / BLOCK < ranks => Err(Error::usage(format!(
            "{all}: a bucket of {} elements has too few blocks of {BLOCK} for each to own one; use a larger --bucket-mib",
            layout.bucket_elems()
        ))),
        _ => Ok(()),
    }
}

/// The attention implementation. cuDNN supports neither float32 nor soft caps, and runs on GPUs only.
fn attention(settings: &Settings, shape: &ModelShape, dtype: Dtype, kind: DeviceKind) -> Result<Attention> {
    let obstacle = if dtype == Dtype::Float32 {
        Some("cuDNN has 16-bit formats only; use --dtype bfloat16 or --attention plain")
    } else {
        shape.caps_scores().then_some("cuDNN's graph has no soft caps on scores, which this model has; use --attention plain")
    };
    match (settings.attention, obstacle) {
        _ if kind == DeviceKind::Cpu => Ok(Attention::Plain),
        (AttentionChoice::Plain, _) | (AttentionChoice::Auto, Some(_)) => Ok(Attention::Plain),
        (AttentionChoice::Cudnn, Some(obstacle)) => Err(Error::usage(format!("--attention cudnn: {obstacle}"))),
        (AttentionChoice::Auto | AttentionChoice::Cudnn, None) => Ok(Attention::Cudnn { deterministic: !settings.nondeterministic }),
    }
}

/// Host memory for loading and saving: state passes through one fp32 buffer, in pieces of a tensor.
fn transient_bytes(table: &TensorTable) -> u64 {
    let largest = table.specs().iter().map(|spec| spec.elems()).max().unwrap_or(0);
    4 * largest.min(PIECE_ELEMS) as u64
}

fn isa(settings: &Settings, techniques: Techniques) -> Result<Isa> {
    match wanted_isa(settings.isa) {
        None if techniques.grace_adam => Ok(Isa::detect()),
        None => Ok(Isa::Scalar),
        Some(isa) if isa != Isa::Scalar && !techniques.grace_adam => {
            Err(Error::usage(format!("--isa {isa} needs the technique grace-adam, which is off")))
        }
        Some(isa) => Ok(isa),
    }
}

/// Whether the device casts. By default the 16-bit format crosses the link, and Adam casts in its own pass. Casting on the device pays off
/// only on a link as fast as memory (paper, section 4.5).
fn cast_on_device(settings: &Settings, techniques: Techniques) -> Result<bool> {
    let wanted = settings.cast == CastSide::Device;
    if wanted && !techniques.superchip_cast {
        return Err(Error::usage("--cast device needs the technique superchip-cast, which is off"));
    }
    Ok(wanted)
}

/// The recipe of a run of `workload` with this tile of the loss.
fn recipe(settings: &Settings, shape: &ModelShape, workload: &Workload<'_>, loss_tile: LossTile) -> Recipe {
    let numerics = Numerics {
        dtype: workload.dtype,
        fp8: workload.fp8,
        moments: workload.moments,
        attention: workload.attention,
        experts: workload.expert_engine.by,
        loss_tile,
        attention_block: workload.attention.block(&workload.attention_shapes()[0]),
        mlp_tile: workload.mlp_tile(),
        device: workload.machine.kind,
        inverse_rollback: workload.rules.policy == Policy::Inverse,
    };
    Recipe {
        model: Arc::new(shape.clone()),
        rows: settings.row_order(),
        step: settings.step_shape(),
        numerics,
        optimizer: settings.optimizer(),
        schedule: settings.schedule(),
        max_grad_norm: settings.max_grad_norm,
        router_aux_loss_coef: settings.router_aux_loss_coef,
    }
}

/// Checks that an injected fault is inside a tensor. Padding between tensors has no gradient, so a fault there would never be overwritten.
fn check_inject(settings: &Settings, table: &TensorTable) -> Result<()> {
    let outside = |element: usize| !table.specs().iter().any(|spec| spec.range().contains(&element));
    match settings.inject.iter().find(|i| outside(i.element)) {
        None => Ok(()),
        Some(i) => {
            Err(Error::usage(format!("inject: element {} of the flat order of {} belongs to no tensor", i.element, table.flat_elems())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(settings: Settings) -> Result<Plan> {
        Plan::new(&settings, &ModelShape::demo(), &Machine::cpu(2), false)
    }

    #[test]
    fn strategies_are_sets_of_techniques() {
        let of = |strategy| plan(Settings { strategy, ..Settings::demo() }).unwrap();
        let none = of(Strategy::NoOffload);
        let on_host: Vec<_> = none.memory.iter().filter(|class| class.space == MemorySpace::Host).map(|class| class.name).collect();
        assert_eq!((none.layout.offloaded(), &on_host[..]), (0, &["batches, norm"][..]));
        assert!(none.to_string().contains("fits without offload: every optimizer state stays on the device"));
        let zero = of(Strategy::ZeroOffload);
        assert!(zero.barrier && zero.rules.policy == Policy::ValidateFirst && zero.layout.offloaded() == zero.layout.count());
        assert_eq!(zero.grad_slots, zero.layout.count(), "a strong baseline: a gradient never waits for a slot");
        let ours = of(Strategy::Superoffload);
        assert!(!ours.barrier && ours.techniques.stv == cfg!(feature = "stv"));
        assert_eq!(ours.rules.policy == Policy::Deferred, cfg!(feature = "stv"));
        assert_eq!(ours.layout.offloaded() < ours.layout.count(), cfg!(feature = "repartition"));
    }

    #[test]
    fn offloaded_state_takes_14_bytes_a_parameter_or_10_and_the_lent_memory() {
        for (moments, bytes) in [(Moments::Float32, 14), (Moments::Bfloat16, 10)] {
            expect_offloaded_bytes(moments, bytes);
        }
    }

    fn expect_offloaded_bytes(moments: Moments, bytes: usize) {
        let plan = plan(Settings { moments, without: vec![Technique::Repartition], ..Settings::demo() }).unwrap();
        let lent = 2 * plan.param_slots * plan.layout.bucket_elems() * 2;
        let classes = plan.memory.iter().filter(|class| class.space == MemorySpace::Host && class.name != "batches, norm");
        let state = classes.map(|class| class.bytes).sum::<usize>() - if plan.rules.policy == Policy::Deferred { lent } else { lent / 2 };
        // Every slot has the length of a whole bucket, also that of the shorter last bucket.
        let last_slot_excess = 2 * (plan.layout.count() * plan.layout.bucket_elems() - plan.layout.flat_elems());
        assert_eq!(state, bytes * plan.layout.flat_elems() + last_slot_excess);
    }

    #[test]
    fn disabled_techniques_cannot_be_requested() {
        let refused = |settings: Settings| plan(settings).unwrap_err().to_string();
        let off = |t| Settings { without: vec![t], ..Settings::demo() };
        assert!(refused(Settings { rollback: Rollback::Inverse, ..off(Technique::Stv) }).contains("stv"));
        assert!(refused(Settings { cast: CastSide::Device, ..off(Technique::SuperchipCast) }).contains("superchip-cast"));
        let two = crate::config::options::ResidentBuckets::Count(2);
        assert!(refused(Settings { resident_buckets: two, ..off(Technique::Repartition) }).contains("repartition"));
        assert!(refused(Settings { isa: IsaChoice::Avx2, ..off(Technique::GraceAdam) }).contains("grace-adam"));
        let fault = Injection { step: 1, element: usize::MAX, share: 0, value: 0.0 };
        assert!(refused(Settings { inject: vec![fault], ..Settings::demo() }).contains("belongs to no tensor"));
    }
}
