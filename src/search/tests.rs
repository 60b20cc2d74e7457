//! Properties of every answer on random machines, and comparisons of predictions with measurements. Steps must agree within 15 %, or within
//! 8 % if the host's memory speed at that hour is known; device memory within 5 % and host memory within 3 %.

use super::limits::Limits;
use super::report::SearchReport;
use super::{Candidate, Ranking, Scope, SearchQuery, sharing};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::profile::Profile;
use crate::hardware::rates::Rates;
use crate::hardware::sourced::{Curve, Points};
use crate::memory::Addressing;
use crate::memory::{DeviceMemory, MemorySpace};
use crate::model::policy::LayerPolicy;
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::moments::Moments;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::choices::{
    ActivationsChoice, ExpertProductsChoice, MastersChoice, ResidentBuckets, Strategy, Technique, WeightsChoice,
};
use crate::request::wanted::Wanted;
use crate::simulate::clip::Clip;
use crate::simulate::saves::SaveSchedule;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use crate::sweep::sweep;
use crate::units::Bytes;
use clap::ValueEnum;
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const GIB: u64 = 1 << 30;

fn rank(settings: &Settings, shape: &ModelShape, machine: &Machine) -> crate::error::Result<Ranking> {
    SearchQuery::new(&settings.request(shape), machine).rank()
}

fn model(name: &str, layers: usize) -> ModelShape {
    presets::shape(Path::new(name)).unwrap().with_layers(layers)
}

fn h200(hbm: u64, host: u64, rates: Rates) -> Machine {
    let device = DeviceMemory::Own { bytes: hbm * GIB, addressing: Addressing::Managed };
    Machine { host_bytes: host * GIB, kind: DeviceKind::Gpu, device, rates: Arc::new(rates), ..Machine::cpu(16) }
}

/// A simulated schedule may become slightly longer when everything is faster, because work that ends earlier lets other work start first
/// (Graham's anomalies). The search also keeps a plan that is hardly slower than the best. Of 400 random pairs four were slower, by 0.4 %
/// at most.
const ANOMALY: f64 = 1.02;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(sweep(4, 12)))]

    #[test]
    fn answers_fit_repeat_and_improve_with_the_machine(
        hbm in 12u64..60, host in 30u64..120, layers in 4usize..14, name in prop::sample::select(vec!["qwen3-4b", "llama-8b", "gpt-5b"]),
        batch in 1usize..4, gain in 1.2..3.0f64, which in 0usize..4,
    ) {
        let (shape, rates) = (model(name, layers), Rates::assumed());
        let settings = Settings { per_device_train_batch_size: batch, seq_length: 1024, ..Settings::default() };
        let machine = h200(hbm, host, (*rates).clone());
        let Ok(ranking) = rank(&settings, &shape, &machine) else { return Ok(()) };
        for candidate in &ranking.candidates {
            let plan = &candidate.plan;
            prop_assert!(plan.bytes_at(MemorySpace::Device) <= hbm * GIB && plan.bytes_at(MemorySpace::Host) <= host * GIB, "{}", plan);
        }
        let best = &ranking.candidates[0];
        let again = rank(&settings, &shape, &machine).unwrap();
        prop_assert_eq!((&again.candidates[0].wanted, again.candidates[0].mean_s()), (&best.wanted, best.mean_s()));
        let more = match which {
            0 => h200((hbm as f64 * gain) as u64, host, (*rates).clone()),
            1 => h200(hbm, host, rates.with_faster_link(gain)),
            2 => h200(hbm, host, rates.with_faster_host(gain)),
            _ => h200(hbm, host, rates.with_faster_device(gain)),
        };
        let (slow, fast) = (best.mean_s(), rank(&settings, &shape, &more).unwrap().candidates[0].mean_s());
        prop_assert!(fast <= ANOMALY * slow, "{} s became {} s with more of {}", slow, fast, which);
    }
}

/// Regressions: with a 60 % faster link the best step became 3 % slower, because no number of resident buckets between two tried ones was tried;
/// with a device 2.37 times as fast 2 % slower, because smaller buckets were tried with as many bytes resident, and not with more.
#[test]
fn a_faster_machine_is_no_reason_to_look_less_closely() {
    let rates = Rates::assumed();
    let faster = [(("gpt-5b", 10), (20, 106), rates.with_faster_link(1.6)), (("llama-8b", 11), (30, 30), rates.with_faster_device(2.37))];
    for ((name, layers), (hbm, host), faster) in faster {
        let settings = Settings { per_device_train_batch_size: 3, seq_length: 1024, ..Settings::default() };
        let mean_s = |rates| rank(&settings, &model(name, layers), &h200(hbm, host, rates)).unwrap().candidates[0].mean_s();
        let (slow, fast) = (mean_s((*rates).clone()), mean_s(faster));
        assert!(fast <= slow, "{slow} s became {fast} s");
    }
}

#[test]
fn tokens_of_a_step_are_cut_into_the_largest_micro_batches_that_pay() {
    let (shape, machine) = (model("llama-8b", 32), h200(139, 125, (*Rates::assumed()).clone()));
    let requested = |tokens| Settings { seq_length: 4096, tokens_per_step: Some(tokens), is_batch_open: true, ..Settings::default() };
    let sequences = sweep(128, 256);
    let ranking = rank(&requested(sequences * 4096), &shape, &machine).unwrap();
    let plan = &ranking.candidates[0].plan;
    assert_eq!(plan.tokens_per_step(), sequences * 4096, "{plan}");
    assert!(ranking.unfit > 0, "{sequences} sequences at once do not fit");
    assert!(rank(&requested(4097), &shape, &machine).unwrap_err().to_string().contains("not a multiple"));
}

/// On an H200 with 131,072 tokens a step, micro-batches of 1 x 4096 gave 5.9k tokens/s and 4 x 4096 gave 5.5k.
#[test]
fn qwen2_5_14b_is_cut_into_small_micro_batches() {
    let config = serde_json::json!({
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 13824, "vocab_size": 152_064, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": false,
    });
    let shape = ModelShape::parse(&config.to_string(), Path::new("config.json")).unwrap();
    let machine = Machine::of(&Profile::load("h200-pcie5").unwrap());
    let tokens_per_s = |batch: usize| {
        let requested = Settings { seq_length: 4096, tokens_per_step: Some(131_072), is_batch_open: batch == 0, ..Settings::default() };
        let settings = Settings { per_device_train_batch_size: batch.max(1), ..requested };
        // Settings that decide between the two. A whole step is 32 sequences, which takes long to simulate, too.
        let steps = Steps { warmup: 1, timed: 2, clip: Clip::Never };
        let scope = Scope { choices: &[super::placement], steps, ..Scope::ALL };
        let ranking = SearchQuery { request: &settings.request(&shape), machine: &machine, scope }.rank().unwrap();
        let best = &ranking.candidates[0];
        (best.plan.recipe.step.micro_batch, 131_072.0 / best.mean_s())
    };
    let [chosen, one, four] = [0, 1, 4].map(tokens_per_s);
    assert!(chosen.0 < 4 && chosen.1 >= one.1.max(four.1) && one.1 > 1.03 * four.1, "{chosen:?}, {one:?}, {four:?}");
}

#[test]
fn on_cpus_micro_batches_are_as_large_as_fits() {
    let shape = model("llama-8b", 1);
    let settings = Settings { seq_length: 1024, tokens_per_step: Some(64 * 1024), is_batch_open: true, ..Settings::default() };
    let settings = Settings { masters: MastersChoice::Float32, ..settings };
    let with = |host_bytes| Machine { host_bytes, ..Machine::cpu(4) };
    let plan = |host_bytes| super::best_plan(&settings.request(&shape), &with(host_bytes), false);
    let whole = plan(1 << 40).unwrap();
    assert_eq!((whole.recipe.step.micro_batch, whole.recipe.step.micro_batches), (64, 1));
    let needed = whole.balances()[1].needed;
    let halves = plan(needed - (1 << 20)).unwrap();
    assert_eq!((halves.recipe.step.micro_batch, halves.recipe.step.micro_batches), (32, 2));
    let refused = plan(1 << 30).unwrap_err().to_string();
    assert!(refused.contains("GiB") && !refused.contains("per-device-train-batch-size"), "{refused}");
}

/// Residency and activations set by hand, with all other settings as chosen, may be better by at most one part in this many.
const SWEEP_PARTS: f64 = 50.0;

/// Tries five values of each; `SUPEROFFLOAD_SWEEP=all` tries 17.
#[test]
fn no_residency_by_hand_is_much_better_than_the_search() {
    let cases = [("qwen3-4b", 36, 4, 4096, 48), ("llama-8b", 32, 4, 4096, 96), ("qwen3-4b", 36, 4, 4096, 64), ("gpt-5b", 44, 8, 1024, 48)];
    for (name, layers, batch, seq_length, hbm) in cases.into_iter().take(sweep(2, 4)) {
        let (shape, machine) = (model(name, layers), h200(hbm, 126, (*Rates::assumed()).clone()));
        let settings = Settings { seq_length, per_device_train_batch_size: batch, ..Settings::default() };
        let found = rank(&settings, &shape, &machine).unwrap().candidates[0].clone();
        let buckets = found.plan.placement.layout.count();
        for activations in ActivationsChoice::value_variants().iter().copied() {
            for sixteenths in (0..=16).step_by(sweep(4, 1)) {
                let resident_buckets = ResidentBuckets::Count(buckets * sixteenths / 16);
                let settings = Settings { activations, resident_buckets, ..settings.clone() };
                let request = settings.request(&shape);
                let query = SearchQuery::new(&request, &machine);
                let Some(by_hand) = query.candidate(&request.wanted).unwrap() else { continue };
                let better = found.mean_s() / by_hand.mean_s() - 1.0;
                assert!(better < 1.0 / SWEEP_PARTS, "{name} in {hbm} GiB: {activations:?}, {resident_buckets} resident: {better:+.3}");
            }
        }
    }
}

/// With a gradient ring, eight slots cost 12 % of a simulated step. On an H200 the plan with eight slots took 1870 ms, 3 % more than
/// simulated.
#[test]
fn no_number_of_slots_by_hand_is_much_better_than_the_search() {
    let (shape, machine) = (model("llama-8b", 32), h200(50, 126, (*Rates::assumed()).clone()));
    let settings = Settings {
        seq_length: 4096,
        per_device_train_batch_size: 4,
        resident_buckets: ResidentBuckets::Count(24),
        activations: ActivationsChoice::RecomputeBlock,
        weights: WeightsChoice::Replicated,
        ..Settings::default()
    };
    let found = rank(&settings, &shape, &machine).unwrap().candidates[0].clone();
    assert!(found.plan.placement.rings.grads.is_some());
    let request = settings.request(&shape);
    let query = SearchQuery::new(&request, &machine);
    let by_hand = |slots| query.candidate(&Wanted { slots: Some(slots), ..request.wanted.clone() }).unwrap().unwrap();
    for slots in [1, 8, 48, 128] {
        let better = found.mean_s() / by_hand(slots).mean_s() - 1.0;
        assert!(better < 1.0 / SWEEP_PARTS, "{slots} slots: {better:+.3}");
    }
}

/// Milliseconds of a step of `gpus` H200 on one host, each with 4 x 4096 tokens. `change` modifies the machine.
fn step_of_several(
    (name, gpus): (&str, usize),
    activations: ActivationsChoice,
    resident_buckets: ResidentBuckets,
    change: impl Fn(&mut Machine),
) -> f64 {
    let shape = presets::shape(Path::new(name)).unwrap();
    let mut machine = Machine::of_several(&Profile::load(&format!("h200-x{gpus}")).unwrap(), gpus).unwrap();
    change(&mut machine);
    let settings =
        Settings { gpus, seq_length: 4096, per_device_train_batch_size: 4, activations, resident_buckets, ..Settings::default() };
    let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
    assert!(plan.shortage().is_none(), "{plan}");
    let steps = Steps { warmup: 2, timed: 2, clip: Clip::Never };
    simulate(&plan, &shape, "several", steps, 0).unwrap().0.step_ms.median
}

/// Half of the weights of GPT-OSS-20B stream, at the speed of the link in the forward pass. If the other half of the layers runs first
/// without copies, a step waits 160 ms for weights in the simulation and 179 ms on an H200.
#[cfg(feature = "weight-flow")]
#[test]
fn weights_stream_while_layers_compute_whose_weights_stay() {
    let (shape, machine) = (model("gpt-oss-20b", 24), Machine::of(&Profile::load("h200-pcie5").unwrap()));
    let settings = Settings {
        seq_length: 4096,
        per_device_train_batch_size: 8,
        moments: Moments::Bfloat16,
        expert_products: ExpertProductsChoice::Own,
        bucket_mib: Some(256.0),
        resident_buckets: ResidentBuckets::Count(78),
        ..Settings::default()
    };
    let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
    let (period, streamed) = plan.placement.rings.weights.map(|ring| (ring.period_elems, ring.ringed_elems)).unwrap();
    assert!(plan.shortage().is_none() && streamed > 5 * period, "{plan}");
    let step = simulate(&plan, &shape, "streamed", Steps { warmup: 2, timed: 2, clip: Clip::Never }, 0).unwrap().0;
    assert!(step.exposed.transfer_ms < 40.0, "{:?}", step.exposed);
}

/// A profile has a rate for expert products, or the plan prints its assumption. Plans of models without experts print neither.
#[test]
fn products_of_experts_take_their_own_rate() {
    let with_grouped = |rate: Option<f64>| {
        let mut profile = Profile::load("h200-pcie5").unwrap();
        let curve = |rate| Curve { value: Points(vec![(1.0, rate)]), source: String::new(), spread: None, others: Vec::new() };
        profile.gpu.as_mut().unwrap().grouped_flops_by_rows = rate.map(curve);
        Machine::of(&profile)
    };
    let steps = Steps { warmup: 1, timed: 1, clip: Clip::Never };
    let step = |shape: &ModelShape, rate| {
        let expert_products = ExpertProductsChoice::Own;
        let settings = Settings { seq_length: 4096, per_device_train_batch_size: 4, expert_products, ..Settings::default() };
        let plan = Plan::new(&settings.request(shape), &with_grouped(rate), false).unwrap();
        (simulate(&plan, shape, "grouped", steps, 0).unwrap().0.step_ms.median, plan.to_string())
    };
    let [(fast, output), (slow, _), (assumed, message)] = [Some(4e14), Some(2e14), None].map(|rate| step(&model("olmoe-1b-7b", 8), rate));
    // Eight layers: 16,384 tokens with eight experts each, and three weights of 2048 x 1024, for one forward and two backward products.
    let grouped_ms = |rate: f64| 1e3 * 6.0 * 8.0 * 16_384.0 * 8.0 * 3.0 * 2048.0 * 1024.0 / rate;
    let longer = slow - fast - (grouped_ms(2e14) - grouped_ms(4e14));
    assert!(longer.abs() < 0.03 * (slow - fast), "{fast} {slow} ms: {longer}");
    assert!(fast < assumed && assumed < slow, "{fast} {assumed} {slow}");
    let lines = |plan: &str| plan.lines().filter(|line| line.starts_with("  experts ")).count();
    assert_eq!((lines(&output), lines(&message)), (1, 2), "who multiplies, and what is assumed of that: {message}");
    assert!(
        message.contains("  experts     products of experts at 55 % of the rate of single ones, assumed: h200-pcie5 has no measured rate"),
        "{message}"
    );
    let [(fast, _), (assumed, message)] = [Some(2e14), None].map(|rate| step(&model("llama-8b", 4), rate));
    assert!(fast == assumed && !message.contains("experts"), "{fast} {assumed}");
}

/// Compares the simulation with sums of busy times (GPU, Adam of all GPUs, links, pulls), for an optimizer of 6.5e9 parameters a second in
/// total. The sums slow products down during the whole of a step with copies, so they are 3 % higher when every state is on the CPUs. They
/// ignore gradient rings, so with the 14 B model fewer states stay on the GPUs and they are 3 % lower.
#[test]
fn the_time_of_several_gpus_follows_from_arithmetic() {
    use ActivationsChoice::{Keep, RecomputeCheap};
    use ResidentBuckets::{Auto, Count};
    let steps = [
        (("llama-8b", 2), Keep, Auto, 1341.0),
        (("llama-8b", 2), RecomputeCheap, Count(0), 1486.0),
        (("qwen3-14b", 2), RecomputeCheap, Auto, 2430.0),
        (("llama-8b", 4), Keep, Auto, 1330.0),
    ];
    for (run, activations, resident, floor_ms) in steps {
        let ms = step_of_several(run, activations, resident, |_| ());
        assert!((ms / floor_ms - 1.0).abs() < 0.05, "{run:?}, {resident:?}: {ms} ms, by arithmetic {floor_ms}");
    }
}

#[test]
fn pulls_between_gpus_take_their_time() {
    let with_peers_at = |fraction: f64| {
        step_of_several(("qwen3-4b", 2), ActivationsChoice::Keep, ResidentBuckets::Count(20), |machine| {
            let rates = Arc::make_mut(&mut machine.rates);
            rates.peer_bytes_per_s *= fraction;
        })
    };
    let [fast, slow] = [1.0, 0.01].map(with_peers_at);
    // Half of 8 GB of gradients and of equally many weights at 3.48 GB/s.
    assert!(slow > fast + 1000.0 && slow < fast + 2400.0, "{fast} ms, slow peers {slow} ms");
}

/// Two GPUs without NVLink, for a plan that would exchange 16 GB a step each at the rate of NVLink.
#[test]
fn copies_between_gpus_over_the_links_to_the_host_are_in_the_way() {
    let over = |route| {
        step_of_several(("llama-8b", 2), ActivationsChoice::RecomputeCheap, ResidentBuckets::Count(0), |machine| {
            machine.rates = Arc::new((*machine.rates).clone().with_peers(route));
        })
    };
    let [own, links, host] = [PeerRoute::Own, PeerRoute::Links, PeerRoute::Host].map(over);
    assert!(own < links && links < host, "{own}, {links}, {host} ms");
}

/// A model of eight billion parameters at 4 x 4096 tokens on an H200, with updates that wait for the next gradient. The plan with the
/// fastest unclipped step has 38 % longer clipped steps. Another plan loses 1 %, and its clipped steps are 13 % longer. With early commits
/// there is no such trade-off.
#[test]
fn a_plan_is_good_for_clipped_steps_too() {
    let (shape, machine) = (model("llama-8b", 32), h200(140, 126, (*Rates::assumed()).clone()));
    let planned = |without| {
        let settings = Settings { seq_length: 4096, per_device_train_batch_size: 4, without, ..Settings::default() };
        let plan = rank(&settings, &shape, &machine).unwrap().candidates.swap_remove(0).plan;
        let median_ms = |clip: &str| {
            let steps = Steps { warmup: 1, timed: 3, clip: clip.parse().unwrap() };
            simulate(&plan, &shape, "h200", steps, 0).unwrap().0.step_ms.median
        };
        (median_ms("never"), median_ms("always"), plan.placement.rings.grads.is_none(), plan.to_string())
    };
    let (never, always, has_no_ring, plan) = planned(vec![Technique::EarlyCommit]);
    assert!(has_no_ring && always < 1.2 * never && never < 1400.0, "{never} ms, clipped {always} ms: {plan}");
    let (never, always, _, plan) = planned(Vec::new());
    assert!(always < 1.06 * never && never < 1400.0, "{never} ms, clipped {always} ms: {plan}");
}

#[test]
fn a_search_without_results_is_refused_with_a_plan_that_would_fit() {
    let (shape, machine) = (model("llama-8b", 32), h200(139, 40, (*Rates::assumed()).clone()));
    let settings = Settings { seq_length: 4096, per_device_train_batch_size: 64, ..Settings::default() };
    let refusal = rank(&settings, &shape, &machine).unwrap_err();
    assert!(refusal.exit_code() == 1 && refusal.to_string().contains("would fit"), "{refusal}");
}

#[test]
fn an_answer_names_the_bottleneck_the_alternatives_and_the_limits() {
    let profile = Profile::load("gh200-96").unwrap();
    let (shape, machine) = (model("llama-8b", 32), Machine::of(&profile));
    let settings =
        Settings { seq_length: 4096, per_device_train_batch_size: 4, bucket_mib: sweep(Some(256.0), None), ..Settings::default() };
    let request = settings.request(&shape);
    let query = SearchQuery::new(&request, &machine);
    let report = SearchReport::of(query, ("llama-8b", 0), &profile, Some(SaveSchedule { bytes_per_s: 1e9, every: 500 })).unwrap();
    assert!(report.alternatives.len() == 2 && report.what_if.len() == 4 && report.limits.batch >= 4 && report.limits.layers >= 32);
    assert!(report.limits.seq_length >= 2 * 4096, "{:?}", report.limits);
    assert!(report.break_even.as_ref().is_some_and(|even| even.tokens.is_some()), "{:?}", report.break_even);
    let text = report.to_string();
    assert!(
        [
            "busy",
            "next best",
            "what if",
            "largest that fits",
            "saves",
            "s at 953.7 MiB a second beside steps, which wait",
            "break-even",
            "device memory"
        ]
        .iter()
        .all(|word| text.contains(word)),
        "{text}"
    );
    let output = |start: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(start)).unwrap_or_else(|| panic!("{start}: {text}"));
        line.trim().split(" ms").next().unwrap().to_string()
    };
    assert_eq!(output("step       "), output("simulated "), "one plan has one step time: {text}");
    assert!(!text.contains("predicted ") && text.contains("threads, vector code;"), "{text}");
    let streams = report.best.streamed_bytes > 0;
    let chosen = text.lines().find(|line| line.starts_with("chosen ")).unwrap();
    assert_eq!(chosen.contains("GiB of weights"), streams, "{text}");
    for (shown, mean) in [
        (output("mean "), report.best.mean_step_ms),
        (output("next best ").rsplit(' ').next().unwrap().into(), report.alternatives[0].mean_step_ms),
    ] {
        assert_eq!(shown, format!("{mean:.1}"), "{text}");
    }
    let json: Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(json["best"]["plan"]["predicted_step_ms"], json["best"]["step_ms"], "to programs, too");
    assert_eq!(json["hardware"]["profile"], "gh200-96");
    let save = &json["saves"]["simulated"];
    assert_eq!((save["bytes"].as_u64(), save["every"].as_u64()), (json["saves"]["checkpoint_bytes"].as_u64(), Some(500)));
    let classes = |place: usize| json["memory"][place]["classes"].as_array().unwrap().iter().map(|c| c[1].as_u64().unwrap()).sum::<u64>();
    assert_eq!(json["memory"][0]["needed_bytes"], classes(0), "to the byte");
}

/// A model of one layer cannot stream weights, which is rejected. This must not limit a model of twelve layers.
#[cfg(feature = "weight-flow")]
#[test]
fn limits_differ_from_those_without_streaming() {
    let shape = ModelShape { max_positions: 1536, ..model("qwen3-4b", 12) };
    let machine = h200(140, 126, (*Rates::assumed()).clone());
    let settings = Settings { weights: WeightsChoice::Flow, seq_length: 512, ..Settings::default() };
    let limits_of = |shape| Limits::of(&settings.request(shape), &machine);
    let limits = limits_of(&shape);
    assert!(limits.batch > 8 && limits.layers > 36, "{limits:?}");
    assert_eq!((limits.seq_length, limits.seq_length_is_the_models), (1536, true));
    assert_eq!(limits_of(&model("qwen3-4b", 1)).layers, 0);
}

fn results(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("paper-figures/results").join(name)
}

/// Lines written by `bench step`.
fn lines(name: &str) -> impl Iterator<Item = Value> {
    std::fs::read_to_string(results(name)).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>().into_iter()
}

/// Settings of a line, with its plan fixed as far as settings can, because the test compares the time of that plan.
fn settings_of(line: &Value) -> Settings {
    let (settings, plan) = (&line["settings"], &line["plan"]);
    let policies: Vec<_> = plan["layer_policies"].as_object().unwrap().keys().collect();
    let activations = match policies[..] {
        [policy] => ActivationsChoice::from_str(policy, false).unwrap(),
        _ => ActivationsChoice::Auto,
    };
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    Settings {
        seq_length: number(&settings["seq_length"]),
        per_device_train_batch_size: number(&settings["per_device_train_batch_size"]),
        // Before 2026-11-24 there was one format.
        moments: plan["moments"].as_str().map_or_else(Moments::default, |moments| Moments::from_str(moments, false).unwrap()),
        threads: Some(number(&plan["threads"])),
        // Each offloaded bucket keeps one slot for another step.
        slots: Some(number(&plan["grad_slots"]) + number(&plan["resident_buckets"]) - number(&plan["buckets"])),
        resident_buckets: ResidentBuckets::Count(number(&plan["resident_buckets"])),
        activations,
        // Buckets of 16-bit weights.
        bucket_mib: Some((2 * number(&plan["bucket_elems"])) as f64 / f64::from(1 << 20)),
        // The program of the first lines could not stream weights.
        weights: if plan["streamed_elems"].as_u64().unwrap_or(0) > 0 { WeightsChoice::Flow } else { WeightsChoice::Replicated },
        hbm_limit: settings["hbm_limit"].as_u64().map(Bytes),
        gradient_shares: settings["gradient_shares"].as_u64().map(|shares| shares as usize),
        without: if plan["techniques"]["early_commit"] == true { Vec::new() } else { vec![Technique::EarlyCommit] },
        ..Settings::default()
    }
}

/// The model of a line, and its plan on `machine`.
fn planned(line: &Value, machine: &Machine) -> (ModelShape, Plan) {
    let config = results("..").join(line["model"]["config"].as_str().unwrap());
    let config = if config.exists() { config } else { line["model"]["config"].as_str().unwrap().into() };
    let shape = presets::shape(&config).unwrap();
    let mut plan = Plan::new(&settings_of(line).request(&shape), machine, false).unwrap();
    // No setting selects several policies. The first layers have the faster policies, except for inputs on the host.
    let policies = line["plan"]["layer_policies"].as_object().unwrap();
    let of = |(name, policy): (&str, LayerPolicy)| vec![policy; policies.get(name).map_or(0, |layers| layers.as_u64().unwrap() as usize)];
    let layer_policies = [
        ("host", LayerPolicy::Host),
        ("host-attention", LayerPolicy::HostAttention),
        ("keep", LayerPolicy::Keep),
        ("recompute-cheap", LayerPolicy::RecomputeCheap),
        ("recompute-block", LayerPolicy::RecomputeBlock),
    ];
    plan.placement.layer_policies = layer_policies.into_iter().flat_map(of).collect();
    (shape, plan)
}

/// Relative excess of the simulated step over the measured one.
fn longer(line: &Value, shape: &ModelShape, plan: &Plan) -> f64 {
    let steps = Steps {
        warmup: line["warmup"].as_u64().unwrap(),
        timed: line["steps"].as_u64().unwrap(),
        clip: line["clip"].as_str().unwrap().parse().unwrap(),
    };
    let (outcome, ..) = simulate(plan, shape, "predicted", steps, 0).unwrap();
    let measured = &line["step_ms"];
    // A pool that cannot keep up falls further behind with every step, so of a few steps only the last one resembles a long run.
    let (simulated, measured) = if steps.timed <= 3 {
        (outcome.step_ms.samples.last().copied().unwrap(), measured["samples"].as_array().and_then(|all| all.last()).unwrap())
    } else {
        (outcome.step_ms.median, &measured["median"])
    };
    simulated / measured.as_f64().unwrap() - 1.0
}

/// Speed of the host's memory under the optimizer when the line was measured, relative to `rates`.
fn host_gain(line: &Value, rates: &Rates, plan: &Plan) -> f64 {
    line["adam"]["busy_gb_per_s"]
        .as_f64()
        .map_or(1.0, |gb_per_s| gb_per_s * 1e9 / rates.adam_bytes_per_s(plan.site.threads, plan.site.isa, plan.host_formats()))
}

/// Relative excess of the `planned` bytes over the used bytes.
fn more(planned: f64, used: &Value) -> f64 {
    planned / used.as_f64().unwrap() - 1.0
}

/// The machine on which the H200's lines were measured, apart from hourly variation.
fn measured_h200() -> Machine {
    h200(140, 126, (*Rates::assumed()).clone())
}

/// Asserts that the simulated step of the line's plan is close to the measured one.
fn assert_predicted(line: &Value, shape: &ModelShape, plan: &Plan) {
    let (rates, off) = (&plan.site.machine.rates, longer(line, shape, plan));
    let gain = host_gain(line, rates, plan);
    // The speed of one host varies by a fifth between hours; only a probe would measure it.
    let is_host_of_profile = (gain - 1.0).abs() < 0.1;
    assert!(off.abs() < 0.15 || !is_host_of_profile, "{:+.1} % off: {line}", off * 1e2);
    let mut faster = plan.clone();
    faster.site.machine = Machine { rates: Arc::new(rates.with_faster_host(gain)), ..plan.site.machine.clone() };
    let off_faster = longer(line, shape, &faster);
    assert!(off_faster.abs() < 0.08, "{:+.1} % off with that host's pool, {gain:.2} of the profile's: {line}", off_faster * 1e2);
}

#[test]
fn predictions_are_near_every_measured_step_and_its_memory() {
    // Earlier lines are from a program with different plans.
    let lines: Vec<_> = lines("h200-step.jsonl").skip(25).filter(|line| line["settings"]["memory"] == "pinned").collect();
    assert!(lines.len() >= 48);
    for line in lines {
        let (shape, plan) = planned(&line, &measured_h200());
        assert_predicted(&line, &shape, &plan);
        let memory = &line["memory"];
        // The plan of the measurement, except for the context, which was planned larger then.
        let context = |bytes: Option<f64>| bytes.expect("a class of every plan on a GPU");
        let before = context(memory["device_bytes"]["context, libraries"].as_f64());
        let now = context(plan.forecast.memory.iter().find(|class| class.name == "context, libraries").map(|class| class.bytes as f64));
        let device_off = more(memory["device_planned_bytes"].as_f64().unwrap() - before + now, &line["gpu"]["memory_used_bytes"]);
        assert!(device_off.abs() < 0.05, "device memory {:+.1} % off: {line}", device_off * 1e2);
        // Without offload the host memory is only the fixed cost of a process.
        let host_off = more(memory["host_planned_bytes"].as_f64().unwrap(), &memory["available_drop_bytes"]);
        assert!(host_off.abs() < 0.03 || plan.placement.layout.offloaded() == 0, "host memory {:+.1} % off: {line}", host_off * 1e2);
    }
}

#[test]
fn predictions_are_near_every_point_of_the_sweeps() {
    let has_ring = |line: &Value, plan: &Plan| {
        line["memory"]["device_bytes"]["gradients"].as_u64().unwrap() < 2 * plan.placement.layout.flat_elems() as u64
    };
    let mut compared = 0;
    for line in lines("h200-sweep.jsonl") {
        let (shape, plan) = planned(&line, &measured_h200());
        // Four points needed a gradient ring, on machines with 0.1 GiB less memory or with a larger loss tile.
        if plan.placement.rings.grads.is_some() == has_ring(&line, &plan) {
            assert_predicted(&line, &shape, &plan);
            compared += 1;
        }
    }
    assert!(compared >= 88, "{compared}");
}

#[test]
fn predictions_are_near_steps_with_moments_of_either_format() {
    let lines: Vec<_> = lines("h200-moments.jsonl").collect();
    assert!(lines.iter().filter(|line| line["settings"]["moments"] == "bfloat16").count() >= 3);
    for line in lines {
        let (shape, plan) = planned(&line, &measured_h200());
        assert_predicted(&line, &shape, &plan);
    }
}

/// Llama-8B in 23 GiB and Qwen3-4B in 8 GiB, with 32 micro-batches a step.
#[test]
fn predictions_are_near_steps_whose_sums_pass_through_the_device() {
    let lines: Vec<_> = lines("h200-small-cards.jsonl").collect();
    assert_eq!(lines.len(), 2);
    for line in lines {
        let (shape, plan) = planned(&line, &measured_h200());
        assert!(plan.placement.rings.sums_on_host, "{plan}");
        assert_predicted(&line, &shape, &plan);
    }
}

/// The first line is from kernels that no longer exist for Hopper. The lines after the second have expert biases that took three times as
/// long.
#[test]
fn a_prediction_is_near_the_step_of_a_model_with_experts() {
    let line = lines("h200-experts.jsonl").nth(1).unwrap();
    let (shape, plan) = planned(&line, &measured_h200());
    assert_predicted(&line, &shape, &plan);
}

/// `probe --save` measured the profile just before the lines, on the same machine.
#[test]
fn predictions_by_a_measured_profile_are_near_at_once() {
    let profile = Profile::load(results("h200-kept.toml").to_str().unwrap()).unwrap();
    let machine = h200(140, 126, Rates::of(&profile));
    let lines: Vec<_> = lines("h200-kept.jsonl").collect();
    assert!(lines.len() >= 8);
    for line in lines {
        let (shape, plan) = planned(&line, &machine);
        let off = longer(&line, &shape, &plan);
        assert!(off.abs() < 0.06, "{:+.1} % off: {line}", off * 1e2);
    }
}

/// Bytes of the program, its libraries and its stacks, which a plan for the CPU device leaves out.
const PROGRAM_BYTES: f64 = (24 << 20) as f64;

/// The median; of two values the larger.
fn middle(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Three machines with two cores, with profiles that `probe` wrote in the minutes before. On the third machine probe and steps took turns
/// three times, because its rates changed by a third within minutes. Short passes next to the optimizer have the largest errors
/// (`docs/performance.md`).
#[test]
fn predictions_are_near_steps_of_the_cpu_device_and_their_memory() {
    let in_turns = ["cpu-rounds-probe-1.toml", "cpu-rounds-probe-2.toml", "cpu-rounds-probe-3.toml", "cpu-rounds-probe-4.toml"];
    let campaigns: [(&str, &[&str], f64); 3] = [
        ("cpu-step.jsonl", &["cpu-probe.toml"], 0.4),
        ("cpu-avx512-step.jsonl", &["cpu-avx512-probe.toml"], 0.15),
        ("cpu-rounds-step.jsonl", &in_turns, 0.2),
    ];
    for (steps, profiles, short_passes) in campaigns {
        let machines: Vec<_> =
            profiles.iter().map(|profile| Machine::of(&Profile::load(results(profile).to_str().unwrap()).unwrap())).collect();
        let mut rows = BTreeMap::<String, (f64, Vec<f64>)>::new();
        for line in lines(steps) {
            let here = machines.iter().map(|machine| planned(&line, machine));
            let off = middle(here.map(|(shape, plan)| longer(&line, &shape, &plan)).collect());
            let is_short_beside_optimizer =
                line["settings"]["resident_buckets"] != "all" && line["tokens_per_step"].as_u64().unwrap() < 256;
            let bound = if is_short_beside_optimizer { short_passes } else { 0.15 };
            let row = format!("{steps}, clipped {}: {}", line["clip"], line["settings"]);
            rows.entry(row).or_insert((bound, Vec::new())).1.push(off);
            let memory = &line["memory"];
            let planned: f64 = ["device_planned_bytes", "host_planned_bytes"].iter().map(|place| memory[place].as_f64().unwrap()).sum();
            let memory_off = more(planned + PROGRAM_BYTES, &memory["rss_peak_bytes"]);
            assert!(memory_off.abs() < 0.03, "memory {:+.1} % off: {line}", memory_off * 1e2);
        }
        assert_eq!(rows.len(), 8);
        for (row, (bound, offs)) in rows {
            let off = middle(offs);
            assert!(off.abs() < bound, "{:+.1} % off: {row}", off * 1e2);
        }
    }
}

/// Each GPU keeps fp32 sums of its slice, and exchanges gradients for every share.
#[test]
fn more_gradient_shares_than_gpus_take_memory_and_time() {
    let shape = model("qwen3-4b", 12);
    let machine = Machine::of_several(&Profile::load("h200-x2").unwrap(), 2).unwrap();
    let flat = TensorTable::new(&shape).flat_elems();
    let run = |shares| {
        let settings = Settings { gpus: 2, gradient_shares: Some(shares), gradient_accumulation_steps: Some(4), ..Settings::default() };
        let settings = Settings { seq_length: 4096, resident_buckets: ResidentBuckets::All, ..settings };
        let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
        let sums = plan.forecast.memory.iter().find(|class| class.name == "gradient sums").map_or(0, |class| class.bytes);
        let (outcome, ..) = simulate(&plan, &shape, "h200-x2", Steps { warmup: 1, timed: 3, clip: Clip::Never }, 0).unwrap();
        (sums, outcome.step_ms.median, plan.forecast.predicted.unwrap().step_s * 1e3)
    };
    let (none, two, two_predicted) = run(2);
    let (sums, eight, eight_predicted) = run(8);
    assert_eq!((none, sums / (1 << 20)), (0, 4 * flat / (1 << 20)), "4 bytes a parameter over both");
    assert!((1.0..1.1).contains(&(eight / two)), "{two} ms with two shares, {eight} ms with eight");
    assert!((1.0..1.1).contains(&(eight_predicted / two_predicted)), "{two_predicted} ms, {eight_predicted} ms");
}

/// Llama-8B in 32 micro-batches of one sequence, as on a card of 24 GB. With every share 30 GiB of sums cross the link in each direction,
/// which takes longer than a backward pass of 4096 tokens.
#[test]
fn sums_on_the_host_are_simulated_at_the_rate_of_the_link() {
    let (shape, machine) = (model("llama-8b", 32), Machine::of_several(&Profile::load("h200-pcie5").unwrap(), 1).unwrap());
    let settings = Settings { gradient_shares: Some(8), per_device_train_batch_size: 1, seq_length: 4096, ..Settings::default() };
    let settings =
        Settings { moments: Moments::Bfloat16, hbm_limit: Some(Bytes(23 * GIB)), host_limit: Some(Bytes(120 * GIB)), ..settings };
    let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
    assert!(plan.placement.rings.sums_on_host && plan.shortage().is_none(), "{plan}");
    let (outcome, ..) = simulate(&plan, &shape, "h200-pcie5", Steps { warmup: 1, timed: 2, clip: Clip::Never }, 0).unwrap();
    let (step_s, predicted) = (outcome.step_ms.median / 1e3, plan.forecast.predicted.unwrap());
    let passing_s = 7.0 * (4 * plan.placement.layout.offloaded_elems()) as f64 / 50.5e9;
    assert!((1.0..1.7).contains(&(step_s / passing_s)), "{step_s} s, sums {passing_s} s: {plan}");
    assert!((0.8..1.2).contains(&(predicted.step_s / step_s)), "{predicted}, simulated {step_s} s");
}

#[test]
fn a_simulation_repeats_to_the_nanosecond_and_streams_weights() {
    let (shape, machine) = (model("qwen3-4b", 36), h200(30, 125, (*Rates::assumed()).clone()));
    let run = |weights| {
        // More speculations may be sent before a verdict overturns them.
        let without = vec![Technique::EarlyCommit];
        let settings = Settings { seq_length: 2048, weights, without, ..Settings::default() };
        let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
        let steps = Steps { warmup: 1, timed: 3, clip: "every-2".parse().unwrap() };
        let (outcome, tracks, _) = simulate(&plan, &shape, "h200", steps, 1 << 12).unwrap();
        (outcome, tracks.iter().map(|track| track.spans().len()).sum::<usize>())
    };
    let (flow, spans) = run(WeightsChoice::Flow);
    let (again, spans_again) = run(WeightsChoice::Flow);
    assert_eq!((flow.step_ms.clone(), spans), (again.step_ms, spans_again));
    assert!(flow.verdicts.clip > 0 && flow.bucket_steps.rolled_back > 0);
    let (stationary, _) = run(WeightsChoice::Replicated);
    assert!(flow.link.h2d_bytes > 1.5 * stationary.link.h2d_bytes, "weights come in both passes");
}

/// Sharded weights are tried even if weights fit on each device.
#[test]
fn weights_are_shared_for_speed_where_all_leaves_that_open() {
    let shape = model("qwen3-4b", 4);
    let tried = |weights| {
        let machine = Machine::of_several(&Profile::load("h200-x4").unwrap(), 4).unwrap();
        let settings = Settings { gpus: 4, seq_length: 2048, per_device_train_batch_size: 1, weights, ..Settings::default() };
        let request = settings.request(&shape);
        let query = SearchQuery::new(&request, &machine);
        let mut best = query.candidate(&request.wanted).unwrap().unwrap();
        best.wanted.resident_buckets = ResidentBuckets::Count(1);
        // This candidate has no flag for sharding, like one whose weights do not fit next to its resident buckets.
        let shared = query.candidate(&Wanted { weights: WeightsChoice::Sharded, ..request.wanted.clone() }).unwrap().unwrap();
        let by_need = Candidate { wanted: best.wanted.clone(), ..shared };
        [best, by_need].map(|best| sharing(&query, &best))
    };
    let [shared, shared_by_need] = tried(WeightsChoice::Auto);
    let shares = |wanted: &Wanted| wanted.weights == WeightsChoice::Sharded;
    // The search restarts from the maximum of resident buckets for sharded weights.
    assert!(shared.len() > 8 && shared.iter().all(shares) && shared[0].resident_buckets == ResidentBuckets::Auto, "{shared:?}");
    assert!(shared_by_need.len() > 8 && shared_by_need.iter().all(shares), "{shared_by_need:?}");
    assert!(tried(WeightsChoice::Replicated).iter().all(Vec::is_empty));
}

/// A regression: planning a run of 300,000 micro-batches took days, because each one was simulated.
#[test]
fn steps_of_many_micro_batches_are_drawn_out_from_short_ones() {
    let (shape, machine) = (model("qwen3-4b", 36), h200(30, 125, (*Rates::assumed()).clone()));
    let with = |micro_batches, weights| {
        let gradient_accumulation_steps = Some(micro_batches);
        let settings = Settings { seq_length: 2048, weights, gradient_accumulation_steps, gradient_shares: Some(2), ..Settings::default() };
        Plan::new(&settings.request(&shape), &machine, false).unwrap()
    };
    let steps = Steps { warmup: 1, timed: 3, clip: "every-2".parse().unwrap() };
    for weights in [WeightsChoice::Flow, WeightsChoice::Replicated] {
        let plan = with(24, weights);
        let (drawn_out, tracks, _) = simulate(&plan, &shape, "h200", steps, 0).unwrap();
        // With a timeline every micro-batch is simulated.
        let (whole, ..) = simulate(&plan, &shape, "h200", steps, 1).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() <= 2e-3 * b.abs().max(1.0);
        assert!(tracks.iter().all(|track| track.spans().is_empty()));
        assert!(drawn_out.step_ms.samples.iter().zip(&whole.step_ms.samples).all(|(&a, &b)| close(a, b)), "{drawn_out:?} {whole:?}");
        assert!(close(drawn_out.link.h2d_bytes, whole.link.h2d_bytes) && close(drawn_out.link.d2h_bytes, whole.link.d2h_bytes));
        assert!(close(drawn_out.speed.model_flops, whole.speed.model_flops) && close(drawn_out.adam.params, whole.adam.params));
        assert!(close(drawn_out.exposed.device_busy_share, whole.exposed.device_busy_share), "{drawn_out:?} {whole:?}");
        assert_eq!((drawn_out.verdicts, drawn_out.tokens_per_step), (whole.verdicts, whole.tokens_per_step));
    }
    simulate(&with(300_000, WeightsChoice::Replicated), &shape, "h200", steps, 0).unwrap();
}

/// Qwen3-4B with one sequence over two ranks, half of its tokens on each. In every layer each rank pulls half of the queries, keys and
/// values once and of their gradients once, and half of attention's output twice and of its gradient once.
#[test]
fn ranks_of_a_sequence_are_simulated_with_their_exchange() {
    let (shape, length) = (model("qwen3-4b", 12), 32 << 10);
    let machine = Machine::of_several(&Profile::load("h200-x2").unwrap(), 2).unwrap();
    let settings = Settings { gpus: 2, per_device_train_batch_size: 1, activations: ActivationsChoice::Keep, ..Settings::default() };
    let settings = Settings { strategy: Strategy::NoOffload, max_grad_norm: 0.0, ..settings };
    let run = |sequence_ranks, peer_bytes_per_s| {
        let settings = Settings { sequence_ranks, seq_length: length * sequence_ranks / 2, ..settings.clone() };
        let mut rates = (*machine.rates).clone();
        rates.peer_bytes_per_s = peer_bytes_per_s;
        let machine = Machine { rates: Arc::new(rates), ..machine.clone() };
        let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
        let activations = plan.forecast.memory.iter().find(|class| class.name == "activations").map_or(0, |class| class.bytes);
        let (outcome, ..) = simulate(&plan, &shape, "h200-x2", Steps { warmup: 1, timed: 2, clip: Clip::Never }, 0).unwrap();
        (activations as f64, outcome.step_ms.median / 1e3, plan.forecast.predicted.unwrap().step_s)
    };
    let (shared, step_s, predicted_s) = run(2, 300e9);
    let (_, slow_s, slow_predicted_s) = run(2, 100e9);
    let attn = shape.layers[0].attn;
    let bytes = (length / 2 * 12 * (2 * attn.qkv_cols() + 3 * attn.heads * attn.head_dim)) as f64;
    for (how, added_s) in [("simulated", slow_s - step_s), ("predicted", slow_predicted_s - predicted_s)] {
        let exchange_s = bytes / 100e9 - bytes / 300e9;
        // The last gradients, which nothing hides, are pulled at the same low rate.
        assert!((0.95..1.35).contains(&(added_s / exchange_s)), "{how} {added_s} s more, {exchange_s} s of exchange");
    }
    // Both runs have equally many tokens on each rank. The shared run has exchange buffers in addition.
    let (alone, ..) = run(1, 300e9);
    assert!((1.0..1.1).contains(&(shared / alone)), "{shared} bytes of activations, alone {alone}");
}
