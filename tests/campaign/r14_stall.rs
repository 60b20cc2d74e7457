//! R14: the whole process stops for a while, between any two instructions, and continues.

use crate::harness::*;
use nix::sys::signal::{Signal, kill};
use std::time::Duration;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R14",
    what: "SIGSTOP at random moments for up to half a second, now and then for three with a stall limit of one, then SIGCONT: the run \
           is done, with the undisturbed run's digest",
    runs: 50,
    smoke: 1,
    start,
};

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, whole) = harness.reference("whole", &[])?;
    Ok(Box::new(move |harness, turn| {
        harness.remove("stopped");
        let long = turn.index % 10 == 9 && harness.has_flag("--stall-limit");
        let flags: &[&str] = if long { &["--stall-limit", "1"] } else { &[] };
        let child = harness.spawn(harness.train("stopped", flags));
        let stops = if long { 1 } else { 1 + turn.pick(4) };
        for _ in 0..stops {
            std::thread::sleep(Duration::from_micros(turn.pick(whole.as_micros() as u64 / 2)));
            let _ = kill(child.pid(), Signal::SIGSTOP);
            std::thread::sleep(Duration::from_millis(if long { 3000 } else { turn.pick(500) }));
            let _ = kill(child.pid(), Signal::SIGCONT);
        }
        turn.kind = format!("{stops} stops{}", if long { " of 3 s" } else { "" });
        child.finish().expect_digest(&digest)
    }))
}
