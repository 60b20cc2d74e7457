//! Simulated steps of several processes: network time, and a comparison with a measured case.

use super::clip::Clip;
use super::outcome::Outcome;
use super::simulate;
use super::timed::Steps;
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::optim::moments::Moments;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::choices::{ExpertProductsChoice, ResidentBuckets, Transport, WeightsChoice};
use std::path::Path;

pub(super) fn step(settings: &Settings, shape: &ModelShape, profile: &Profile) -> (Plan, Outcome) {
    let plan = Plan::new(&settings.request(shape), &Machine::of_run(profile, &settings.cut()).unwrap(), false).unwrap();
    assert!(plan.shortage().is_none(), "{plan}");
    let steps = Steps { warmup: 2, timed: 2, clip: Clip::Never };
    let (outcome, ..) = simulate(&plan, shape, "several machines", steps, 0).unwrap();
    (plan, outcome)
}

/// Seconds of a step of twelve layers on four nodes of two GPUs, simulated and predicted, and the bytes that each GPU receives in it.
fn on_four_nodes((transport, gradient_group): (Transport, Option<usize>), bytes_per_s: f64) -> ([f64; 2], f64) {
    on_four_nodes_with(WeightsChoice::Replicated, (transport, gradient_group), bytes_per_s)
}

/// Like `on_four_nodes`, with the placement of weights `weights`.
fn on_four_nodes_with(
    weights: WeightsChoice,
    (transport, gradient_group): (Transport, Option<usize>),
    bytes_per_s: f64,
) -> ([f64; 2], f64) {
    let mut profile = Profile::load("gh200-x4").unwrap();
    profile.network.as_mut().unwrap().bytes_per_s.value = bytes_per_s;
    let settings = Settings { gpus: 2, processes: 4, transport, gradient_group, weights, ..Settings::default() };
    let settings = Settings { seq_length: 4096, per_device_train_batch_size: 4, ..settings };
    let settings = Settings { resident_buckets: ResidentBuckets::Count(8), ..settings };
    let shape = presets::shape(Path::new("qwen3-4b")).unwrap().with_layers(12);
    let (plan, outcome) = step(&settings, &shape, &profile);
    ([outcome.step_ms.median / 1e3, plan.forecast.predicted.unwrap().step_s], plan.forecast.peer_traffic.inter_node as f64)
}

/// The bytes match the protocol: gradients from six ranks of other nodes, or sums of groups from three inter-node peers, and weights from
/// three inter-node peers.
#[test]
fn transfers_by_nccl_add_their_time_to_a_step() {
    let mut carried = Vec::new();
    for group in [None, Some(2)] {
        let [(fast, bytes), (slow, same)] = [25e9, 5e9].map(|rate| on_four_nodes((Transport::Nccl, group), rate));
        assert_eq!(bytes, same);
        let longer_s = bytes / 5e9 - bytes / 25e9;
        for (how, fast, slow) in [("simulated", fast[0], slow[0]), ("predicted", fast[1], slow[1])] {
            assert!(((slow - fast) / longer_s - 1.0).abs() < 0.02, "{how}, {group:?}: {fast} s, {slow} s, {longer_s} s more of exchange");
        }
        carried.push(bytes);
    }
    assert_eq!(carried[0] / carried[1], 9.0 / 6.0);
}

#[test]
fn transfers_by_tcp_overlap_with_products_until_they_take_longer() {
    for group in [None, Some(2)] {
        let of = |transport, rate| on_four_nodes((transport, group), rate);
        let [(nccl, _), (tcp, bytes), (slow, _)] = [of(Transport::Nccl, 25e9), of(Transport::Tcp, 25e9), of(Transport::Tcp, 2e9)];
        for (how, nccl, tcp, slow) in [("simulated", nccl[0], tcp[0], slow[0]), ("predicted", nccl[1], tcp[1], slow[1])] {
            let is_between = slow > bytes / 2e9 && slow < 1.3 * bytes / 2e9;
            assert!(tcp < nccl && is_between, "{how}, {group:?}: by NCCL {nccl} s, over TCP {tcp} s and {slow} s");
        }
    }
}

/// Streamed weights come from ranks of the same process only, so as many bytes cross between processes as with replicated weights.
#[cfg(feature = "weight-flow")]
#[test]
fn nothing_crosses_between_processes_for_weights_that_each_shares() {
    let of = |weights, transport, rate| on_four_nodes_with(weights, (transport, Some(2)), rate);
    let longer_s = |weights| {
        let [(fast, _), (slow, _)] = [25e9, 5e9].map(|rate| of(weights, Transport::Nccl, rate));
        slow[0] - fast[0]
    };
    let [sharded, replicated] = [WeightsChoice::Sharded, WeightsChoice::Replicated].map(longer_s);
    assert!((sharded / replicated - 1.0).abs() < 0.02, "{sharded} s and {replicated} s more of exchange");
    let (slow, bytes) = of(WeightsChoice::Sharded, Transport::Tcp, 2e9);
    assert!(slow[0] > bytes / 2e9 && slow[0] < 1.3 * bytes / 2e9, "{} s for {bytes} bytes over TCP", slow[0]);
    let [(sharded, _), (replicated, _)] =
        [WeightsChoice::Sharded, WeightsChoice::Replicated].map(|weights| of(weights, Transport::Nccl, 25e9));
    assert!(sharded[0] > replicated[0], "pulls take no time: {} s", sharded[0]);
}

/// Fully sharded weights cross between processes in every pass. A bucket of two modules crosses in two parts, which are unevenly divided
/// among ranks: the simulated rank, the first, sends more than the mean of a part.
#[cfg(feature = "weight-flow")]
#[test]
fn weights_that_all_share_cross_between_processes_with_every_fetch() {
    let of = |weights, transport, rate| on_four_nodes_with(weights, (transport, Some(2)), rate);
    let [(fast, bytes), (slow, same)] = [25e9, 5e9].map(|rate| of(WeightsChoice::FullySharded, Transport::Nccl, rate));
    let (_, once) = of(WeightsChoice::Sharded, Transport::Nccl, 25e9);
    assert!(bytes == same && bytes > 1.3 * once, "{bytes} bytes, {once} where they cross once");
    let longer_s = bytes / 5e9 - bytes / 25e9;
    for (how, fast, slow, unequal) in [("simulated", fast[0], slow[0], 0.08), ("predicted", fast[1], slow[1], 0.02)] {
        let is_near = (-0.02..unequal).contains(&((slow - fast) / longer_s - 1.0));
        assert!(is_near, "{how}: {fast} s, {slow} s, {longer_s} s more of exchange");
    }
    let [(nccl, _), (tcp, _), (slow, _)] = [(Transport::Nccl, 25e9), (Transport::Tcp, 25e9), (Transport::Tcp, 2e9)]
        .map(|(transport, rate)| of(WeightsChoice::FullySharded, transport, rate));
    let is_between = slow[0] > bytes / 2e9 && slow[0] < 1.3 * bytes / 2e9;
    assert!(tcp[0] < nccl[0] && is_between, "by NCCL {} s, over TCP {} s and {} s of {bytes} bytes", nccl[0], tcp[0], slow[0]);
}

/// Gradients of Qwen3-30B-A3B on two H200 lie in a ring. A module once waited for all enqueued sums, and so for the whole previous layer:
/// 178 ms of a step. Measured value: commit b531df4 in `paper-figures/results/h200-x2-step.jsonl`.
#[test]
fn gpus_wait_only_for_the_sums_that_they_overwrite() {
    let shape = presets::shape(Path::new("qwen3-30b-a3b")).unwrap();
    let settings = Settings {
        gpus: 2,
        seq_length: 4096,
        per_device_train_batch_size: 8,
        moments: Moments::Bfloat16,
        expert_products: ExpertProductsChoice::Own,
        ..Settings::default()
    };
    let timed = |mib, resident| {
        let resident_buckets = ResidentBuckets::Count(resident);
        let settings = Settings { resident_buckets, bucket_mib: Some(mib), slots: Some(64), ..settings.clone() };
        let (plan, outcome) = step(&settings, &shape, &Profile::load("h200-x2").unwrap());
        let (step_ms, peer_ms) = (outcome.step_ms.median, outcome.exposed.peer_ms);
        assert!(plan.placement.rings.grads.is_some() && peer_ms < 0.01 * step_ms, "{peer_ms} of {step_ms} ms: {plan}");
        step_ms
    };
    // Eight of these buckets are smaller than the layer that is overwritten.
    timed(64.0, 584);
    let step_ms = timed(256.0, 148);
    assert!((step_ms / 2269.3 - 1.0).abs() < 0.08, "{step_ms} ms");
}

/// Llama-8B, 4 x 4096 tokens a GPU, on one machine with two H200: `paper-figures/results/h200-x2-processes.jsonl`.
#[test]
fn two_processes_take_as_long_as_measured() {
    let profile = |name: &str| Profile::load(name).unwrap();
    let file = format!("{}/paper-figures/results/h200-x2-processes.toml", env!("CARGO_MANIFEST_DIR"));
    let shape = presets::shape(Path::new("llama-8b")).unwrap();
    let settings = Settings { seq_length: 4096, per_device_train_batch_size: 4, ..Settings::default() };
    let two = Settings { processes: 2, ..settings.clone() };
    let one = Settings { gpus: 2, ..settings };
    for (settings, profile, measured_ms) in [(two, profile(&file), 1426.6), (one, profile("h200-x2"), 1361.2)] {
        let (plan, outcome) = step(&settings, &shape, &profile);
        let predicted_ms = plan.forecast.predicted.unwrap().step_s * 1e3;
        for (how, ms) in [("simulated", outcome.step_ms.median), ("predicted", predicted_ms)] {
            assert!((ms / measured_ms - 1.0).abs() < 0.08, "{how} {ms} ms, measured {measured_ms}: {plan}");
        }
    }
}
