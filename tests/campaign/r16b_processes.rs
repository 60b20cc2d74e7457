//! R16b: one of two processes is killed in any phase.

use crate::harness::*;
use crate::pair;
use std::time::{Duration, Instant};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R16b",
    what: "kill -9 of one of two processes that train together, on CPUs over TCP, while it stands still in one of 12 phases of a random step, or at a \
           random moment: within 10 s the other ends with exit 1 and a line that names it, and resuming on both comes to the undisturbed digest",
    runs: 50,
    smoke: 2,
    start,
};

const PHASES: [&str; 12] =
    ["start", "write", "module", "backward", "sum", "grads-out", "optimize", "params-in", "verdict", "gather", "flush", "read"];

/// Time limit for the end of the other process.
const ENDS: Duration = Duration::from_secs(10);
/// Steps between checkpoints, and steps of a run; see `run.toml`.
const SAVE_STEPS: u64 = 2;
const MAX_STEPS: u64 = 12;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--processes"), || "this program has no --processes".into())?;
    pair::settings(harness);
    let whole = pair::alone(harness, "processes.toml", &[])?;
    Ok(Box::new(move |harness, turn| {
        // Every thirteenth run is killed at a random moment instead.
        let phase = PHASES.get(turn.index as usize % 13);
        let victim = turn.pick(2) as usize;
        let step = match phase {
            Some(&("start" | "write")) => 1,
            Some(&("flush" | "read")) => 1 + SAVE_STEPS * (1 + turn.pick(MAX_STEPS / SAVE_STEPS - 1)),
            _ => 1 + turn.pick(MAX_STEPS),
        };
        turn.kind = phase.map_or("a random moment".into(), ToString::to_string);
        let fault =
            phase.map_or(String::new(), |phase| format!("faults = [{{rank = {victim}, step = {step}, phase = '{phase}', kind = 'hang'}}]"));
        harness.settings("dying.toml", "wide", "data.txt", &fault);
        harness.fresh("dying");
        let mut pair = Vec::from(both(harness, "dying.toml"));
        pair[victim].wait_until(|process| process.stdout().contains("all 2 processes are here"));
        std::thread::sleep(Duration::from_millis(if phase.is_some() { 400 } else { turn.pick(600) }));
        let (killed, status) = (Instant::now(), pair[victim].kill());
        let other = pair.swap_remove(1 - victim).finish();
        if status.code().is_none() && other.code != 0 {
            expect(killed.elapsed() < ENDS, || format!("{fault}: too late: {other}"))?;
            other.expect_orderly(&[1]).map_err(|e| format!("{fault}: {e}"))?;
            expect(other.stderr.contains(&format!("process {victim} on ")), || format!("{fault}: does not name it: {other}"))?;
        }
        let [first, second] = both(harness, "processes.toml").map(Running::finish);
        first.expect_digest(&whole).map_err(|e| format!("{fault}: then resumed: {e}"))?;
        second.expect_orderly(&[0]).map_err(|e| format!("{fault}: then resumed: {e}"))?;
        harness.expect_tidy("dying")
    }))
}

/// Both processes of a run that resumes from the newest checkpoint in `dying`.
fn both(harness: &Harness, config: &str) -> [Running; 2] {
    pair::both(harness, config, "dying", &["--verbose", "--resume-from-checkpoint=auto"], |_, command| command)
}
