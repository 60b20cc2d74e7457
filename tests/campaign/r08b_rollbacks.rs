//! R8b: a long run with injected failures of speculation.

use crate::harness::*;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R8b",
    what: "1,000 steps with a gradient that must be clipped in every k-th step, k = 1, 2, 7, speculating and synchronous: the same digest",
    runs: 9,
    smoke: 1,
    start,
};

fn start(_: &Harness) -> Result<Trial, String> {
    Ok(Box::new(|harness, turn| {
        let (every, seed) = ([1, 2, 7][turn.index as usize % 3], (turn.index / 3).to_string());
        let steps = if harness.is_smoke { 30 } else { 1000 };
        turn.kind = format!("every {every}, {steps} steps");
        // The embedding is a range without gaps.
        let spikes =
            (1..=steps).step_by(every).map(|step| format!("{{step = {step}, element = {}, value = 1e4}}", 2688 + step * 37 % 4096));
        harness.settings("spikes.toml", "model", "data.txt", &format!("inject = [{}]", spikes.collect::<Vec<_>>().join(", ")));
        let steps = steps.to_string();
        let shared = ["--max-steps", &steps, "--save-steps", &steps, "--seed", &seed, "--max-grad-norm", "100", "--logging-steps", "1000"];
        let run = |out: &str, flags: &[&str]| {
            harness.remove(out);
            harness.run(harness.train_by("spikes.toml", out, &[&shared[..], flags].concat()))
        };
        let speculating = run("speculating", &["--without", "adaptive"]);
        speculating.expect_digest(&run("synchronous", &["--strategy", "zero-offload"]).digest()?)
    }))
}
