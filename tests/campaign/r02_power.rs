//! R2: a power failure after every call that changes the disk.

use crate::harness::*;
use crate::power::{Disk, Loss};
use crate::shim::{Op, Shim};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R2",
    what: "power cut after every call of 20 logs of writes, of what was not synced all, nothing or a random part kept: resume finds the \
           newest checkpoint whose name was synced, or a newer one, and comes to the uninterrupted run's digest",
    runs: 3000,
    smoke: 4,
    start,
};

/// Flags of the logged runs.
const LOGS: [[&str; 4]; 20] = {
    const SAVES: [[&str; 2]; 5] =
        [["--save-steps", "2"], ["--save-steps", "1"], ["--save-steps", "3"], ["--save-steps", "4"], ["--save-steps", "5"]];
    const LIMITS: [[&str; 2]; 4] =
        [["--logging-steps", "1"], ["--save-total-limit", "1"], ["--save-total-limit", "2"], ["--save-total-limit", "3"]];
    let mut logs = [[""; 4]; 20];
    let mut idx = 0;
    while idx < 20 {
        logs[idx] = [SAVES[idx % 5][0], SAVES[idx % 5][1], LIMITS[idx / 5][0], LIMITS[idx / 5][1]];
        idx += 1;
    }
    logs
};

struct Log {
    flags: [&'static str; 4],
    ops: Vec<Op>,
}

fn start(harness: &Harness) -> Result<Trial, String> {
    let shim = Shim::new(harness)?;
    let (digest, _) = harness.reference("whole", &[])?;
    let mut logs: Vec<Log> = vec![];
    Ok(Box::new(move |harness, turn| {
        let mut prefix = turn.index as usize;
        for nth in 0..LOGS.len() {
            if nth == logs.len() {
                logs.push(record(harness, &shim, LOGS[nth], &digest)?);
            }
            let log = &logs[nth];
            if prefix <= log.ops.len() {
                return cut(harness, turn, log, prefix, &digest);
            }
            prefix -= log.ops.len() + 1;
        }
        turn.over = true;
        Ok(())
    }))
}

fn record(harness: &Harness, shim: &Shim, flags: [&'static str; 4], digest: &str) -> Result<Log, String> {
    harness.fresh("logged");
    let (outcome, ops) = shim.log(harness, harness.train("logged", &flags), "logged")?;
    outcome.expect_digest(digest)?;
    Ok(Log { flags, ops })
}

fn cut(harness: &Harness, turn: &mut Turn, log: &Log, prefix: usize, digest: &str) -> Result<(), String> {
    let mut disk = Disk::new(harness.path("").canonicalize().unwrap().join("logged"));
    log.ops[..prefix].iter().for_each(|op| disk.apply(op));
    let loss = turn.one_of(&[Loss::Nothing, Loss::Everything, Loss::Random]);
    turn.kind = format!("{loss:?} lost").to_lowercase();
    harness.remove("cut");
    disk.cut(loss, turn, &harness.path("cut"));
    let before = names(&harness.path("cut"));
    let resumed = harness.run(harness.resume("cut", &log.flags));
    let at = || format!("after call {prefix} of {:?}, {before:?}: ", log.flags);
    resumed.expect_digest(digest).map_err(|e| at() + &e)?;
    expect(resumed.resumed_from() >= disk.committed(), || {
        format!("{}resumed from {}, but {} was committed", at(), resumed.resumed_from(), disk.committed())
    })?;
    harness.expect_tidy("cut").map_err(|e| at() + &e)
}
