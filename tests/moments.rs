//! Moments in bfloat16 compared with float32: the same runs, and the distance between their losses.

use crate::campaign::record;
use crate::program::{Workspace, program, run};
use serde_json::{Value, json};

const MOMENTS: [&str; 2] = ["float32", "bfloat16"];

/// Mean losses of the tenths of a run.
fn tenths(metrics: &[Value]) -> Vec<f64> {
    let losses: Vec<f64> = metrics.iter().filter_map(|line| line.get("verdict").and(line["loss"].as_f64())).collect();
    losses.chunks(losses.len().div_ceil(10)).map(|part| part.iter().sum::<f64>() / part.len() as f64).collect()
}

/// `SUPEROFFLOAD_SEEDS=3 SUPEROFFLOAD_FLAGS="--max-steps 300" cargo test --release --test main packed_moments_learn` trains the built-in
/// model, or the model of the flags, from that many seeds and records the result. Otherwise a tiny model is trained from one seed.
#[test]
fn packed_moments_learn_as_those_in_float32_do() {
    let requested: Option<u64> = std::env::var("SUPEROFFLOAD_SEEDS").ok().map(|n| n.parse().unwrap());
    let flags = std::env::var("SUPEROFFLOAD_FLAGS").unwrap_or_default();
    let (workspace, seeds) = (Workspace::new(), requested.unwrap_or(1));
    let train = |moments: &str, seed: u64| {
        let (out, seed) = (format!("{moments}-{seed}"), seed.to_string());
        let own = ["--moments", moments, "--seed", &seed, "--save-steps", "1000000"];
        let outcome = if requested.is_some() {
            run(program(&["train", "--output-dir"]).arg(workspace.path(&out)).args(own).args(flags.split_whitespace()))
        } else {
            run(&mut workspace.train(&out, &[&own[..], &["--max-steps", "60", "--learning-rate", "3e-3"]].concat()))
        };
        assert_eq!(outcome.code, 0, "{outcome:?}");
        tenths(&workspace.metrics(&out))
    };
    let runs: Vec<_> = (1..=seeds).map(|seed| MOMENTS.map(|moments| train(moments, seed))).collect();
    let last = |losses: &Vec<f64>| *losses.last().unwrap();
    let mean = |of: &dyn Fn(&[Vec<f64>; 2]) -> f64| runs.iter().map(of).sum::<f64>() / seeds as f64;
    let [wide, packed] = [0, 1].map(|at| mean(&|pair| last(&pair[at])));
    if requested.is_some() {
        let pairs = runs.iter().zip(1..).map(|([wide, packed], seed): (_, u64)| json!({"seed": seed, "float32": wide, "bfloat16": packed}));
        let spread = mean(&|pair| (last(&pair[0]) - wide).powi(2)).sqrt();
        record(
            "moments",
            json!({"flags": flags, "losses_by_tenth": pairs.collect::<Vec<_>>(), "last_float32": wide, "last_bfloat16": packed,
            "spread_of_seeds_float32": spread, "largest_difference_of_a_seed": largest_difference(&runs)}),
        );
    }
    assert!(runs.iter().all(|[wide, packed]| wide != packed && wide[0] > 1.2 * last(wide)), "{runs:?}");
    assert!((packed / wide - 1.0).abs() < 0.02, "{packed} with moments in bfloat16, {wide} with float32: {runs:?}");
}

fn largest_difference(runs: &[[Vec<f64>; 2]]) -> f64 {
    let differences = runs.iter().map(|[wide, packed]| (wide.last().unwrap() - packed.last().unwrap()).abs());
    differences.fold(0.0, f64::max)
}
