//! The implementation of attention on a GPU, by model and format.

use super::machine::Machine;
use super::plan::Plan;
use super::tests::{h200, settings};
use crate::config::options::TrainDtype;
use crate::config::settings::Settings;
use crate::data::rows::row_rules::Packing;
use crate::device::Attention;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::request::choices::AttentionChoice;
use std::path::Path;

fn planned(model: &str, settings: &Settings, machine: &Machine) -> crate::error::Result<Plan> {
    Plan::new(&settings.request(&presets::shape(Path::new(model)).unwrap()), machine, false)
}

fn bytes(plan: &Plan, name: &str) -> usize {
    plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes)
}

#[test]
fn layers_that_cudnn_lacks_are_computed_by_products() {
    let by = |model, attention| planned(model, &Settings { attention, ..settings() }, &h200()).unwrap().recipe.numerics.attention;
    let (auto, deterministic) = (AttentionChoice::Auto, true);
    assert_eq!(by("qwen3-4b", auto), Attention::Cudnn { deterministic });
    assert_eq!(by("gemma-2-2b", auto), Attention::Products);
    assert_eq!(by("gemma-4-31b", auto), Attention::CudnnOrProducts { deterministic });
    assert_eq!(by("qwen3-4b", AttentionChoice::Products), Attention::Products);
    let wide = Settings { dtype: TrainDtype::Float32, ..settings() };
    assert_eq!(planned("gemma-2-2b", &wide, &h200()).unwrap().recipe.numerics.attention, Attention::Plain);
    let refused = |model, settings| planned(model, &settings, &h200()).unwrap_err().to_string();
    let cudnn = refused("gemma-4-31b", Settings { attention: AttentionChoice::Cudnn, ..settings() });
    assert!(cudnn.contains("no heads of more than 256 channels") && cudnn.contains("--attention auto"), "{cudnn}");
    let products = refused("qwen3-4b", Settings { attention: AttentionChoice::Products, ..wide });
    assert!(products.contains("--attention products: it has 16-bit formats only"), "{products}");
}

#[test]
fn scores_are_planned_to_the_byte() {
    let plan = planned("gemma-4-31b", &settings(), &h200()).unwrap();
    // 1024 queries of 16 of the 32 heads with 4096 keys, 12 bytes each; and sums of keys and values of 4 heads of 512 channels.
    let (scores, sums) = (12 * 16 * 1024 * 4096, 2 * 4 * 4 * 4096 * 512);
    assert_eq!(bytes(&plan, "scores of attention"), scores + sums);
    // Layers with a window still go by cuDNN.
    assert!(bytes(&plan, "attention workspace") > 0 && plan.recipe.numerics.attention_block.is_none(), "{plan}");
    assert!(plan.to_string().contains("attention   by products in layers with heads of more than 256 channels"), "{plan}");
    assert_eq!(bytes(&planned("qwen3-4b", &settings(), &h200()).unwrap(), "scores of attention"), 0);
    // Documents are gathered, 4096 tokens at a time: 16 key heads of one head of queries each are fewer than 32 documents of 128 tokens.
    let packed = planned("gemma-2-2b", &Settings { packing: Packing::Bfd, ..settings() }, &h200()).unwrap();
    assert!(bytes(&packed, "packed documents") > 0 && bytes(&packed, "attention workspace") == 0, "{packed}");
    assert!(bytes(&packed, "scores of attention") > 0, "{packed}");
}

#[test]
fn products_take_the_time_of_products_and_of_scores() {
    let machine = Machine::of(&Profile::load("h200-pcie5").unwrap());
    let seconds = |model, attention| {
        let plan = planned(model, &Settings { attention, ..settings() }, &machine).unwrap();
        plan.forecast.predicted.unwrap().step_s
    };
    let [products, plain] = [AttentionChoice::Products, AttentionChoice::Plain].map(|by| seconds("gemma-2-2b", by));
    // Plain kernels take most of a step.
    assert!(products < 0.6 * plain, "{products} {plain}");
    // Where cuDNN has a kernel, it is faster.
    let [products, cudnn] = [AttentionChoice::Products, AttentionChoice::Auto].map(|by| seconds("qwen3-4b", by));
    assert!(products > 1.02 * cudnn, "{products} {cudnn}");
    // A wide layer costs no more than its FLOPs at the rate of products, with scores beside them.
    let (wide, dense) = ("gemma-4-31b", "gemma-3-27b");
    let step =
        |model| planned(model, &Settings { per_device_train_batch_size: 1, ..settings() }, &machine).unwrap().forecast.predicted.unwrap();
    let (wide, dense) = (step(wide), step(dense));
    assert!(wide.step_s < 1.4 * dense.step_s, "{} {}", wide.step_s, dense.step_s);
}
