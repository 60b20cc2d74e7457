//! R7: a NaN or infinite gradient at every place with separate handling.

use crate::harness::*;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R7",
    what: "NaN, Inf and -Inf in the first, a middle and the last element of the gradient, by format, strategy, accumulation and step: \
           that step is skipped and changes no bit of the state, the rest equals the synchronous run",
    runs: 324,
    smoke: 3,
    start,
};

const VALUES: [&str; 3] = ["nan", "inf", "-inf"];
/// Indices in the flat order: in the last norm, in the layer, and the last of the embedding.
const ELEMENTS: [u64; 3] = [0, 1500, 6783];
const FORMATS: [&str; 3] = ["float32", "bfloat16", "float16"];
const WAYS: [[&str; 2]; 3] = [["--strategy", "superoffload"], ["--strategy", "zero-offload"], ["--strategy", "no-offload"]];
const ACCUMULATIONS: [&str; 2] = ["1", "3"];
const STEPS_HIT: [u64; 2] = [1, 4];

fn start(_: &Harness) -> Result<Trial, String> {
    Ok(Box::new(|harness, turn| {
        // The grid in an order in which a few runs are a sample.
        let mut rest = turn.index * 127 % 324;
        let mut axis = |len: usize| {
            let at = rest as usize % len;
            rest /= len as u64;
            at
        };
        let (value, element, format) = (VALUES[axis(3)], ELEMENTS[axis(3)], FORMATS[axis(3)]);
        let (way, accumulation, step) = (WAYS[axis(3)], ACCUMULATIONS[axis(2)], STEPS_HIT[axis(2)]);
        turn.kind = format!("{} {format}", way[1]);
        harness.settings(
            "inject.toml",
            "model",
            "data.txt",
            &format!("inject = [{{step = {step}, element = {element}, value = '{value}'}}]"),
        );
        let flags = ["--dtype", format, "--gradient-accumulation-steps", accumulation, "--save-steps", "1", "--max-steps", "6"];
        skips(harness, &[&flags[..], &way].concat(), &flags, step).map_err(|e| format!("{value} at {element} in step {step}: {e}"))
    }))
}

fn skips(harness: &Harness, flags: &[&str], shared: &[&str], step: u64) -> Result<(), String> {
    let run = |out: &str, flags: &[&str]| {
        harness.remove(out);
        harness.run(harness.train_by("inject.toml", out, flags))
    };
    let outcome = run("injected", flags);
    outcome.expect_digest(&run("synchronous", &[shared, &["--strategy", "zero-offload"]].concat()).digest()?)?;
    let metrics = std::fs::read_to_string(harness.path("injected/metrics.jsonl")).unwrap();
    let verdict = |line| serde_json::from_str::<serde_json::Value>(line).unwrap().get("verdict").cloned();
    let verdicts: Vec<_> = metrics.lines().filter_map(verdict).collect();
    let skipped: Vec<_> = (1..).zip(&verdicts).filter(|(_, verdict)| *verdict == "skip").map(|(step, _)| step).collect();
    expect(skipped == [step], || format!("steps {skipped:?} were skipped: {outcome}"))?;
    let state = |step: u64| harness.digest_of(&harness.path(&format!("injected/checkpoint-{step}")));
    // The step number, the parameters and the moments equal those of the previous checkpoint.
    expect(step == 1 || state(step)? == state(step - 1)?, || format!("step {step} changed the state"))
}
