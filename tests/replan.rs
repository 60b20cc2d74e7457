//! A run whose plan changes: buckets move between host and device, layers keep something else, slots are more or fewer, weights begin or
//! cease to stream. Not a bit of its results may change, and no byte of what it took stays behind.

use crate::planned;
use crate::program::{CONFIG, STEPS as RUN_STEPS, Workspace, run};
use crate::resume::await_line;
use crate::support::{Noise, digest, random_params, settings, start, tiny_llama};
use superoffload::internals::device::{CpuDevice, DeviceKind};
use superoffload::internals::engine::{Counts, Engine};
use superoffload::internals::model::ModelShape;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

const STEPS: u64 = 8;

/// What a case computes, whatever its plans.
struct Case {
    shape: ModelShape,
    lines: String,
    max_norm: &'static str,
}

impl Case {
    fn new(seed: u64) -> Self {
        let pick = |every: u64, count: usize| (seed / every) as usize % count;
        let max_norm = ["0.0", "1e-3", "1.7", "1e9"][pick(1, 4)];
        let (dtype, shares) = (["bfloat16", "float32", "float16"][pick(2, 3)], [1, 2][pick(5, 2)]);
        let fault = if seed.is_multiple_of(3) { "inject = [{step = 3, element = 5000, value = \"nan\"}]" } else { "" };
        let lines = format!(
            "dtype = \"{dtype}\"\nmoments = \"{}\"\nmax-grad-norm = {max_norm}\ngradient-shares = {shares}\ngradient-accumulation-steps = {}\n{fault}\n\
             seed = 5\nseq-length = 8\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1\nmax-steps = 99",
            ["float32", "bfloat16"][pick(7, 2)],
            shares * [1, 1, 2][pick(3, 3)],
        );
        Self { shape: tiny_llama([2, 12][pick(2, 2)], 32, [64, 300][pick(4, 2)], seed.is_multiple_of(2)), lines, max_norm }
    }

    fn plan(&self, lines: &str) -> Result<Plan> {
        Plan::new(&settings(&format!("{}\n{lines}", self.lines)), &self.shape, &Machine::cpu(2), false)
    }

    /// The digest and the losses of a run whose plan is `plan`, and before each step what `next` makes of it.
    fn run(&self, plan: &Plan, mut next: impl FnMut(&mut Engine<CpuDevice>)) -> (String, Vec<u32>, Counts) {
        let mut engine = start(plan, &self.shape, random_params(5));
        let (mut batches, mut counts, mut losses) = (Noise::new(5, 64), Counts::default(), Vec::new());
        for step in 0..STEPS {
            next(&mut engine);
            let report = engine.step(1e-2 / (1.0 + step as f64), &mut batches).unwrap();
            counts += report.counts;
            losses.push(report.loss.to_bits());
        }
        assert_eq!((engine.train_step(), engine.optimizer_step() < STEPS), (STEPS, counts.skipped > 0));
        (digest(&mut engine), losses, counts)
    }
}

/// Settings that may change between two steps, drawn from `noise`.
fn places(noise: &mut Noise, strategy: &str) -> String {
    let mut one_of = |count: i32| (noise.next() % count) as usize;
    let resident = if cfg!(feature = "repartition") && strategy == "superoffload" { [0, 1, 2, 5, 99][one_of(5)] } else { 0 };
    let activations = ["auto", "keep", "recompute-cheap", "recompute-block", "host"][one_of(5)];
    let weights =
        if cfg!(feature = "weight-flow") && strategy != "no-offload" && resident < 3 { ["auto", "flow"][one_of(2)] } else { "auto" };
    format!("resident-buckets = {resident}\nactivations = \"{activations}\"\nslots = {}\nweights = \"{weights}\"", 1 + one_of(6))
}

#[test]
fn plans_that_change_between_steps_change_no_bit() {
    let (mut moved, mut speculated, mut skipped) = ([0; 4], 0, 0);
    for seed in 0..60u64 {
        let case = Case::new(seed);
        let (want, losses, _) = case.run(&case.plan("strategy = \"no-offload\"\nthreads = 1").unwrap(), |_| ());
        let strategy = ["superoffload", "superoffload", "zero-offload", "superoffload", "no-offload"][seed as usize % 5];
        let without = ["", "\"adaptive\"", "\"stv\"", "\"adaptive\", \"deadline-order\""][seed as usize / 3 % 4];
        let cast = if cfg!(feature = "superchip-cast") && seed % 7 == 0 { "device" } else { "host" };
        let adversary = if seed % 4 < 3 { format!("adversary = {seed}\ndevice = \"cpu\"") } else { String::new() };
        let fixed = format!(
            "strategy = \"{strategy}\"\nthreads = {}\nbucket-mib = {}\ncast = \"{cast}\"\nwithout = [{without}]\n{adversary}",
            1 + seed % 3,
            [0.0078, 0.0156, 0.03][seed as usize % 3],
        );
        let mut noise = Noise::new(seed, 1 << 30);
        // Streamed weights and casts on the device exclude each other, and few layers need no ring.
        let mut draw = || loop {
            if let Ok(plan) = case.plan(&format!("{fixed}\n{}", places(&mut noise, strategy))) {
                return plan;
            }
        };
        let (first, mut steps) = (draw(), Noise::new(seed + 7, 4));
        let (have, have_losses, counts) = case.run(&first, |engine| {
            if steps.next() < 2 {
                let (plan, before) = (draw(), engine.plan().clone());
                assert!(engine.replan(plan.clone()).unwrap().is_none());
                planned::check(engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{wrong}, after\n{before}"));
                let of = |plan: &Plan| {
                    let policies = plan.layer_policies.iter().map(|policy| *policy as usize).sum::<usize>();
                    [plan.layout.offloaded(), policies, plan.param_slots, usize::from(plan.weight_ring.is_some())]
                };
                let (before, after) = (of(&before), of(&plan));
                (0..4).for_each(|what| moved[what] += usize::from(before[what] != after[what]));
            }
        });
        assert_eq!((&have, &have_losses), (&want, &losses), "seed {seed}, clip above {}: {fixed}", case.max_norm);
        (speculated, skipped) = (speculated + counts.speculated, skipped + counts.skipped);
    }
    let [resident, policies, slots, streamed] = moved;
    assert!(policies > 20 && slots > 20 && skipped > 0, "{moved:?}");
    assert_eq!((resident > 20, streamed > 20), (cfg!(feature = "repartition"), cfg!(feature = "weight-flow")), "{moved:?}");
    assert_eq!(speculated > 0, cfg!(feature = "stv"));
}

/// Buckets go to the device and come back, and what refused them is said.
#[cfg(feature = "repartition")]
#[test]
fn a_plan_without_memory_for_it_keeps_the_old_one() {
    let case = Case::new(2);
    let plan = |places: &str| case.plan(&format!("bucket-mib = 0.0156\nthreads = 2\n{places}")).unwrap();
    let (small, large) = (plan("resident-buckets = 1\nslots = 2"), plan("resident-buckets = 5\nslots = 3"));
    let (want, losses, _) = case.run(&small, |_| ());
    for (from, to) in [(&small, &large), (&large, &small)] {
        let too_many = (1 << 58) / to.layout.bucket_elems();
        for refused in [Plan { grad_slots: too_many, ..to.clone() }, Plan { param_slots: too_many, ..to.clone() }] {
            let (have, have_losses, _) = case.run(from, |engine| {
                let why = engine.replan(refused.clone()).unwrap().expect("more memory than there is").to_string();
                assert!(why.contains("slots") && why.contains("TiB"), "{why}");
                assert_eq!(engine.plan().layout, from.layout);
                planned::check(engine, DeviceKind::Cpu).unwrap();
            });
            assert_eq!((have, have_losses), (want.clone(), losses.clone()));
        }
    }
}

/// Flags of a run that changes its plan to random places at random steps.
const RANDOM: [&str; 2] = ["--replan", "random"];

/// Its metrics, of which none is missing, and how many of its steps were the first by another plan.
fn moves(workspace: &Workspace, out: &str) -> usize {
    let metrics = workspace.metrics(out);
    assert_eq!(metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), Vec::from_iter(1..=RUN_STEPS), "{out}");
    metrics.iter().filter(|line| line["replan_ms"].as_f64().unwrap() > 0.0).count()
}

#[test]
fn a_run_whose_plan_changes_ends_with_the_same_bits_also_after_kill_9() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 12"));
    let (mut all, mut resumed) = (0, 0);
    for (name, flags) in [
        ("plain", &["--bucket-mib", "0.002"][..]),
        ("adversary", &["--adversary", "3", "--device", "cpu"]),
        ("clipped", &["--max-grad-norm", "0.001", "--gradient-accumulation-steps", "2"]),
        ("zero", &["--strategy", "zero-offload", "--dtype", "float16"]),
    ] {
        let kept = run(&mut workspace.train("kept", &[flags, &["--replan", "off"]].concat()));
        assert_eq!(moves(&workspace, "kept"), 0);
        let outcome = run(&mut workspace.train(name, &[flags, &RANDOM].concat()));
        assert_eq!(outcome.digest(), kept.digest(), "{name}: {outcome:?}");
        let moved = moves(&workspace, name);
        assert_eq!(outcome.stdout.matches(": another plan in ").count(), moved, "{outcome:?}");
        let trace = std::fs::read(workspace.path(name).join("trace.json")).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
        let spans = trace["traceEvents"].as_array().unwrap().iter().filter(|span| span["name"] == "replan").count();
        assert_eq!(spans, moved, "{name}");
        all += moved;
        // Ended in the middle, and gone on with: the plan of the start, and then others again.
        let killed = format!("{name}-killed");
        let mut child = workspace.train(&killed, &[flags, &RANDOM].concat()).spawn().unwrap();
        await_line(&mut child, "another plan");
        child.kill().unwrap();
        child.wait().unwrap();
        let outcome = run(&mut workspace.resume(&killed, &[flags, &RANDOM].concat()));
        assert_eq!(outcome.digest(), kept.digest(), "{name}, killed: {outcome:?}");
        resumed += usize::from(outcome.stdout.contains("another plan"));
        moves(&workspace, &killed);
        std::fs::remove_dir_all(workspace.path("kept")).unwrap();
    }
    assert!(all > 8 && resumed > 0, "{all} moves, {resumed} runs with some after a kill");
}
