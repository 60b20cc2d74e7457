//! Each technique on the CPU device, as whole steps of a small model with the technique and without it, and the planner's search.
//!
//! The optimizer shares the cores with the passes here, so a step shows what a technique costs in work and in order, not what it hides. The
//! benchmark `optim` has the passes of vector Adam alone.
#![allow(missing_docs, reason = "criterion's macros write functions without docs")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::Path;
use std::time::Duration;
use superoffload::internals::data::{DataPosition, Dataset, Loader, Preparation, RowRules, Tokenizer};
use superoffload::internals::device::CpuDevice;
use superoffload::internals::engine::{Counts, Engine};
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::cpu_engine;
use superoffload::internals::model::{ModelShape, init_tensor};
use superoffload::internals::optim::StatePart;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Settings, TrainOptions};

/// Settings of every case: real threads, small buckets, and so many slots that no bucket waits for one.
const COMMON: &str = "threads = 2\nbucket-mib = 0.125\nslots = 8\nresident-buckets = 0\nseq-length = 32\nper-device-train-batch-size = 2\n\
                      max-grad-norm = 0\nmax-steps = 1000000\n";
/// A bound that every gradient norm exceeds.
const CLIPPED: &str = "max-grad-norm = 1e-3\n";
const WARM_UP_STEPS: usize = 3;

/// A model with enough layers for a ring of weights.
fn shape() -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true,
    });
    ModelShape::parse(&config.to_string(), Path::new("config.json")).expect("the shape is valid")
}

/// The settings of a case: [`COMMON`], with the lines in `more` in place of its own.
fn settings(more: &str) -> Settings {
    let mut options: toml::Table = toml::from_str(COMMON).expect("valid settings");
    options.extend(toml::from_str::<toml::Table>(more).expect("valid settings"));
    Settings::resolve(options.try_into::<TrainOptions>().expect("valid settings")).expect("valid settings")
}

/// An engine with random weights, and its data.
struct Training {
    engine: Engine<CpuDevice>,
    loader: Loader,
}

impl Training {
    fn new(more: &str) -> Self {
        let (settings, shape) = (settings(more), shape());
        let plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), true).unwrap_or_else(|error| panic!("{more}: {error}"));
        let mut engine = cpu_engine(&plan, &shape, &Topology::this_machine()).unwrap_or_else(|error| panic!("{more}: {error}"));
        for spec in engine.table().specs().to_vec() {
            let mut params = vec![0.0; spec.elems()];
            init_tensor(&spec, 1, &mut params);
            engine.write_state(StatePart::PARAMS, spec.offset_elems, &params).expect("the state has this tensor");
        }
        engine.send_weights().expect("weights fit the device");
        let rules = RowRules::wrapped(settings.seq_length);
        let dataset = Dataset::open(&settings.data, &Tokenizer::bytes(), shape.vocab, rules, &mut Preparation::default());
        let start = DataPosition { epoch: 0, next_sequence: 0 };
        let loader = dataset.and_then(|dataset| Loader::new(dataset, settings.per_device_train_batch_size, settings.seed, true, start));
        Self { engine, loader: loader.unwrap_or_else(|error| panic!("{more}: {error}")) }
    }

    fn step(&mut self) -> Counts {
        self.engine.step(1e-4, &mut self.loader).expect("a step of the CPU device succeeds").counts
    }
}

/// Times steps with the settings `more`. The first steps must have the outcome that the case is about.
fn steps(c: &mut Criterion, (group, case): (&str, &str), more: &str, is_right: impl Fn(Counts) -> bool) {
    let mut training = Training::new(more);
    let mut counts = Counts::default();
    (0..WARM_UP_STEPS).for_each(|_| counts += training.step());
    assert!(is_right(counts), "{group}/{case}: {counts:?}");
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Elements(2 * 32));
    group.bench_function(case, |bench| bench.iter(|| black_box(training.step())));
}

/// Speculation: committed, rolled back exactly and by algebra, and the step that waits for the norm.
fn speculation(c: &mut Criterion) {
    let rolled_back = |counts: Counts| counts.clipped > 0 && counts.committed == 0;
    steps(c, ("stv", "every step committed"), "", |counts| counts.committed > 0 && counts.clipped == 0);
    steps(c, ("stv", "every step rolled back"), &format!("{CLIPPED}without = [\"adaptive\"]\n"), rolled_back);
    steps(
        c,
        ("stv", "every step rolled back by algebra"),
        &format!("{CLIPPED}without = [\"adaptive\"]\nrollback = \"inverse\"\n"),
        |counts| counts.clipped + counts.skipped > 0,
    );
    steps(c, ("stv", "without"), "without = [\"stv\"]\n", |counts| counts.speculated == 0);
    steps(c, ("stv", "zero-offload"), "strategy = \"zero-offload\"\n", |counts| counts.speculated == 0);
}

/// Order of buckets on the optimizer's threads.
fn deadline_order(c: &mut Criterion) {
    steps(c, ("deadline-order", "with"), "", |counts| counts.committed > 0);
    steps(c, ("deadline-order", "without"), "without = [\"deadline-order\"]\n", |counts| counts.committed > 0);
}

/// Gradients and weights on their way between device and host: one staging slot or eight, bf16 or fp32 on the link.
fn staging(c: &mut Criterion) {
    steps(c, ("staging", "1 slot"), "slots = 1\n", |counts| counts.committed > 0);
    steps(c, ("staging", "8 slots"), "", |counts| counts.committed > 0);
    steps(c, ("superchip-cast", "cast in the pass, bf16 on the link"), "", |counts| counts.committed > 0);
    steps(c, ("superchip-cast", "cast on the device, fp32 on the link"), "cast = \"device\"\n", |counts| counts.committed > 0);
}

/// Weights on the device, and weights that stream from host memory.
fn weight_flow(c: &mut Criterion) {
    steps(c, ("weight-flow", "resident weights"), "", |counts| counts.committed > 0);
    steps(c, ("weight-flow", "streamed weights"), "weights = \"flow\"\n", |counts| counts.committed > 0);
}

/// Model of 27 M parameters whose plan is searched.
const SEARCHED_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../paper-figures/models/cpu-27m.json");

/// Resident buckets, and the search that chooses how many, on a GH200.
fn repartition(c: &mut Criterion) {
    steps(c, ("repartition", "no resident bucket"), "", |counts| counts.committed > 0);
    steps(c, ("repartition", "2 resident buckets"), "resident-buckets = 2\n", |counts| counts.committed > 0);
    let plan = |without: &str| {
        let text = format!("hardware = \"gh200-96\"\nseq-length = 1024\nper-device-train-batch-size = 8\nwithout = [{without}]\n");
        let options: TrainOptions = toml::from_str(&text).expect("valid settings");
        superoffload::plan(Path::new(SEARCHED_MODEL), options, &mut |_| ()).expect("the model fits").to_string()
    };
    assert_ne!(plan(""), plan("\"repartition\""), "resident buckets change the plan");
    let mut group = c.benchmark_group("repartition");
    group.bench_function("search of a plan", |bench| bench.iter(|| black_box(plan(""))));
    group.bench_function("search without resident buckets", |bench| bench.iter(|| black_box(plan("\"repartition\""))));
}

fn short_runs() -> Criterion {
    Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500))
}

criterion_group!(name = benches; config = short_runs(); targets = speculation, deadline_order, staging, weight_flow, repartition);
criterion_main!(benches);
