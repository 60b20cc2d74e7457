//! R4: every file of a checkpoint is truncated.

use crate::harness::*;
use std::fs;
use std::path::{Path, PathBuf};
use superoffload::internals::checkpoint;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R4",
    what: "each file of a checkpoint cut at its edges and at 200 random places: detected each time, by a tenth of the runs also in the \
           program, which names the file and goes on from the checkpoint before to the same digest",
    runs: 600,
    smoke: 12,
    start,
};

/// Number of random lengths for each file, after the special ones.
const RANDOM: u64 = 200;
const EDGES: u64 = 8;

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    harness.copy("whole/checkpoint-12", "cut");
    let files = files(&harness.path("cut"));
    Ok(Box::new(move |harness, turn| {
        let (file, nth) = (turn.index as usize % files.len(), turn.index / files.len() as u64);
        if nth >= EDGES + RANDOM {
            turn.over = true;
            return Ok(());
        }
        let path = &files[file];
        turn.kind = path.file_name().unwrap().to_string_lossy().into_owned();
        let whole = fs::read(path).unwrap();
        let len = cut_at(turn, nth, whole.len());
        fs::write(path, &whole[..len]).unwrap();
        let noticed = noticed(harness, path, "cut");
        let resumed = if turn.index.is_multiple_of(10) { falls_back(harness, path, len, &digest) } else { Ok(()) };
        fs::write(path, whole).unwrap();
        noticed.and(resumed).map_err(|e| format!("cut at {len}: {e}"))
    }))
}

fn cut_at(turn: &mut Turn, nth: u64, len: usize) -> usize {
    let edges = [0, 1, 8, 22, 23, len / 2, len.saturating_sub(23), len - 1];
    edges.get(nth as usize).copied().unwrap_or_else(|| turn.pick(len as u64) as usize).min(len - 1)
}

/// Checks that the checkpoint `name` is rejected with an error that names the damaged file.
pub fn noticed(harness: &Harness, path: &Path, name: &str) -> Result<(), String> {
    match checkpoint::verify(&harness.path(name)) {
        Ok(_) => Err(format!("damage to {} went unnoticed", path.display())),
        Err(e) if e.to_string().contains(path.to_str().unwrap()) => Ok(()),
        Err(e) => Err(format!("the error does not name {}: {e}", path.display())),
    }
}

/// Checks that a run with the same damage to its last checkpoint resumes from the previous one.
fn falls_back(harness: &Harness, path: &Path, len: usize, digest: &str) -> Result<(), String> {
    harness.copy("whole", "damaged");
    let same: PathBuf = harness.path("damaged/checkpoint-12").join(path.strip_prefix(harness.path("cut")).unwrap());
    fs::OpenOptions::new().write(true).open(&same).and_then(|file| file.set_len(len as u64)).unwrap();
    let resumed = harness.run(harness.resume("damaged", &[]));
    resumed.expect_digest(digest)?;
    let warned = resumed.stderr.lines().any(|line| line.starts_with("warning: ") && line.contains(same.to_str().unwrap()));
    expect(warned && resumed.resumed_from() == 10, || format!("no warning, or not from checkpoint-10: {resumed}"))
}
