//! Simulated runs on machines that deviate from their profile: the rates that they measure, the answers of the search, and whether the next
//! steps are as fast as predicted.

use super::observed_rates::{ObservedRates, RecentSteps, WINDOW};
use super::{PlanChange, ReplanRequest};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::device::sim::SimDevice;
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::hardware::profile::Profile;
use crate::hardware::rates::Rates;
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
use crate::memory::{Addressing, DeviceMemory};
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::choices::{ActivationsChoice, ResidentBuckets, Technique};
use crate::search::best_plan;
use crate::simulate::clip::Clip;
use crate::simulate::random_tokens::RandomTokens;
use crate::sweep::sweep;
use crate::units::Bytes;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A simulated run.
#[derive(Clone)]
pub(crate) struct SimulatedRun {
    pub(crate) settings: Settings,
    pub(crate) shape: ModelShape,
    pub(crate) machine: Machine,
}

impl SimulatedRun {
    /// Llama-8B with fewer layers on a GPU with less memory.
    pub(crate) fn new(settings: Settings) -> Self {
        let shape = presets::shape(Path::new("llama-8b")).unwrap().with_layers(12);
        let device = DeviceMemory::Own { bytes: 30 << 30, addressing: Addressing::Managed };
        let machine = Machine { host_bytes: 200 << 30, kind: DeviceKind::Gpu, device, ..Machine::cpu(16) };
        // With early commits the pool is not a bottleneck.
        let without = vec![Technique::EarlyCommit];
        Self { settings: Settings { per_device_train_batch_size: 4, seq_length: 4096, without, ..settings }, shape, machine }
    }

    /// A model by name on an H200 limited to `gib` GiB, with the rates of its profile.
    pub(crate) fn on_h200(model: &str, gib: u64, settings: Settings) -> Self {
        let settings = Settings { hbm_limit: Some(Bytes(gib << 30)), seq_length: 4096, ..settings };
        let machine = Machine::of(&Profile::load("h200-pcie5").unwrap()).limited(settings.hbm_limit, settings.host_limit);
        Self { shape: presets::shape(Path::new(model)).unwrap(), machine, settings }
    }

    /// A run with default settings and its plan. The plan is searched once for all tests.
    pub(crate) fn plain() -> (Self, Plan) {
        static PLAIN: OnceLock<(SimulatedRun, Plan)> = OnceLock::new();
        let searched = || {
            let run = Self::new(Settings::default());
            let plan = run.plan();
            (run, plan)
        };
        PLAIN.get_or_init(searched).clone()
    }

    pub(crate) fn plan(&self) -> Plan {
        best_plan(&self.settings.request(&self.shape), &self.machine, false).unwrap()
    }

    /// Starts an engine on a machine with other rates than in its plan.
    pub(crate) fn start(&self, plan: &Plan, rates: &Rates) -> Engine<SimDevice> {
        let (plan, dev, pool) = self.device(plan, rates);
        ready(Engine::new(plan, self.shape.clone(), dev, pool, Arc::new(Doorbell::default())).unwrap())
    }

    fn device(&self, plan: &Plan, rates: &Rates) -> (Plan, SimDevice, Pool<StepJob>) {
        let plan = plan.clone().with_host_memory(MemoryPolicy::unbacked());
        let on = (plan.site.machine.kind, plan.site.machine.device);
        let (dev, pool) = SimDevice::new("replay", rates, on, (plan.site.threads, plan.site.isa, plan.host_formats()), 0);
        (plan, dev, Pool::Simulated(pool))
    }

    fn question(&self, plan: &Plan, observed_rates: ObservedRates, assumed: Option<ObservedRates>, steps_left: u64) -> ReplanRequest {
        let request = self.settings.request(&self.shape);
        ReplanRequest { request, plan: plan.clone(), observed_rates, assumed, steps_left }
    }
}

/// Sends the weights to the device of `engine`.
fn ready(mut engine: Engine<SimDevice>) -> Engine<SimDevice> {
    engine.pretend_norm();
    engine.send_weights().unwrap();
    engine
}

/// Rates of the next steps.
fn watch(engine: &mut Engine<SimDevice>, clip: Clip) -> ObservedRates {
    let (mut window, mut tokens) = (RecentSteps::default(), RandomTokens::new(0, engine.shape().vocab));
    let first = engine.train_step();
    // The first steps differ: there are no deferred updates yet.
    for step in first + 1..=first + 6 + WINDOW as u64 {
        engine.set_max_grad_norm(clip.max_grad_norm(step));
        let start_ns = engine.now_ns();
        let report = engine.step(1e-3, &mut tokens).unwrap();
        let time = Duration::from_nanos(engine.now_ns() - start_ns);
        if step > first + 6 {
            window.add(&report, time);
        }
    }
    window.observed_rates().unwrap()
}

const EVERY_TENTH: &str = "every-10";

/// Replans a run that measures `rates`. Returns its mean step before and after.
fn replanned((run, plan): (&SimulatedRun, &Plan), rates: &Rates, clip: &str) -> (f64, f64, PlanChange) {
    let clip = clip.parse().unwrap();
    let mut engine = run.start(plan, rates);
    let observed_rates = watch(&mut engine, clip);
    let before_s = observed_rates.step_s;
    let answer = run.question(plan, observed_rates, None, 1000).answer().unwrap();
    let change = answer.change.expect("another plan");
    assert!(engine.replan(change.plan.clone()).unwrap().is_none());
    let observed_rates = watch(&mut engine, clip);
    let after_s = observed_rates.step_s;
    assert!(!observed_rates.has_left(&answer.assumed), "it would ask again: {observed_rates:?} is not {:?}", answer.assumed);
    let text = [change.before_ms / 1e3 / before_s, change.after_ms / 1e3 / after_s];
    assert!(text.iter().all(|text| (0.95..1.05).contains(text)), "{change}, but it was {before_s:.3} -> {after_s:.3} s");
    // A second search does not change the plan again.
    let again = run.question(engine.plan(), observed_rates, Some(answer.assumed), 1000).answer().unwrap();
    assert!(again.change.is_none(), "{}, and then {}", change, again.change.unwrap());
    (before_s, after_s, change)
}

#[test]
fn a_run_whose_host_is_slow_moves_states_to_the_device() {
    let (run, plan) = SimulatedRun::plain();
    let (before_s, after_s, change) = replanned((&run, &plan), &run.machine.rates.with_faster_host(0.5), EVERY_TENTH);
    assert!(after_s < 0.97 * before_s, "{before_s:.3} -> {after_s:.3} s: {change}");
    assert!(change.plan.placement.layout.offloaded() < change.from.placement.layout.offloaded(), "{change}");
    let words = change.to_string();
    assert!((48..=52).any(|percent| words.contains(&format!("the optimizer has {percent} % of its assumed rate"))), "{words}");
}

#[test]
fn a_run_that_is_always_clipped_is_planned_for_it() {
    let (run, plan) = SimulatedRun::plain();
    let (before_s, after_s, change) = replanned((&run, &plan), &run.machine.rates, "always");
    assert!(after_s < 0.97 * before_s && change.to_string().contains("100 % of steps are clipped"), "{before_s} -> {after_s}: {change}");
}

#[test]
fn a_run_that_goes_as_assumed_or_is_nearly_over_keeps_its_plan() {
    let (run, plan) = SimulatedRun::plain();
    let observed_rates = watch(&mut run.start(&plan, &run.machine.rates), EVERY_TENTH.parse().unwrap());
    assert!(run.question(&plan, observed_rates, None, 1000).answer().unwrap().change.is_none());
    let slow = run.machine.rates.with_faster_host(0.5);
    let observed_rates = watch(&mut run.start(&plan, &slow), EVERY_TENTH.parse().unwrap());
    assert!(run.question(&plan, observed_rates, None, 1).answer().unwrap().change.is_none(), "one step does not pay for a move");
}

#[test]
fn explicit_settings_survive_a_replan() {
    let (resident_buckets, activations) = (ResidentBuckets::Count(4), ActivationsChoice::RecomputeBlock);
    let run = SimulatedRun::new(Settings { resident_buckets, activations, ..Settings::default() });
    let plan = run.plan();
    let observed_rates = watch(&mut run.start(&plan, &run.machine.rates.with_faster_host(0.5)), EVERY_TENTH.parse().unwrap());
    let change = run.question(&plan, observed_rates, None, 1000).answer().unwrap().change;
    assert!(change.is_none_or(|change| (change.plan.placement.layout, change.plan.placement.layer_policies)
        == (plan.placement.layout, plan.placement.layer_policies)));
}

/// Bytes per parameter that Adam reads and writes in a pass that commits one step and speculates on the next.
const FUSED_BYTES: f64 = 30.0;

/// `SUPEROFFLOAD_SWEEP=all` uses buckets of the usual size and compares with the recorded line described in paper-figures/log/2026-11.md.
/// `SUPEROFFLOAD_SWEEP=all SUPEROFFLOAD_RECORD=1 cargo test --release --lib 4_gparam` writes the line.
#[test]
fn w2_in_80_gib_beside_an_adam_of_4_gparam_a_second_gains_more_than_a_tenth() {
    let bucket_mib = sweep(Some(256.0), None);
    let run = SimulatedRun::on_h200("llama-8b", 80, Settings { per_device_train_batch_size: 4, bucket_mib, ..Settings::default() });
    let plan = run.plan();
    let alone = run.machine.rates.adam_bytes_per_s(plan.site.threads, plan.site.isa, plan.host_formats()) / FUSED_BYTES;
    let (before_s, after_s, change) = replanned((&run, &plan), &run.machine.rates.with_faster_host(4e9 / alone), EVERY_TENTH);
    assert!(before_s > 1.1 * after_s, "{before_s:.3} -> {after_s:.3} s: {change}");
    if bucket_mib.is_some() {
        return;
    }
    let step_ms = [before_s, after_s].map(|seconds| (seconds * 1e4).round() / 10.0);
    let line = json!({
        "bench": "replan", "device": "simulated h200-pcie5", "model": "llama-8b", "hbm_limit": "80GiB",
        "per_device_train_batch_size": 4, "seq_length": 4096, "adam_gparams_per_s": 4.0, "clip": EVERY_TENTH, "step_ms": step_ms,
        "said": change.to_string(), "command": "SUPEROFFLOAD_SWEEP=all SUPEROFFLOAD_RECORD=1 cargo test --release --lib 4_gparam",
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("paper-figures/results/simulated-replan.jsonl");
    if std::env::var_os("SUPEROFFLOAD_RECORD").is_some() {
        fs::write(&path, format!("{line}\n")).unwrap();
    }
    let message: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (message, now) in message["step_ms"].as_array().unwrap().iter().zip(step_ms) {
        assert!((message.as_f64().unwrap() / now - 1.0).abs() < 0.03, "the line says {message} ms, and it is {now}: {line}");
    }
}
