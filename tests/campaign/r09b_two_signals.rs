//! R9b: a launcher and a scheduler request a stop, one after the other.

use crate::harness::*;
use nix::sys::signal::{Signal, kill};
use std::time::Duration;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R9b",
    what: "two of SIGTERM, SIGINT and SIGHUP, 0 to 950 ms apart, while a run prepares, plans, steps and evaluates, in steps of seconds: exit 75 with a checkpoint of \
           every step that was done, or the end was near; a resume comes to the undisturbed digest",
    runs: 100,
    smoke: 2,
    start,
};

const SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
const PHASES: [(&str, &str); 5] = [
    ("the first step", "\ndevice "),
    ("an evaluation", "\neval "),
    ("a step", "\nstep      1"),
    ("the plan", "\nplan"),
    ("the start", "reading "),
];
/// Maximum time between the two signals.
const GAP_MS: u64 = 950;
/// Steps of about a second, so that the second signal arrives before the run reacts to the first.
const LONG: [&str; 7] = [
    "--verbose",
    "--gradient-accumulation-steps=200",
    "--max-steps=2",
    "--save-steps=2",
    "--eval-steps=1",
    "--eval-on-start",
    "--report-to=none",
];

fn start(harness: &Harness) -> Result<Trial, String> {
    let eval_data = format!("--eval-data={}", harness.path("data.txt").display());
    let (digest, _) = harness.reference("whole", &[&LONG[..], &[&eval_data]].concat())?;
    Ok(Box::new(move |harness, turn| {
        let flags = [&LONG[..], &[&eval_data]].concat();
        let (name, words) = PHASES[turn.index as usize % PHASES.len()];
        let (first, second, gap) = (turn.one_of(&SIGNALS), turn.one_of(&SIGNALS), turn.pick(GAP_MS + 1));
        turn.kind = format!("{name}: {} to {} ms apart", gap / 250 * 250, gap / 250 * 250 + 250);
        harness.remove("stopped");
        let mut child = harness.spawn(harness.train("stopped", &flags));
        if child.wait_until(|child| child.stdout().contains(words)) {
            let _ = kill(child.pid(), first);
            std::thread::sleep(Duration::from_millis(gap));
            let _ = kill(child.pid(), second);
        }
        let ended = child.finish();
        let case = format!("{first}, after {gap} ms {second}");
        ended.expect_orderly(&[75, 0]).map_err(|e| format!("{case}: {e}"))?;
        let steps =
            std::fs::read_to_string(harness.path("stopped/metrics.jsonl")).unwrap_or_default().matches("\"step_ms\"").count() as u64;
        let saved = checkpoints(&harness.path("stopped")).last().copied().unwrap_or(0);
        expect(saved == steps, || format!("{case}: {steps} steps were done, {saved} are saved: {ended}"))?;
        harness.run(harness.resume("stopped", &flags)).expect_digest(&digest).map_err(|e| format!("{case}: {e}"))
    }))
}
