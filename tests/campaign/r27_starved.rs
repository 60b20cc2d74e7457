//! R27: fewer CPUs than threads.

use crate::harness::*;
use std::process::Command;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R27",
    what: "one CPU to run on, from the start or from the middle, with no number of threads wanted, 1, 2 or 8: done with the same digest, or \
           refused in one line, which only more threads than CPUs can be",
    runs: 24,
    smoke: 1,
    start,
};

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    let bound = Command::new("taskset").args(["-c", "0", "true"]).status();
    expect(bound.is_ok_and(|status| status.success()), || "no taskset here".into())?;
    let settings = std::fs::read_to_string(harness.path("run.toml")).unwrap().replace("threads = 2", "");
    harness.write("free.toml", settings);
    Ok(Box::new(move |harness, turn| {
        let (later, threads) = (turn.index % 2 == 1, ["", "1", "2", "8"][turn.index as usize / 2 % 4]);
        turn.kind = if later { "bound in the middle" } else { "bound from the start" }.into();
        harness.remove("starved");
        let flags: &[&str] = if threads.is_empty() { &[] } else { &["--threads", threads] };
        let train = harness.train_by("free.toml", "starved", flags);
        let outcome = if later {
            let mut child = harness.spawn(train);
            child.wait_until(|child| child.stdout().contains("\nstep      2"));
            // The run may have ended.
            let _ = Command::new("taskset").args(["-a", "-p", "-c", "0"]).arg(child.child.id().to_string()).output();
            child.finish()
        } else {
            let mut bound = Command::new("taskset");
            bound.args(["-c", "0"]).arg(train.get_program()).args(train.get_args());
            harness.run(bound)
        };
        let cpus = if later { harness.cpus() } else { 1 };
        if outcome.code == 2 && threads.parse::<u64>().is_ok_and(|threads| threads > cpus) {
            turn.kind += ", refused";
            return outcome.expect_orderly(&[2]);
        }
        outcome.expect_digest(&digest)
    }))
}
