//! Tests of plans of real models on real machines: residency, offload, recomputation, and rejected plans.

use super::budget::kept_sums;
use super::machine::Machine;
use crate::bucket::layout::Tier;
use crate::config::options::{MatmulDtype, Rollback, TrainDtype};
use crate::config::settings::Settings;
use crate::data::rows::row_rules::Packing;
use crate::device::{Attention, DeviceKind};
use crate::hardware::profile::Profile;
use crate::memory::{Addressing, DeviceMemory, MemorySpace};
use crate::model::policy::LayerPolicy;
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, TensorTable};
use crate::optim::moments::Moments;
use crate::planner::plan::Plan;
#[cfg(feature = "stv")]
use crate::request::choices::EarlyRows;
use crate::request::choices::{
    ActivationsChoice, AttentionChoice, CastSide, HostMemoryKind, MastersChoice, ResidentBuckets, Strategy, Technique, WeightsChoice,
};
use crate::units::Bytes;
use std::path::Path;

pub(super) const GIB: u64 = 1 << 30;

/// One H200 with 16 cores and 128 GB, reduced to the free memory.
pub(super) fn h200() -> Machine {
    let device = DeviceMemory::Own { bytes: 139 * GIB + 8 * GIB / 10, addressing: Addressing::Managed };
    Machine { host_bytes: 125 * GIB, kind: DeviceKind::Gpu, device, ..Machine::cpu(16) }
}

/// Layers, channels, heads, kv heads, ffn, vocabulary, tied.
type Sizes = (usize, usize, usize, usize, usize, usize, bool);

fn model(architecture: &str, (layers, channels, heads, kv_heads, ffn, vocab, tied): Sizes) -> ModelShape {
    let config = serde_json::json!({
        "architectures": [architecture], "hidden_size": channels, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": ffn, "vocab_size": vocab,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": tied, "attention_bias": false,
    });
    ModelShape::parse(&config.to_string(), Path::new("config.json")).unwrap()
}

pub(super) fn qwen3_4b() -> ModelShape {
    model("Qwen3ForCausalLM", (36, 2560, 32, 8, 9728, 151_936, true))
}

pub(super) fn llama_8b() -> ModelShape {
    model("LlamaForCausalLM", (32, 4096, 32, 8, 14_336, 128_256, false))
}

pub(super) fn qwen3_14b() -> ModelShape {
    model("Qwen3ForCausalLM", (40, 5120, 40, 8, 17_408, 151_936, false))
}

/// `gpus` of the four H200 of one host.
fn of_four(gpus: usize) -> Machine {
    Machine::of_several(&Profile::load("h200-x4").unwrap(), gpus).unwrap()
}

/// States are divided among GPUs and weights are not: with more GPUs, more states stay on them and fewer are left for the host.
#[test]
fn each_of_several_gpus_holds_its_own_weights_and_its_part_of_the_states() {
    let (shape, mut offloaded) = (qwen3_14b(), Vec::new());
    let flat = TensorTable::new(&shape).flat_elems() as u64;
    for gpus in 1..=4 {
        let settings = Settings { gpus, activations: ActivationsChoice::RecomputeBlock, ..settings() };
        let plan = Plan::new(&settings.request(&shape), &of_four(gpus), false).unwrap();
        let class = |name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes as u64);
        let [device, host] = plan.balances();
        let bytes_at =
            |space| plan.forecast.memory.iter().filter(|class| class.space == space).map(|class| class.bytes as u64).sum::<u64>();
        assert_eq!(device.needed, bytes_at(MemorySpace::Device).div_ceil(gpus as u64), "{gpus}");
        assert_eq!(host.needed, bytes_at(MemorySpace::Host) + plan.forecast.transient_bytes, "{gpus}");
        assert!(device.lacking() == 0 && host.lacking() == 0 && device.available == 150_100_000_000, "{plan}");
        assert!(class("weights") >= gpus as u64 * 2 * flat && class("peers' gradients") > 0 || gpus == 1, "{plan}");
        let states = class("resident p, m, v") + class("offloaded p, m, v");
        // Slices are cut at block boundaries; memory is planned for the longest slice.
        assert!((12 * flat..12 * flat + flat / 100).contains(&states), "{states}: {plan}");
        offloaded.push(class("offloaded p, m, v"));
    }
    // Without repartition every state is on the host.
    let falls = offloaded[..3].is_sorted_by(|more, less| more > less) && offloaded[2..] == [0, 0];
    assert_eq!(falls, cfg!(feature = "repartition"), "{offloaded:?}");
}

#[test]
fn several_gpus_replicate_their_weights_while_those_fit_and_shard_them_else() {
    let plan = |gpus, gib: u64| {
        let settings = Settings { gpus, hbm_limit: Some(Bytes(gib << 30)), ..settings() };
        Plan::new(&settings.request(&qwen3_4b()), &of_four(gpus).limited(settings.hbm_limit, settings.host_limit), false).unwrap()
    };
    let class = |plan: &Plan, name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes);
    let replicated = plan(2, 80);
    assert!(replicated.placement.rings.weights.is_none() && replicated.shortage().is_none() && class(&replicated, "weight slices") == 0);
    let sharded = plan(2, 16);
    assert_eq!((sharded.placement.rings.weights.is_some(), sharded.shortage().is_none()), (FLOW, FLOW), "{sharded}");
    if FLOW {
        // Each device holds its half of the streamed weights, and a ring in their place.
        let streamed = 2 * sharded.placement.rings.weights.unwrap().ringed_elems;
        let slices = class(&sharded, "weight slices");
        assert!((streamed..streamed + (64 << 20)).contains(&slices), "{slices} of {streamed}: {sharded}");
        assert!(class(&sharded, "weights") + slices < class(&replicated, "weights"), "{sharded}");
        assert!(sharded.to_string().contains("stream from the slices of all GPUs"), "{sharded}");
    }
    let settings = Settings { hbm_limit: Some(Bytes(8 << 30)), ..settings() };
    let alone = Plan::new(&settings.request(&qwen3_4b()), &of_four(1).limited(settings.hbm_limit, settings.host_limit), false).unwrap();
    assert_eq!(alone.placement.rings.weights.is_some(), FLOW, "{alone}");
}

/// Llama-8B with all activations kept: layer products take 1009 of 1351 ms. Quantization costs a part of the gain.
#[test]
fn products_in_fp8_take_less_time_and_memory_of_their_own() {
    let plan = |matmul_dtype, machine: &Machine| {
        let settings = Settings { matmul_dtype, activations: ActivationsChoice::Keep, ..settings() };
        Plan::new(&settings.request(&llama_8b()), machine, false).unwrap()
    };
    let (plain, fp8) = (plan(None, &h200()), plan(Some(MatmulDtype::Fp8), &h200()));
    let saved_s = plain.forecast.predicted.unwrap().device_s - fp8.forecast.predicted.unwrap().device_s;
    assert!((0.25..0.45).contains(&saved_s), "{saved_s}: {fp8}");
    let activations = |plan: &Plan| plan.forecast.memory.iter().find(|class| class.name == "activations").map_or(0, |class| class.bytes);
    // Additional memory: gate and up (28,672 columns) twice, the input of the last matrix once, and scales. Savings: norms and activations
    // of 32 layers have 8 bits instead of 16, and one more 16-bit set is shared.
    let (tokens, scales, cheap) = (4 * 4096, 4 * 32 * 48, 2 * 4096 + 14_336);
    let (work, saved) = (tokens * (2 * 28_672 + 14_336) + scales, tokens * (32 - 2) * cheap);
    assert_eq!(activations(&plain) - activations(&fp8), saved - work);
    let products = |plan: &Plan| plan.to_string().lines().find(|line| line.starts_with("  products ")).map(str::to_string);
    assert_eq!((products(&plain), products(&fp8).unwrap().as_str()), (None, "  products    of layers in FP8, E4M3 and for gradients E5M2"));
    let assumed = plan(Some(MatmulDtype::Fp8), &Machine::of_several(&Profile::load("gh200-96").unwrap(), 1).unwrap());
    assert!(products(&assumed).unwrap().ends_with("times as fast as in bfloat16, assumed: gh200-96 has no measured rate"), "{assumed}");
}

#[test]
fn more_gpus_than_a_profile_knows_are_refused_with_one_that_does() {
    let refused = |name: &str, gpus| Machine::of_several(&Profile::load(name).unwrap(), gpus).unwrap_err().to_string();
    let two = refused("h200-pcie5", 2);
    assert!(two.starts_with("--gpus 2: the hardware profile h200-pcie5 has rates for at most 1") && two.contains("h200-x4"), "{two}");
    let three = refused("h200-x2", 3);
    assert!(three.contains("use --gpus 2, or --hardware h200-x4"), "{three}");
    assert!(refused("h200-x4", 8).ends_with("use --gpus 4"));
}

#[test]
fn more_machines_than_a_profile_knows_are_refused_with_a_remedy() {
    let on = |name: &str, processes| Machine::of_run(&Profile::load(name).unwrap(), &Settings { processes, ..settings() }.cut());
    let unknown = on("h200-x2", 2).unwrap_err().to_string();
    assert!(unknown.contains("--processes 2: the hardware profile h200-x2 has no rates between") && unknown.contains("`network`"));
    let few = on("gh200-x4", 5).unwrap_err().to_string();
    assert!(few.contains("gh200-x4 has rates for 4 machines") && few.contains("use --processes 4"), "{few}");
    assert_eq!(on("gh200-x4", 1).unwrap(), Machine::of(&Profile::load("gh200-x4").unwrap()));
}

/// Two nodes of four GPUs: each node holds half of the states, and each GPU as much as one of eight.
#[test]
fn each_of_several_machines_has_its_part_of_the_states_in_its_memory() {
    let profile = Profile::load("gh200-x4").unwrap();
    let plan = |processes| {
        let settings = Settings { gpus: 4, processes, resident_buckets: ResidentBuckets::Count(0), ..settings() };
        Plan::new(&settings.request(&llama_8b()), &Machine::of_run(&profile, &settings.cut()).unwrap(), false).unwrap()
    };
    let [one, two] = [1, 2].map(plan);
    let flat = TensorTable::new(&llama_8b()).flat_elems() as f64;
    let host = |plan: &Plan| plan.balances()[1].needed as f64;
    assert!((host(&one) / host(&two) / 2.0 - 1.0).abs() < 0.1 && (host(&one) / flat - 14.0).abs() < 1.0, "{one}\n{two}");
    let output = two.to_string();
    // Each of the four sends an eighth of the gradients, and the inter-node peer sends weights.
    assert!(
        output.contains("  network     10.04 GB a step to and from each GPU by NCCL, 402 ms at 25.0 GB/s, not overlapped with computation"),
        "{output}"
    );
    assert!(output.contains("  peers       330.0 GB/s from each other") && output.contains("NCCL's buffers         1.0 GiB"), "{output}");
    assert!(output.contains("  host, of each process"), "{output}");
}

/// Four machines of four GPUs with the 80B model: a GPU holds a quarter of the weights, made of its own slices and those of its inter-node
/// peers.
#[test]
fn gpus_of_each_process_share_its_weights_where_they_do_not_fit_on_each() {
    let file = format!("{}/paper-figures/table-4_models/80B.json", env!("CARGO_MANIFEST_DIR"));
    let (shape, profile) = (presets::shape(Path::new(&file)).unwrap(), Profile::load("gh200-x4").unwrap());
    let many = Settings { gpus: 4, processes: 4, gradient_group: Some(4), host_limit: Some(Bytes(940_000_000_000)), ..Settings::default() };
    let plan = |weights| {
        let settings = Settings { weights, per_device_train_batch_size: 8, seq_length: 1024, ..many.clone() };
        Plan::new(&settings.request(&shape), &Machine::of_run(&profile, &settings.cut()).unwrap(), false).unwrap()
    };
    let [replicated, auto] = [WeightsChoice::Replicated, WeightsChoice::Auto].map(plan);
    assert!(replicated.shortage().is_some(), "{replicated}");
    assert_eq!((auto.placement.rings.weights.is_some(), auto.shortage().is_none()), (FLOW, FLOW), "{auto}");
    if FLOW {
        let class = |plan: &Plan, name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes / 16);
        let (streamed, slices) = (2 * auto.placement.rings.weights.unwrap().ringed_elems, class(&auto, "weight slices"));
        assert!((streamed / 4..streamed / 4 + (64 << 20)).contains(&slices), "{slices} of {streamed}: {auto}");
        assert!(class(&auto, "weights") + slices < class(&replicated, "weights") / 3, "{auto}");
        assert!(auto.to_string().contains("stream from the slices that the GPUs of each process have"), "{auto}");
        // Three quarters of the streamed weights are fetched once more, except the part that the ring still holds.
        let again = (auto.forecast.peer_traffic.intra_node - replicated.forecast.peer_traffic.intra_node) as f64 / (0.75 * streamed as f64);
        assert!(
            auto.forecast.peer_traffic.inter_node == replicated.forecast.peer_traffic.inter_node && (0.9..1.0).contains(&again),
            "{again}"
        );
    }
    let alone = Settings { gpus: 1, processes: 4, weights: WeightsChoice::Sharded, ..settings() };
    let refused = Plan::new(&alone.request(&shape), &Machine::of_run(&profile, &alone.cut()).unwrap(), false).unwrap_err().to_string();
    assert!(["--weights replicated", "--gpus", "--weights fully-sharded"].iter().all(|remedy| refused.contains(remedy)), "{refused}");
}

/// On the same machines a 150B model fits with a sixteenth of the weights on each GPU, and not with a quarter. The test also covers 50B on
/// four machines with one GPU each, whose processes have a single rank.
#[test]
fn gpus_of_all_processes_share_weights_of_which_a_part_of_a_process_is_too_much() {
    use WeightsChoice::{Auto, Replicated, Sharded};
    let profile = Profile::load("gh200-x4").unwrap();
    let plan = |model: &str, gpus: usize, weights| {
        let file = format!("{}/paper-figures/table-4_models/{model}.json", env!("CARGO_MANIFEST_DIR"));
        let shape = presets::shape(Path::new(&file)).unwrap();
        let host_limit = Some(Bytes(235_000_000_000 * gpus as u64));
        let settings = Settings { gpus, processes: 4, gradient_group: Some(4), host_limit, weights, ..Settings::default() };
        let settings = Settings { per_device_train_batch_size: 4, seq_length: 1024, ..settings };
        let request = settings.request(&shape);
        let plan = Plan::new(&request, &Machine::of_run(&profile, &request.cut).unwrap(), false).unwrap();
        let fits = plan.check_fits(&request).map_err(|refusal| refusal.to_string());
        (plan, fits)
    };
    for (model, gpus, too_much) in [("150B", 4, &[Replicated, Sharded][..]), ("50B", 1, &[Replicated])] {
        for weights in too_much.iter().filter(|weights| FLOW || **weights == Replicated) {
            let refusal = plan(model, gpus, *weights).1.unwrap_err();
            assert_eq!(refusal.contains("--weights fully-sharded would fit"), FLOW, "{model} {weights:?}: {refusal}");
        }
        let (auto, fits) = plan(model, gpus, Auto);
        assert_eq!([auto.placement.rings.fully_sharded, fits.is_ok()], [FLOW; 2], "{auto}");
        if FLOW {
            let class =
                |name| auto.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes / auto.site.ranks);
            let (part, slices) = (2 * auto.placement.rings.weights.unwrap().ringed_elems / auto.site.ranks, class("weight slices"));
            assert!((part..part + (64 << 20)).contains(&slices), "{slices} of {part}: {auto}");
            assert!(auto.to_string().contains("the slices of all GPUs, those of other processes over the network"), "{auto}");
        }
    }
}

pub(super) fn settings() -> Settings {
    Settings { per_device_train_batch_size: 4, seq_length: 4096, ..Settings::default() }
}

fn plan(shape: &ModelShape, settings: &Settings) -> Plan {
    Plan::new(&settings.request(shape), &h200(), true).unwrap()
}

pub(super) fn fitting(shape: &ModelShape, settings: &Settings) -> Plan {
    let plan = plan(shape, settings);
    plan.check_fits(&settings.request(shape)).unwrap_or_else(|e| panic!("{e}\n{plan}"));
    plan
}

pub(super) fn refusal(shape: &ModelShape, settings: &Settings) -> String {
    let plan = plan(shape, settings);
    plan.check_fits(&settings.request(shape)).expect_err(&plan.to_string()).to_string()
}

fn kept(plan: &Plan) -> usize {
    plan.placement.layer_policies.iter().filter(|policy| **policy == LayerPolicy::Keep).count()
}

fn resident(plan: &Plan) -> usize {
    plan.placement.layout.count() - plan.placement.layout.offloaded()
}

fn on_device(plan: &Plan, class: &str) -> f64 {
    let found = plan.forecast.memory.iter().find(|c| c.space == MemorySpace::Device && c.name == class);
    found.map_or(0.0, |c| c.bytes as f64 / GIB as f64)
}

/// Whether the build has resident buckets under `superoffload`. Without them every plan in these tests offloads all or nothing.
pub(super) const REPARTITION: bool = cfg!(feature = "repartition");

/// Whether the build can stream weights.
pub(super) const FLOW: bool = cfg!(feature = "weight-flow");

#[test]
fn a_4b_model_stays_on_the_device_and_the_plan_shows_it() {
    let plan = fitting(&qwen3_4b(), &settings());
    assert_eq!((plan.placement.layout.offloaded() == 0, kept(&plan)), (REPARTITION, 36), "{plan}");
    assert_eq!(plan.to_string().contains("fits without offload: every optimizer state stays on the device"), REPARTITION, "{plan}");
    assert_eq!((plan.recipe.numerics.loss_tile.rows, plan.recipe.numerics.loss_tile.vocab), (2048, 151_936), "{plan}");
    assert!(plan.to_string().contains("36 layers: 36 keep"), "{plan}");
    let offloaded = fitting(&qwen3_4b(), &Settings { resident_buckets: ResidentBuckets::Count(0), ..settings() });
    assert_eq!(offloaded.placement.layout.offloaded(), offloaded.placement.layout.count());
}

#[test]
fn an_8b_model_computes_cheap_parts_again_for_more_resident_states() {
    let plan = fitting(&llama_8b(), &settings());
    assert!(plan.placement.layer_policies.iter().all(|policy| matches!(policy, LayerPolicy::Keep | LayerPolicy::RecomputeCheap)), "{plan}");
    if REPARTITION {
        assert!((0.2..0.8).contains(&(resident(&plan) as f64 / plan.placement.layout.count() as f64)), "{plan}");
        let free = 139.8 - plan.bytes_at(MemorySpace::Device) as f64 / GIB as f64;
        assert!(free < 1.0, "what is free holds another bucket: {plan}");
        // The device's work is the lower bound of the step.
        let predicted = plan.forecast.predicted.unwrap();
        assert!(predicted.pool_s < predicted.device_s && (1.0..1.6).contains(&predicted.step_s), "{plan}");
        // The chosen plan costs 3 % of an unclipped step, and a step that waits for its verdict is a fifth shorter.
        let keep = fitting(&llama_8b(), &Settings { activations: ActivationsChoice::Keep, ..settings() }).forecast.predicted.unwrap();
        assert!(predicted.step_s < 1.04 * keep.step_s && predicted.validated_s < 0.85 * keep.validated_s, "{plan}");
        let waits = fitting(&llama_8b(), &Settings { strategy: Strategy::ZeroOffload, ..settings() }).forecast.predicted.unwrap();
        assert_eq!(waits.step_s, waits.validated_s);
    }
}

#[test]
fn a_limit_makes_a_smaller_machine() {
    let limited = |gib| fitting(&llama_8b(), &Settings { hbm_limit: Some(Bytes(gib * GIB)), ..settings() });
    let plans = [140, 120, 100, 80, 60].map(limited);
    for pair in plans.windows(2) {
        assert!(kept(&pair[1]) <= kept(&pair[0]) && resident(&pair[1]) <= resident(&pair[0]) + 40, "{}\n{}", pair[0], pair[1]);
        // Without resident buckets nothing fills a larger memory.
        let [small, large] = [&pair[1], &pair[0]].map(|plan| plan.bytes_at(MemorySpace::Device));
        assert!(small < large || (!REPARTITION && small == large), "{}\n{}", pair[0], pair[1]);
        // A resident optimizer costs little device time.
        assert!(pair[1].forecast.predicted.unwrap().step_s > 0.97 * pair[0].forecast.predicted.unwrap().step_s, "{}\n{}", pair[0], pair[1]);
    }
    assert!(plans[3].bytes_at(MemorySpace::Device) <= 80 * GIB && kept(&plans[3]) < 32, "{}", plans[3]);
    if REPARTITION {
        let host_limit = Some(Bytes(30 * GIB));
        let small_host = fitting(&llama_8b(), &Settings { host_limit, ..settings() });
        assert!(resident(&small_host) > resident(&plans[0]), "{small_host}");
        assert!(small_host.bytes_at(MemorySpace::Host) <= 30 * GIB);
    }
}

#[test]
fn a_14b_model_fits_both_memories() {
    if !REPARTITION {
        return;
    }
    let plan = fitting(&qwen3_14b(), &settings());
    assert!(resident(&plan) > 0 && plan.placement.layout.offloaded() > 0 && kept(&plan) < 40, "{plan}");
}

#[test]
fn requested_settings_are_planned() {
    for (activations, policy) in [
        (ActivationsChoice::Keep, LayerPolicy::Keep),
        (ActivationsChoice::RecomputeCheap, LayerPolicy::RecomputeCheap),
        (ActivationsChoice::RecomputeBlock, LayerPolicy::RecomputeBlock),
        (ActivationsChoice::HostAttention, LayerPolicy::HostAttention),
        (ActivationsChoice::Host, LayerPolicy::Host),
    ] {
        let requested = Settings { activations, ..settings() };
        assert!(plan(&llama_8b(), &requested).placement.layer_policies.iter().all(|p| *p == policy));
        let demo = Plan::new(&Settings { activations, ..Settings::demo() }.request(&ModelShape::demo()), &Machine::cpu(2), false).unwrap();
        assert_eq!(demo.placement.layer_policies, [policy; 6]);
    }
    let count = |resident_buckets| resident(&plan(&llama_8b(), &Settings { resident_buckets, ..settings() }));
    assert_eq!(count(ResidentBuckets::Count(0)), 0);
    if REPARTITION {
        let all = plan(&llama_8b(), &settings()).placement.layout.count();
        assert_eq!((count(ResidentBuckets::Count(7)), count(ResidentBuckets::All)), (7, all));
    }
}

#[test]
fn unified_states_need_a_window_and_the_link_and_nothing_else() {
    let unified = |more: Settings| Settings { memory: HostMemoryKind::Unified, ..more };
    let none = Settings { resident_buckets: ResidentBuckets::Count(0), ..settings() };
    let (paged, pinned) = (fitting(&llama_8b(), &unified(none.clone())), fitting(&llama_8b(), &none));
    let layout = &paged.placement.layout;
    let away = |plan: &Plan| plan.placement.layout.buckets_in(Tier::Unified).len();
    assert_eq!((layout.offloaded(), away(&paged), layout.elems_in(Tier::Unified)), (0, layout.count(), 0..layout.flat_elems()));
    assert!(!paged.protocol.techniques.stv && paged.placement.grad_slots == 0 && paged.placement.rings.grads.is_none(), "{paged}");
    let on_host: Vec<_> = paged.forecast.memory.iter().filter(|c| c.space == MemorySpace::Host).map(|c| (c.name, c.bytes)).collect();
    assert_eq!(on_host[0], ("paged p, m, v", 12 * layout.flat_elems()));
    assert!(!on_host.iter().any(|class| class.0.contains("slots")) && on_device(&pinned, "paged states here") == 0.0, "{paged}");
    let window = on_device(&paged, "paged states here") * GIB as f64 / (4 * layout.bucket_elems()) as f64;
    assert!((12.0..12.5).contains(&window), "four buckets of 12 bytes a parameter: {window}\n{paged}");
    let text = paged.to_string();
    assert!(text.contains(&format!("all stepped on the device; states of {} are unified: managed memory", away(&paged))), "{text}");
    // 96 GB in each direction at 50 GB/s, of which the optimizer's own 0.06 s hide little.
    let (paged_s, pinned_s) = (paged.forecast.predicted.unwrap(), pinned.forecast.predicted.unwrap());
    assert!((7.4..7.7).contains(&paged_s.link_s) && paged_s.pool_s == 0.0 && paged_s.step_s == paged_s.validated_s, "{paged}");
    assert!(paged_s.step_s > paged_s.link_s + 0.8 * pinned_s.device_s, "{paged}\n{pinned}");

    let shared = Machine { device: DeviceMemory::Own { bytes: 139 * GIB, addressing: Addressing::Coherent }, ..h200() };
    let direct = Plan::new(&unified(none).request(&llama_8b()), &shared, false).unwrap();
    assert!(on_device(&direct, "paged states here") == 0.0 && direct.to_string().contains("page tables shared"), "{direct}");
    if REPARTITION {
        // Paging is so slow that recomputing blocks is faster, as long as that makes room for all states.
        let best = fitting(&llama_8b(), &unified(settings()));
        assert!(away(&best) == 0 && best.placement.layer_policies.contains(&LayerPolicy::RecomputeBlock), "{best}");
        assert!(best.forecast.predicted.unwrap().step_s < paged_s.step_s, "{best}");
        let tight = fitting(&llama_8b(), &unified(Settings { hbm_limit: Some(Bytes(100 * GIB)), ..settings() }));
        assert!((1..tight.placement.layout.count()).contains(&away(&tight)), "{tight}");
        let small = fitting(&qwen3_4b(), &unified(settings()));
        assert!(away(&small) == 0 && small.to_string().contains("fits without offload"), "{small}");
    }
}

/// Arrays of 8-bit moments of 2^25 parameters have 33 MiB, for which the driver takes 34 MiB.
#[test]
fn a_gpu_plan_counts_what_the_driver_adds_to_arrays_of_states() {
    let added = |bucket_mib| {
        let settings = Settings { moments: Moments::Int8, bucket_mib: Some(bucket_mib), ..settings() };
        let plan = fitting(&llama_8b(), &settings);
        let class = plan.forecast.memory.iter().find(|class| class.name == "rounding of states");
        (class.map_or(0, |class| class.bytes), plan.placement.layout.buckets_in(Tier::Device).len())
    };
    let (bytes, resident) = added(64.0);
    assert!(resident > 0 && bytes == resident * (2 << 20), "{resident} buckets: {bytes}");
    assert_eq!(added(128.0).0, 0);
}

#[test]
fn a_gpu_plan_counts_its_workspaces() {
    let of = |settings: Settings| plan(&llama_8b(), &settings);
    let workspace = |settings| on_device(&of(settings), "attention workspace") * GIB as f64;
    // cuDNN's own sizes for b4 h32/8 s4096 d128: MiB as given, plus 256 bytes.
    assert_eq!(workspace(settings()), 4354.0 * f64::from(1 << 20) + 256.0);
    assert_eq!(workspace(Settings { nondeterministic: true, ..settings() }), 514.0 * f64::from(1 << 20) + 256.0);
    assert_eq!(workspace(Settings { attention: AttentionChoice::Plain, ..settings() }), 0.0);
    assert_eq!(workspace(Settings { dtype: TrainDtype::Float32, ..settings() }), 0.0);
    let plan = of(settings());
    assert_eq!(["matrix workspace", "kernel scratch"].map(|class| on_device(&plan, class)), [1.0 / 16.0; 2]);
    assert_eq!(on_device(&plan, "context, libraries"), 1.0);
    let on_cpu = Plan::new(&settings().request(&llama_8b()), &Machine::cpu(2), true).unwrap();
    assert!(!on_cpu.forecast.memory.iter().any(|class| class.name.contains("workspace") || class.name.contains("context")));
}

/// A sequence for which the scores of one key head's queries alone would take 137 GB.
#[test]
fn a_long_sequence_goes_back_in_blocks_and_fits() {
    let long = |nondeterministic| {
        plan(&llama_8b(), &Settings { seq_length: 131_072, nondeterministic, per_device_train_batch_size: 1, ..settings() })
    };
    let (blocks, whole) = (long(false), long(true));
    assert_eq!((blocks.recipe.numerics.attention_block, whole.recipe.numerics.attention_block), (Some(16_384), None));
    assert!(
        [&blocks, &whole]
            .iter()
            .all(|plan| plan.recipe.numerics.mlp_tile == Some(32_768) && plan.to_string().contains("tiles of 32768 tokens"))
    );
    assert!(on_device(&blocks, "attention workspace") < 4.6, "{blocks}");
    assert!(blocks.placement.layer_policies.contains(&LayerPolicy::HostAttention), "{blocks}");
    assert!(
        blocks.shortage().is_none() && blocks.to_string().contains("\n  attention   backward pass in blocks of 16384 queries and keys"),
        "{blocks}"
    );
    // Attention outputs also go to the host if ranks share a sequence.
    let machine = Machine::of_several(&Profile::load("gh200-x4").unwrap(), 4).unwrap();
    let of_four = |sequence_ranks, seq_length| {
        let settings = Settings { gpus: 4, sequence_ranks, seq_length, per_device_train_batch_size: 1, ..settings() };
        Plan::new(&settings.request(&llama_8b()), &machine, false).unwrap()
    };
    let (alone, shared) = (of_four(1, 131_072), of_four(4, 524_288));
    let is_away = |plan: &Plan| plan.placement.layer_policies.contains(&LayerPolicy::HostAttention);
    assert!(is_away(&alone) && is_away(&shared), "{alone}\n{shared}");
    let short = plan(&llama_8b(), &Settings { hbm_limit: Some(Bytes(60 * GIB)), ..settings() });
    assert!(
        short.recipe.numerics.attention_block.is_none() && !short.placement.layer_policies.contains(&LayerPolicy::HostAttention),
        "{short}"
    );
}

#[test]
fn a_gpu_that_shares_the_hosts_memory_is_a_gpu() {
    let machine = Machine::of(&Profile::load("mi300a").unwrap());
    assert_eq!((machine.kind, machine.device), (DeviceKind::Gpu, DeviceMemory::Shared));
    let plan = Plan::new(&settings().request(&qwen3_4b()), &machine, false).unwrap();
    assert!(matches!(plan.recipe.numerics.attention, Attention::Cudnn { .. }) && plan.forecast.predicted.is_some(), "{plan}");
    assert!(plan.site.threads < machine.cpus && on_device(&plan, "context, libraries") > 0.0, "{plan}");
    // Offloading to the same memory saves nothing.
    assert_eq!(plan.placement.layout.offloaded() == 0, REPARTITION, "{plan}");
    let [device, host] = plan.balances();
    assert_eq!(
        (device.needed, host.needed),
        (0, plan.bytes_at(MemorySpace::Device) + plan.bytes_at(MemorySpace::Host) + plan.forecast.transient_bytes)
    );
    assert!(plan.shortage().is_none() && plan.to_string().contains("host memory, compute"), "{plan}");
}

#[test]
fn offload_takes_14_bytes_a_parameter_of_host_memory_and_the_ring() {
    let plan = fitting(&llama_8b(), &Settings { resident_buckets: ResidentBuckets::Count(0), ..settings() });
    let host = |class: &str| plan.forecast.memory.iter().find(|c| c.space == MemorySpace::Host && c.name == class).unwrap().bytes;
    assert_eq!(host("offloaded p, m, v"), 12 * plan.placement.layout.flat_elems());
    let (retained, lent) = (plan.placement.layout.count(), if cfg!(feature = "stv") { plan.placement.param_slots } else { 0 });
    assert_eq!(host("gradient slots"), (retained + lent) * plan.placement.layout.bucket_elems() * 2);
}

#[test]
fn an_impossible_plan_names_the_memory_both_sizes_and_a_way_out() {
    let refused_with = |shape: &ModelShape, settings: Settings, words: &[&str]| {
        let message = refusal(shape, &settings);
        words.iter().for_each(|word| assert!(message.contains(word), "`{word}` is not in `{message}`"));
    };
    let float32 = Settings { masters: MastersChoice::Float32, ..settings() };
    let hbm = |gib| Settings { hbm_limit: Some(Bytes(gib * GIB)), weights: WeightsChoice::Replicated, ..float32.clone() };
    let no_way = "no smaller batch or sequence would fit either";
    refused_with(&llama_8b(), hbm(8), &["not enough device memory: ", "8.0 GiB of device memory are available", "--hbm-limit", no_way]);
    if FLOW {
        // This fits because saving needs no further host memory.
        refused_with(&llama_8b(), hbm(16), &["16.0 GiB of device memory are available", "--weights flow would fit"]);
    }
    let way_out = if FLOW { "--weights flow would fit" } else { "--per-device-train-batch-size 2 would fit" };
    refused_with(&llama_8b(), hbm(26), &["26.0 GiB", way_out]);
    refused_with(
        &llama_8b(),
        Settings { activations: ActivationsChoice::Keep, ..hbm(80) },
        &["device memory", "--activations auto would fit"],
    );
    refused_with(&llama_8b(), Settings { strategy: Strategy::NoOffload, ..hbm(100) }, &["--strategy superoffload would fit"]);
    let small_host = Settings { host_limit: Some(Bytes(64 * GIB)), hbm_limit: Some(Bytes(24 * GIB)), ..settings() };
    if FLOW {
        refused_with(&llama_8b(), small_host.clone(), &["64.0 GiB are available", "--moments int8 would fit"]);
        let float32 = Settings { masters: MastersChoice::Float32, ..small_host };
        refused_with(&llama_8b(), float32, &["not enough host memory: ", "64.0 GiB of host memory are available", "; short by "]);
    }
    let none = ResidentBuckets::Count(0);
    refused_with(
        &qwen3_14b(),
        Settings { resident_buckets: none, ..settings() },
        &["not enough host memory: ", "125.0 GiB", "--host-limit"],
    );
    if REPARTITION {
        refused_with(
            &llama_8b(),
            Settings { resident_buckets: ResidentBuckets::All, ..hbm(120) },
            &["device memory", "--resident-buckets "],
        );
    }
    let demo = Settings { host_limit: Some(Bytes(140 << 20)), ..Settings::demo() }.request(&ModelShape::demo());
    let on_cpu = Plan::new(&demo, &Machine::cpu(2), false).unwrap();
    let message = on_cpu.check_fits(&demo).unwrap_err().to_string();
    assert!(message.contains("140.0 MiB of host memory") && message.contains("--activations recompute-block would fit"), "{message}");
}

/// 19 billion parameters on one H200: 16 bytes per parameter exceed both memories, 12 bytes fit.
#[test]
fn a_model_whose_states_fit_only_in_16_bits_gets_this_advice() {
    if !REPARTITION {
        return;
    }
    let shape = model("LlamaForCausalLM", (44, 6144, 48, 8, 16_384, 151_936, false));
    let float32 = Settings { masters: MastersChoice::Float32, ..settings() };
    assert!(refusal(&shape, &float32).contains("; --moments bfloat16 would fit"), "{}", refusal(&shape, &float32));
    let packed = fitting(&shape, &Settings { moments: Moments::Bfloat16, ..settings() });
    let class = |name: &str| packed.forecast.memory.iter().find(|class| class.name == name).unwrap().bytes;
    let offloaded = packed.placement.layout.offloaded_elems();
    assert_eq!(class("offloaded p, m, v") + class("resident p, m, v"), 8 * packed.placement.layout.flat_elems());
    assert_eq!(class("offloaded p, m, v"), 8 * offloaded);
    assert!(packed.to_string().contains(", moments in bfloat16; clip above"), "{packed}");
    let inverse = Settings { rollback: Rollback::Inverse, ..settings() };
    assert!(cfg!(not(feature = "stv")) || !refusal(&shape, &inverse).contains("--moments"), "what is refused is no advice");
}

/// Most parameters of these models belong to experts. With full training, 16 bytes per parameter exceed both memories of one GPU.
#[test]
fn models_with_experts_are_planned_and_advised() {
    if !REPARTITION {
        return;
    }
    let one = Settings { per_device_train_batch_size: 1, ..settings() };
    let preset = |name: &str| presets::shape(Path::new(name)).unwrap();
    let (gpt_oss, qwen3) = (preset("gpt-oss-20b"), preset("qwen3-30b-a3b"));
    assert!(refusal(&gpt_oss, &one).contains("; --moments bfloat16 would fit"), "{}", refusal(&gpt_oss, &one));
    let packed = Settings { moments: Moments::Bfloat16, ..one.clone() };
    fitting(&gpt_oss, &packed);
    fitting(&preset("olmoe-1b-7b"), &one);
    assert!(refusal(&qwen3, &packed).contains("30532122624 parameters"));
    let balanced = Settings { router_aux_loss_coef: 0.01, ..one.clone() };
    Plan::new(&balanced.request(&gpt_oss), &h200(), false).unwrap();
    let refused = Plan::new(&balanced.request(&llama_8b()), &h200(), false).unwrap_err().to_string();
    assert!(refused.starts_with("--router-aux-loss-coef 0.01: the model has no experts"), "{refused}");
    let by_score = presets::shape(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/glm4_moe")).unwrap();
    let refused = Plan::new(&balanced.request(&by_score), &h200(), false).unwrap_err().to_string();
    assert!(refused.starts_with("--router-aux-loss-coef 0.01: the loss is not defined"), "{refused}");
    let two = Settings { gpus: 2, ..packed };
    Plan::new(&two.request(&qwen3), &of_four(2), false).unwrap().check_fits(&two.request(&qwen3)).unwrap();
}

/// 114.7 B parameters of experts take 61 GB in MXFP4, and those of one layer 6.4 GB in bfloat16. Each pass of a layer reads 1.7 GB and writes
/// 6.4 GB: 36 layers take 0.13 s at 4.3 TB/s in both passes.
#[test]
fn gpt_oss_120b_fits_one_gpu_if_its_experts_stay_in_mxfp4() {
    if !REPARTITION {
        return;
    }
    let freeze = vec![r"mlp\.experts\..*_proj$".to_string()];
    let settings = Settings { per_device_train_batch_size: 4, seq_length: 4096, freeze, ..settings() };
    let shape = settings.freezing(presets::shape(Path::new("gpt-oss-120b")).unwrap(), None).unwrap();
    let plan = fitting(&shape, &settings);
    let (layer, layers) = (128 * (5760 + 2880) * 2880, 36);
    let class = |name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes);
    assert_eq!((class("packed experts"), class("expanded experts")), (layers * layer * 17 / 32, 2 * layer), "{plan}");
    refusal(&ModelShape { packs_experts: false, ..shape.clone() }, &settings);
    let seconds = |shape: &ModelShape| {
        let unlimited = Machine { device: DeviceMemory::Own { bytes: 1 << 40, addressing: Addressing::Managed }, ..h200() };
        Plan::new(&settings.request(shape), &unlimited, false).unwrap().forecast.predicted.unwrap().device_s
    };
    let added_s = seconds(&shape) - seconds(&ModelShape { packs_experts: false, ..shape.clone() });
    assert!((0.10..0.20).contains(&added_s), "{added_s}: {plan}");
}

#[test]
fn the_advice_is_right() {
    let shape = llama_8b();
    let tight = Settings { hbm_limit: Some(Bytes(26 * GIB)), without: vec![Technique::WeightFlow], ..settings() };
    assert!(refusal(&shape, &tight).contains("--per-device-train-batch-size 2"));
    fitting(&shape, &Settings { per_device_train_batch_size: 2, ..tight });
}

#[test]
fn weights_that_do_not_fit_are_streamed() {
    if !FLOW {
        return;
    }
    let shape = llama_8b();
    let limited = |gib| Settings { hbm_limit: Some(Bytes(gib * GIB)), ..settings() };
    let (roomy, tight) = (fitting(&shape, &limited(40)), fitting(&shape, &limited(22)));
    assert!(roomy.placement.rings.weights.is_none() && tight.bytes_at(MemorySpace::Device) <= 22 * GIB, "{tight}");
    let ring = tight.placement.rings.weights.unwrap();
    // The ring holds two layers, or the head and a layer, in whole chunks. The embeddings are resident or stay outside.
    let table = TensorTable::new(&shape);
    let [head, layer, embed] = [Module::Head, Module::Layer(31), Module::Embed].map(|module| table.module_range(module));
    assert!((head.len() + layer.len()..head.len() + layer.len() + (16 << 20)).contains(&ring.period_elems), "{ring:?}");
    assert!(embed.start - ring.ringed_elems < 16 << 20 && ring.ringed_elems <= embed.start, "{ring:?}");
    let whole_chunks = (2 * table.flat_elems()).next_multiple_of(32 << 20);
    assert_eq!((on_device(&tight, "weights") * GIB as f64) as usize, whole_chunks - 2 * (ring.ringed_elems - ring.period_elems));
    // Each bucket has a permanent host slot instead of a few shared slots.
    assert_eq!(tight.placement.param_slots, tight.placement.layout.offloaded());
    let streamed = tight.forecast.memory.iter().find(|class| class.name == "streamed weights").unwrap();
    assert_eq!(
        (streamed.space, streamed.bytes),
        (MemorySpace::Host, 2 * tight.placement.layout.offloaded() * tight.placement.layout.bucket_elems())
    );
    assert!(!tight.forecast.memory.iter().any(|class| class.name == "parameter slots"));
    // Each pass copies the weights over the link at 50 GB/s.
    let predicted = tight.forecast.predicted.unwrap();
    assert!(predicted.link_s > (4 * ring.ringed_elems) as f64 / 50e9 && predicted.step_s >= predicted.link_s, "{tight}");
    let text = tight.to_string();
    assert!(text.contains("stream from host memory through a ring of 1.4 GiB, forward and backward"), "{text}");
}

#[test]
fn sums_are_kept_where_a_round_is_not_the_step_and_twice_where_it_ends_within_a_group() {
    assert_eq!([(4, 1), (4, 2)].map(|shares| kept_sums(shares, 4)), [0; 2]);
    assert_eq!([((4, 1), 2), ((8, 2), 2), ((8, 2), 4)].map(|(shares, ranks)| kept_sums(shares, ranks)), [1; 3]);
    assert_eq!([((4, 2), 1), ((8, 4), 2), ((6, 2), 3)].map(|(shares, ranks)| kept_sums(shares, ranks)), [2; 3]);
    let sums = |gradient_group| {
        let settings = Settings { gradient_shares: Some(4), gradient_group, ..settings() };
        let plan = plan(&llama_8b(), &settings);
        plan.forecast
            .memory
            .iter()
            .filter(|class| ["gradient sums", "gradients' sums"].contains(&class.name))
            .map(|class| class.bytes)
            .sum::<usize>()
    };
    assert_eq!((sums(Some(2)), sums(Some(4)), sums(None)), (2 * sums(None), sums(None), sums(Some(1))));
}

/// If there is room, sums stay on the device, even when weights stream and every state is on the host.
#[test]
fn sums_stay_on_the_device_while_they_fit() {
    let shares = Settings { gradient_shares: Some(4), ..settings() };
    let plan = |gib| plan(&llama_8b(), &Settings { hbm_limit: Some(Bytes(gib * GIB)), ..shares.clone() });
    let plans: Vec<_> = [139, 100, 70, 60, 50, 40, 30].map(plan).into_iter().collect();
    for plan in &plans {
        let on_device = plan.forecast.memory.iter().find(|class| class.name == "gradient sums").map_or(0, |class| class.bytes);
        assert_eq!(plan.placement.rings.sums_on_host, on_device < 4 * plan.placement.layout.flat_elems(), "{plan}");
    }
    assert!(
        !plans[..4].iter().any(|plan| plan.placement.rings.sums_on_host)
            && plans.is_sorted_by_key(|plan| plan.placement.rings.sums_on_host),
        "{plans:?}"
    );
    let several = Settings { gpus: 2, gradient_shares: Some(8), ..settings() };
    assert!(!Plan::new(&several.request(&llama_8b()), &of_four(2), false).unwrap().placement.rings.sums_on_host);
    let on_cpus = Settings { gradient_shares: Some(8), ..Settings::demo() };
    assert!(!Plan::new(&on_cpus.request(&ModelShape::demo()), &Machine::cpu(2), false).unwrap().placement.rings.sums_on_host);
}

#[test]
fn streaming_can_be_requested_and_refused() {
    let flow = |more: Settings| Settings { weights: WeightsChoice::Flow, ..more };
    let refused = |more: Settings| Plan::new(&flow(more).request(&qwen3_4b()), &h200(), false).unwrap_err().to_string();
    if !FLOW {
        return assert!(refused(settings()).starts_with("--weights flow needs the technique weight-flow"));
    }
    let requested = fitting(&qwen3_4b(), &flow(settings()));
    let streamed = requested.placement.rings.weights.unwrap().ringed_elems;
    // The pool steps streamed buckets. The tied embedding, which is also the output matrix, may be resident.
    assert!(requested.placement.layout.offloaded_elems() >= streamed && (resident(&requested) > 0) == REPARTITION, "{requested}");
    let few = Settings { resident_buckets: ResidentBuckets::Count(100), ..settings() };
    if REPARTITION {
        assert!((1..streamed).contains(&fitting(&qwen3_4b(), &flow(few)).placement.rings.weights.unwrap().ringed_elems));
    }
    for (more, why) in [
        (Settings { without: vec![Technique::WeightFlow], ..settings() }, "needs the technique weight-flow"),
        (Settings { strategy: Strategy::NoOffload, ..settings() }, "needs a strategy that offloads"),
        (Settings { memory: HostMemoryKind::Unified, ..settings() }, "--memory unified"),
    ] {
        let message = refused(more);
        assert!(message.starts_with("--weights flow ") && message.contains(why), "{message}");
    }
    if cfg!(feature = "superchip-cast") {
        assert!(refused(Settings { cast: CastSide::Device, ..settings() }).contains("--cast device"));
    }
    if REPARTITION {
        assert!(refused(Settings { resident_buckets: ResidentBuckets::All, ..settings() }).contains("no memory would be saved"));
    }
    let small = Plan::new(&flow(Settings::demo()).request(&ModelShape::demo()), &h200(), false).unwrap_err().to_string();
    assert!(small.contains("no memory would be saved"), "{small}");
    // On the CPU, where ring chunks are small.
    let demo =
        |weights| Plan::new(&Settings { weights, ..Settings::demo() }.request(&ModelShape::demo()), &Machine::cpu(2), false).unwrap();
    assert!(demo(WeightsChoice::Flow).placement.rings.weights.is_some() && demo(WeightsChoice::Auto).placement.rings.weights.is_none());
}

#[cfg(feature = "stv")]
#[test]
fn a_tied_embedding_leaves_early_where_few_of_its_rows_can_be_of_a_batch() {
    let none = ResidentBuckets::Count(0);
    let plan = |shape: &ModelShape, more: Settings| Plan::new(&Settings { resident_buckets: none, ..more }.request(shape), &h200(), false);
    let early = |shape: &ModelShape, more: Settings| plan(shape, more).unwrap().placement.layout.early();
    let many = Settings { per_device_train_batch_size: 24, ..settings() };
    let with = |early_rows, more: Settings| Settings { early_rows, ..more };
    assert_eq!(early(&qwen3_4b(), settings()), 109..120, "not the one that begins in a layer");
    assert_eq!(early(&qwen3_4b(), with(EarlyRows::Off, settings())).len(), 0);
    assert_eq!(early(&qwen3_4b(), many.clone()).len(), 0, "98,304 tokens may use more than half of 151,936 rows");
    assert_eq!(early(&qwen3_4b(), with(EarlyRows::On, many)).len(), 11);
    assert_eq!(early(&llama_8b(), settings()).len(), 0);
    for (shape, more, why) in [
        (llama_8b(), settings(), "the model's output matrix is not its embedding"),
        (qwen3_4b(), Settings { without: vec![Technique::Stv], ..settings() }, "the technique stv"),
        (qwen3_4b(), Settings { rollback: Rollback::Inverse, ..settings() }, "--rollback deferred"),
        (qwen3_4b(), Settings { bucket_mib: Some(2048.0), ..settings() }, "use a smaller --bucket-mib"),
    ] {
        assert_eq!(early(&shape, more.clone()).len(), 0, "{why}");
        let message = plan(&shape, with(EarlyRows::On, more)).unwrap_err().to_string();
        assert!(message.starts_with("--early-rows on: ") && message.contains(why), "{message}");
    }
    let layout = plan(&qwen3_4b(), settings()).unwrap().placement.layout;
    assert_eq!((layout.with_resident(4).early(), layout.with_resident(100).early().len()), (109..116, 0), "as far as the pool steps them");
}

#[test]
fn the_cpu_device_refuses_gpu_options() {
    for (settings, flag) in [
        (Settings { memory: HostMemoryKind::Unified, ..Settings::demo() }, "--memory unified"),
        (Settings { attention: AttentionChoice::Cudnn, ..Settings::demo() }, "--attention cudnn"),
        (Settings { hbm_limit: Some(Bytes(GIB)), ..Settings::demo() }, "--hbm-limit 1.0 GiB"),
    ] {
        let message = Plan::new(&settings.request(&ModelShape::demo()), &Machine::cpu(2), false).unwrap_err().to_string();
        assert!(message.starts_with(flag) && message.contains("--device cuda"), "{message}");
    }
    let wide = Settings { attention: AttentionChoice::Cudnn, dtype: TrainDtype::Float32, ..settings() };
    assert!(Plan::new(&wide.request(&llama_8b()), &h200(), false).unwrap_err().to_string().contains("--attention plain"));
}

/// cuDNN computes packed documents one by one in memory that is planned, so its own workspace is smaller.
#[test]
fn cudnn_keeps_documents_of_a_row_apart_in_memory_that_is_planned() {
    let plan = |packing| {
        let settings = Settings { packing, per_device_train_batch_size: 4, ..settings() };
        Plan::new(&settings.request(&llama_8b()), &h200(), false).unwrap()
    };
    let bytes = |plan: &Plan, name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes);
    let [whole, packed] = [Packing::Auto, Packing::Bfd].map(plan);
    assert_eq!([whole.recipe.numerics.attention, packed.recipe.numerics.attention], [Attention::Cudnn { deterministic: true }; 2]);
    // For 4096 tokens at a time: queries, keys and values of 6144 channels and outputs of 4096 channels, with gradients, in 2 bytes; the
    // log-sum-exp of 32 heads; and a table of 16384 tokens.
    assert_eq!(bytes(&packed, "packed documents"), 4096 * (2 * (6144 + 4096) * 2 + 32 * 4) + 16384 * 2 * 4);
    assert_eq!(bytes(&whole, "packed documents"), 0);
    assert!(2 * bytes(&packed, "attention workspace") < bytes(&whole, "attention workspace"));
}

#[test]
fn the_plan_prints_a_table_for_each_place() {
    let text = fitting(&llama_8b(), &settings()).to_string();
    let heads = [
        "predicted",
        "device memory",
        "weights",
        "gradients",
        "activations",
        "attention workspace",
        "free",
        "host memory",
        "offloaded p, m, v",
    ];
    let found: Vec<_> = heads.iter().map(|head| text.find(head).unwrap_or_else(|| panic!("{head}: {text}"))).collect();
    assert!(found.is_sorted(), "{text}");
    assert_eq!(text.matches("\n    free").count(), 2, "{text}");
    assert!(!text.ends_with('\n') && text.lines().all(|line| line == line.trim_end()), "{text}");
}
