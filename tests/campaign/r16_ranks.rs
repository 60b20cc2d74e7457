//! R16: one of several devices fails or panics in any phase. A panic of rank 0, on the program's main thread, ends it like any program.

use crate::harness::*;
use std::time::Duration;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R16",
    what: "one of 2 or 4 ranks, CPUs as devices, fails, or panics unless it is rank 0, which is the program, in each of 13 phases of a random \
           step: within 5 s of an undisturbed run's length it ends with exit 1 and names the rank, and resuming comes to the undisturbed digest",
    runs: 52,
    smoke: 2,
    start,
};

const PHASES: [&str; 13] = [
    "start",
    "write",
    "module",
    "backward",
    "sum",
    "grads-out",
    "optimize",
    "params-in",
    "step-on-device",
    "verdict",
    "gather",
    "flush",
    "read",
];

/// Steps between checkpoints; see `run.toml`.
const SAVE_STEPS: u64 = 2;
const MAX_STEPS: u64 = 12;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--gpus"), || "this program has no --gpus".into())?;
    // Enough buckets for each rank to own a slice of every bucket.
    let config = std::fs::read_to_string(harness.path("model/config.json")).unwrap();
    harness.write("wide/config.json", config.replace("\"hidden_size\": 16", "\"hidden_size\": 64"));
    harness.settings("ranks.toml", "wide", "data.txt", "");
    let whole = harness.run(harness.train_by("ranks.toml", "whole", &flags(4)));
    let (digest, alone) = (whole.digest()?, Duration::from_secs_f64(whole.seconds));
    Ok(Box::new(move |harness, turn| {
        let phase = PHASES[turn.index as usize % PHASES.len()];
        let ranks = turn.one_of(&[2, 4]);
        let rank = turn.pick(ranks);
        let kind = if rank == 0 { "error" } else { turn.one_of(&["error", "panic"]) };
        let step = match phase {
            "start" => 1,
            // A resumed run writes its state at its first step.
            "write" => MAX_STEPS - SAVE_STEPS + 1,
            // Work after a verdict counts to the next step.
            "step-on-device" => 2 + turn.pick(MAX_STEPS - 1),
            "flush" | "read" => 1 + SAVE_STEPS * (1 + turn.pick(MAX_STEPS / SAVE_STEPS - 1)),
            _ => 1 + turn.pick(MAX_STEPS),
        };
        turn.kind = format!("{phase}, {kind}");
        let fault = format!("faults = [{{rank = {rank}, step = {step}, phase = '{phase}', kind = '{kind}'}}]");
        harness.settings("dying.toml", "wide", "data.txt", &fault);
        harness.remove("dying");
        // Ranks other than 0 write state when a run resumes.
        if phase == "write" {
            harness.copy("whole", "dying");
            harness.remove(&format!("dying/checkpoint-{MAX_STEPS}"));
        }
        let resume = ["--resume-from-checkpoint", "auto"];
        let outcome = harness.run(harness.train_by("dying.toml", "dying", &[&flags(ranks)[..], &resume].concat()));
        expect(!outcome.hung && outcome.code == 1, || format!("{fault}: {outcome}"))?;
        expect(outcome.seconds < alone.as_secs_f64() + 5.0, || format!("{fault}: too late: {outcome}"))?;
        expect(outcome.stderr.contains(&format!("error: rank {rank}: ")), || format!("{fault}: does not name it: {outcome}"))?;
        let resumed = harness.run(harness.train_by("ranks.toml", "dying", &[&flags(ranks)[..], &resume].concat()));
        resumed.expect_digest(&digest).map_err(|e| format!("{fault}: then resumed: {e}"))?;
        harness.expect_tidy("dying")
    }))
}

/// Four micro-batches a step with a share each, on any number of ranks, and a resident bucket.
fn flags(ranks: u64) -> [&'static str; 7] {
    let [gpus, accumulation] = if ranks == 2 { ["2", "2"] } else { ["4", "1"] };
    ["--bucket-mib=0.03125", "--resident-buckets=1", "--gradient-shares=4", "--gpus", gpus, "--gradient-accumulation-steps", accumulation]
}
