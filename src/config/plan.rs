//! What the settings mean on this machine: every number that the engine needs, fixed and printed before step 0.

use crate::bucket::layout::BucketLayout;
use crate::config::options::{CastSide, Injection, IsaChoice, Rollback, Strategy, Technique, TrainDtype};
use crate::config::settings::Settings;
use crate::device::RingShape;
use crate::dtype::Dtype;
use crate::engine::coordinator::{Policy, Rules};
use crate::engine::trace::{Span, spans_per_track};
use crate::error::{Error, Result};
use crate::model::activations::{ActivationPlan, LossTile};
use crate::model::policy::LayerPolicy;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::adam::AdamHyper;
use crate::optim::norm::BLOCK;
use crate::optim::simd::Isa;
use crate::units::Bytes;
use std::fmt;

/// Bytes of working weights in a bucket where the paper's link saturates (section 4.3).
const BUCKET_BYTES_MAX: usize = 64 << 20;
/// A model is cut into at least this many buckets, so that a small one is pipelined, too.
const BUCKETS_MIN: usize = 16;
/// One bucket in this many keeps its optimizer on the device unless the settings say otherwise: the first layers, which
/// the next forward needs before the pool can have finished (paper 4.3). The planner will choose it by measurement.
const RESIDENT_ONE_IN: usize = 8;
/// Logits of one loss tile: columns at most, and bytes at most.
const LOSS_TILE_VOCAB_MAX: usize = 32_768;
const LOSS_TILE_BYTES_MAX: usize = 64 << 20;

/// Which techniques run: compiled in, part of the strategy, and not turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Techniques {
    /// Speculation-then-validation.
    pub stv: bool,
    /// No speculation while clips are frequent.
    pub adaptive: bool,
    /// Earliest deadline first.
    pub deadline_order: bool,
    /// Resident tail buckets.
    pub repartition: bool,
    /// Casts on the device, fp32 on the link, where the settings ask for it.
    pub superchip_cast: bool,
    /// Vector CPU Adam.
    pub grace_adam: bool,
    /// Core affinity and partitions.
    pub mpam: bool,
}

impl Techniques {
    fn new(settings: &Settings) -> Self {
        let on = |compiled: bool, technique| compiled && !settings.without.contains(&technique);
        let superoffload = settings.strategy == Strategy::Superoffload;
        let stv = superoffload && on(cfg!(feature = "stv"), Technique::Stv);
        Self {
            stv,
            adaptive: stv && on(true, Technique::Adaptive),
            deadline_order: superoffload && on(cfg!(feature = "deadline-order"), Technique::DeadlineOrder),
            repartition: superoffload && on(cfg!(feature = "repartition"), Technique::Repartition),
            superchip_cast: on(cfg!(feature = "superchip-cast"), Technique::SuperchipCast),
            grace_adam: on(cfg!(feature = "grace-adam"), Technique::GraceAdam),
            mpam: on(cfg!(feature = "mpam"), Technique::Mpam),
        }
    }

    fn names(self) -> String {
        let all = [
            ("stv", self.stv),
            ("adaptive", self.adaptive),
            ("deadline-order", self.deadline_order),
            ("repartition", self.repartition),
            ("superchip-cast", self.superchip_cast),
            ("grace-adam", self.grace_adam),
            ("mpam", self.mpam),
        ];
        let on: Vec<_> = all.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        if on.is_empty() { "none".into() } else { on.join(", ") }
    }
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the device.
    Device,
    /// In pinned host memory.
    Host,
}

/// One class of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryClass {
    /// What it holds.
    pub name: &'static str,
    /// Where.
    pub place: Place,
    /// How much.
    pub bytes: usize,
}

/// The resolved plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Named set of techniques.
    pub strategy: Strategy,
    /// Techniques in force.
    pub techniques: Techniques,
    /// What the coordinator may do.
    pub rules: Rules,
    /// The next forward waits for all parameters, not per bucket (ZeRO-Offload).
    pub barrier: bool,
    /// Format of weights, activations and gradients on the device.
    pub dtype: Dtype,
    /// Format of gradients and parameters on the link; fp32 when the device casts.
    pub link_dtype: Dtype,
    /// Instruction set of the optimizer.
    pub isa: Isa,
    /// Threads that compute, and as many optimizer workers.
    pub threads: usize,
    /// How the flat order is cut.
    pub layout: BucketLayout,
    /// The device's gradients as a ring; `None`: each has its own place.
    pub grad_ring: Option<RingShape>,
    /// Host slots for gradients: one retained per offloaded bucket, and the ring.
    pub grad_slots: usize,
    /// Host slots for parameters.
    pub param_slots: usize,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Micro-batches of a step.
    pub grad_accum_steps: usize,
    /// Tile of the loss.
    pub loss_tile: LossTile,
    /// What each layer keeps for its backward pass.
    pub layer_policies: Vec<LayerPolicy>,
    /// Adam; its learning rate is the schedule's.
    pub hyper: AdamHyper,
    /// Clip above this norm; 0 never clips.
    pub max_grad_norm: f64,
    /// Faults to inject.
    pub inject: Vec<Injection>,
    /// Reorder events with this seed (cpu device).
    pub adversary: Option<u64>,
    /// Room for spans on each track of the timeline; 0 records none.
    pub trace_spans: usize,
    /// All memory, by class.
    pub memory: Vec<MemoryClass>,
    /// Parameters of the model.
    pub params: usize,
}

impl Plan {
    /// Resolves `settings` for a model on a machine with `usable_cpus`.
    ///
    /// # Errors
    /// `Usage` when a setting asks for what is not compiled in or makes no sense for this model.
    pub fn new(settings: &Settings, shape: &ModelShape, usable_cpus: usize, trace: bool) -> Result<Self> {
        let techniques = Techniques::new(settings);
        let table = TensorTable::new(shape);
        let dtype = compute_dtype(settings.dtype);
        let layout = layout(settings, &table, dtype, techniques)?;
        check_inject(settings, &table)?;
        let threads = settings.threads.unwrap_or(usable_cpus).max(1);
        let rules =
            Rules { policy: policy(settings, techniques)?, adaptive: techniques.adaptive, deadline_order: techniques.deadline_order };
        let mut plan = Self {
            strategy: settings.strategy,
            techniques,
            rules,
            barrier: settings.strategy == Strategy::ZeroOffload,
            dtype,
            link_dtype: if cast_on_device(settings, techniques)? { Dtype::Float32 } else { dtype },
            isa: isa(settings, techniques)?,
            threads,
            grad_ring: None,
            grad_slots: if rules.policy == Policy::Deferred { layout.offloaded() + settings.slots } else { layout.offloaded() },
            param_slots: settings.slots,
            batch: settings.per_device_train_batch_size,
            seq_length: settings.seq_length,
            grad_accum_steps: settings.gradient_accumulation_steps,
            loss_tile: loss_tile(settings, shape, dtype),
            layer_policies: vec![LayerPolicy::Keep; shape.layers],
            hyper: hyper(settings),
            max_grad_norm: settings.max_grad_norm,
            inject: settings.inject.clone(),
            adversary: settings.adversary,
            trace_spans: if trace { spans_per_track(threads + 5) } else { 0 },
            memory: Vec::new(),
            params: table.params(),
            layout,
        };
        plan.memory = plan.memory_classes(shape)?;
        Ok(plan)
    }

    /// Tokens of an optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.seq_length * self.grad_accum_steps
    }

    /// Bytes planned at `place`.
    pub fn bytes_at(&self, place: Place) -> usize {
        self.memory.iter().filter(|m| m.place == place).map(|m| m.bytes).sum()
    }

    /// Whether the device casts and fp32 crosses the link; without the feature `superchip-cast` known at compile time.
    pub fn device_casts(&self) -> bool {
        cfg!(feature = "superchip-cast") && self.link_dtype != self.dtype
    }

    /// Refuses a plan that cannot fit: on the cpu device all memory is host memory. `loading_bytes` are needed besides, until the
    /// first step.
    ///
    /// # Errors
    /// `Resource` with both sizes and the smallest change that helps.
    pub fn check_fits(&self, available_bytes: u64, loading_bytes: u64) -> Result<()> {
        let needed = (self.bytes_at(Place::Device) + self.bytes_at(Place::Host)) as u64 + loading_bytes;
        if needed <= available_bytes {
            return Ok(());
        }
        let cause = format!(
            "{} are available (free memory and cgroup limit); a smaller --per-device-train-batch-size or --seq-length saves activations",
            Bytes(available_bytes)
        );
        Err(Error::resource(format!("plan {} of memory for {} parameters", Bytes(needed), self.params), cause))
    }

    fn memory_classes(&self, shape: &ModelShape) -> Result<Vec<MemoryClass>> {
        let activations = ActivationPlan::new(shape, self.batch, self.seq_length, self.dtype, self.loss_tile, &self.layer_policies)?;
        let (flat, offloaded) = (self.layout.flat_elems(), self.layout.offloaded_elems());
        let (width, link, bucket) = (self.dtype.bytes(), self.link_dtype.bytes(), self.layout.bucket_elems());
        let staging = if self.device_casts() && offloaded > 0 { 2 * bucket * 4 } else { 0 };
        let class = |name, place, bytes| MemoryClass { name, place, bytes };
        let classes = vec![
            class("weights", Place::Device, flat * width),
            class("gradients", Place::Device, flat * width),
            class("resident p, m, v", Place::Device, 12 * (flat - offloaded)),
            class("cast staging", Place::Device, staging),
            class("activations", Place::Device, activations.device_bytes().0 as usize),
            class("norm partials", Place::Device, flat / BLOCK * 4),
            class("offloaded p, m, v", Place::Host, 12 * offloaded),
            class("gradient slots", Place::Host, self.grad_slots * bucket.min(offloaded) * link),
            class("kept activations", Place::Host, activations.host_bytes().0 as usize),
            class("parameter slots", Place::Host, self.param_slots * bucket.min(offloaded) * link),
            class("timeline", Place::Host, (self.threads + 4) * self.trace_spans * size_of::<Span>()),
        ];
        Ok(classes.into_iter().filter(|c| c.bytes > 0).collect())
    }
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

fn layout(settings: &Settings, table: &TensorTable, dtype: Dtype, techniques: Techniques) -> Result<BucketLayout> {
    use crate::config::options::ResidentBuckets::{Auto, Count};
    let flat = table.flat_elems();
    let bucket_bytes = match settings.bucket_mib {
        Some(mib) => (mib * f64::from(1 << 20)) as usize,
        None => BUCKET_BYTES_MAX.min(flat * dtype.bytes() / BUCKETS_MIN),
    };
    let bucket_elems = bucket_bytes / dtype.bytes();
    let buckets = BucketLayout::new(flat, bucket_elems, 0).count();
    let resident = match settings.resident_buckets {
        _ if settings.strategy == Strategy::NoOffload => buckets,
        Count(count) if count > 0 && !techniques.repartition => {
            return Err(Error::usage(format!("--resident-buckets {count} needs --strategy superoffload with the technique repartition")));
        }
        Count(count) => count,
        Auto if techniques.repartition => buckets / RESIDENT_ONE_IN,
        Auto => 0,
    };
    Ok(BucketLayout::new(flat, bucket_elems, resident))
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

/// Automatic: the 16-bit format crosses the link, and Adam casts in the pass it makes anyway. Casting on the device pays
/// where the link is as fast as memory (paper 4.5); which link is, a measurement will tell.
fn cast_on_device(settings: &Settings, techniques: Techniques) -> Result<bool> {
    let wanted = settings.cast == CastSide::Device;
    if wanted && !techniques.superchip_cast {
        return Err(Error::usage("--cast device needs the technique superchip-cast, which is off"));
    }
    Ok(wanted)
}

fn loss_tile(settings: &Settings, shape: &ModelShape, dtype: Dtype) -> LossTile {
    let vocab = shape.vocab.min(LOSS_TILE_VOCAB_MAX);
    let rows = settings.per_device_train_batch_size * settings.seq_length;
    LossTile { rows: rows.min(LOSS_TILE_BYTES_MAX / (vocab * dtype.bytes())).max(1), vocab }
}

fn hyper(settings: &Settings) -> AdamHyper {
    AdamHyper {
        lr: settings.learning_rate,
        beta1: settings.adam_beta1,
        beta2: settings.adam_beta2,
        eps: settings.adam_epsilon,
        weight_decay: settings.weight_decay,
    }
}

/// Padding between tensors has no gradient: a fault there would never be overwritten.
fn check_inject(settings: &Settings, table: &TensorTable) -> Result<()> {
    let outside = |element: usize| !table.specs().iter().any(|spec| spec.range().contains(&element));
    match settings.inject.iter().find(|i| outside(i.element)) {
        None => Ok(()),
        Some(i) => {
            Err(Error::usage(format!("inject: element {} of the flat order of {} belongs to no tensor", i.element, table.flat_elems())))
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = &self.layout;
        let bucket = Bytes((layout.bucket_elems() * self.dtype.bytes()) as u64);
        writeln!(f, "plan")?;
        writeln!(f, "  strategy    {:?}, {:?}; techniques: {}", self.strategy, self.rules.policy, self.techniques.names())?;
        writeln!(
            f,
            "  model       {:.2} M parameters, {} on the device, {} on the link",
            self.params as f64 / 1e6,
            self.dtype,
            self.link_dtype
        )?;
        let (batch, seq, accum) = (self.batch, self.seq_length, self.grad_accum_steps);
        writeln!(
            f,
            "  step        {accum} x {batch} x {seq} = {} tokens; loss in tiles of {} x {}",
            self.tokens_per_step(),
            self.loss_tile.rows,
            self.loss_tile.vocab
        )?;
        writeln!(
            f,
            "  buckets     {} of {bucket}, {} with a resident optimizer; {} gradient slots, {} parameter slots",
            layout.count(),
            layout.count() - layout.offloaded(),
            self.grad_slots,
            self.param_slots
        )?;
        writeln!(f, "  optimizer   AdamW on {} threads, {}; clip above {}", self.threads, self.isa, self.max_grad_norm)?;
        for class in &self.memory {
            writeln!(
                f,
                "  memory      {:<18} {:>10}  {}",
                class.name,
                Bytes(class.bytes as u64).to_string(),
                if class.place == Place::Host { "host" } else { "device" }
            )?;
        }
        let (device, host) = (self.bytes_at(Place::Device), self.bytes_at(Place::Host));
        write!(f, "  memory      device {}, host {}", Bytes(device as u64), Bytes(host as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(settings: Settings) -> Result<Plan> {
        Plan::new(&settings, &ModelShape::demo(), 2, false)
    }

    #[test]
    fn a_plan_that_does_not_fit_names_both_sizes_and_a_way_out() {
        let plan = plan(Settings::demo()).unwrap();
        let needed = (plan.bytes_at(Place::Device) + plan.bytes_at(Place::Host)) as u64;
        assert!(plan.check_fits(needed, 0).is_ok());
        let message = plan.check_fits(needed, 1).unwrap_err().to_string();
        assert!(message.contains("MiB") && message.contains("--seq-length"), "{message}");
    }

    #[test]
    fn strategies_are_sets_of_techniques() {
        let of = |strategy| plan(Settings { strategy, ..Settings::demo() }).unwrap();
        let none = of(Strategy::NoOffload);
        assert_eq!((none.layout.offloaded(), none.bytes_at(Place::Host)), (0, 0));
        let zero = of(Strategy::ZeroOffload);
        assert!(zero.barrier && zero.rules.policy == Policy::ValidateFirst && zero.layout.offloaded() == zero.layout.count());
        assert_eq!(zero.grad_slots, zero.layout.count(), "a strong baseline: a gradient never waits for a slot");
        let ours = of(Strategy::Superoffload);
        assert!(!ours.barrier && ours.techniques.stv == cfg!(feature = "stv"));
        assert_eq!(ours.rules.policy == Policy::Deferred, cfg!(feature = "stv"));
        assert_eq!(ours.layout.offloaded() < ours.layout.count(), cfg!(feature = "repartition"));
    }

    #[test]
    fn offloaded_state_takes_14_bytes_a_parameter_and_the_ring() {
        let plan = plan(Settings { without: vec![Technique::Repartition], ..Settings::demo() }).unwrap();
        let ring = 2 * plan.param_slots * plan.layout.bucket_elems() * 2;
        let state = plan.bytes_at(Place::Host) - if plan.rules.policy == Policy::Deferred { ring } else { ring / 2 };
        // A slot is as long as a whole bucket, also for the last one.
        let last_slot_excess = 2 * (plan.layout.count() * plan.layout.bucket_elems() - plan.layout.flat_elems());
        assert_eq!(state, 14 * plan.layout.flat_elems() + last_slot_excess);
    }

    #[test]
    fn what_is_off_cannot_be_asked_for() {
        let refused = |settings: Settings| plan(settings).unwrap_err().to_string();
        let off = |t| Settings { without: vec![t], ..Settings::demo() };
        assert!(refused(Settings { rollback: Rollback::Inverse, ..off(Technique::Stv) }).contains("stv"));
        assert!(refused(Settings { cast: CastSide::Device, ..off(Technique::SuperchipCast) }).contains("superchip-cast"));
        let two = crate::config::options::ResidentBuckets::Count(2);
        assert!(refused(Settings { resident_buckets: two, ..off(Technique::Repartition) }).contains("repartition"));
        assert!(refused(Settings { isa: IsaChoice::Avx2, ..off(Technique::GraceAdam) }).contains("grace-adam"));
        let fault = Injection { step: 1, element: usize::MAX, value: 0.0 };
        assert!(refused(Settings { inject: vec![fault], ..Settings::demo() }).contains("belongs to no tensor"));
    }
}
