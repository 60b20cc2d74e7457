//! Waits of a simulated device: each is reported as idle time, so that its busy time does not depend on its waits.

use super::network_tests::step;
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::optim::moments::Moments;
use crate::request::choices::{ExpertProductsChoice, ResidentBuckets};
use std::path::Path;

/// GPT-OSS-20B on an H200, where gradients lie in a ring. On a slow host its backward pass waits for slots held by the optimizer. These
/// waits once counted as busy time: 322 ms of a step here.
#[test]
fn a_device_that_waits_for_slots_is_not_busy() {
    let shape = presets::shape(Path::new("gpt-oss-20b")).unwrap();
    let settings = Settings {
        seq_length: 4096,
        per_device_train_batch_size: 8,
        moments: Moments::Bfloat16,
        expert_products: ExpertProductsChoice::Own,
        ..Settings::default()
    };
    let settings = Settings { resident_buckets: ResidentBuckets::Count(78), bucket_mib: Some(256.0), slots: Some(16), ..settings };
    let of = |speed: f64| {
        let mut profile = Profile::load("h200-pcie5").unwrap();
        profile.host.adam_bytes_per_s_by_threads.value.0.iter_mut().for_each(|(_, bytes_per_s)| *bytes_per_s *= speed);
        let (plan, outcome) = step(&settings, &shape, &profile);
        assert!(plan.placement.rings.grads.is_some(), "{plan}");
        (outcome.step_ms.median, outcome.step_ms.median * outcome.exposed.device_busy_share)
    };
    let [(fast_ms, fast_busy_ms), (slow_ms, slow_busy_ms)] = [1.0, 0.7].map(of);
    assert!(slow_ms > 1.15 * fast_ms, "{fast_ms} and {slow_ms} ms");
    assert!(
        (slow_busy_ms / fast_busy_ms - 1.0).abs() < 0.02,
        "computes for {fast_busy_ms} of {fast_ms} ms, and {slow_busy_ms} of {slow_ms}"
    );
}

/// Qwen3-30B-A3B on two H200, limited by the optimizers: 2773 ms a step. It takes 2890 ms if the workers follow deadlines only, even while
/// drivers wait for slots (`paper-figures/results/simulated-slots.jsonl`).
#[test]
fn workers_free_the_slots_that_drivers_wait_for() {
    let shape = presets::shape(Path::new("qwen3-30b-a3b")).unwrap();
    let settings = Settings {
        gpus: 2,
        seq_length: 4096,
        per_device_train_batch_size: 8,
        expert_products: ExpertProductsChoice::Own,
        ..Settings::default()
    };
    let settings = Settings { resident_buckets: ResidentBuckets::Count(106), bucket_mib: Some(256.0), slots: Some(32), ..settings };
    let (plan, outcome) = step(&settings, &shape, &Profile::load("h200-x2").unwrap());
    assert!(outcome.step_ms.median < 2830.0, "{:?}: {plan}", outcome.step_ms);
}
