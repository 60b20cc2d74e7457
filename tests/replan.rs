//! Runs whose plan changes: buckets move between host and device, layers change policies, the number of slots changes, weights start or
//! stop to stream. No bit of the results may change, and no memory may leak.

use crate::planned;
use crate::program::{CONFIG, STEPS as RUN_STEPS, Workspace, run};
use crate::resume::await_line;
use crate::support::{Noise, digest, grad_ring, load, params_with_ties, settings, tiny_llama};
use superoffload::internals::device::{DeviceKind, Kernels};
use superoffload::internals::engine::{Counts, Engine};
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::model::{ModelShape, TensorTable};
use superoffload::internals::optim::BLOCK;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

const STEPS: u64 = 8;

/// A computation that is independent of its plans.
struct Case {
    shape: ModelShape,
    lines: String,
    max_norm: &'static str,
    micro_batches: usize,
}

/// Digest, losses, and counts of bucket steps.
type Run = (String, Vec<u32>, Counts);

/// The steps of a run, with changes of plan before some of them.
struct Steps<'a> {
    next: &'a mut dyn FnMut(&Plan) -> Option<Plan>,
    /// The expected error, if all ranks must reject the plan.
    refusal: Option<&'a str>,
}

impl UseEngine for Steps<'_> {
    type Output = Run;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Run> {
        load(&mut engine, params_with_ties(5));
        let (mut batches, mut counts, mut losses) = (Noise::new(5, 64), Counts::default(), Vec::new());
        for step in 0..STEPS {
            if let Some(plan) = (self.next)(engine.plan()) {
                self.go_over(&mut engine, plan)?;
            }
            let report = engine.step(1e-2 / (1.0 + step as f64), &mut batches)?;
            counts += report.counts;
            losses.push(report.loss.to_bits());
        }
        assert_eq!((engine.train_step(), engine.optimizer_step() < STEPS), (STEPS, counts.skipped > 0));
        Ok((digest(&mut engine), losses, counts))
    }
}

impl Steps<'_> {
    fn go_over<D: Kernels>(&self, engine: &mut Engine<D>, plan: Plan) -> Result<()> {
        let before = engine.plan().clone();
        let kept = engine.replan(plan.clone())?;
        assert_eq!(kept.is_some(), self.refusal.is_some(), "{kept:?}");
        if let (Some(kept), Some(refusal)) = (kept, self.refusal) {
            let why = kept.to_string();
            assert!(why.contains(refusal), "{why}");
            assert_eq!(engine.plan().placement.layout, before.placement.layout);
        }
        // If all slices have equal lengths, each rank has allocated the planned memory.
        let blocks = |bucket| plan.placement.layout.range(bucket).len() / BLOCK;
        if (0..plan.placement.layout.count()).all(|bucket| blocks(bucket).is_multiple_of(plan.site.ranks))
            && engine.plan().placement.rings.grads.is_none()
            && !engine.plan().placement.rings.sums_on_host
        {
            planned::check(engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{wrong}, after\n{before}"));
        }
        Ok(())
    }
}

impl Case {
    fn new(seed: u64) -> Self {
        let pick = |every: u64, count: usize| (seed / every) as usize % count;
        let max_norm = ["0.0", "1e-3", "1.7", "1e9"][pick(1, 4)];
        let shape = tiny_llama([2, 12][pick(2, 2)], 32, [64, 300][pick(4, 2)], seed.is_multiple_of(2));
        let (dtype, partial_sums) = (["bfloat16", "float32", "float16"][pick(2, 3)], [1, 2][pick(5, 2)]);
        Self::of(seed, shape, (max_norm, dtype), (partial_sums, [1, 1, 2][pick(3, 3)]))
    }

    /// A case with this number of shares a step and of micro-batches a share.
    fn of(seed: u64, shape: ModelShape, (max_norm, dtype): (&'static str, &str), (partial_sums, per_partial_sum): (usize, usize)) -> Self {
        let fault = if seed.is_multiple_of(3) { "inject = [{step = 3, element = 5000, value = \"nan\"}]" } else { "" };
        let lines = format!(
            "dtype = \"{dtype}\"\nmoments = \"{}\"\nmax-grad-norm = {max_norm}\ngradient-shares = {partial_sums}\n{fault}\n\
             seed = 5\nseq-length = 8\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1\nmax-steps = 99",
            ["float32", "bfloat16", "int8"][(seed / 7) as usize % 3],
        );
        Self { shape, lines, max_norm, micro_batches: partial_sums * per_partial_sum }
    }

    /// Storage of master weights on the device, split where the format and the strategy permit it, but for one seed in four.
    fn masters(&self, seed: u64, strategy: &str) -> &'static str {
        let is_stepped_there = strategy == "no-offload" || cfg!(feature = "repartition") && strategy == "superoffload";
        let may_split = is_stepped_there && self.lines.starts_with("dtype = \"bfloat16\"");
        if may_split && !seed.is_multiple_of(4) { "masters = \"split\"" } else { "" }
    }

    fn plan(&self, lines: &str) -> Result<Plan> {
        self.plan_on(1, lines)
    }

    fn plan_on(&self, ranks: usize, lines: &str) -> Result<Plan> {
        let devices = format!("gpus = {ranks}\ngradient-accumulation-steps = {}", self.micro_batches / ranks);
        let request = settings(&format!("{}\n{devices}\n{lines}", self.lines)).request(&self.shape);
        Plan::new(&request, &Machine::cpu(2), false)
    }

    /// Runs the case with `plan` first. Before each step `next` may replace the plan.
    fn run(&self, plan: &Plan, mut next: impl FnMut(&Plan) -> Option<Plan>) -> Run {
        let steps = Steps { next: &mut next, refusal: None };
        on_cpus(plan, &self.shape, &Topology::this_machine(), steps).unwrap_or_else(|error| panic!("{error}: {}", self.lines))
    }

    /// The reference: every step on one device, sequentially.
    fn reference(&self) -> Run {
        self.run(&self.plan("strategy = \"no-offload\"\nthreads = 1").unwrap(), |_| None)
    }
}

/// Differences of two plans in offloaded buckets, policies, slots, weight ring and gradient ring.
fn differences(a: &Plan, b: &Plan) -> [usize; 5] {
    let of = |plan: &Plan| {
        let policies = plan.placement.layer_policies.iter().map(|policy| *policy as usize).sum::<usize>();
        let rings = [plan.placement.rings.weights, plan.placement.rings.grads].map(|ring| usize::from(ring.is_some()));
        [plan.placement.layout.offloaded(), policies, plan.placement.param_slots, rings[0], rings[1]]
    };
    let (a, b) = (of(a), of(b));
    std::array::from_fn(|place| usize::from(a[place] != b[place]))
}

/// Placement settings, drawn from `noise`. With `cut` the layers may be cut into segments.
fn places(noise: &mut Noise, strategy: &str, streamed: &str, cut: bool) -> String {
    let mut one_of = |count: i32| (noise.next() % count) as usize;
    let resident = if cfg!(feature = "repartition") && strategy == "superoffload" { [0, 1, 2, 5, 99][one_of(5)] } else { 0 };
    let order = if cut { ["auto", "whole", "segments:1,1", "segments:2,0", "segments:3,2"][one_of(5)] } else { "auto" };
    let policies = if order.starts_with("segments") { 4 } else { 6 };
    let activations = ["auto", "keep", "recompute-cheap", "recompute-block", "host-attention", "host"][one_of(policies)];
    let weights =
        if cfg!(feature = "weight-flow") && strategy != "no-offload" && resident < 3 { ["auto", streamed][one_of(2)] } else { "auto" };
    let slots = 1 + one_of(6);
    format!(
        "resident-buckets = {resident}\nactivations = \"{activations}\"\nslots = {slots}\nweights = \"{weights}\"\nlayer-order = \"{order}\""
    )
}

#[test]
fn plans_that_change_between_steps_change_no_bit() {
    let (mut moved, mut speculated, mut skipped) = ([0; 5], 0, 0);
    for seed in 0..60u64 {
        let case = Case::new(seed);
        let (want, losses, _) = case.reference();
        let strategy = ["superoffload", "superoffload", "zero-offload", "superoffload", "no-offload"][seed as usize % 5];
        let without = ["", "\"adaptive\"", "\"stv\"", "\"adaptive\", \"deadline-order\""][seed as usize / 3 % 4];
        let cast = if cfg!(feature = "superchip-cast") && seed % 7 == 0 { "device" } else { "host" };
        let adversary = if seed % 4 < 3 { format!("adversary = {seed}\ndevice = \"cpu\"") } else { String::new() };
        let fixed = format!(
            "strategy = \"{strategy}\"\n{}\nthreads = {}\nbucket-mib = {}\ncast = \"{cast}\"\nwithout = [{without}]\n{adversary}",
            case.masters(seed, strategy),
            1 + seed % 3,
            [0.0078, 0.0156, 0.03][seed as usize % 3],
        );
        let mut noise = Noise::new(seed, 1 << 30);
        // Rows of a tied embedding leave early in the usual order alone, and a change of plan keeps the buckets that leave early.
        let cut = !case.shape.tied;
        // Streamed weights and casts on the device exclude each other, and a model with few layers needs no ring.
        let mut draw = || loop {
            // Split masters of the host cannot move.
            if let Ok(mut plan) = case.plan(&format!("{fixed}\n{}", places(&mut noise, strategy, "flow", cut)))
                && !plan.placement.rings.split_masters
            {
                plan.placement.rings.sums_on_host = plan.recipe.step.shares > 1
                    && plan.placement.segments.is_whole()
                    && plan.placement.layout.offloaded() > 0
                    && noise.next() % 2 == 0;
                return plan;
            }
        };
        let (first, mut steps) = (draw(), Noise::new(seed + 7, 4));
        let (have, have_losses, counts) = case.run(&first, |before| {
            let plan = (steps.next() < 2).then(&mut draw)?;
            moved.iter_mut().zip(differences(before, &plan)).for_each(|(moved, differs)| *moved += differs);
            Some(plan)
        });
        assert_eq!((&have, &have_losses), (&want, &losses), "seed {seed}, clip above {}: {fixed}", case.max_norm);
        (speculated, skipped) = (speculated + counts.speculated, skipped + counts.skipped);
    }
    let [resident, policies, slots, streamed, _] = moved;
    assert!(policies > 20 && slots > 20 && skipped > 0, "{moved:?}");
    assert_eq!((resident > 20, streamed > 20), (cfg!(feature = "repartition"), cfg!(feature = "weight-flow")), "{moved:?}");
    assert_eq!(speculated > 0, cfg!(feature = "stv"));
}

/// Two, three and four ranks in any relative order. Rings, slices and slots of all ranks change at one step. Reading a peer's old memory,
/// or reading it too early, would change bits.
#[test]
fn ranks_go_over_to_another_plan_at_one_step_and_change_no_bit() {
    let (mut moved, mut reordered, mut speculated, mut skipped) = ([0; 5], 0, 0, 0);
    for seed in 0..crate::sweep::sweep(20, 36u64) {
        let pick = |every: u64, count: usize| (seed / every) as usize % count;
        let (ranks, rounds, per_partial_sum) = ([2, 3, 4][pick(1, 3)], [1, 2][pick(3, 2)], [1, 2][pick(6, 2)]);
        let kind = (["0.0", "1e-3", "1.7", "1e9"][pick(1, 4)], ["bfloat16", "float32"][pick(2, 2)]);
        let case = Case::of(seed, tiny_llama(12, 32, 64, seed.is_multiple_of(2)), kind, (ranks * rounds, per_partial_sum));
        let (want, losses, _) = case.reference();
        let strategy = ["superoffload", "superoffload", "zero-offload", "superoffload", "no-offload"][pick(1, 5)];
        let without = ["", "\"adaptive\"", "\"stv\""][pick(3, 3)];
        let adversary = if seed % 4 < 3 { format!("adversary = {seed}\ndevice = \"cpu\"") } else { String::new() };
        let masters = case.masters(seed, strategy);
        let fixed =
            format!("strategy = \"{strategy}\"\n{masters}\nthreads = 4\nbucket-mib = 0.0703125\nwithout = [{without}]\n{adversary}");
        let (mut noise, table) = (Noise::new(seed, 1 << 30), TensorTable::new(&case.shape));
        let mut draw = || loop {
            let places = places(&mut noise, strategy, "sharded", true);
            let is_ringed = per_partial_sum == 1 && noise.next() % 2 == 0;
            if let Ok(mut plan) = case.plan_on(ranks, &format!("{fixed}\n{places}")) {
                plan.placement.rings.grads = grad_ring(&plan, &table).filter(|_| is_ringed && plan.placement.segments.is_whole());
                return plan;
            }
        };
        let (first, mut steps) = (draw(), Noise::new(seed + 7, 4));
        let (have, have_losses, counts) = case.run(&first, |before| {
            let plan = (steps.next() < 2).then(&mut draw)?;
            moved.iter_mut().zip(differences(before, &plan)).for_each(|(moved, differs)| *moved += differs);
            reordered += usize::from(before.placement.segments != plan.placement.segments);
            Some(plan)
        });
        assert_eq!((&have, &have_losses), (&want, &losses), "seed {seed}, {ranks} ranks, clip above {}: {fixed}", case.max_norm);
        (speculated, skipped) = (speculated + counts.speculated, skipped + counts.skipped);
    }
    let [resident, policies, slots, sharded, ringed] = moved;
    assert!(policies > 20 && slots > 20 && ringed > 10 && reordered > 10 && skipped > 0, "{moved:?} {reordered}");
    assert_eq!((resident > 10, sharded > 10), (cfg!(feature = "repartition"), cfg!(feature = "weight-flow")), "{moved:?}");
    assert_eq!(speculated > 0, cfg!(feature = "stv"));
}

/// Buckets move to the device and return, and the reason of a rejected plan is reported, on one rank and on two.
#[cfg(feature = "repartition")]
#[test]
fn a_plan_without_memory_for_it_keeps_the_old_one() {
    let case = Case::of(2, tiny_llama(12, 32, 64, true), ("1.7", "bfloat16"), (2, 1));
    let (want, losses, _) = case.reference();
    for (ranks, masters) in [(1, "float32"), (2, "float32"), (1, "split"), (2, "split")] {
        let fixed = format!("masters = \"{masters}\"\nbucket-mib = 0.0156\nthreads = 2");
        let plan = |places: &str| case.plan_on(ranks, &format!("{fixed}\n{places}")).unwrap();
        let (small, large) = (plan("resident-buckets = 1\nslots = 2"), plan("resident-buckets = 5\nslots = 3"));
        for (from, to) in [(&small, &large), (&large, &small)] {
            let too_many = (1 << 58) / to.placement.layout.bucket_elems();
            let [mut grads, mut params] = [to.clone(), to.clone()];
            (grads.placement.grad_slots, params.placement.param_slots) = (too_many, too_many);
            for refused in [grads, params] {
                let mut next = |_: &Plan| Some(refused.clone());
                let steps = Steps { next: &mut next, refusal: Some("TiB of host memory for ") };
                let (have, have_losses, _) = on_cpus(from, &case.shape, &Topology::this_machine(), steps).unwrap();
                assert_eq!((&have, &have_losses), (&want, &losses));
            }
        }
    }
}

/// Flags of a run that changes to random placements at random steps.
const RANDOM: [&str; 2] = ["--replan", "random"];

/// Checks that no metrics are missing. Returns the number of steps that were the first with another plan.
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
        ("split", &["--bucket-mib", "0.002", "--masters", if cfg!(feature = "repartition") { "split" } else { "float32" }]),
        ("adversary", &["--adversary", "3", "--device", "cpu"]),
        ("clipped", &["--max-grad-norm", "0.001", "--gradient-accumulation-steps", "2"]),
        ("zero", &["--strategy", "zero-offload", "--dtype", "float16"]),
        ("ranks", &["--gpus", "2", "--gradient-shares", "2", "--bucket-mib", "0.0703125"]),
        ("ranks-adversary", &["--gpus", "3", "--gradient-shares", "3", "--bucket-mib", "0.0703125", "--adversary", "5", "--device", "cpu"]),
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
        // The run is killed and resumed: it starts with the initial plan and changes it again.
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

/// One of two ranks fails or panics after both have dropped their peer mappings. Both end at once, and the run continues from its last
/// checkpoint.
#[test]
fn a_rank_that_fails_in_a_move_ends_all_and_loses_no_step_that_was_saved() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 12"));
    let flags = ["--gpus", "2", "--gradient-shares", "2", "--bucket-mib", "0.0703125"];
    let kept = run(&mut workspace.train("kept", &[&flags[..], &["--replan", "off"]].concat()));
    for (rank, kind) in [(0, "error"), (1, "error"), (1, "panic")] {
        let faults: Vec<_> =
            (4..=RUN_STEPS + 1).map(|step| format!("{{rank = {rank}, step = {step}, phase = 'move', kind = '{kind}'}}")).collect();
        workspace.settings(&format!("faults = [{}]", faults.join(", ")));
        let out = format!("rank-{rank}-{kind}");
        let outcome = run(&mut workspace.train(&out, &[&flags[..], &RANDOM].concat()));
        assert!(outcome.code == 1 && outcome.stderr.contains(&format!("error: rank {rank}: ")), "{outcome:?}");
        workspace.settings("");
        let outcome = run(&mut workspace.resume(&out, &[&flags[..], &RANDOM].concat()));
        assert_eq!(outcome.digest(), kept.digest(), "rank {rank}, {kind}: {outcome:?}");
    }
}
