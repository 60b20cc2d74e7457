//! R1: the run is killed at a random moment, or before a random call that changes the disk, up to three times.

use crate::harness::*;
use crate::shim::Shim;
use std::time::Duration;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R1",
    what: "kill -9 at random moments, or before a random call that changes the disk, up to three times, then resume: the digest is the \
           uninterrupted run's, no more than two save intervals are lost, no part of a save remains",
    runs: 500,
    smoke: 3,
    start,
};

/// Steps of a run, and steps between two checkpoints.
const STEPS: u64 = 12;
const SAVE_STEPS: u64 = 2;

/// An uninterrupted run.
struct Whole {
    digest: String,
    time: Duration,
    /// Number of calls that change the disk.
    calls: u64,
    shim: Shim,
}

fn start(harness: &Harness) -> Result<Trial, String> {
    let shim = Shim::new(harness)?;
    let (digest, time) = harness.reference("whole", &[])?;
    harness.fresh("logged");
    let calls = shim.log(harness, harness.train("logged", &[]), "logged")?.1.len() as u64;
    let whole = Whole { digest, time, calls, shim };
    Ok(Box::new(move |harness, turn| {
        harness.fresh("killed");
        let mut kinds = vec![];
        for _ in 0..1 + turn.pick(3) {
            kinds.push(kill_once(harness, turn, &whole)?);
        }
        // The kind is the most critical place of all kills.
        const PLACES: [&str; 2] = ["inside a write", "between writes"];
        turn.kind = PLACES.into_iter().find(|place| kinds.contains(place)).unwrap_or("done before").into();
        harness.run(harness.resume("killed", &[])).expect_digest(&whole.digest)?;
        harness.expect_tidy("killed")
    }))
}

/// Starts or resumes the run and kills it. Returns the place of the kill.
fn kill_once(harness: &Harness, turn: &mut Turn, whole: &Whole) -> Result<&'static str, String> {
    let out = harness.path("killed");
    let resume = harness.resume("killed", &[]);
    let by_call = turn.pick(2) == 0;
    let mut child = if by_call {
        let left = STEPS - checkpoints(&out).last().unwrap_or(&0);
        let at = turn.pick((whole.calls * left / STEPS).max(1));
        harness.spawn(whole.shim.killed(harness, resume, "killed", at))
    } else {
        harness.spawn(resume)
    };
    std::thread::sleep(Duration::from_micros(if by_call { 0 } else { turn.pick(whole.time.as_micros() as u64) }));
    if by_call {
        child.wait_until(|_| false);
    }
    let printed = child.stdout();
    if child.kill().code().is_some() {
        return Ok("done before");
    }
    let logged = printed.lines().filter_map(|line| line.strip_prefix("step ")?.split_whitespace().next()?.parse::<u64>().ok()).max();
    let kept = checkpoints(&out).last().copied().unwrap_or(0);
    let lost = logged.unwrap_or(0).saturating_sub(kept);
    // A save runs beside the steps until the next one is due.
    expect(lost <= 2 * SAVE_STEPS, || format!("{lost} steps lost: logged {logged:?}, newest checkpoint {kept}"))?;
    Ok(if names(&out).iter().any(|name| name.contains(".tmp-")) { "inside a write" } else { "between writes" })
}
