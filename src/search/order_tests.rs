//! Segments of layers and sizes of buckets as choices of the search, and limits.

use super::limits::{LargestModel, Limits};
use super::{SearchQuery, bucket_mib};
use crate::config::settings::Settings;
use crate::hardware::profile::Profile;
use crate::memory::{Addressing, DeviceMemory};
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::optim::moments::Moments;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::choices::{ActivationsChoice, LayerOrder, MastersChoice, ResidentBuckets};
use crate::request::wanted::Wanted;
use crate::simulate::clip::Clip;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use std::path::Path;

const GIB: u64 = 1 << 30;

/// Llama-8B in 23 GiB, with 32 micro-batches of one sequence in a step and as many gradient shares.
fn small_card() -> (Settings, ModelShape, Machine) {
    let settings = Settings {
        seq_length: 4096,
        per_device_train_batch_size: 1,
        gradient_shares: Some(32),
        moments: Moments::Bfloat16,
        ..Settings::default()
    };
    let device = DeviceMemory::Own { bytes: 23 * GIB, addressing: Addressing::Managed };
    let machine = Machine { host_bytes: 120 * GIB, device, ..Machine::of(&Profile::load("h200-pcie5").unwrap()) };
    (settings, presets::shape(Path::new("llama-8b")).unwrap(), machine)
}

/// In the usual order the step was measured at 23.1 s, and fp32 sums took 19.7 s of the link.
#[test]
fn segments_of_layers_shorten_a_step_on_a_small_card() {
    let (settings, shape, machine) = small_card();
    let step_s = |settings: &Settings, layer_order| {
        let plan = Plan::new(&Settings { layer_order, ..settings.clone() }.request(&shape), &machine, false).unwrap();
        assert!(plan.shortage().is_none(), "{plan}");
        let steps = Steps { warmup: 1, timed: 2, clip: Clip::Never };
        simulate(&plan, &shape, "h200-pcie5", steps, 0).unwrap().0.step_ms.median / 1e3
    };
    let cut = LayerOrder::Segments { layers: 2, turn: 5 };
    let (whole, segments) = (step_s(&settings, LayerOrder::Whole), step_s(&settings, cut));
    assert!(whole > 20.0 && segments < 14.5, "{whole} s in the usual order, {segments} s in segments");
    let one_share = Settings { gradient_shares: None, gradient_accumulation_steps: Some(32), ..settings };
    let alone = step_s(&one_share, cut);
    assert!((0.9..1.01).contains(&(alone / segments)), "{alone} s with one share, {segments} s with 32");
}

/// Two of these cards hold a half of the weights each. In the usual order, each fetches the other half twice for every micro-batch, and holds
/// fp32 sums of a half of the parameters.
#[test]
fn segments_of_layers_take_less_memory_and_time_on_two_small_cards() {
    let (settings, shape, machine) = small_card();
    let machine = Machine { host_bytes: machine.host_bytes, device: machine.device, ..Machine::of(&Profile::load("h200-x2").unwrap()) };
    let settings = Settings { gpus: 2, ..settings };
    let planned = |layer_order| {
        let plan = Plan::new(&Settings { layer_order, ..settings.clone() }.request(&shape), &machine, false).unwrap();
        let steps = Steps { warmup: 1, timed: 2, clip: Clip::Never };
        (simulate(&plan, &shape, "h200-x2", steps, 0).unwrap().0.step_ms.median / 1e3, plan)
    };
    let (whole_s, whole) = planned(LayerOrder::Whole);
    let (segments_s, segments) = planned(LayerOrder::Segments { layers: 2, turn: 4 });
    assert!(whole.shortage().is_some() && segments.shortage().is_none(), "{whole}\n{segments}");
    assert!(segments_s < whole_s, "{segments_s} s in segments, {whole_s} s in the usual order");
    let predicted_s = segments.forecast.predicted.unwrap().step_s;
    assert!((0.85..1.05).contains(&(predicted_s / segments_s)), "{segments_s} s simulated, {predicted_s} s predicted");
}

#[test]
fn segments_are_tried_with_the_longest_turn_that_fits() {
    let (settings, shape, machine) = small_card();
    let orders = |settings: Settings| {
        let request = settings.request(&shape);
        SearchQuery::new(&request, &machine).orders(&request.wanted)
    };
    let tried = orders(settings.clone());
    let turns: Vec<_> = tried
        .iter()
        .filter_map(|wanted| match wanted.layer_order {
            LayerOrder::Segments { layers: 2, turn } => Some(turn),
            _ => None,
        })
        .collect();
    assert!(turns.len() == 2 && turns[1] == turns[0] / 2 && (3..10).contains(&turns[0]), "{turns:?}");
    let request = settings.request(&shape);
    let longer = LayerOrder::Segments { layers: 2, turn: turns[0] + 1 };
    let plan = Plan::new(&request.with(Wanted { layer_order: longer, ..request.wanted.clone() }), &machine, false).unwrap();
    assert!(plan.shortage().is_some(), "{plan}");
    for other in [
        Settings { layer_order: LayerOrder::Whole, ..settings.clone() },
        Settings { gradient_shares: None, ..settings.clone() },
        Settings { gradient_shares: Some(2), gpus: 2, ..settings },
    ] {
        assert!(orders(other).is_empty());
    }
}

/// The usual order needs 121 GiB of host memory.
#[test]
fn limits_count_what_fits_in_segments_alone() {
    let (settings, shape, machine) = small_card();
    let machine = Machine { host_bytes: 119 * GIB, ..machine };
    let settings = Settings { moments: Moments::Float32, gradient_shares: None, gradient_accumulation_steps: Some(32), ..settings };
    let settings = Settings { masters: MastersChoice::Float32, ..settings };
    let limits = |layer_order| Limits::of(&Settings { layer_order, ..settings.clone() }.request(&shape), &machine);
    let (whole, open) = (limits(LayerOrder::Whole), limits(LayerOrder::Auto));
    assert!(whole.batch == 0 && whole.layers < 32, "{whole:?}");
    assert!(open.batch >= 1 && open.seq_length >= 4096 && open.layers >= 32, "{open:?}");
}

/// Two H200 with 251 GiB of host memory; the byte count alone predicted 31.8 B parameters on both. A single GPU, which has the whole host,
/// streams its weights from there.
#[test]
fn the_largest_model_is_shown_by_gpus() {
    let settings = Settings { activations: ActivationsChoice::RecomputeBlock, seq_length: 4096, ..Settings::default() };
    let settings = Settings { gpus: 2, per_device_train_batch_size: 1, ..settings };
    let billions = |masters| {
        let request = Settings { masters, ..settings.clone() }.request(&presets::shape(Path::new("qwen3-14b")).unwrap());
        let largest = LargestModel::by_gpus(&request, &Profile::load("h200-x2").unwrap());
        largest.iter().map(|on| (on.gpus, on.params as f64 / 1e9)).collect::<Vec<_>>()
    };
    let [float32, open] = [MastersChoice::Float32, MastersChoice::Auto].map(billions);
    assert!(matches!(float32[..], [(1, one), (2, two)] if (24.0..27.0).contains(&one) && (31.8..34.0).contains(&two)), "{float32:?}");
    assert!(matches!(open[..], [(1, one), (2, two)] if (28.0..30.0).contains(&one) && (34.0..36.0).contains(&two)), "{open:?}");
    assert!(
        LargestModel::by_gpus(&settings.request(&presets::shape(Path::new("qwen3-14b")).unwrap()), &Profile::load("h200-pcie5").unwrap())
            .is_empty()
    );
}

/// Buffers that grow with buckets may need the memory of one bucket: with as many bytes of resident buckets only smaller loss tiles fit, or
/// nothing. Smaller buckets may leave room for more.
#[test]
fn larger_buckets_are_also_tried_with_one_resident_fewer_and_smaller_ones_with_more() {
    let shape = presets::shape(Path::new("qwen3-4b")).unwrap().with_layers(12);
    let device = DeviceMemory::Own { bytes: 80 * GIB, addressing: Addressing::Managed };
    let machine = Machine { host_bytes: 125 * GIB, device, ..Machine::of(&Profile::load("h200-pcie5").unwrap()) };
    let settings = Settings { activations: ActivationsChoice::Keep, ..Settings::default() };
    let request = settings.request(&shape);
    let query = SearchQuery::new(&request, &machine);
    let from = query.candidate(&Wanted { resident_buckets: ResidentBuckets::Count(20), ..request.wanted.clone() }).unwrap().unwrap();
    let tried: Vec<_> = bucket_mib(&query, &from).iter().map(|tried| (tried.bucket_mib, tried.resident_buckets)).collect();
    let more = |mib: usize| from.plan.placement.layout.count() * (64 / mib) / 32;
    let expected = [(16.0, 80), (16.0, 80 + more(16)), (32.0, 40), (32.0, 40 + more(32)), (128.0, 10), (128.0, 9), (256.0, 5), (256.0, 4)];
    assert_eq!(tried, expected.map(|(mib, count)| (Some(mib), ResidentBuckets::Count(count))));
}
