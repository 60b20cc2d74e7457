//! R16b: one of two processes is killed, wherever it is.

use crate::harness::*;
use std::net::TcpListener;
use std::process::Command;
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

/// What the other process has to end in.
const ENDS: Duration = Duration::from_secs(10);
/// Steps between checkpoints, and of a run; see `run.toml`.
const SAVE_STEPS: u64 = 2;
const MAX_STEPS: u64 = 12;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--processes"), || "this program has no --processes".into())?;
    let config = std::fs::read_to_string(harness.path("model/config.json")).unwrap();
    harness.write("wide/config.json", config.replace("\"hidden_size\": 16", "\"hidden_size\": 64"));
    harness.settings("processes.toml", "wide", "data.txt", "");
    let alone = ["--gpus=1", "--gradient-accumulation-steps=2"];
    let whole = harness.run(harness.train_by("processes.toml", "whole", &[&CUT[..], &alone].concat())).digest()?;
    Ok(Box::new(move |harness, turn| {
        // Each thirteenth run stands still nowhere.
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

/// Two micro-batches a step, each a share.
const CUT: [&str; 4] = ["--device=cpu", "--threads=1", "--bucket-mib=0.03125", "--gradient-shares=2"];

/// Both processes of a run that goes on from the newest checkpoint in `dying`.
fn both(harness: &Harness, config: &str) -> [Running; 2] {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap().port();
    let rendezvous = format!("--rendezvous=127.0.0.1:{port}");
    [0, 1].map(|process| {
        let process_flag = format!("--process={process}");
        let flags = ["--gradient-accumulation-steps=1", "--processes=2", &process_flag, &rendezvous, "--resume-from-checkpoint=auto"];
        let mut command: Command = harness.train_by(config, "dying", &[&CUT[..], &flags].concat());
        command.env("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");
        harness.spawn_as(command, &format!("process-{process}"))
    })
}
