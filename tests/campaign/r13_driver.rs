//! R12 and R13: the driver runs out of memory, or loses its GPU, at any call. The fake driver is that of `tests/fake_gpus`, which computes
//! nothing and ends a run that uses freed objects.

use crate::harness::*;
use std::process::Command;

pub const MEMORY: Campaign = Campaign {
    id: "R12",
    what: "memory of the device, or pinned memory of the host, that ends at the k-th call for it, for every k, under a driver that is none: one \
           line that names it, checkpoints stay, and a resume comes to the uninterrupted run's state",
    runs: 1000,
    smoke: 3,
    start: |harness| {
        let whole = whole(harness)?;
        let [allocations, locks] = [counted(&whole, "allocations")?, counted(&whole, "page locks")?];
        let fault = move |call| match call < allocations {
            true => (format!("FAKE_NO_MEMORY={}", call + 1), 2),
            false => (format!("FAKE_NO_PINS={}", call - allocations + 1), 2),
        };
        start(harness, allocations + locks, fault)
    },
};

pub const CALLS: Campaign = Campaign {
    id: "R13",
    what: "an error from a random call of the driver on, with the codes 2, 46, 700, 719 and 999, under a driver that is none: one line that \
           names it, checkpoints stay, and a resume comes to the uninterrupted run's state",
    runs: 2000,
    smoke: 5,
    start: |harness| {
        let calls = counted(&whole(harness)?, "calls")?;
        start(harness, calls, |call| {
            let codes = if call < OPENING { &CODES[..] } else { &CODES[1..] };
            let code = codes[call as usize % codes.len()];
            (format!("FAKE_FAIL={call},{code}"), code)
        })
    },
};

/// The first code is returned if another process has exclusive use of the GPU.
const CODES: [u32; 5] = [46, 2, 700, 719, 999];
/// Number of calls that find and open a GPU.
const OPENING: u64 = 12;

const FLAGS: [&str; 5] =
    ["--device=cuda", "--attention=plain", "--hardware=h200-pcie5", "--bucket-mib=0.03125", "--resume-from-checkpoint=auto"];

/// A run without faults.
fn whole(harness: &Harness) -> Result<Outcome, String> {
    build(harness)?;
    harness.remove("whole");
    let whole = harness.run(train(harness, "whole"));
    expect(whole.code == 0, || format!("the run without faults: {whole}")).map(|()| whole)
}

/// Prepares runs in which one of `calls` calls fails. `fault` selects the call and the code.
fn start(harness: &Harness, calls: u64, fault: impl Fn(u64) -> (String, u32) + 'static) -> Result<Trial, String> {
    let digest = harness.digest_of(&harness.path("whole/checkpoint-12"))?;
    Ok(Box::new(move |harness, turn| {
        // All calls if there are few, a sample otherwise.
        let call = if calls <= 500 || turn.index < 60 { turn.index } else { turn.pick(calls) };
        turn.over = call >= calls;
        if turn.over {
            return Ok(());
        }
        let (variable, code) = fault(call);
        let (name, value) = variable.split_once('=').unwrap();
        harness.remove("failing");
        let mut failing = train(harness, "failing");
        let outcome = harness.run({
            failing.env(name, value);
            failing
        });
        turn.kind = format!("error {code}: exit {}", outcome.code);
        outcome.expect_orderly(&[0, 1]).map_err(|e| format!("{variable}: {e}"))?;
        let is_named = outcome.code == 0 || outcome.stderr.contains(&format!("error {code}"));
        expect(is_named, || format!("{variable}: does not name the code: {outcome}"))?;
        for step in checkpoints(&harness.path("failing")) {
            harness
                .digest_of(&harness.path(&format!("failing/checkpoint-{step}")))
                .map_err(|e| format!("{variable}: then checkpoint-{step}: {e}"))?;
        }
        let resumed = harness.run(train(harness, "failing"));
        expect(resumed.code == 0, || format!("{variable}: then resumed: {resumed}"))?;
        let found = harness.digest_of(&harness.path("failing/checkpoint-12"))?;
        expect(found == digest, || format!("{variable}: then resumed: digest {found} instead of {digest}"))?;
        harness.expect_tidy("failing")
    }))
}

/// Builds the fake driver and the fake cuBLASLt.
fn build(harness: &Harness) -> Result<(), String> {
    let source = harness.write("driver.c", include_str!("../fake_gpus/driver.c"));
    let library = harness.write("libraries/libcuda.so.1", "");
    let built = Command::new("cc").args(["-O1", "-w", "-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-lpthread").output();
    let built = built.map_err(|e| format!("cc: {e}; a C compiler is needed"))?;
    expect(built.status.success(), || String::from_utf8_lossy(&built.stderr).into_owned())?;
    let products = library.with_file_name("libcublasLt.so.13");
    let _ = std::fs::remove_file(&products);
    std::fs::hard_link(&library, products).map_err(|e| e.to_string())
}

fn train(harness: &Harness, out: &str) -> Command {
    let mut train = harness.train(out, &FLAGS);
    let libraries = harness.path("libraries");
    train.arg(format!("--cuda-libraries={}", libraries.display())).env("LD_LIBRARY_PATH", libraries);
    train
}

/// The number before `word` in the driver's statistics.
fn counted(outcome: &Outcome, word: &str) -> Result<u64, String> {
    let lines = outcome.stdout.lines().filter_map(|line| line.strip_prefix("fake driver")?.split_once(": "));
    let mut parts = lines.flat_map(|(_, counts)| counts.split(", "));
    let number = parts.find_map(|part| part.strip_suffix(word)?.trim_end().parse().ok());
    number.ok_or_else(|| format!("the driver counts no {word}: {outcome}"))
}
