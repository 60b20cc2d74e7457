//! R3b: file systems that fail or delay a call: at a start over an older run, which is moved aside, in saves, and in rotation.

use crate::harness::*;
use crate::shim::{Op, Shim};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R3b",
    what: "EINVAL, ENOTSUP, EBADF, EXDEV, ENOLCK and ESTALE at every call that changes or locks the disk, once and from then on, and each of them late by \
           0.2 s, in a run that moves an older one aside, saves and rotates: it comes to the undisturbed digest, or ends with one line and a good checkpoint; \
           what says that a file system has no locks or no fsync of directories never ends it",
    runs: 4000,
    smoke: 4,
    start,
};

const ERRORS: [(&str, i32); 6] = [
    ("EINVAL", libc::EINVAL),
    ("ENOTSUP", libc::ENOTSUP),
    ("EBADF", libc::EBADF),
    ("EXDEV", libc::EXDEV),
    ("ENOLCK", libc::ENOLCK),
    ("ESTALE", libc::ESTALE),
];

/// Each error once and permanently, and a delay.
const WAYS: u64 = 2 * ERRORS.len() as u64 + 1;
const LATE_MS: u64 = 200;
/// Distance between the calls of consecutive runs, so that a few runs cover several phases.
const STRIDE: u64 = 61;

const FLAGS: [&str; 2] = ["--save-total-limit", "2"];

fn start(harness: &Harness) -> Result<Trial, String> {
    let shim = Shim::new(harness)?;
    let (digest, _) = harness.reference("old", &FLAGS)?;
    harness.copy("old", "logged");
    let (_, ops) = shim.log(harness, harness.train("logged", &FLAGS), "logged")?;
    let count = ops.len() as u64;
    Ok(Box::new(move |harness, turn| {
        let (nth, way) = (turn.index / WAYS, turn.index % WAYS);
        if nth >= count {
            turn.over = true;
            return Ok(());
        }
        let op = &ops[(nth * STRIDE % count) as usize];
        harness.copy("old", "logged");
        let train = harness.train("logged", &FLAGS);
        let outcome = match ERRORS.get(way as usize / 2) {
            Some((name, errno)) => {
                let sticky = way % 2 == 1;
                turn.kind = format!("{name} {}", if sticky { "from then on" } else { "once" });
                shim.fail(harness, train, "logged", op.call, *errno, sticky)
            }
            None => {
                turn.kind = "late".into();
                shim.delay(harness, train, "logged", op.call, LATE_MS)
            }
        };
        let is_late = way == WAYS - 1;
        let must_finish = is_late || way % 2 == 0 && is_missing(&ops, op, ERRORS[way as usize / 2].1);
        holds(harness, &outcome, must_finish, &digest).map_err(|e| format!("{} {}: {e}", op.name, op.path.display()))
    }))
}

/// Whether this error at this call means that the file system lacks the feature.
fn is_missing(ops: &[Op], op: &Op, errno: i32) -> bool {
    let is_dir = || op.path.ends_with("logged") || ops.iter().any(|made| made.name == "mkdir" && made.path == op.path);
    match op.name.as_str() {
        "lock" => [libc::EINVAL, libc::ENOTSUP, libc::EBADF, libc::ENOLCK].contains(&errno),
        "fsync" => [libc::EINVAL, libc::ENOTSUP, libc::EBADF].contains(&errno) && is_dir(),
        _ => false,
    }
}

fn holds(harness: &Harness, outcome: &Outcome, must_finish: bool, digest: &str) -> Result<(), String> {
    outcome.expect_orderly(if must_finish { &[0] } else { &[0, 1] })?;
    if outcome.code == 0 {
        outcome.expect_digest(digest)?;
    } else {
        let path = harness.path("logged").display().to_string();
        expect(outcome.stderr.contains(&path), || format!("the error names no path: {outcome}"))?;
    }
    let resumed = harness.run(harness.resume("logged", &FLAGS));
    expect(outcome.code == 0 || resumed.resumed_from() > 0, || format!("no good checkpoint is left: {resumed}"))?;
    resumed.expect_digest(digest)
}
