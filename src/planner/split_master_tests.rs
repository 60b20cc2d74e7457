//! Streamed weights that are halves of masters.

use super::tests::{FLOW, GIB, REPARTITION, fitting, llama_8b, refusal, settings};
use crate::config::settings::Settings;
use crate::model::presets;
use crate::optim::moments::Moments;
use crate::request::choices::{ActivationsChoice, MastersChoice, WeightsChoice};
use crate::units::Bytes;
use std::path::Path;

/// Qwen3-30B-A3B on one H200 needs split masters on the host. Llama-8B fits with float32 masters there, also if all others may be split.
#[test]
fn weights_are_halves_of_masters_only_where_nothing_else_fits() {
    if !(FLOW && REPARTITION) {
        return;
    }
    let int8 = Settings { moments: Moments::Int8, activations: ActivationsChoice::RecomputeBlock, ..settings() };
    let large = presets::shape(Path::new("qwen3-30b-a3b")).unwrap();
    let plan = fitting(&large, &int8);
    assert!(plan.placement.rings.split_masters && plan.placement.layout.offloaded() > 0, "{plan}");
    assert_eq!(plan.placement.grad_slots, plan.placement.layout.offloaded(), "no gradient waits for another step");
    let stated = "those on the host stepped after the verdict";
    assert!(plan.to_string().contains(stated) && plan.save_obstacle().is_some() && !plan.is_movable(), "{plan}");
    refusal(&large, &Settings { masters: MastersChoice::Float32, ..int8.clone() });
    for masters in [MastersChoice::Auto, MastersChoice::Split] {
        let plan =
            fitting(&llama_8b(), &Settings { masters, weights: WeightsChoice::Flow, hbm_limit: Some(Bytes(40 * GIB)), ..int8.clone() });
        assert!(!plan.placement.rings.split_masters && plan.placement.rings.weights.is_some() && plan.is_movable(), "{plan}");
    }
}
