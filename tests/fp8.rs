//! Products in FP8: where weights lie, what layers keep and who steps change no bit; what is no number reaches the verdict; and a
//! checkpoint goes on under its own recipe alone.

use crate::program::{Workspace, run};
use crate::support::{Noise, digest, random_params, settings, start, tiny_llama};
use superoffload::Plan;
use superoffload::internals::engine::Verdict;
use superoffload::internals::model::TensorSpec;
use superoffload::internals::planner::Machine;

const STEPS: usize = 5;
const COMMON: &str = "seq-length = 8\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1\nmax-steps = 99\nseed = 3\n\
                      max-grad-norm = 1.7\ngradient-accumulation-steps = 2\n";
const FP8: &str = "matmul-dtype = \"fp8\"\n";

/// Random weights, larger in some layers than in others, so that a scale of another layer shows.
fn uneven(spec: &TensorSpec) -> Vec<f32> {
    let layer = spec.name.split('.').nth(1).and_then(|layer| layer.parse::<usize>().ok());
    let factor = [1.0, 5.0, 0.3][layer.unwrap_or(0) % 3];
    random_params(3)(spec).into_iter().map(|x| x * factor).collect()
}

/// Digest and losses of a model of twelve layers.
fn train(lines: &str) -> (String, Vec<u32>) {
    let shape = tiny_llama(12, 32, 64, true);
    let plan = Plan::new(&settings(&format!("{COMMON}{lines}")), &shape, &Machine::cpu(2), false).unwrap();
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

/// The weights of a tensor as `change` makes them of random ones.
fn with_weights<'a>(name: &'a str, change: impl Fn(&mut [f32]) + 'a) -> impl Fn(&TensorSpec) -> Vec<f32> + 'a {
    move |spec| {
        let mut params = random_params(3)(spec);
        if spec.name.contains(name) {
            change(&mut params);
        }
        params
    }
}

/// The verdict on a step with these weights.
fn verdict(params: impl Fn(&TensorSpec) -> Vec<f32>) -> (f32, Verdict) {
    let shape = tiny_llama(2, 32, 64, true);
    let plan = Plan::new(&settings(&format!("{COMMON}{FP8}")), &shape, &Machine::cpu(2), false).unwrap();
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
fn what_cannot_be_computed_in_fp8_is_refused_with_the_reason() {
    let workspace = Workspace::new();
    let refused = |flags: &[&str]| {
        let outcome = run(&mut workspace.train("refused", &[&["--matmul-dtype", "fp8"], flags].concat()));
        assert_eq!(outcome.code, 2, "{outcome:?}");
        outcome.stderr
    };
    assert!(refused(&["--dtype", "float32"]).contains("--matmul-dtype fp8: allowed is only with --dtype bfloat16"));
    assert!(refused(&["--dtype", "float16"]).contains("only with --dtype bfloat16"));
    let odd = refused(&["--seq-length", "9", "--per-device-train-batch-size", "1"]);
    assert!(odd.contains("a micro-batch of 9 tokens is no multiple of 16; change --per-device-train-batch-size"), "{odd}");
}
