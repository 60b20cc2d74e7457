//! R23b: a long run that changes its plan after one step in three, in orders of an adversary.

use crate::harness::*;
use std::collections::HashMap;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R23b",
    what: "1,000 steps whose plan changes to random places at random steps, in orders chosen by an adversary, plain, clipped, in float16, with \
           accumulated gradients, without speculation and on two ranks: the digest of the run that keeps its plan",
    runs: 24,
    smoke: 1,
    start,
};

/// Variants of the training.
const KINDS: [(&str, &[&str]); 6] = [
    ("plain", &[]),
    ("clipped", &["--max-grad-norm", "0.3"]),
    ("float16", &["--dtype", "float16"]),
    ("accumulated", &["--gradient-accumulation-steps", "2"]),
    ("not speculated", &["--strategy", "zero-offload"]),
    ("two ranks", &["--gpus", "2", "--gradient-shares", "2", "--bucket-mib", "0.015625"]),
];

/// Minimum number of changes of plan per hundred steps.
const MOVES: usize = 20;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--replan"), || "this program has no --replan".into())?;
    // Enough layers and buckets for different placements.
    let config = std::fs::read_to_string(harness.path("model/config.json")).unwrap();
    harness.write("deep/config.json", config.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 12"));
    harness.settings("deep.toml", "deep", "data.txt", "bucket-mib = 0.002");
    let mut kept = HashMap::new();
    Ok(Box::new(move |harness, turn| {
        let (kind, flags) = KINDS[turn.index as usize % KINDS.len()];
        let steps = if harness.is_smoke { 30 } else { 1000 };
        let (digits, adversary) = (steps.to_string(), (1 + turn.index).to_string());
        turn.kind = format!("{kind}, {steps} steps");
        let run = |out: &str, more: &[&str]| {
            let steps = ["--max-steps", &digits, "--save-steps", &digits, "--logging-steps", &digits];
            harness.remove(out);
            harness.run(harness.train_by("deep.toml", out, &[&steps, flags, more].concat()))
        };
        if !kept.contains_key(kind) {
            kept.insert(kind, run("kept", &["--replan", "off"]).digest()?);
        }
        let outcome = run("moved", &["--replan", "random", "--adversary", &adversary]);
        outcome.expect_digest(&kept[kind])?;
        let moves = outcome.stdout.matches(": another plan in ").count();
        expect(moves >= steps / 100 * MOVES, || format!("only {moves} moves: {outcome}"))
    }))
}
