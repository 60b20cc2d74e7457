//! Plans for runs that clip many steps.

use super::{best_plan, best_plan_for};
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::optim::moments::Moments;
use crate::planner::machine::Machine;
use crate::request::choices::{LayerOrder, MastersChoice};
use crate::simulate::clip::Clip;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use crate::units::Bytes;
use std::path::Path;

/// Llama-8B in 79 GiB of an H200: with rare clipping most states stay on the host, so that layers recompute little. With every step clipped,
/// the GPU waits for them.
#[test]
fn a_plan_for_clipped_steps_has_faster_clipped_steps() {
    let shape = presets::shape(Path::new("llama-8b")).unwrap();
    let settings = Settings {
        seq_length: 4096,
        per_device_train_batch_size: 4,
        moments: Moments::Int8,
        masters: MastersChoice::Split,
        bucket_mib: Some(256.0),
        layer_order: LayerOrder::Whole,
        hbm_limit: Some(Bytes(79 << 30)),
        ..Settings::default()
    };
    let machine = Machine::of_run(&Profile::load("h200-pcie5").unwrap(), &settings.cut()).unwrap();
    let request = settings.request(&shape);
    let always: Clip = "always".parse().unwrap();
    let (usual, plan) = (best_plan(&request, &machine, false).unwrap(), best_plan_for(&request, &machine, false, always).unwrap());
    let clipped_ms = |plan| {
        let steps = Steps { warmup: 1, timed: 2, clip: always };
        simulate(plan, &shape, "h200-pcie5", steps, 0).unwrap().0.step_ms.median
    };
    let (usual_ms, ms) = (clipped_ms(&usual), clipped_ms(&plan));
    assert!(ms < 0.85 * usual_ms, "{ms} ms, {usual_ms} ms by the usual plan: {plan}");
    assert_eq!(best_plan_for(&request, &machine, false, Clip::Never).unwrap().to_string(), usual.to_string());
}
