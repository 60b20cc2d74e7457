//! R3: every call that changes the disk fails, once or from then on.

use crate::harness::*;
use crate::shim::{Op, Shim};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R3",
    what: "ENOSPC, EIO, EDQUOT and EROFS at every call that changes the disk, once and from then on: the run goes on or ends with one line \
           that names a path; what was committed stays, and a resume comes to the uninterrupted run's digest",
    runs: 3000,
    smoke: 4,
    start,
};

const ERRORS: [(&str, i32); 4] = [("ENOSPC", libc::ENOSPC), ("EIO", libc::EIO), ("EDQUOT", libc::EDQUOT), ("EROFS", libc::EROFS)];

fn start(harness: &Harness) -> Result<Trial, String> {
    let shim = Shim::new(harness)?;
    let (digest, _) = harness.reference("whole", &["--save-total-limit", "2"])?;
    harness.fresh("logged");
    let (_, ops) = shim.log(harness, harness.train("logged", &["--save-total-limit", "2"]), "logged")?;
    Ok(Box::new(move |harness, turn| {
        let (call, way) = (turn.index / 8, turn.index as usize % 8);
        let Some(op) = ops.get(call as usize) else {
            turn.over = true;
            return Ok(());
        };
        let ((name, errno), sticky) = (ERRORS[way / 2], way % 2 == 1);
        turn.kind = format!("{name} {}", if sticky { "from then on" } else { "once" });
        fails(harness, &shim, (call, op), errno, sticky, &digest).map_err(|e| format!("{} {}: {e}", op.name, op.path.display()))
    }))
}

fn fails(harness: &Harness, shim: &Shim, (call, _): (u64, &Op), errno: i32, sticky: bool, digest: &str) -> Result<(), String> {
    harness.fresh("logged");
    let outcome = shim.fail(harness, harness.train("logged", &["--save-total-limit", "2"]), "logged", call, errno, sticky);
    outcome.expect_orderly(&[0, 1])?;
    let names_a_path = outcome.stderr.contains(harness.path("logged").to_str().unwrap());
    expect(outcome.code == 0 || names_a_path, || format!("the error names no path: {outcome}"))?;
    let kept =
        outcome.stdout.lines().filter_map(|line| line.strip_prefix("checkpoint ")?.rsplit_once("checkpoint-")?.1.parse::<u64>().ok());
    let kept = kept.max().unwrap_or(0);
    let resumed = harness.run(harness.resume("logged", &["--save-total-limit", "2"]));
    expect(resumed.resumed_from() >= kept, || format!("checkpoint-{kept} was told and is lost: {resumed}"))?;
    resumed.expect_digest(digest)
}
