//! The plans of benchmarks that clip many steps.

use super::options::StepOptions;
use super::simulate::{SimulatedRecord, Simulation};
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::planner::machine::Machine;
use crate::search::best_plan;
use crate::simulate::clip::Clip;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use clap::{Args, Command, FromArgMatches};
use std::path::Path;

const PROFILE: &str = "h200-pcie5";

/// Llama-8B on an H200, with `more` flags.
fn options(clip: &str, more: &str) -> StepOptions {
    let flags = format!(
        "step --clip {clip} --warmup 1 --steps 2 --model llama-8b --seq-length 4096 --per-device-train-batch-size 4 --bucket-mib 256 {more}"
    );
    let matches = StepOptions::augment_args(Command::new("step")).get_matches_from(flags.split_whitespace());
    StepOptions::from_arg_matches(&matches).unwrap()
}

fn record(clip: &str, more: &str) -> SimulatedRecord {
    Simulation::new(options(clip, more), Profile::load(PROFILE).unwrap()).unwrap().run().unwrap()
}

/// In 79 GiB: with rare clipping most states stay on the host, so that layers recompute little. With every step clipped, the GPU waits for them.
#[test]
fn a_benchmark_of_clipped_steps_has_the_plan_for_them() {
    let [usual, clipped] =
        ["never", "always"].map(|clip| record(clip, "--hbm-limit 79GiB --moments int8 --masters split --layer-order whole"));
    let steps = Steps { warmup: 1, timed: 2, clip: "always".parse::<Clip>().unwrap() };
    let shape = presets::shape(Path::new("llama-8b")).unwrap();
    let usual_ms = simulate(&usual.chosen, &shape, PROFILE, steps, 0).unwrap().0.step_ms.median;
    let ms = clipped.outcome.step_ms.median;
    assert!(ms < 0.85 * usual_ms, "{ms} ms, {usual_ms} ms by the usual plan: {}", clipped.chosen);
}

/// Without early commits the plan with the fastest unclipped steps has much longer clipped steps, which every run has.
#[test]
fn a_benchmark_without_clipping_has_the_plan_of_a_run() {
    const MORE: &str = "--without early-commit";
    let settings = Settings::resolve_over(Settings::default(), options("never", MORE).train).unwrap();
    let machine = Machine::of_run(&Profile::load(PROFILE).unwrap(), &settings.cut()).unwrap();
    let shape = presets::shape(Path::new("llama-8b")).unwrap();
    let of_run = best_plan(&settings.request(&shape), &machine, false).unwrap().for_another_machine();
    assert_eq!(record("never", MORE).chosen.to_string(), of_run.to_string());
}
