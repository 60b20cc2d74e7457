//! R22: the run is resumed after every step.

use crate::harness::*;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R22",
    what: "resumed after each of the first 50 steps and after ten random ones to 1,000, with another number of threads, by turns with \
           accumulated gradients; epochs end in between: the uninterrupted run's digest",
    runs: 60,
    smoke: 1,
    start,
};

fn start(_: &Harness) -> Result<Trial, String> {
    // References are made on demand, because a few runs need few of them.
    let mut short: [Option<String>; 2] = [None, None];
    let mut long: Option<String> = None;
    Ok(Box::new(move |harness, turn| {
        let threads = (1 + turn.pick(harness.cpus())).to_string();
        if turn.index >= 50 {
            return random(harness, turn, &mut long, &threads);
        }
        let (accumulates, step) = (turn.index as usize % 2, turn.index + 1);
        turn.kind = ["plain", "accumulating"][accumulates].into();
        let out = format!("whole-{accumulates}");
        let shared = ["--max-steps", "60", "--save-steps", "1", "--gradient-accumulation-steps", ["1", "3"][accumulates]];
        let digest = match &short[accumulates] {
            Some(digest) => digest.clone(),
            None => short[accumulates].insert(harness.reference(&out, &shared)?.0).clone(),
        };
        harness.remove("resumed");
        copy_dir(&harness.path(&format!("{out}/checkpoint-{step}")), &harness.path(&format!("resumed/checkpoint-{step}")));
        let outcome = harness.run(harness.resume("resumed", &[&shared[..], &["--threads", &threads]].concat()));
        expect(outcome.resumed_from() == step, || format!("resumed from {}, not {step}: {outcome}", outcome.resumed_from()))?;
        outcome.expect_digest(&digest)
    }))
}

fn random(harness: &Harness, turn: &mut Turn, long: &mut Option<String>, threads: &str) -> Result<(), String> {
    turn.kind = "random to 1,000".into();
    let digest = match long {
        Some(digest) => digest.clone(),
        None => long.insert(harness.reference("long", &["--max-steps", "1000", "--save-steps", "1000"])?.0).clone(),
    };
    let step = (1 + turn.pick(999)).to_string();
    harness.remove("resumed");
    let part = harness.run(harness.train("resumed", &["--max-steps", &step, "--save-steps", "1000"]));
    part.expect_orderly(&[0])?;
    harness.run(harness.resume("resumed", &["--max-steps", "1000", "--save-steps", "1000", "--threads", threads])).expect_digest(&digest)
}
