//! R14b: one of two processes takes longer than the stall limit to carry out an order of process 0.

use crate::harness::*;
use crate::pair::{alone, both};
use crate::shim::Shim;
use nix::sys::signal::{Signal, kill};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R14b",
    what: "process 0, process 1 or both slower than the stall limit in a save (each fsync takes 1.3 s, the limit is 1 s), in the save after SIGTERM, or in an \
           evaluation (2 s): the run waits, comes to the undisturbed digest or exits with 75 and a checkpoint from which it does",
    runs: 36,
    smoke: 2,
    start,
};

/// The slow processes.
const VICTIMS: [(&str, &[usize]); 3] = [("process 1", &[1]), ("process 0", &[0]), ("both", &[0, 1])];
const PHASES: [&str; 3] = ["save", "SIGTERM", "evaluation"];
const FSYNC_MS: u64 = 1300;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--processes"), || "this program has no --processes".into())?;
    let shim = Shim::new(harness)?;
    // A slow process pauses in each micro-batch of an evaluation, so the data of evaluations has few.
    let eval_data =
        format!("--eval-data={}", harness.write("eval.txt", "the quick brown fox jumps over the lazy dog. ".repeat(4)).display());
    let flags = ["--stall-limit=1", "--save-steps=6", "--eval-steps=6"].map(str::to_string);
    let flags: Vec<String> = flags.into_iter().chain([eval_data]).collect();
    let whole = alone(harness, "run.toml", &flags.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(Box::new(move |harness, turn| {
        let ((slow, victims), phase) = (VICTIMS[turn.index as usize % 3], PHASES[turn.index as usize / 3 % 3]);
        turn.kind = format!("{slow}: {phase}");
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let fault = |rank: &usize| format!("{{rank = {rank}, step = {}, phase = 'evaluate', kind = 'slow'}}", 7 + 6 * turn.pick(2));
        let faults: Vec<String> = victims.iter().map(fault).collect();
        let faults = if phase == "evaluation" { format!("faults = [{}]", faults.join(", ")) } else { String::new() };
        harness.settings("slow.toml", "model", "data.txt", &faults);
        harness.fresh("slow");
        let is_slow = |process: usize| phase != "evaluation" && victims.contains(&process);
        let slow = |process, command| if is_slow(process) { shim.slow(harness, command, "fsync", FSYNC_MS) } else { command };
        let mut pair = both(harness, "slow.toml", "slow", &flags, slow);
        if phase == "SIGTERM" {
            let message = turn.pick(2) as usize;
            pair[0].wait_until(|process| process.stdout().contains("\nstep      3"));
            let _ = kill(pair[message].pid(), Signal::SIGTERM);
        }
        let [first, second] = pair.map(Running::finish);
        let code = if phase == "SIGTERM" && first.code == 75 { 75 } else { 0 };
        first.expect_orderly(&[code])?;
        second.expect_orderly(&[code]).map_err(|e| format!("{e}; process 0: {first}"))?;
        if code == 0 {
            return first.expect_digest(&whole);
        }
        expect(!checkpoints(&harness.path("slow")).is_empty(), || format!("no checkpoint: {first}"))?;
        let resumed = both(harness, "run.toml", "slow", &[&flags[..], &["--resume-from-checkpoint=auto"]].concat(), |_, command| command);
        resumed.map(Running::finish)[0].expect_digest(&whole)
    }))
}
