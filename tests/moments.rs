//! Moments in 16 and in 8 bits compared with float32: the same runs, and the distance between their losses.

use crate::campaign::record;
use crate::program::{Workspace, program, run};
use serde_json::{Value, json};

/// Formats of moments: float32 first, then the packed ones.
const MOMENTS: [&str; 3] = ["float32", "bfloat16", "int8"];

/// Mean losses of the tenths of a run in each format.
type Losses = [Vec<f64>; MOMENTS.len()];

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
    let runs: Vec<Losses> = (1..=seeds).map(|seed| MOMENTS.map(|moments| train(moments, seed))).collect();
    let mean = |of: &dyn Fn(&Losses) -> f64| runs.iter().map(of).sum::<f64>() / seeds as f64;
    let means: Vec<f64> = (0..MOMENTS.len()).map(|at| mean(&|losses| last(&losses[at]))).collect();
    if requested.is_some() {
        let spread = mean(&|losses| (last(&losses[0]) - means[0]).powi(2)).sqrt();
        record("moments", summary(&flags, &runs, &means, spread));
    }
    for at in 1..MOMENTS.len() {
        assert!(runs.iter().all(|losses| losses[0] != losses[at] && losses[0][0] > 1.2 * last(&losses[0])), "{runs:?}");
        assert!(
            (means[at] / means[0] - 1.0).abs() < 0.02,
            "{} with moments in {}, {} with float32: {runs:?}",
            means[at],
            MOMENTS[at],
            means[0]
        );
    }
}

/// The last tenth of a run.
fn last(losses: &[f64]) -> f64 {
    *losses.last().unwrap()
}

/// The recorded line: losses of every seed and format, their means, and the largest difference of each packed format from float32.
fn summary(flags: &str, runs: &[Losses], means: &[f64], spread: f64) -> Value {
    let seeds = runs.iter().zip(1..).map(|(losses, seed): (_, u64)| {
        let mut line = json!({ "seed": seed });
        MOMENTS.iter().zip(losses).for_each(|(moments, losses)| line[*moments] = json!(losses));
        line
    });
    let mut line = json!({ "flags": flags, "losses_by_tenth": seeds.collect::<Vec<_>>(), "spread_of_seeds_float32": spread });
    for (at, moments) in MOMENTS.iter().enumerate() {
        line[format!("last_{moments}")] = json!(means[at]);
        if at > 0 {
            line[format!("largest_difference_of_a_seed_{moments}")] = json!(largest_difference(runs, at));
        }
    }
    line
}

fn largest_difference(runs: &[Losses], at: usize) -> f64 {
    runs.iter().map(|losses| (last(&losses[0]) - last(&losses[at])).abs()).fold(0.0, f64::max)
}
