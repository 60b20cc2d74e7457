//! R28: wrong modification times of files.

use crate::harness::*;
use std::fs::{File, FileTimes};
use std::time::{Duration, SystemTime};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R28",
    what: "times of checkpoints set to 1970, 2038, 2106 and the reverse of their order: resume takes the newest by its step, and the limit \
           removes the oldest by its step",
    runs: 40,
    smoke: 2,
    start,
};

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    harness.run(harness.train("half", &["--max-steps", "8"])).digest()?;
    Ok(Box::new(move |harness, turn| {
        harness.copy("half", "skewed");
        let kinds = ["1970", "2038", "2106", "reversed"];
        turn.kind = kinds[turn.index as usize % 4].into();
        for step in checkpoints(&harness.path("skewed")) {
            let seconds = [1, 0x7fff_ffff, 0xffff_ffff, 2_000_000_000 - step * 1000][turn.index as usize % 4] + turn.pick(3);
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            let dir = harness.path(&format!("skewed/checkpoint-{step}"));
            for path in files(&dir).into_iter().chain([dir]) {
                File::open(path).and_then(|file| file.set_times(FileTimes::new().set_modified(time).set_accessed(time))).unwrap();
            }
        }
        let resumed = harness.run(harness.resume("skewed", &["--save-total-limit", "2"]));
        expect(resumed.resumed_from() == 8, || format!("resumed from {}: {resumed}", resumed.resumed_from()))?;
        resumed.expect_digest(&digest)?;
        let kept = checkpoints(&harness.path("skewed"));
        expect(kept == [10, 12], || format!("kept {kept:?}"))
    }))
}
