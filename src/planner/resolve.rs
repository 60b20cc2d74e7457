//! The way from a request to a plan: the recipe, the site and the protocol follow from the request, the placement is chosen.

use super::budget::{FrozenSizes, Workload, driver_tracks, own_memory};
use super::checks::{check, check_products, check_ranks, check_streams, name};
use super::choice::{Permitted, Residency, choose, fits};
use super::early::{check_early, early_table};
use super::experts::ExpertEngine;
use super::forecast::Forecast;
use super::machine::Machine;
use super::order;
use super::peer_traffic::PeerTraffic;
use super::placement::{Placement, SaveCopies};
use super::plan::Plan;
use super::protocol::Protocol;
use super::rules::{Policy, Rules};
use super::site::Site;
use super::techniques::Techniques;
use crate::bucket::layout::{BucketLayout, BucketStarts, LayoutRequest, Tier};
use crate::device::cpu::SUM_BLOCK;
use crate::device::footprint::MemoryClass;
use crate::device::{Attention, DeviceKind, ExpertProducts, LongSums, ScoreTile};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::memory_policy::MemoryPolicy;
use crate::model::activations::LossTile;
use crate::model::heads::SequenceRank;
use crate::model::mlp_tile;
use crate::model::segments::LayerSegments;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use crate::optim::norm::BLOCK;
use crate::optim::simd::Isa;
use crate::optim::split::Masters;
use crate::recipe::{Numerics, Recipe};
use crate::request::choices::{
    AttentionChoice, CastSide, HostMemoryKind, IsaChoice, MastersChoice, ResidentBuckets, SaveMemory, Strategy, Transport, WeightsChoice,
};
use crate::request::{KernelChoices, Request};
use crate::trace::spans_per_track;

/// Maximum bytes of working weights in a bucket: the size at which the paper's link saturates (section 4.3).
const BUCKET_BYTES_MAX: usize = 64 << 20;
/// Minimum number of buckets, so that small models are pipelined, too.
const BUCKETS_MIN: usize = 16;
/// Default number of slots.
pub(crate) const SLOTS: usize = 8;

impl Plan {
    /// Resolves `request` on `machine`, with memory for a timeline if `trace`. [`Plan::check_fits`] checks whether the plan fits. If the
    /// storage of masters is open, they are split where nothing fits with float32 masters, or only a tile of the loss that is smaller than
    /// the usual one and so changes bits.
    ///
    /// # Errors
    /// `Usage` if a setting needs a technique that is not compiled in, or does not suit this model or machine.
    pub fn new(request: &Request, machine: &Machine, trace: bool) -> Result<Self> {
        let plan = Self::resolve(request, machine, trace)?;
        let rows = |plan: &Self| if plan.shortage().is_none() { plan.recipe.numerics.loss_tile.rows } else { 0 };
        let split = request.with_split_masters().filter(|_| rows(&plan) < plan.forecast.usual_tile.rows);
        let split = split.and_then(|request| Self::resolve(&request, machine, trace).ok());
        Ok(split.filter(|split| rows(split) > rows(&plan)).unwrap_or(plan))
    }

    /// Whether a plan of `request` fits on `machine`, whatever its speed. Requirements of streams and early rows are not checked.
    pub(crate) fn fits(request: &Request, machine: &Machine) -> bool {
        let fits = |request: &Request| Given::of(request, machine, false).and_then(|given| given.fits()).unwrap_or(false);
        fits(request) || request.with_split_masters().is_some_and(|request| fits(&request))
    }

    /// The plan of `request`, with float32 masters if their storage is open.
    fn resolve(request: &Request, machine: &Machine, trace: bool) -> Result<Self> {
        let given = Given::of(request, machine, trace)?;
        let workload = given.workload();
        let mut choice = choose(&workload, &given.table, &given.layout, given.permitted)?;
        check_streams(request.wanted.weights, choice.rings)?;
        check_early(request.early_rows, &choice.layout)?;
        // A plan that no run follows shows the memory that training needs.
        let is_shown = request.site.save_memory == SaveMemory::Auto && !trace;
        let save_copies =
            if is_shown { SaveCopies::default() } else { workload.take_copies((&choice.layout, choice.rings), &mut choice.memory) };
        let placement = Placement {
            save_copies,
            rings: choice.rings,
            grad_slots: workload.grad_slots(&choice.layout, choice.rings),
            param_slots: workload.param_slots(&choice.layout, choice.rings),
            layout: choice.layout,
            layer_policies: choice.policies,
            segments: given.segments.clone(),
        };
        let forecast = Forecast {
            memory: choice.memory,
            transient_bytes: workload.transient_bytes,
            peer_traffic: PeerTraffic::of(&workload, &given.table, choice.rings),
            predicted: choice.predicted,
            simulated_step_ms: None,
            usual_tile: choice.usual_tile,
        };
        let Given { recipe, site, protocol, .. } = given;
        let numerics = Numerics { loss_tile: choice.tile, ..recipe.numerics };
        Ok(Self { recipe: Recipe { numerics, ..recipe }, site, protocol, placement, forecast })
    }
}

/// All that follows from a request on a machine before the planner chooses.
struct Given {
    recipe: Recipe,
    site: Site,
    protocol: Protocol,
    segments: LayerSegments,
    table: TensorTable,
    /// The cut into buckets, none of them resident.
    layout: BucketLayout,
    permitted: Permitted,
    /// Reusable host slots of each kind.
    slots: usize,
    own_memory: Vec<MemoryClass>,
}

impl Given {
    fn of(request: &Request, machine: &Machine, trace: bool) -> Result<Self> {
        let (techniques, shape) = (Techniques::new(request), request.shape());
        let table = TensorTable::new(shape);
        check(request, &table, machine.kind)?;
        let protocol = protocol(request, techniques)?;
        check_products(request)?;
        let expert_engine = ExpertEngine::of(request.kernels.experts, shape, request.recipe.numerics.dtype, machine)?;
        let recipe = recipe(request, &protocol, (machine.kind, expert_engine.by))?;
        let site = site(request, techniques, &machine.clone().attending_by(recipe.numerics.attention), (expert_engine, trace))?;
        let segments = order::segments(request)?;
        let permitted = permitted(request, techniques)?;
        let (layout, slots) = (cut(request, &table, recipe.numerics.dtype), request.wanted.slots.unwrap_or(SLOTS));
        let own_memory = own_memory(&recipe, site.machine.kind);
        let given = Self { recipe, site, protocol, segments, table, layout, permitted, slots, own_memory };
        let early = early_table(request.early_rows, &given.workload(), &given.table)?;
        let given = Self { layout: given.layout.clone().with_early(early), ..given };
        check_ranks(request, &given.layout)?;
        Ok(given)
    }

    fn workload(&self) -> Workload<'_> {
        Workload {
            recipe: &self.recipe,
            site: &self.site,
            protocol: &self.protocol,
            segments: &self.segments,
            slots: self.slots,
            transient_bytes: transient_bytes(&self.table),
            frozen: FrozenSizes::of(&self.table),
            own_memory: &self.own_memory,
        }
    }

    fn fits(&self) -> Result<bool> {
        fits(&self.workload(), &self.table, &self.layout, self.permitted)
    }
}

/// How steps proceed.
fn protocol(request: &Request, techniques: Techniques) -> Result<Protocol> {
    let link_dtype = if cast_on_device(request, techniques)? { Dtype::Float32 } else { request.recipe.numerics.dtype };
    let rules = Rules {
        policy: policy(request, techniques)?,
        adaptive: techniques.adaptive,
        deadline_order: techniques.deadline_order,
        early_commit: techniques.early_commit,
    };
    let (strategy, masters) = (request.strategy, masters(request, techniques)?);
    Ok(Protocol { strategy, techniques, rules, barrier: strategy == Strategy::ZeroOffload, masters, link_dtype })
}

/// The storage of master weights on the device. Split masters need buckets that the device steps.
fn masters(request: &Request, techniques: Techniques) -> Result<Masters> {
    match request.wanted.masters {
        MastersChoice::Auto | MastersChoice::Float32 => Ok(Masters::Float32),
        MastersChoice::Split if techniques.repartition || request.strategy == Strategy::NoOffload => Ok(Masters::Split),
        MastersChoice::Split => Err(Error::usage(
            "--masters split needs buckets that the device steps: use --strategy no-offload, or superoffload with the technique repartition",
        )),
    }
}

/// The recipe with its kernels, and with the requested tile of the loss, or the whole loss in one tile until the planner has chosen it.
fn recipe(request: &Request, protocol: &Protocol, (kind, experts): (DeviceKind, ExpertProducts)) -> Result<Recipe> {
    let (step, shape, Numerics { dtype, fp8, moments, .. }) = (request.step(), request.shape(), request.recipe.numerics);
    let tokens = step.tokens_of_rank();
    let attention = attention(request.kernels, shape, dtype, kind)?;
    let first = SequenceRank { rank: 0, ranks: step.sequence_ranks };
    let numerics = Numerics {
        dtype,
        logits_dtype: request.kernels.logits_dtype.resolve(dtype, request.recipe.objective.is_some())?,
        fp8,
        moments,
        attention,
        experts,
        long_sums: request.kernels.long_sums.unwrap_or(if kind == DeviceKind::Gpu { LongSums::Slices } else { LongSums::Library }),
        head_rows: request.kernels.head_rows.resolve(),
        loss_tile: request.kernels.loss_tile.unwrap_or(LossTile { rows: tokens.max(1), vocab: shape.vocab, tail: 0 }),
        attention_block: shape
            .layers_with_scores()
            .next()
            .and_then(|layer| attention.block(&shape.attention_of((step.micro_batch, step.seq_length), layer, first))),
        mlp_tile: mlp_tile::tile_tokens(tokens, fp8),
        device: kind,
        sum_block: (kind == DeviceKind::Cpu).then_some(SUM_BLOCK),
        inverse_rollback: protocol.rules.policy == Policy::Inverse,
    };
    Ok(Recipe { step, numerics, ..request.recipe.clone() })
}

/// The machine and the processes of a run, with memory for a timeline if `trace`.
fn site(request: &Request, techniques: Techniques, machine: &Machine, (experts, trace): (ExpertEngine, bool)) -> Result<Site> {
    let threads = request.wanted.threads.unwrap_or(machine.workers());
    Ok(Site {
        machine: machine.limited(request.site.hbm_limit, request.site.host_limit).multiplying_experts_by(experts.by),
        ranks: request.cut.ranks(),
        processes: request.cut.processes,
        by_nccl: match request.site.transport {
            Transport::Nccl => true,
            Transport::Tcp => false,
            // The machines are remote. For a run, the processes have already agreed on a transport.
            Transport::Auto => request.cut.processes > 1 && machine.kind == DeviceKind::Gpu,
        },
        cuda_libraries: request.site.cuda_libraries.iter().cloned().collect(),
        isa: isa(request, techniques)?,
        threads,
        data_bytes: request.site.data_bytes as usize,
        host_memory: MemoryPolicy::default(),
        save_memory: request.site.save_memory,
        trace_spans: if trace { spans_per_track(threads + 1 + driver_tracks(request.cut.ranks())) } else { 0 },
        for_other_machine: false,
        expert_products_note: experts.note,
        rank_faults: request.site.rank_faults.clone(),
        adversary: request.site.adversary,
    })
}

/// The choices that `request` leaves to the planner.
fn permitted(request: &Request, techniques: Techniques) -> Result<Permitted> {
    let (residency, weights) = (residency(request, techniques)?, weights(request, techniques)?);
    Ok(Permitted { residency, activations: request.wanted.activations, weights, tile: request.kernels.loss_tile })
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

fn policy(request: &Request, techniques: Techniques) -> Result<Policy> {
    match request.recipe.numerics.inverse_rollback {
        true if !techniques.stv => Err(Error::usage("--rollback inverse needs --strategy superoffload with the technique stv")),
        _ if !techniques.stv => Ok(Policy::ValidateFirst),
        true => Ok(Policy::Inverse),
        false => Ok(Policy::Deferred),
    }
}

/// Cuts the flat order into buckets, none of them resident.
fn cut(request: &Request, table: &TensorTable, dtype: Dtype) -> BucketLayout {
    let flat = table.flat_elems();
    let least_bytes = if request.cut.ranks() > 1 { request.cut.ranks() * BLOCK * dtype.bytes() } else { 0 };
    let bucket_bytes = match request.wanted.bucket_mib {
        Some(mib) => (mib * f64::from(1 << 20)) as usize,
        // Each GPU owns at least one block of every bucket.
        None => BUCKET_BYTES_MAX.min(flat * dtype.bytes() / BUCKETS_MIN).max(least_bytes),
    };
    let away = if request.site.memory == HostMemoryKind::Unified { Tier::Unified } else { Tier::Host };
    let tensors: Vec<usize> = table.specs().iter().map(|spec| spec.offset_elems).collect();
    let optimizer = request.recipe.optimizer();
    let starts = if optimizer.needs_whole_tensors() { BucketStarts::Tensors(&tensors) } else { BucketStarts::Blocks };
    LayoutRequest { flat_elems: flat, bucket_elems: bucket_bytes / dtype.bytes(), away, starts }.layout()
}

fn residency(request: &Request, techniques: Techniques) -> Result<Residency> {
    let requested = request.wanted.resident_buckets;
    match requested {
        _ if request.strategy == Strategy::NoOffload => Ok(Residency::Exactly(usize::MAX)),
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
fn weights(request: &Request, techniques: Techniques) -> Result<WeightsChoice> {
    let Request { cut, strategy, site, wanted, .. } = request;
    let obstacle = match wanted.weights {
        _ if !techniques.weight_flow => Some("needs the technique weight-flow, which is off"),
        // Weights stream from other ranks.
        weights if cut.ranks() > 1 && weights != WeightsChoice::Flow => None,
        _ if *strategy == Strategy::NoOffload => Some("needs a strategy that offloads"),
        _ if wanted.cast == CastSide::Device => Some("cannot be combined with --cast device: weights cross the link in --dtype"),
        _ if site.memory == HostMemoryKind::Unified => Some("cannot be combined with --memory unified: nothing is offloaded"),
        _ => None,
    };
    match (request.wanted.weights, obstacle) {
        (WeightsChoice::Sharded, _) if request.cut.gpus == 1 => Err(Error::usage(
            "--weights sharded needs several devices in each process: use --weights replicated, a larger --gpus, or with several processes \
             --weights fully-sharded",
        )),
        (WeightsChoice::FullySharded, _) if request.cut.ranks() == 1 => {
            Err(Error::usage("--weights fully-sharded needs several devices: use --weights replicated, or a larger --gpus"))
        }
        (WeightsChoice::Auto, Some(_)) => Ok(WeightsChoice::Replicated),
        (WeightsChoice::Auto | WeightsChoice::Replicated, _) | (_, None) => Ok(request.wanted.weights),
        (choice, Some(obstacle)) => Err(Error::usage(format!("--weights {} {obstacle}", name(choice)))),
    }
}

/// The attention implementation. cuDNN and products compute on GPUs only, in 16-bit formats, on heads of whole vectors; cuDNN lacks soft caps
/// and wide heads, which products have.
fn attention(kernels: KernelChoices, shape: &ModelShape, dtype: Dtype, kind: DeviceKind) -> Result<Attention> {
    let (choice, deterministic) = (kernels.attention, kernels.deterministic);
    if kind == DeviceKind::Cpu || choice == AttentionChoice::Plain {
        return Ok(Attention::Plain);
    }
    let has_vectors = shape.layers_with_scores().all(|layer| shape.layers[layer].attn.head_dim.is_multiple_of(ScoreTile::GRAIN));
    let obstacle = match (dtype, has_vectors) {
        (Dtype::Float32, _) => Some("has 16-bit formats only; use --dtype bfloat16 or --attention plain"),
        (_, false) => Some("has heads of multiples of 8 channels only, and this model has others; use --attention plain"),
        (_, true) => None,
    };
    let lacking: Vec<_> = shape.layers_with_scores().map(|layer| Attention::cudnn_lacks(&shape.attention(1, 1, layer))).collect();
    let lacks = lacking.iter().flatten().next();
    match (choice, obstacle, lacks) {
        (AttentionChoice::Auto, Some(_), _) => Ok(Attention::Plain),
        (AttentionChoice::Products, Some(obstacle), _) => Err(Error::usage(format!("--attention products: it {obstacle}"))),
        (_, Some(obstacle), _) => Err(Error::usage(format!("--attention cudnn: cuDNN {obstacle}"))),
        (AttentionChoice::Products, None, _) => Ok(Attention::Products),
        (AttentionChoice::Cudnn, None, Some(lacks)) => {
            Err(Error::usage(format!("--attention cudnn: cuDNN has no {lacks}, which this model has; use --attention auto")))
        }
        (_, None, None) => Ok(Attention::Cudnn { deterministic }),
        (_, None, Some(_)) if lacking.iter().all(Option::is_some) => Ok(Attention::Products),
        (_, None, Some(_)) => Ok(Attention::CudnnOrProducts { deterministic }),
    }
}

/// Host memory for loading and saving: state passes through one fp32 buffer, in pieces of a tensor.
fn transient_bytes(table: &TensorTable) -> u64 {
    let largest = table.specs().iter().map(|spec| spec.elems()).max().unwrap_or(0);
    4 * largest.min(PIECE_ELEMS) as u64
}

fn isa(request: &Request, techniques: Techniques) -> Result<Isa> {
    match wanted_isa(request.site.isa) {
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
fn cast_on_device(request: &Request, techniques: Techniques) -> Result<bool> {
    let wanted = request.wanted.cast == CastSide::Device;
    if wanted && !techniques.superchip_cast {
        return Err(Error::usage("--cast device needs the technique superchip-cast, which is off"));
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Rollback;
    use crate::config::settings::Settings;
    use crate::faults::Injection;
    use crate::memory::MemorySpace;
    use crate::optim::moments::Moments;
    use crate::request::choices::Technique;

    fn plan(settings: Settings) -> Result<Plan> {
        Plan::new(&settings.request(&ModelShape::demo()), &Machine::cpu(2), false)
    }

    #[test]
    fn strategies_are_sets_of_techniques() {
        let of = |strategy| plan(Settings { strategy, ..Settings::demo() }).unwrap();
        let none = of(Strategy::NoOffload);
        let on_host: Vec<_> =
            none.forecast.memory.iter().filter(|class| class.space == MemorySpace::Host).map(|class| class.name).collect();
        assert_eq!((none.placement.layout.offloaded(), &on_host[..]), (0, &["batches, norm"][..]));
        assert!(none.to_string().contains("fits without offload: every optimizer state stays on the device"));
        let zero = of(Strategy::ZeroOffload);
        assert!(
            zero.protocol.barrier
                && zero.protocol.rules.policy == Policy::ValidateFirst
                && zero.placement.layout.offloaded() == zero.placement.layout.count()
        );
        assert_eq!(zero.placement.grad_slots, zero.placement.layout.count(), "a strong baseline: a gradient never waits for a slot");
        let ours = of(Strategy::Superoffload);
        assert!(!ours.protocol.barrier && ours.protocol.techniques.stv == cfg!(feature = "stv"));
        assert_eq!(ours.protocol.rules.policy == Policy::Deferred, cfg!(feature = "stv"));
        assert_eq!(ours.placement.layout.offloaded() < ours.placement.layout.count(), cfg!(feature = "repartition"));
    }

    #[test]
    fn offloaded_state_takes_14_bytes_a_parameter_or_10_or_8_and_the_lent_memory() {
        for (moments, bytes) in [(Moments::Float32, 14.0), (Moments::Bfloat16, 10.0), (Moments::Int8, 8.0625)] {
            expect_offloaded_bytes(moments, bytes);
        }
    }

    fn expect_offloaded_bytes(moments: Moments, bytes: f64) {
        let plan = plan(Settings { moments, without: vec![Technique::Repartition], ..Settings::demo() }).unwrap();
        let lent = 2 * plan.placement.param_slots * plan.placement.layout.bucket_elems() * 2;
        let classes = plan.forecast.memory.iter().filter(|class| class.space == MemorySpace::Host && class.name != "batches, norm");
        let state =
            classes.map(|class| class.bytes).sum::<usize>() - if plan.protocol.rules.policy == Policy::Deferred { lent } else { lent / 2 };
        // Every slot has the length of a whole bucket, also that of the shorter last bucket.
        let last_slot_excess =
            2 * (plan.placement.layout.count() * plan.placement.layout.bucket_elems() - plan.placement.layout.flat_elems());
        assert_eq!(state as f64, bytes * plan.placement.layout.flat_elems() as f64 + last_slot_excess as f64);
    }

    #[test]
    fn disabled_techniques_cannot_be_requested() {
        let refused = |settings: Settings| plan(settings).unwrap_err().to_string();
        let off = |t| Settings { without: vec![t], ..Settings::demo() };
        assert!(refused(Settings { rollback: Rollback::Inverse, ..off(Technique::Stv) }).contains("stv"));
        assert!(refused(Settings { cast: CastSide::Device, ..off(Technique::SuperchipCast) }).contains("superchip-cast"));
        let two = ResidentBuckets::Count(2);
        assert!(refused(Settings { resident_buckets: two, ..off(Technique::Repartition) }).contains("repartition"));
        assert!(refused(Settings { isa: IsaChoice::Avx2, ..off(Technique::GraceAdam) }).contains("grace-adam"));
        let split = MastersChoice::Split;
        assert!(refused(Settings { masters: split, ..off(Technique::Repartition) }).starts_with("--masters split needs buckets"));
        assert!(refused(Settings { masters: split, strategy: Strategy::ZeroOffload, ..Settings::demo() }).contains("no-offload"));
        let fault = Injection { step: 1, element: usize::MAX, share: 0, value: 0.0 };
        assert!(refused(Settings { inject: vec![fault], ..Settings::demo() }).contains("belongs to no tensor"));
    }
}
