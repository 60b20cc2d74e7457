//! R15: a read of data that never returns, as on a lost network disk.

use crate::harness::*;
use crate::shim::Shim;
use std::time::Instant;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R15",
    what: "reads of the data that never come back, from a random moment on, with a stall limit of 2 s: within the limit and 5 s the run ends \
           with exit 1, says that there is no progress, and its last checkpoint is good",
    runs: 30,
    smoke: 0,
    start,
};

const LIMIT_S: u64 = 2;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--stall-limit"), || "this program has no --stall-limit".into())?;
    let shim = Shim::new(harness)?;
    let ids: Vec<u8> = (0..20_000u32).flat_map(|i| ((i % 251) as u16).to_le_bytes()).collect();
    harness.write("ids.u16.bin", ids);
    harness.settings("hang.toml", "model", "ids.u16.bin", "");
    Ok(Box::new(move |harness, turn| {
        let (step, hang) = (3 + turn.pick(20), harness.path("hang"));
        turn.kind = "read".into();
        let _ = std::fs::remove_file(&hang);
        harness.remove("hangs");
        let flags = ["--max-steps", "1000000", "--stall-limit", &LIMIT_S.to_string()];
        let mut child = harness.spawn(shim.hanging(harness, harness.train_by("hang.toml", "hangs", &flags), &hang));
        child.wait_until(|child| child.stdout().contains(&format!("\nstep {step:>6}")));
        harness.write("hang", "");
        let begin = Instant::now();
        let outcome = child.finish();
        let seconds = begin.elapsed().as_secs();
        expect(outcome.code == 1 && seconds <= LIMIT_S + 5, || format!("after {seconds} s: {outcome}"))?;
        expect(outcome.stderr.contains("no progress"), || format!("does not say so: {outcome}"))?;
        let newest = *checkpoints(&harness.path("hangs")).last().ok_or("no checkpoint")?;
        harness.digest_of(&harness.path(&format!("hangs/checkpoint-{newest}"))).map(drop)
    }))
}
