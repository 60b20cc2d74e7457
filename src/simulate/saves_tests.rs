//! Waits of steps for saves on simulated disks, against the formula: bytes that neither the disk nor copies take within a step.

use super::clip::Clip;
use super::saves::{SaveSchedule, SimulatedSave, simulate_save};
use super::simulate;
use super::timed::Steps;
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::optim::moments::Moments;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::choices::{ResidentBuckets, SaveMemory};
use crate::units::Bytes;
use std::path::Path;

const GIB: u64 = 1 << 30;

fn shape(name: &str, layers: usize) -> ModelShape {
    presets::shape(Path::new(name)).unwrap().with_layers(layers)
}

fn settings(save_memory: SaveMemory) -> Settings {
    Settings { seq_length: 4096, per_device_train_batch_size: 4, save_memory, ..Settings::default() }
}

/// The save of a plan on a disk of `bytes_per_s`, the seconds of a step, and the wait by the formula.
fn saved(settings: &Settings, (shape, profile): (&ModelShape, &str), clip: Clip, bytes_per_s: f64) -> (SimulatedSave, f64, f64) {
    let machine = Machine::of_run(&Profile::load(profile).unwrap(), &settings.cut()).unwrap();
    let plan = Plan::new(&settings.request(shape), &machine, false).unwrap().with_save_copies();
    assert!(plan.shortage().is_none(), "{plan}");
    let steps = Steps { warmup: 2, timed: 2, clip };
    let step_s = simulate(&plan, shape, profile, steps, 0).unwrap().0.step_ms.median / 1e3;
    let save = simulate_save((&plan, shape), profile, steps, SaveSchedule { bytes_per_s, every: 100 }).unwrap();
    let rest = save.bytes.saturating_sub(save.copy_bytes) as f64 / bytes_per_s;
    (save, step_s, (rest - step_s).max(0.0))
}

/// A state stands still for one to two steps, so that short waits are shorter than by the formula. Copies take time of the pool.
#[test]
fn steps_wait_for_a_save_as_long_as_the_formula_says() {
    let (model, small) = (shape("qwen3-4b", 12), shape("llama-8b", 8));
    let host = |memory| Settings { resident_buckets: ResidentBuckets::Count(0), ..settings(memory) };
    let size = |gib: u64| SaveMemory::Size(Bytes(gib * GIB));
    let always = Clip::OneIn(1.try_into().unwrap());
    let rows = [
        (host(size(0)), &model, "h200-pcie5", Clip::Never, 0.9e9),
        (host(size(8)), &model, "h200-pcie5", Clip::Never, 0.9e9),
        (host(size(8)), &model, "h200-pcie5", always, 0.9e9),
        (host(size(12)), &model, "h200-pcie5", Clip::Never, 3e9),
        (host(size(100)), &model, "h200-pcie5", Clip::Never, 0.9e9),
        (host(size(4)), &small, "h200-pcie5", Clip::Never, 0.9e9),
        (Settings { moments: Moments::Bfloat16, ..host(size(8)) }, &small, "h200-pcie5", Clip::Never, 0.5e9),
        (Settings { moments: Moments::Int8, ..host(size(4)) }, &small, "h200-pcie5", Clip::Never, 0.5e9),
        (settings(size(8)), &model, "h200-pcie5", Clip::Never, 0.9e9),
        (Settings { gpus: 2, ..host(size(8)) }, &model, "h200-x2", Clip::Never, 0.9e9),
    ];
    let mut long = 0;
    for (nth, (settings, shape, profile, clip, rate)) in rows.into_iter().enumerate() {
        let (save, step_s, expected) = saved(&settings, (shape, profile), clip, rate);
        let is_long = expected > 10.0 * step_s;
        let least = if is_long { 0.9 * expected } else { expected - 2.0 * step_s };
        let most = (1.02 * expected).max(step_s);
        assert!((least..=most).contains(&save.wait_s), "row {nth}: {save}, not {expected:.2} s; a step takes {step_s:.2} s");
        long += usize::from(is_long);
    }
    assert!(long >= 7, "only {long} rows have long waits");
}

/// The goals for an automatic plan of Llama-8B whose copies have 78 GiB, on a disk of 0.9 GB/s.
#[test]
fn saves_of_llama_8b_keep_to_their_goals() {
    let model = shape("llama-8b", 32);
    for (moments, least_s, most_s) in [(Moments::Float32, 12.0, 13.5), (Moments::Bfloat16, 0.0, 0.5)] {
        let settings = Settings { moments, ..settings(SaveMemory::Size(Bytes(78 * GIB))) };
        let (save, ..) = saved(&settings, (&model, "h200-pcie5"), Clip::Never, 0.9e9);
        assert!((least_s..=most_s).contains(&save.wait_s), "{save}");
    }
}
