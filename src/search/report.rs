//! The report of `plan`: memory, speed, bottleneck, alternatives, and changes that would help.

use super::limits::{BreakEven, LargestModel, Limits};
use super::{Candidate, STEPS, SearchQuery, WORTH};
use crate::checkpoint::checkpoint_bytes;
use crate::error::Result;
use crate::facts::HardwareFacts;
use crate::facts::{ModelFacts, PlanFacts};
use crate::hardware::profile::Profile;
use crate::hardware::rates::Rates;
use crate::memory::{DeviceMemory, MemorySpace};
use crate::planner::budget::Balance;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::wanted::Wanted;
use crate::simulate::saves::{SaveSchedule, SimulatedSave, simulate_save};
use crate::units::{Bytes, Count, counted};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

const ALTERNATIVES: usize = 2;
/// Factor by which each resource is increased in turn.
const MORE: f64 = 1.5;

#[derive(Debug, Serialize)]
pub(crate) struct SearchReport {
    pub hardware: HardwareFacts,
    pub model: ModelFacts,
    pub best: Step,
    /// The next best candidates.
    pub(crate) alternatives: Vec<Step>,
    /// Number of candidates that were simulated.
    pub(crate) candidates: usize,
    /// Number of candidates that do not fit.
    pub(crate) unfit: usize,
    /// The busiest resource, which limits the speed.
    pub(crate) binds: BusyFractions,
    /// All resources, the busiest first.
    pub busy: Vec<BusyFractions>,
    pub memory: Vec<MemoryNeed>,
    /// Steps of the same settings on machines with more of one resource.
    pub(crate) what_if: Vec<WhatIf>,
    /// Limits of the machine.
    pub limits: Limits,
    /// Largest models with more or fewer of its GPUs.
    pub(crate) largest_by_gpus: Vec<LargestModel>,
    /// Disk space of the run's saves.
    pub(crate) saves: SaveSizes,
    /// The number of tokens from which the optimizer is hidden.
    pub(crate) break_even: Option<BreakEven>,
    #[serde(skip)]
    plan: Plan,
}

/// A simulated candidate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Step {
    /// Differences from the defaults.
    pub flags: Vec<String>,
    /// Bytes of weights that stream from host memory in each pass; 0 if all weights stay on the device.
    pub(crate) streamed_bytes: usize,
    /// Milliseconds of a step with a successful speculation.
    pub step_ms: f64,
    /// Mean milliseconds with one clipped step in ten.
    pub(crate) mean_step_ms: f64,
    /// Tokens per second, for `step_ms`.
    pub tokens_per_second: f64,
    /// Model TFLOP/s, for `step_ms`.
    pub model_tflops: f64,
    /// TFLOP/s including recomputation, for `step_ms`.
    pub(crate) hardware_tflops: f64,
    /// Milliseconds in which compute waits for the optimizer.
    pub(crate) exposed_cpu_ms: f64,
    /// Milliseconds in which compute waits for copies.
    pub(crate) exposed_transfer_ms: f64,
    pub plan: PlanFacts,
}

impl Step {
    fn of(candidate: &Candidate, requested: &Wanted) -> Self {
        let outcome = &candidate.outcome;
        Self {
            flags: candidate.wanted.flags(requested),
            streamed_bytes: candidate
                .plan
                .placement
                .rings
                .weights
                .map_or(0, |ring| ring.ringed_elems * candidate.plan.recipe.numerics.dtype.bytes()),
            step_ms: outcome.step_ms.median,
            mean_step_ms: candidate.mean_s() * 1e3,
            tokens_per_second: outcome.tokens_per_second,
            model_tflops: outcome.speed.model_tflops,
            hardware_tflops: outcome.speed.hardware_tflops,
            exposed_cpu_ms: outcome.exposed.cpu_ms,
            exposed_transfer_ms: outcome.exposed.transfer_ms,
            plan: PlanFacts::new(&candidate.plan),
        }
    }

    /// The flags, and the streamed weights, which no flag shows.
    fn flags(&self) -> String {
        let flags = if self.flags.is_empty() { "defaults".into() } else { self.flags.join(" ") };
        match self.streamed_bytes {
            0 => flags,
            bytes => format!("{flags}, streams {} of weights", Bytes(bytes as u64)),
        }
    }
}

/// The load of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct BusyFractions {
    pub what: &'static str,
    /// Fraction of the step in which the resource works.
    pub share: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct MemoryNeed {
    /// `device` or `host`.
    pub place: &'static str,
    /// Planned bytes, including those for loading and saving.
    pub(crate) needed_bytes: u64,
    /// Available bytes; `None` if the device has no memory of its own.
    pub(crate) available_bytes: Option<u64>,
    /// Bytes by class.
    pub classes: Vec<(&'static str, usize)>,
}

/// Disk space that the saves of a run take.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SaveSizes {
    /// Bytes of one checkpoint without the model's files, which are small.
    pub(crate) checkpoint_bytes: u64,
    /// Bytes of carried tensors, which a run writes once; 0 where the weights of the model are not at hand.
    pub(crate) carried_bytes: u64,
    /// A save beside steps, if the rate of the disk is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simulated: Option<SimulatedSave>,
}

/// The step on a machine with more of one resource.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WhatIf {
    /// The resource that is increased.
    pub change: String,
    pub step_ms: f64,
    pub(crate) changes_plan: bool,
}

impl WhatIf {
    /// The faster of two plans on that machine: `changed`, which a search finds for it, and `in_hand`, the present plan at its present
    /// speed.
    fn new(change: &str, changed: &Candidate, in_hand: &Candidate) -> Self {
        let median = |candidate: &Candidate| candidate.outcome.step_ms.median;
        let changes_plan = differ(&changed.plan, &in_hand.plan) && median(changed) <= median(in_hand);
        Self { change: format!("{change} by half"), step_ms: median(changed).min(median(in_hand)), changes_plan }
    }
}

impl SearchReport {
    /// The answer to `query` for the model named `config`, whose tensors beside the text part have `carried_bytes`, on the machine of
    /// `profile`.
    ///
    /// # Errors
    /// Errors of [`SearchQuery::rank`]: if nothing fits, the error names a change that would help.
    pub(crate) fn of(
        query: SearchQuery,
        (config, carried_bytes): (&str, u64),
        profile: &Profile,
        saves: Option<SaveSchedule>,
    ) -> Result<Self> {
        let ranking = query.rank()?;
        let best = &ranking.candidates[0];
        let distinct = ranking.candidates[1..].iter().filter(|other| differ(&other.plan, &best.plan));
        let busy = busy(best);
        // Larger dimensions may choose the open settings anew.
        let mut requested = query.request.clone();
        (requested.cut.tokens, requested.wanted.split) = (None, best.wanted.split);
        let model = ModelFacts::new(config.into(), query.request.shape());
        let of_saves = |saves| {
            let (plan, shape) = (best.plan.clone().with_save_copies(), query.request.shape());
            simulate_save((&plan, shape), &profile.name, STEPS, saves)
        };
        let simulated = saves.map(of_saves).transpose()?;
        let checkpoint_bytes = checkpoint_bytes(best.plan.trained_params(), best.plan.optimizer().arrays(), &[]);
        Ok(Self {
            hardware: HardwareFacts::of(profile),
            model,
            saves: SaveSizes { checkpoint_bytes, carried_bytes, simulated },
            alternatives: distinct.take(ALTERNATIVES).map(|other| Step::of(other, &query.request.wanted)).collect(),
            candidates: ranking.candidates.len(),
            unfit: ranking.unfit,
            binds: busy[0],
            busy,
            memory: memory(&best.plan),
            what_if: what_if(query, best)?,
            limits: Limits::of(&requested, query.machine),
            largest_by_gpus: LargestModel::by_gpus(&requested, profile),
            break_even: BreakEven::of(&requested, query.machine)?,
            plan: best.plan.clone().for_another_machine(),
            best: Step::of(best, &query.request.wanted),
        })
    }
}

/// Whether two plans differ in more than a few slots.
fn differ(one: &Plan, other: &Plan) -> bool {
    let essence = |plan: &Plan| {
        (
            plan.placement.layout.clone(),
            plan.placement.layer_policies.clone(),
            plan.placement.segments.clone(),
            plan.protocol.link_dtype,
            plan.placement.rings.weights,
            plan.protocol.techniques,
            plan.site.threads,
        )
    };
    essence(one) != essence(other)
}

/// Load of each resource in a step, the busiest first.
fn busy(candidate: &Candidate) -> Vec<BusyFractions> {
    let (outcome, rates) = (&candidate.outcome, &candidate.plan.site.machine.rates);
    let step_ms = candidate.mean_s() * 1e3;
    let link = |bytes: f64| bytes / rates.both_ways_bytes_per_s * 1e3 / step_ms;
    let mut busy = vec![
        BusyFractions { what: "the device's arithmetic", share: outcome.exposed.device_busy_share },
        BusyFractions { what: "the optimizer on the CPUs (host memory)", share: outcome.adam.busy_ms / step_ms },
        BusyFractions { what: "the link (PCIe, C2C) to the host", share: link(outcome.link.d2h_bytes) },
        BusyFractions { what: "the link (PCIe, C2C) to the device", share: link(outcome.link.h2d_bytes) },
    ];
    let network = candidate.plan.forecast.peer_traffic.far_s(rates) * 1e3 / step_ms;
    busy.extend((candidate.plan.site.processes > 1).then_some(BusyFractions { what: "the network", share: network }));
    busy.sort_by(|a, b| b.share.total_cmp(&a.share));
    busy
}

fn memory(plan: &Plan) -> Vec<MemoryNeed> {
    let of = |Balance { space, needed, available }: Balance| {
        let parts = if space == MemorySpace::Device { plan.site.ranks } else { plan.site.processes };
        let classes =
            plan.forecast.memory.iter().filter(|class| class.space == space).map(|class| (class.name, class.bytes.div_ceil(parts)));
        MemoryNeed {
            place: if space == MemorySpace::Device { "device" } else { "host" },
            needed_bytes: needed,
            available_bytes: Some(available).filter(|bytes| *bytes < u64::MAX),
            classes: classes.collect(),
        }
    };
    plan.balances().map(of).into()
}

/// Repeats the query on machines with more of one resource.
fn what_if(query: SearchQuery, best: &Candidate) -> Result<Vec<WhatIf>> {
    // The user's memory limits belong to the present machine.
    let mut request = query.request.clone();
    let machine = query.machine.limited(request.site.hbm_limit.take(), request.site.host_limit.take());
    let with = |rates: Rates| Machine { rates: Arc::new(rates), ..machine.clone() };
    let mut machines = vec![
        ("the host's memory and optimizer were faster", with(machine.rates.with_faster_host(MORE))),
        ("the link were faster", with(machine.rates.with_faster_link(MORE))),
        ("the device's arithmetic and memory were faster", with(machine.rates.with_faster_device(MORE))),
    ];
    if best.plan.site.processes > 1 {
        machines.push(("the network were faster", with(machine.rates.with_faster_network(MORE))));
    }
    if let DeviceMemory::Own { bytes, addressing } = machine.device {
        let device = DeviceMemory::Own { bytes: (bytes as f64 * MORE) as u64, addressing };
        machines.push(("the device's memory were larger", Machine { device, ..machine.clone() }));
    }
    let what_if = |(change, machine): (&str, Machine)| -> Result<WhatIf> {
        let ranking = SearchQuery { request: &request, machine: &machine, ..query }.rank()?;
        Ok(WhatIf::new(change, &ranking.candidates[0], best))
    };
    machines.into_iter().map(what_if).collect()
}

impl fmt::Display for SearchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = &self.best;
        writeln!(f, "{} of {} parameters on {}", self.model.config, Count(self.model.params), self.hardware.machine)?;
        writeln!(f, "fits; {} candidates simulated, {} did not fit", self.candidates, self.unfit)?;
        writeln!(f, "\nchosen       {}", best.flags())?;
        writeln!(
            f,
            "  step       {:.1} ms, {:.0} tokens/s, {:.1} model TFLOP/s, {:.1} with recomputation",
            best.step_ms, best.tokens_per_second, best.model_tflops, best.hardware_tflops
        )?;
        let hardly = (1.0 - WORTH) * 1e2;
        let how = format!("used to rank plans; gains below {hardly:.1} % keep the defaults");
        writeln!(f, "  mean       {:.1} ms if one step in ten is clipped; {how}", best.mean_step_ms)?;
        let (cpu_ms, transfer_ms) = (best.exposed_cpu_ms, best.exposed_transfer_ms);
        writeln!(f, "  exposed    {cpu_ms:.1} ms of the mean waiting for the optimizer, {transfer_ms:.1} ms for copies")?;
        let shares: Vec<_> = self.busy.iter().map(|busy| format!("{} {:.0} %", busy.what, busy.share * 1e2)).collect();
        writeln!(f, "  busy       {}", shares.join(", "))?;
        self.alternatives.iter().enumerate().try_for_each(|(i, other)| {
            let slower = (other.mean_step_ms / best.mean_step_ms - 1.0) * 1e2;
            let title = if i == 0 { "next best" } else { "" };
            writeln!(f, "  {title:<10} {}: mean {:.1} ms ({slower:+.1} %)", other.flags(), other.mean_step_ms)
        })?;
        writeln!(f, "\nwhat if")?;
        self.what_if.iter().try_for_each(|what| {
            let note = if what.changes_plan { ", with another plan" } else { "" };
            writeln!(f, "  {:<56} {:.1} ms ({:+.1} %){note}", what.change, what.step_ms, (what.step_ms / best.step_ms - 1.0) * 1e2)
        })?;
        writeln!(f, "\nlargest that fits, with the other settings unchanged")?;
        let Limits { batch, seq_length, seq_length_is_the_models, layers, params } = self.limits;
        let why = if seq_length_is_the_models { " (the model has no more positions)" } else { "" };
        writeln!(f, "  batch      {}\n  sequence   {}, batch 1{why}", counted(batch, "sequence"), counted(seq_length, "token"))?;
        writeln!(f, "  model      {} of this width, {:.2} B parameters", counted(layers, "layer"), params as f64 / 1e9)?;
        if !self.largest_by_gpus.is_empty() {
            let sizes: Vec<_> = self.largest_by_gpus.iter().map(|on| format!("{}: {:.2} B", on.gpus, on.params as f64 / 1e9)).collect();
            writeln!(f, "  by GPUs    {}", sizes.join(", "))?;
        }
        writeln!(f, "\nsaves        {}", self.saves)?;
        self.break_even.iter().try_for_each(|even| writeln!(f, "\n{even}"))?;
        write!(f, "\n{}", self.plan)
    }
}

impl fmt::Display for SaveSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} each, and the tokenizer's files", Bytes(self.checkpoint_bytes))?;
        if self.carried_bytes > 0 {
            write!(f, "; carried tensors of {}, once", Bytes(self.carried_bytes))?;
        }
        self.simulated.iter().try_for_each(|save| write!(f, "\n  beside     {save}"))
    }
}

impl fmt::Display for BreakEven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tokens {
            Some(tokens) => {
                write!(f, "break-even   with every state on the CPUs, the GPU waits for the optimizer below {tokens} tokens a micro-step")?
            }
            None => write!(f, "break-even   with every state on the CPUs, the GPU waits for the optimizer at every batch that fits")?,
        }
        write!(
            f,
            "\n  below      at {} tokens the plan keeps the states of {} of {} buckets on the GPU, which then waits for {:.0} % of a step",
            self.below_tokens,
            self.resident_buckets,
            self.buckets,
            self.exposed_share * 1e2
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::model::presets;
    use std::path::Path;

    #[test]
    fn more_of_one_thing_is_never_worse_than_the_plan_in_hand() {
        let (shape, profile) = (presets::shape(Path::new("gemma-3-1b")).unwrap(), Profile::load("gh200-96").unwrap());
        let machine = Machine::of(&profile);
        let candidate = |batch| {
            let settings = Settings { per_device_train_batch_size: batch, seq_length: 512, ..Settings::default() };
            let request = settings.request(&shape);
            SearchQuery::new(&request, &machine).candidate(&request.wanted).unwrap().unwrap()
        };
        let (fast, slow) = (candidate(1), candidate(8));
        let what_if = |changed, in_hand| {
            let WhatIf { change, step_ms, changes_plan } = WhatIf::new("the link were faster", changed, in_hand);
            assert_eq!(change, "the link were faster by half");
            (step_ms, changes_plan)
        };
        let (fast_ms, slow_ms) = (fast.outcome.step_ms.median, slow.outcome.step_ms.median);
        assert!(fast_ms < slow_ms, "{fast_ms} and {slow_ms}");
        assert_eq!(what_if(&slow, &fast), (fast_ms, false), "the plan in hand stays");
        assert_eq!(what_if(&fast, &slow).0, fast_ms);
        assert_eq!(what_if(&fast, &fast), (fast_ms, false));
    }

    #[test]
    fn a_save_has_the_states_of_trained_tensors_alone() {
        let settings = Settings { train_only: vec![r"layers\.3\.".into()], seq_length: 1024, ..Settings::default() };
        let shape = settings.freezing(presets::shape(Path::new("qwen3-4b")).unwrap().with_layers(4), None).unwrap();
        let (profile, request) = (Profile::load("h200-pcie5").unwrap(), settings.request(&shape));
        let machine = Machine::of(&profile);
        let report = SearchReport::of(SearchQuery::new(&request, &machine), ("qwen3-4b", 0), &profile, None).unwrap();
        let trained = report.model.trained_params.unwrap();
        assert!(trained < report.model.params / 4, "{report}");
        assert!((12 * trained..13 * trained).contains(&(report.saves.checkpoint_bytes as usize)), "{report}");
    }
}
