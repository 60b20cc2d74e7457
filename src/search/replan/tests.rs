//! Runs on a machine that is not as its profile says, on the simulated device: what they see, what they are answered, and whether the steps
//! that follow are as fast as was said.

use super::pace::{Pace, RecentSteps, WINDOW};
use super::{Change, Question};
use crate::config::options::{ActivationsChoice, ResidentBuckets};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::device::sim::SimDevice;
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::hardware::rates::Rates;
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
use crate::memory::{Addressing, DeviceMemory};
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::search::best_plan;
use crate::simulate::clip::Clip;
use crate::simulate::timed::RandomTokens;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A run of Llama-8B with fewer layers on a GPU with less memory.
struct Run {
    settings: Settings,
    shape: ModelShape,
    machine: Machine,
}

impl Run {
    fn new(settings: Settings) -> Self {
        let shape = presets::shape("model", Path::new("llama-8b")).unwrap().with_layers(12);
        let device = DeviceMemory::Own { bytes: 30 << 30, addressing: Addressing::Managed };
        let machine = Machine { cpus: 16, host_bytes: 200 << 30, kind: DeviceKind::Gpu, device, rates: Rates::assumed() };
        Self { settings: Settings { per_device_train_batch_size: 4, seq_length: 4096, ..settings }, shape, machine }
    }

    fn plan(&self) -> Plan {
        best_plan(&self.settings, &self.shape, &self.machine, false).unwrap()
    }

    /// An engine whose machine has other rates than its plan says.
    fn start(&self, plan: &Plan, rates: &Rates) -> Engine<SimDevice> {
        let plan = Plan { host_memory: MemoryPolicy::unbacked(), ..plan.clone() };
        let on = (plan.machine.kind, plan.machine.device);
        let (dev, pool) = SimDevice::new("replay", rates, on, (plan.threads, plan.isa), 0);
        let mut engine = Engine::new(plan, self.shape.clone(), dev, Pool::Simulated(pool), Arc::new(Doorbell::default())).unwrap();
        engine.pretend_norm();
        engine.send_weights().unwrap();
        engine
    }

    fn question(&self, plan: &Plan, pace: Pace, assumed: Option<Pace>, steps_left: u64) -> Question {
        let (settings, shape) = (self.settings.clone(), self.shape.clone());
        Question { settings, shape, plan: plan.clone(), pace, assumed, steps_left }
    }
}

/// How the next steps go.
fn watch(engine: &mut Engine<SimDevice>, clip: Clip) -> Pace {
    let (mut window, mut tokens) = (RecentSteps::default(), RandomTokens::new(0, engine.shape().vocab));
    let first = engine.train_step();
    // The first ones are not as the others: what is deferred is not there yet.
    for step in first + 1..=first + 6 + WINDOW as u64 {
        engine.set_max_grad_norm(clip.max_grad_norm(step));
        let start_ns = engine.now_ns();
        let report = engine.step(1e-3, &mut tokens).unwrap();
        let time = Duration::from_nanos(engine.now_ns() - start_ns);
        if step > first + 6 {
            window.add(&report, time);
        }
    }
    window.pace().unwrap()
}

const EVERY_TENTH: &str = "every-10";

/// What becomes of a run that sees the machine as it is: its mean step before and after.
fn replanned(run: &Run, rates: &Rates, clip: &str) -> (f64, f64, Change) {
    let (plan, clip) = (run.plan(), clip.parse().unwrap());
    let mut engine = run.start(&plan, rates);
    let pace = watch(&mut engine, clip);
    let before_s = pace.step_s;
    let answer = run.question(&plan, pace, None, 1000).answer().unwrap();
    let change = answer.change.expect("another plan");
    assert!(engine.replan(change.plan.clone()).unwrap().is_none());
    let pace = watch(&mut engine, clip);
    let after_s = pace.step_s;
    assert!(!pace.has_left(&answer.assumed), "it would ask again: {pace:?} is not {:?}", answer.assumed);
    let said = [change.before_ms / 1e3 / before_s, change.after_ms / 1e3 / after_s];
    assert!(said.iter().all(|said| (0.95..1.05).contains(said)), "{change}, but it was {before_s:.3} -> {after_s:.3} s");
    // Asked again it stays.
    let again = run.question(engine.plan(), pace, Some(answer.assumed), 1000).answer().unwrap();
    assert!(again.change.is_none(), "{}, and then {}", change, again.change.unwrap());
    (before_s, after_s, change)
}

#[test]
fn a_run_whose_host_is_slow_moves_states_to_the_device() {
    let run = Run::new(Settings::default());
    let (before_s, after_s, change) = replanned(&run, &run.machine.rates.with_faster_host(0.5), EVERY_TENTH);
    assert!(after_s < 0.97 * before_s, "{before_s:.3} -> {after_s:.3} s: {change}");
    assert!(change.plan.layout.offloaded() < change.from.layout.offloaded(), "{change}");
    let words = change.to_string();
    assert!((48..=52).any(|percent| words.contains(&format!("the optimizer has {percent} % of its assumed rate"))), "{words}");
}

#[test]
fn a_run_that_is_always_clipped_is_planned_for_it() {
    let run = Run::new(Settings::default());
    let (before_s, after_s, change) = replanned(&run, &run.machine.rates, "always");
    assert!(after_s < 0.97 * before_s && change.to_string().contains("100 % of steps are clipped"), "{before_s} -> {after_s}: {change}");
}

#[test]
fn a_run_that_goes_as_assumed_or_is_nearly_over_keeps_its_plan() {
    let run = Run::new(Settings::default());
    let plan = run.plan();
    let pace = watch(&mut run.start(&plan, &run.machine.rates), EVERY_TENTH.parse().unwrap());
    assert!(run.question(&plan, pace, None, 1000).answer().unwrap().change.is_none());
    let slow = run.machine.rates.with_faster_host(0.5);
    let pace = watch(&mut run.start(&plan, &slow), EVERY_TENTH.parse().unwrap());
    assert!(run.question(&plan, pace, None, 1).answer().unwrap().change.is_none(), "one step does not pay for a move");
}

#[test]
fn what_a_person_asked_for_stays() {
    let (resident_buckets, activations) = (ResidentBuckets::Count(4), ActivationsChoice::RecomputeBlock);
    let run = Run::new(Settings { resident_buckets, activations, ..Settings::default() });
    let plan = run.plan();
    let pace = watch(&mut run.start(&plan, &run.machine.rates.with_faster_host(0.5)), EVERY_TENTH.parse().unwrap());
    let change = run.question(&plan, pace, None, 1000).answer().unwrap().change;
    assert!(change.is_none_or(|change| (change.plan.layout, change.plan.layer_policies) == (plan.layout, plan.layer_policies)));
}
