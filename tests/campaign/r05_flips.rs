//! R5: bits, bytes and blocks of a checkpoint change.

use crate::harness::*;
use crate::r04_truncation::noticed;
use std::fs;
use std::path::Path;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R5",
    what: "10,000 flipped bits, 1,000 changed bytes and 100 swapped blocks, over state, manifest and the model's files: each detected, by \
           one in fifty also in the program's digest",
    runs: 11_100,
    smoke: 40,
    start,
};

fn start(harness: &Harness) -> Result<Trial, String> {
    harness.reference("whole", &["--max-steps", "2"])?;
    harness.copy("whole/checkpoint-2", "flipped");
    let files = files(&harness.path("flipped"));
    Ok(Box::new(move |harness, turn| {
        // Of 111 runs, 100 flip a bit, ten change a byte, and one swaps blocks, which needs a file of several blocks.
        let way = turn.index % 111;
        let path = &files[if way == 110 { largest(&files) } else { turn.pick(files.len() as u64) as usize }];
        let whole = fs::read(path).unwrap();
        let damaged = match way {
            ..100 => flip(turn, whole.clone()),
            100..110 => change(turn, whole.clone()),
            _ => swap(turn, whole.clone()),
        };
        fs::write(path, &damaged).unwrap();
        let found =
            noticed(harness, path, "flipped").and_then(|()| if turn.index.is_multiple_of(50) { refused(harness, path) } else { Ok(()) });
        fs::write(path, whole).unwrap();
        found.map_err(|e| format!("{}: {e}", turn.kind))
    }))
}

fn largest(files: &[std::path::PathBuf]) -> usize {
    (0..files.len()).max_by_key(|&idx| fs::metadata(&files[idx]).unwrap().len()).unwrap()
}

fn flip(turn: &mut Turn, mut bytes: Vec<u8>) -> Vec<u8> {
    turn.kind = "bit".into();
    let bit = turn.pick(bytes.len() as u64 * 8) as usize;
    bytes[bit / 8] ^= 1 << (bit % 8);
    bytes
}

fn change(turn: &mut Turn, mut bytes: Vec<u8>) -> Vec<u8> {
    turn.kind = "byte".into();
    let (at, by) = (turn.pick(bytes.len() as u64) as usize, 1 + turn.pick(255) as u8);
    bytes[at] = bytes[at].wrapping_add(by);
    bytes
}

/// Swaps two different blocks of a page's size.
fn swap(turn: &mut Turn, mut bytes: Vec<u8>) -> Vec<u8> {
    turn.kind = "swapped blocks".into();
    const BLOCK: usize = 4096;
    let blocks = bytes.len() / BLOCK;
    loop {
        let [a, b] = [(); 2].map(|()| turn.pick(blocks as u64) as usize * BLOCK);
        if bytes[a..a + BLOCK] != bytes[b..b + BLOCK] {
            let kept = bytes[a..a + BLOCK].to_vec();
            bytes.copy_within(b..b + BLOCK, a);
            bytes[b..b + BLOCK].copy_from_slice(&kept);
            return bytes;
        }
    }
}

/// Checks that the program rejects the checkpoint, too. Its digest covers only the state, without the model's files.
fn refused(harness: &Harness, path: &Path) -> Result<(), String> {
    let in_state = !path.parent().unwrap().ends_with("model");
    expect(!in_state || harness.digest_of(&harness.path("flipped")).is_err(), || "the program takes it".into())
}
