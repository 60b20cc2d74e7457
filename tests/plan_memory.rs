//! A plan counts every byte that an engine allocates, for all strategies, formats, policies and rings, on the CPU device. `tests/gpu` makes
//! the comparison on a GPU.

use crate::planned;
use crate::support::{settings, tiny_delta, tiny_gemma, tiny_latent, tiny_llama, tiny_moe};
use superoffload::internals::bucket::Tier;
use superoffload::internals::device::{DeviceKind, Kernels};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::engine::Engine;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::MemoryPolicy;
use superoffload::internals::launch::{UseEngine, cpu_engine, on_cpus};
use superoffload::internals::memory::{Addressing, DeviceMemory};
use superoffload::internals::model::{FreezeRules, ModelShape, TensorTable};
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

/// Makes a plan for `machine`, allocates its memory and compares both.
fn compare(toml: &str, shape: &ModelShape, machine: &Machine) -> Plan {
    let plan = Plan::new(&settings(&format!("max-steps = 1\nthreads = 1\n{toml}")).request(shape), machine, false).unwrap();
    let plan = plan.with_host_memory(MemoryPolicy::unbacked());
    let engine = cpu_engine(&plan, shape, &Topology::this_machine()).unwrap();
    planned::check(&engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{toml}: {wrong}"));
    plan
}

/// `shape` with an embedding, layers and norms that are frozen.
fn with_frozen(shape: ModelShape) -> ModelShape {
    let freeze = ["embed_tokens", r"layers\.[01]\.", r"layers\.3\..*norm", r"layers\.4\.mlp"].map(String::from);
    shape.freezing(FreezeRules { freeze: &freeze, train_only: &[], tokens: None }).unwrap()
}

#[test]
fn a_frozen_parameter_takes_two_bytes_and_every_class_matches_allocations() {
    let common = "seq-length = 16\nper-device-train-batch-size = 3\nbucket-mib = 0.03125\n";
    for shape in [
        tiny_llama(6, 64, 300, false),
        tiny_llama(6, 64, 300, true),
        tiny_moe(6, 64, 300, false),
        tiny_delta(6, 64, 300, false),
        tiny_gemma(6, 64, 300, false),
        tiny_latent(6, 64, 300, false),
    ] {
        let shape = with_frozen(shape);
        for more in ["", "strategy = \"no-offload\"\n", "gradient-shares = 3\n", "dtype = \"float32\"\n", "activations = \"host\"\n"] {
            let plan = compare(&format!("{common}{more}"), &shape, &Machine::cpu(2));
            let bytes = |name| plan.forecast.memory.iter().find(|class| class.name == name).unwrap().bytes;
            let (table, width) = (TensorTable::new(&shape), plan.recipe.numerics.dtype.bytes());
            let frozen: usize = table.frozen().iter().map(|spec| spec.elems().next_multiple_of(128)).sum();
            assert_eq!(bytes("frozen weights"), width * frozen, "{plan}");
            let vectors = table.frozen().iter().filter(|spec| spec.shape.len() == 1 || spec.name.ends_with("conv"));
            let longest = vectors.map(|spec| spec.elems().next_multiple_of(128)).max().unwrap();
            assert_eq!(bytes("unused gradients"), 2 * width * longest, "{plan}");
            assert_eq!(bytes("weights"), width * table.flat_elems(), "{plan}");
        }
    }
}

#[test]
fn rows_of_tokens_are_small_tensors_and_every_class_matches_allocations() {
    let common = "seq-length = 16\nper-device-train-batch-size = 3\nbucket-mib = 0.03125\n";
    let (layers, tokens) = ([r"layers\.[45]\.".to_string()], 290..300);
    for tied in [false, true] {
        for train_only in [&layers[..], &[]] {
            let shape = tiny_llama(6, 64, 300, tied);
            let all: usize = TensorTable::new(&shape).specs().iter().map(|spec| spec.elems().next_multiple_of(128)).sum();
            let shape = shape.freezing(FreezeRules { freeze: &[], train_only, tokens: Some(&tokens) }).unwrap();
            for more in [
                "",
                "strategy = \"no-offload\"\n",
                "strategy = \"no-offload\"\nmasters = \"split\"\n",
                "gradient-shares = 3\n",
                "dtype = \"float32\"\n",
                "activations = \"host\"\n",
                "layer-order = \"segments:2,2\"\nactivations = \"recompute-cheap\"\n",
            ] {
                let plan = compare(&format!("{common}{more}"), &shape, &Machine::cpu(2));
                let bytes = |name| plan.forecast.memory.iter().find(|class| class.name == name).unwrap().bytes;
                let (table, width) = (TensorTable::new(&shape), plan.recipe.numerics.dtype.bytes());
                let trained: Vec<_> = table.specs().iter().filter(|spec| spec.first_token().is_none()).map(|spec| spec.elems()).collect();
                let rounded: usize = trained.iter().map(|elems| elems.next_multiple_of(128)).sum();
                assert_eq!(bytes("frozen weights"), width * (all - rounded), "both tables are frozen as a whole: {plan}");
                assert_eq!(bytes("weights"), width * table.flat_elems(), "{plan}");
                let rows: usize = if tied { 10 * 64 } else { 2 * 10 * 64 };
                assert_eq!(plan.trained_params(), trained.iter().sum::<usize>() + rows, "{plan}");
                assert!(plan.to_string().contains("rows 290..300 (10 tokens) of "), "{plan}");
            }
        }
    }
}

#[test]
fn frozen_experts_in_mxfp4_take_four_and_a_quarter_bits_and_every_class_matches_allocations() {
    let common = "seq-length = 16\nper-device-train-batch-size = 3\nbucket-mib = 0.03125\n";
    let freeze = [r"mlp\.experts\..*proj$", r"layers\.3\."].map(String::from);
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gpt_oss_mxfp4/config.json");
    let whole = ModelShape::read(&golden).unwrap().with_layers(6);
    for more in ["", "strategy = \"no-offload\"\n", "gradient-shares = 3\n", "activations = \"host\"\n", "dtype = \"float32\"\n"] {
        let packs = !more.contains("float32");
        let dtype = if packs { Dtype::Bfloat16 } else { Dtype::Float32 };
        let shape = whole.clone().computing_in(dtype).freezing(FreezeRules { freeze: &freeze, train_only: &[], tokens: None }).unwrap();
        let plan = compare(&format!("{common}{more}"), &shape, &Machine::cpu(2));
        let bytes = |name| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes);
        // Three experts of 64 x 64 and 64 x 32 in each layer.
        let elems = 3 * 64 * (64 + 32);
        let want = if packs { (6 * elems * 17 / 32, 2 * elems) } else { (0, 0) };
        assert_eq!((bytes("packed experts"), bytes("expanded experts")), want, "{plan}");
        let frozen: usize = TensorTable::new(&shape).frozen().iter().map(|spec| spec.elems().next_multiple_of(128)).sum();
        assert_eq!(bytes("frozen weights"), frozen * plan.recipe.numerics.dtype.bytes(), "{plan}");
        let line =
            "  packed      12 frozen tensors of experts stay in MXFP4 (57.4 KiB); each pass of a layer expands its own into 36.0 KiB";
        assert_eq!(plan.to_string().lines().any(|found| found == line), packs, "{plan}");
    }
}

#[test]
fn every_memory_class_of_a_plan_for_cpus_matches_allocations() {
    let common = "seq-length = 16\nper-device-train-batch-size = 3\nbucket-mib = 0.03125\n";
    let strategies = ["superoffload", "zero-offload", "no-offload"].map(|name| format!("{common}strategy = \"{name}\"\n"));
    let (demo, small, experts) = (ModelShape::demo(), tiny_llama(6, 64, 300, false), tiny_moe(6, 64, 300, false));
    let (delta, gemma) = (tiny_delta(6, 64, 300, false), tiny_gemma(6, 64, 300, false));
    let latent = tiny_latent(6, 64, 300, false);
    for shape in [&demo, &small, &experts, &delta, &gemma, &latent] {
        for strategy in &strategies {
            for more in [
                "",
                "save-memory = \"100KiB\"\n",
                "gradient-shares = 3\n",
                "gradient-shares = 4\ngradient-group = 2\n",
                "dtype = \"float32\"\nslots = 3\n",
                "moments = \"bfloat16\"\n",
                "moments = \"int8\"\n",
                "head-rows = \"trained\"\n",
                "logits-dtype = \"float32\"\n",
                "gradient-accumulation-steps = 2\nactivations = \"recompute-block\"\n",
            ] {
                compare(&format!("{strategy}{more}"), shape, &Machine::cpu(2));
            }
            for (order, more) in [("1,1", ""), ("2,1", "gradient-shares = 3\n"), ("1,2", "gradient-shares = 4\ngradient-group = 2\n")] {
                let more = format!("{more}layer-order = \"segments:{order}\"\nactivations = \"recompute-cheap\"\n");
                compare(&format!("{strategy}{more}"), shape, &Machine::cpu(2));
            }
            for activations in ["host", "host-attention"] {
                compare(&format!("{strategy}activations = \"{activations}\"\n"), shape, &Machine::cpu(2));
            }
        }
        for (moments, bytes) in [("float32", 10.0), ("bfloat16", 6.0), ("int8", 4.0625)] {
            let lines = format!("{}masters = \"split\"\nmoments = \"{moments}\"\n", strategies[2]);
            let plan = compare(&lines, shape, &Machine::cpu(2));
            let resident = plan.forecast.memory.iter().find(|class| class.name == "resident p, m, v").unwrap();
            assert_eq!(resident.bytes as f64, bytes * plan.placement.layout.flat_elems() as f64, "{plan}");
        }
        if cfg!(feature = "superchip-cast") {
            compare(&format!("{}cast = \"device\"\n", strategies[0]), shape, &Machine::cpu(2));
        }
        if cfg!(feature = "weight-flow") {
            let plan = compare(&format!("{}weights = \"flow\"\n", strategies[1]), shape, &Machine::cpu(2));
            assert!(plan.placement.rings.weights.is_some(), "{plan}");
        }
        for (moments, bytes) in [("float32", 10.0), ("bfloat16", 6.0), ("int8", 4.0625)] {
            let streams = cfg!(all(feature = "weight-flow", feature = "repartition"));
            let lines = format!("{}masters = \"split\"\nweights = \"flow\"\nmoments = \"{moments}\"\n", strategies[0]);
            let Some(plan) = streams.then(|| compare(&lines, shape, &Machine::cpu(2))) else { continue };
            let class = |name| plan.forecast.memory.iter().find(|class| class.name == name).unwrap().bytes as f64;
            let (offloaded, of_slots) =
                (plan.placement.layout.offloaded_elems() as f64, class("gradient slots") + class("streamed weights"));
            assert_eq!(class("offloaded p, m, v"), bytes * offloaded, "{plan}");
            assert_eq!(of_slots, 4.0 * (plan.placement.layout.offloaded() * plan.placement.layout.bucket_elems()) as f64, "{plan}");
        }
    }
}

/// GPU plans on the CPU device, which can run them: rings with larger chunks, and paged states.
#[test]
fn every_memory_class_of_a_plan_for_a_gpu_matches_allocations() {
    let gpu = |mib: u64| {
        let device = DeviceMemory::Own { bytes: mib << 20, addressing: Addressing::Managed };
        Machine { kind: DeviceKind::Gpu, device, ..Machine::cpu(8) }
    };
    let (shape, common) = (tiny_llama(12, 1024, 256, true), "seq-length = 64\nper-device-train-batch-size = 1\n");
    let (mut grads, mut weights, mut resident, mut sums, mut groups, mut segments) = (0, 0, 0, 0, 0, 0);
    for mib in (1400..3600).step_by(50) {
        let plan = compare(common, &shape, &gpu(mib));
        grads += usize::from(plan.placement.rings.grads.is_some());
        weights += usize::from(plan.placement.rings.weights.is_some());
        resident += usize::from(plan.placement.layout.offloaded() == 0);
        let plan = compare(&format!("{common}gradient-shares = 3\n"), &shape, &gpu(mib));
        sums += usize::from(plan.placement.rings.sums_on_host);
        let plan = compare(&format!("{common}gradient-shares = 3\nlayer-order = \"segments:2,{}\"\n", mib / 50 % 4), &shape, &gpu(mib));
        let rings = plan.placement.rings;
        segments += usize::from(rings.sums.is_some() && rings.grads.is_some());
        if mib % 400 == 0 {
            let plan = compare(&format!("{common}gradient-shares = 4\ngradient-group = 2\n"), &shape, &gpu(mib));
            groups += usize::from(plan.placement.rings.sums_on_host);
        }
    }
    assert!(sums > 0 && groups > 0, "no sums on the host were tried");
    assert!(segments > 0, "no rings of segments were tried");
    assert!(grads > 0, "no ring of gradients was tried");
    assert_eq!((weights > 0, resident > 0), (cfg!(feature = "weight-flow"), cfg!(feature = "repartition")));
    for moments in ["float32", "bfloat16", "int8"] {
        let lines = format!("{common}moments = \"{moments}\"\nmemory = \"unified\"\nresident-buckets = 0\n");
        let paged = compare(&lines, &shape, &gpu(8000));
        assert!(!paged.placement.layout.elems_in(Tier::Unified).is_empty(), "{paged}");
    }
    compare(&format!("{common}moments = \"bfloat16\"\n"), &shape, &gpu(2000));
    if cfg!(feature = "repartition") {
        let more = "masters = \"split\"\n";
        compare(&format!("{common}{more}"), &shape, &gpu(2000));
        let paged = compare(&format!("{common}{more}memory = \"unified\"\nresident-buckets = 3\n"), &shape, &gpu(8000));
        assert!([Tier::Device, Tier::Unified].into_iter().all(|tier| !paged.placement.layout.elems_in(tier).is_empty()), "{paged}");
    }
    for (mib, shape) in [tiny_moe, tiny_delta].into_iter().flat_map(|model| [1600, 2400, 4000].map(|mib| (mib, model(12, 1024, 256, true))))
    {
        compare(common, &shape, &gpu(mib));
    }
}

/// Checks one of several ranks, on a machine with separate device memories.
struct Compared<'a>(&'a str);

impl UseEngine for Compared<'_> {
    type Output = Plan;

    fn run<D: Kernels>(self, engine: Engine<D>) -> Result<Plan> {
        planned::check(&engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{}: {wrong}", self.0));
        Ok(engine.plan().clone())
    }
}

/// The plan of several ranks, each of which allocates the planned memory.
fn planned_as_taken(toml: &str, shape: &ModelShape, machine: &Machine) -> Plan {
    let plan = Plan::new(&settings(toml).request(shape), machine, false).unwrap();
    let plan = plan.with_host_memory(MemoryPolicy::unbacked());
    on_cpus(&plan, shape, &Topology::this_machine(), Compared(toml)).unwrap()
}

#[test]
fn every_memory_class_of_a_plan_for_several_gpus_matches_allocations() {
    let device = DeviceMemory::Own { bytes: 4 << 30, addressing: Addressing::Managed };
    let machine = Machine { kind: DeviceKind::Gpu, device, ..Machine::cpu(8) };
    // The last bucket also has equally many blocks for each rank.
    let shape = tiny_llama(12, 1024, 276, true);
    let common = "max-steps = 1\nthreads = 4\nseq-length = 64\nper-device-train-batch-size = 1\nbucket-mib = 4\n";
    let experts = tiny_moe(12, 1024, 280, true);
    // As above, with another number of trained parameters.
    let freeze = [r"layers\.[0-5]\.".to_string(), r"layers\.9\.mlp".to_string()];
    let frozen =
        |vocab| tiny_llama(12, 1024, vocab, true).freezing(FreezeRules { freeze: &freeze, train_only: &[], tokens: None }).unwrap();
    let frozen = (256..).map(frozen).find(|shape| TensorTable::new(shape).flat_elems().is_multiple_of(8 * 4096)).unwrap();
    for more in ["", "weights = \"replicated\"\n", "strategy = \"no-offload\"\n"] {
        planned_as_taken(&format!("{common}gpus = 2\n{more}"), &frozen, &machine);
    }
    for gpus in [2, 4] {
        for (shape, more) in [(&experts, ""), (&experts, "gradient-shares = 8\n")] {
            planned_as_taken(&format!("{common}gpus = {gpus}\n{more}"), shape, &machine);
        }
        for more in [
            "",
            "gradient-shares = 8\n",
            "gradient-shares = 8\ngradient-group = 4\n",
            "moments = \"bfloat16\"\n",
            "moments = \"int8\"\n",
            "resident-buckets = 2\n",
            "weights = \"sharded\"\n",
            "strategy = \"no-offload\"\n",
            "strategy = \"no-offload\"\nmasters = \"split\"\n",
            "resident-buckets = 2\nmasters = \"split\"\n",
            "sequence-ranks = 2\n",
            "sequence-ranks = 2\nhead-rows = \"trained\"\n",
            // Two ranks share each key head.
            "sequence-ranks = 4\nactivations = \"recompute-block\"\n",
            "sequence-ranks = 4\nactivations = \"host-attention\"\n",
        ] {
            if gpus == 2 && more.contains("ranks = 4") {
                continue;
            }
            let wanted = cfg!(feature = "weight-flow") || !more.contains("sharded");
            let wanted = wanted && (cfg!(feature = "repartition") || !more.contains("resident"));
            if !wanted {
                continue;
            }
            let toml = format!("{common}gpus = {gpus}\n{more}");
            let plan = planned_as_taken(&toml, &shape, &machine);
            assert_eq!(plan.placement.rings.weights.is_some(), more.contains("sharded"), "{plan}");
        }
    }
    // Less memory than separate gradients need, with slices of the sums of some, all or no buckets.
    for (resident, shares) in [("0", 2), ("2", 4), ("all", 2)] {
        let resident = if cfg!(feature = "repartition") { resident } else { "0" };
        let toml = format!(
            "{common}gpus = 2\nmasters = \"float32\"\nweights = \"replicated\"\nresident-buckets = \"{resident}\"\ngradient-shares = {shares}\n"
        );
        let settings = settings(&format!("{toml}gradient-accumulation-steps = {}\nactivations = \"keep\"\n", shares / 2));
        let plan = |machine: &Machine| Plan::new(&settings.request(&shape), machine, false).unwrap();
        let bytes = plan(&machine).balances()[0].needed - (32 << 20);
        let device = DeviceMemory::Own { bytes, addressing: Addressing::Managed };
        let plan = plan(&Machine { device, ..machine.clone() }).with_host_memory(MemoryPolicy::unbacked());
        assert!(plan.placement.rings.grads.is_some(), "{plan}");
        on_cpus(&plan, &shape, &Topology::this_machine(), Compared(&toml)).unwrap();
    }
}

#[test]
fn every_memory_class_of_segments_on_several_gpus_matches_allocations() {
    let (shape, common) =
        (tiny_llama(12, 1024, 276, true), "max-steps = 1\nthreads = 4\nseq-length = 64\nper-device-train-batch-size = 1\nbucket-mib = 4\n");
    let (mut sums, mut grads, mut weights) = (0, 0, 0);
    for mib in (900..2600).step_by(100) {
        let device = DeviceMemory::Own { bytes: mib << 20, addressing: Addressing::Managed };
        let machine = Machine { kind: DeviceKind::Gpu, device, ..Machine::cpu(8) };
        for (gpus, more) in [(2, "gradient-shares = 4\n"), (2, "gradient-shares = 8\ngradient-group = 4\n"), (4, "gradient-shares = 8\n")] {
            let toml = format!("{common}gpus = {gpus}\n{more}layer-order = \"segments:2,{}\"\n", mib / 100 % 3);
            let rings = planned_as_taken(&toml, &shape, &machine).placement.rings;
            sums += usize::from(rings.sums.is_some());
            grads += usize::from(rings.grads.is_some());
            weights += usize::from(rings.weights.is_some());
        }
    }
    assert!(sums > 0 && grads > 0, "{sums} {grads}");
    assert_eq!(weights > 0, cfg!(feature = "weight-flow"));
}
