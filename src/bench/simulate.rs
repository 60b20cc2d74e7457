//! `simulate`: steps on a machine described by a hardware profile.

use super::gantt::Gantt;
use super::options::StepOptions;
use crate::config::options::{DeviceChoice, GpuCount};
use crate::config::settings::{Settings, TrainOptions};
use crate::error::{Error, Result};
use crate::facts::{BuildFacts, HardwareFacts, ModelFacts, PlanFacts};
use crate::hardware::profile::Profile;
use crate::hardware::selected_profile::{AUTO, MachineId, SelectedProfile};
use crate::hardware::topology::Topology;
use crate::launch::context::check_context;
use crate::memory::MemorySpace;
use crate::model::shape::ModelShape;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::probe::{self, ProbeOptions};
use crate::search::best_plan_for;
use crate::simulate::outcome::Outcome;
use crate::simulate::saves::{SaveSchedule, SimulatedSave, simulate_save};
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use crate::trace::file::TraceFile;
use crate::units::Count;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// Room for spans on each track of one simulation.
const TRACE_SPANS: usize = 1 << 16;
/// Seconds spent measuring this machine for `--hardware this`.
const PROBE_S: u64 = 20;

/// Options, profile, plan and results of one simulation.
#[derive(Debug, Serialize)]
pub(crate) struct SimulatedRecord {
    /// `simulate`.
    pub bench: &'static str,
    pub build: BuildFacts,
    /// The machine that is simulated.
    pub hardware: HardwareFacts,
    /// Description of the device.
    pub device: String,
    pub model: ModelFacts,
    pub clip: crate::simulate::clip::Clip,
    /// Warm-up steps, which are not timed.
    pub(crate) warmup: u64,
    pub steps: u64,
    pub settings: Settings,
    pub plan: PlanFacts,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// A save beside steps, with `--save-rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) save: Option<SimulatedSave>,
    /// Planned on the device.
    pub(crate) device_planned_bytes: u64,
    /// Planned in host memory.
    pub(crate) host_planned_bytes: u64,
    #[serde(skip)]
    pub chosen: Plan,
    /// The last step as a picture.
    #[serde(skip)]
    pub(crate) gantt: Gantt,
}

pub(crate) struct Simulation {
    settings: Settings,
    config: String,
    shape: ModelShape,
    steps: Steps,
    /// Saves that are simulated as well.
    saves: Option<SaveSchedule>,
    profile: Profile,
}

/// Flags of saves, which `--save-rate` turns on.
const SAVE_FLAGS: [&str; 3] = ["save_rate", "save_steps", "save_memory"];

impl Simulation {
    /// Resolves `options` on the machine of `profile`.
    ///
    /// # Errors
    /// `Usage` that names an option that makes no sense; errors in the model's configuration.
    pub(crate) fn new(mut options: StepOptions, profile: Profile) -> Result<Self> {
        options.check_except(if options.train.save_rate.is_some() { &SAVE_FLAGS } else { &[] })?;
        let (model, shape) = options.take_model()?;
        let StepOptions { warmup, steps, clip, data, train, .. } = options;
        if data.documents.is_some() {
            return Err(Error::usage("--documents: not available in simulate, which times rows of a single document; use bench step"));
        }
        if !data.token_skew.is_uniform() {
            return Err(Error::usage("--token-skew: not available in simulate, which routes no tokens; use bench step"));
        }
        if !data.trained_share.is_all() {
            return Err(Error::usage("--trained-share: not available in simulate, which trains every token; use bench step"));
        }
        if train.digest == Some(true) {
            return Err(Error::usage("--digest: not available in simulate, which computes no state; use bench step"));
        }
        let settings = Settings::resolve_over(Settings::default(), train)?;
        let shape = settings.freezing(shape, Some(&model))?;
        check_context(&settings, &shape, &model)?;
        let steps = Steps { warmup, timed: steps, clip };
        Ok(Self { saves: settings.save_schedule(), settings, config: model.display().to_string(), shape, steps, profile })
    }

    /// Tokens of a step, as far as the options determine them before a plan is made.
    #[cfg(test)]
    pub(super) fn tokens(&self) -> usize {
        let Settings { per_device_train_batch_size: batch, seq_length, tokens_per_step, .. } = self.settings;
        tokens_per_step.unwrap_or_else(|| batch.saturating_mul(seq_length).saturating_mul(self.settings.micro_batches()))
    }

    /// Runs the simulation.
    ///
    /// # Errors
    /// `Resource` that names the shortage when the plan does not fit the machine; `Io` when the timeline cannot be written.
    pub(crate) fn run(&self) -> Result<SimulatedRecord> {
        let trace = self.settings.trace.as_deref().map(TraceFile::open).transpose()?;
        let machine = Machine::of_run(&self.profile, &self.settings.cut())?;
        let plan = best_plan_for(&self.settings.request(&self.shape), &machine, false, self.steps.clip)?.for_another_machine();
        let (outcome, tracks, window_ns) = simulate(&plan, &self.shape, &self.profile.name, self.steps, TRACE_SPANS)?;
        trace.map(|trace| trace.write(&tracks)).transpose()?;
        let of_saves = |saves| {
            let plan = plan.clone().with_save_copies();
            simulate_save((&plan, &self.shape), &self.profile.name, self.steps, saves)
        };
        let save = self.saves.map(of_saves).transpose()?;
        Ok(SimulatedRecord {
            bench: "simulate",
            build: BuildFacts::this_program(),
            hardware: HardwareFacts::of(&self.profile),
            device: format!("simulated {}", self.profile.machine),
            model: ModelFacts::new(self.config.clone(), &self.shape),
            clip: self.steps.clip,
            warmup: self.steps.warmup,
            steps: self.steps.timed,
            settings: self.settings.settled(plan.split()),
            plan: PlanFacts::new(&plan),
            device_planned_bytes: plan.bytes_at(MemorySpace::Device),
            host_planned_bytes: plan.bytes_at(MemorySpace::Host),
            gantt: Gantt::new(
                &tracks,
                window_ns.end - (outcome.step_ms.samples.last().copied().unwrap_or(0.0) * 1e6) as u64..window_ns.end,
            ),
            outcome,
            save,
            chosen: plan,
        })
    }
}

impl fmt::Display for SimulatedRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n\n{} of {} parameters on {}", self.chosen, self.model.config, Count(self.model.params), self.device)?;
        write!(f, "{}", self.outcome)?;
        self.save.iter().try_for_each(|save| write!(f, "\n  save         {save}"))?;
        write!(f, "\n\n{}", self.gantt)
    }
}

/// The hardware profile named by `options`: `this` measures this machine now, `auto` is the profile stored by `probe --save`. `log`
/// receives progress lines.
///
/// # Errors
/// `Usage` when no profile is named or stored, or with `--gpus all`; errors of [`Profile::load`], [`probe::run`] and [`Key::new`].
pub(crate) fn profile(options: &TrainOptions, log: &mut dyn FnMut(&dyn fmt::Display)) -> Result<Profile> {
    if options.gpus == Some(GpuCount::All) {
        return Err(Error::usage("--gpus all: only available for runs on this machine; give a number, for example --gpus 2"));
    }
    match &options.hardware {
        None => {
            Err(Error::usage(format!("--hardware is missing: this, auto, a profile's file, or one of {}", Profile::names().join(", "))))
        }
        Some(name) if name == Path::new("this") => {
            let (device, cuda_libraries) = (options.device.unwrap_or(DeviceChoice::Auto), options.cuda_libraries.clone());
            probe::run(&ProbeOptions { device, gpus: None, seconds: PROBE_S, out: None, save: false, cuda_libraries }, log)
        }
        Some(name) if name == Path::new(AUTO) => {
            let kept = MachineId::new(&Topology::this_machine())?.file().and_then(SelectedProfile::kept);
            let rates_from = kept.ok_or_else(|| {
                Error::usage("--hardware auto: no saved profile of this machine; create one with `superoffload probe --save`")
            })??;
            log(&format_args!("rates: {rates_from}"));
            Ok(rates_from.profile)
        }
        Some(name) => Profile::load(&name.to_string_lossy()),
    }
}
