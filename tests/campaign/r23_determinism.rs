//! R23: equal bits on all threads and instruction sets.

use crate::harness::*;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R23",
    what: "the same run twice, on 1, 2, 4, 8 and 16 threads, by every instruction set of this machine, in orders chosen by an adversary: one \
           digest",
    runs: 120,
    smoke: 3,
    start,
};

const THREADS: [&str; 5] = ["1", "2", "4", "8", "16"];
const ISAS: [&str; 4] = ["scalar", "avx2", "avx512", "auto"];

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    Ok(Box::new(move |harness, turn| {
        let idx = turn.index as usize;
        let (threads, isa, order) = (THREADS[idx % 5], ISAS[idx / 5 % 4], (turn.index / 20).to_string());
        harness.remove("again");
        // Twice with real threads, then in orders of an adversary.
        let adversary: &[&str] = if turn.index < 40 { &[] } else { &["--adversary", &order] };
        let outcome = harness.run(harness.train("again", &[&["--threads", threads, "--isa", isa], adversary].concat()));
        turn.kind = format!("{isa}{}", if adversary.is_empty() { "" } else { ", adversary" });
        let lacks = ["--isa", "--threads"].into_iter().find(|flag| outcome.code == 2 && outcome.stderr.contains(flag));
        if let Some(flag) = lacks {
            turn.kind = format!("refused: {flag} beyond this machine");
            return outcome.expect_orderly(&[2]);
        }
        outcome.expect_digest(&digest)
    }))
}
