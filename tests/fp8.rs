//! FP8 products. Placements, layer policies and strategies change no bit, NaN reaches the verdict, and a checkpoint continues only with its
//! own recipe.

use crate::program::{Workspace, program, run};
use crate::support::{Noise, digest, random_params, read_params, settings, start, tiny_llama};
use superoffload::Plan;
use superoffload::internals::engine::{Engine, Verdict};
use superoffload::internals::model::TensorSpec;
use superoffload::internals::planner::Machine;

const STEPS: usize = 5;
const COMMON: &str = "seq-length = 8\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1\nmax-steps = 99\nseed = 3\n\
                      max-grad-norm = 1.7\ngradient-accumulation-steps = 2\n";
const FP8: &str = "matmul-dtype = \"fp8\"\n";

/// Random weights on a scale that varies between layers, so that a scale of the wrong layer is detected.
fn uneven(spec: &TensorSpec) -> Vec<f32> {
    let layer = spec.name.split('.').nth(1).and_then(|layer| layer.parse::<usize>().ok());
    let factor = [1.0, 5.0, 0.3][layer.unwrap_or(0) % 3];
    random_params(3)(spec).into_iter().map(|x| x * factor).collect()
}

/// Digest and losses of a model with twelve layers.
fn train(lines: &str) -> (String, Vec<u32>) {
    let shape = tiny_llama(12, 32, 64, true);
    let plan = Plan::new(&settings(&format!("{COMMON}{lines}")).request(&shape), &Machine::cpu(2), false).unwrap();
    let mut engine = start(&plan, &shape, uneven);
    let mut batches = Noise::new(3, 64);
    let losses = (0..STEPS).map(|_| engine.step(1e-2, &mut batches).unwrap().loss.to_bits()).collect();
    (digest(&mut engine), losses)
}

#[test]
fn neither_places_nor_policies_nor_strategies_change_a_bit() {
    let want = train(&format!("{FP8}strategy = \"no-offload\"\nthreads = 1\nactivations = \"keep\"\n"));
    assert_ne!(train("strategy = \"no-offload\"\nactivations = \"keep\"\n"), want, "8 bits are fewer than 16");
    let streams = if cfg!(feature = "weight-flow") { "weights = \"flow\"\n" } else { "" };
    for (seed, activations) in ["keep", "recompute-cheap", "recompute-block", "host-attention", "host"].into_iter().enumerate() {
        for way in [String::from("strategy = \"zero-offload\"\n"), format!("strategy = \"superoffload\"\n{streams}")] {
            let adversary = format!("device = \"cpu\"\nadversary = {seed}\nbucket-mib = 0.0156\nactivations = \"{activations}\"\n");
            assert!(train(&format!("{FP8}{way}{adversary}")) == want, "{way}{adversary}");
        }
    }
}

/// The steps are large enough for the largest weights to pass powers of two. The scales that an engine maintains over steps must equal
/// those of a new engine with the present weights, with clipped steps, streamed weights and any schedule.
#[test]
fn scales_of_weights_are_those_of_each_step_and_evaluation() {
    let shape = tiny_llama(12, 32, 64, true);
    let plan = |lines: &str| Plan::new(&settings(&format!("{COMMON}{FP8}{lines}")).request(&shape), &Machine::cpu(2), false).unwrap();
    let plain = plan("strategy = \"no-offload\"\nthreads = 1\n");
    let found = |engine: &mut Engine<_>, at: u64| {
        let evaluated = engine.evaluate(&mut Noise::new(100 + at, 64)).unwrap().loss;
        let report = engine.step(0.3, &mut Noise::new(at, 64)).unwrap();
        (evaluated.to_bits(), report.loss.to_bits(), report.verdict)
    };
    let mut engine = start(&plain, &shape, uneven);
    let want: Vec<_> = (0..STEPS as u64)
        .map(|at| {
            let params = read_params(&mut engine);
            let (evaluated, loss, verdict) = found(&mut start(&plain, &shape, |spec| params[spec.range()].to_vec()), at);
            let after = found(&mut engine, at);
            assert_eq!((after.0, after.1), (evaluated, loss), "step {at}, {verdict:?}");
            after
        })
        .collect();
    assert!(want.iter().all(|(_, loss, _)| f32::from_bits(*loss).is_finite()), "{want:?}");
    assert!(want.iter().any(|(.., verdict)| matches!(verdict, Verdict::Clip(_))), "{want:?}");
    let streams = if cfg!(feature = "weight-flow") { "weights = \"flow\"\n" } else { "" };
    for seed in 0..6 {
        for way in ["strategy = \"zero-offload\"\n", "strategy = \"superoffload\"\n", &format!("strategy = \"superoffload\"\n{streams}")] {
            let activations = ["keep", "recompute-block", "host"][seed % 3];
            let lines = format!("{way}device = \"cpu\"\nadversary = {seed}\nbucket-mib = 0.0156\nactivations = \"{activations}\"\n");
            let mut engine = start(&plan(&lines), &shape, uneven);
            assert_eq!((0..STEPS as u64).map(|at| found(&mut engine, at)).collect::<Vec<_>>(), want, "{lines}");
        }
    }
}

/// Outputs of the attention library need a pass in each micro-batch, and weights one in each step. Kernels find all other scales.
#[test]
fn passes_over_weights_are_of_steps_and_not_of_micro_batches() {
    let passes = |accumulation: usize, steps: usize| {
        let workspace = Workspace::new();
        let trace = workspace.path("trace.json");
        let task = format!(
            "simulate --json --model-config=llama-8b --hardware=h200-pcie5 --seq-length=1024 --per-device-train-batch-size=1 \
             --matmul-dtype=fp8 --activations=keep --resident-buckets=0 --warmup=0 --steps={steps} --gradient-accumulation-steps={accumulation}"
        );
        let outcome = run(program(&[]).args(task.split_whitespace()).arg("--trace").arg(&trace));
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let events: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
        events["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "abs_max_scale").count()
    };
    let (layers, weights, libraries) = (32, 4, 2);
    for (accumulation, steps) in [(1, 1), (3, 2), (3, 1)].into_iter().take(crate::sweep::sweep(2, 3)) {
        assert_eq!(passes(accumulation, steps), layers * steps * (weights + accumulation * libraries), "{accumulation} x {steps}");
    }
}

/// Random weights, with the tensor `name` modified by `change`.
fn with_weights<'a>(name: &'a str, change: impl Fn(&mut [f32]) + 'a) -> impl Fn(&TensorSpec) -> Vec<f32> + 'a {
    move |spec| {
        let mut params = random_params(3)(spec);
        if spec.name.contains(name) {
            change(&mut params);
        }
        params
    }
}

/// The loss and verdict of a step with these weights.
fn verdict(params: impl Fn(&TensorSpec) -> Vec<f32>) -> (f32, Verdict) {
    let shape = tiny_llama(2, 32, 64, true);
    let plan = Plan::new(&settings(&format!("{COMMON}{FP8}")).request(&shape), &Machine::cpu(2), false).unwrap();
    let report = start(&plan, &shape, params).step(1e-2, &mut Noise::new(3, 64)).unwrap();
    (report.loss, report.verdict)
}

#[test]
fn a_matrix_of_zeros_trains_and_one_that_is_no_number_skips_the_step() {
    for name in ["attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"] {
        let (loss, found) = verdict(with_weights(name, |params| params.fill(0.0)));
        assert!(loss.is_finite() && found != Verdict::SkipNonFinite, "{name}: {loss} {found:?}");
        for wrong in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let (loss, found) = verdict(with_weights(name, |params| params[7] = wrong));
            assert!(found == Verdict::SkipNonFinite, "{name} {wrong}: {loss} {found:?}");
        }
    }
}

#[test]
fn a_run_is_resumed_in_fp8_and_in_nothing_else_unasked() {
    let workspace = Workspace::new();
    let fp8 = ["--matmul-dtype", "fp8"];
    let digest = run(&mut workspace.train("whole", &fp8)).digest().to_string();
    assert_ne!(run(&mut workspace.train("plain", &[])).digest(), digest);
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    assert_eq!(run(&mut workspace.resume("resumed", &fp8)).digest(), digest);
    workspace.copy_checkpoints("whole", "refused", &[6]);
    let refused = run(&mut workspace.resume("refused", &[]));
    assert!(
        refused.code == 2 && refused.stderr.contains("matmul was \"fp8: E4M3") && refused.stderr.contains("--allow-changed numerics"),
        "{refused:?}"
    );
    let accepted = run(&mut workspace.resume("refused", &["--allow-changed", "numerics"]));
    assert!(accepted.code == 0 && accepted.digest() != digest, "{accepted:?}");
}

#[test]
fn unsupported_fp8_products_are_refused_with_the_reason() {
    let workspace = Workspace::new();
    let refused = |flags: &[&str]| {
        let outcome = run(&mut workspace.train("refused", &[&["--matmul-dtype", "fp8"], flags].concat()));
        assert_eq!(outcome.code, 2, "{outcome:?}");
        outcome.stderr
    };
    assert!(refused(&["--dtype", "float32"]).contains("--matmul-dtype fp8: needs --dtype bfloat16"));
    assert!(refused(&["--dtype", "float16"]).contains("needs --dtype bfloat16"));
    let odd = refused(&["--seq-length", "9", "--per-device-train-batch-size", "1"]);
    assert!(odd.contains("a micro-batch of 9 tokens is not a multiple of 16; change --per-device-train-batch-size"), "{odd}");
}
