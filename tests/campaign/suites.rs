//! Campaigns that consist of ordinary tests, which are run and counted.

use crate::harness::*;
use std::path::Path;
use std::process::Command;

/// Defines a campaign that is part of the ordinary tests.
macro_rules! suite {
    ($name:ident, $id:literal, $runs:literal, $args:expr, $what:literal) => {
        pub const $name: Campaign =
            Campaign { id: $id, what: $what, runs: $runs, smoke: 0, start: |_| Ok(Box::new(|_, turn| tests(turn, &$args))) };
    };
}

suite!(
    RESCTRL,
    "R26b",
    1,
    ["--package", "superoffload-resctrl"],
    "resctrl absent, read-only, half made, full, shared, of another machine, left by a killed run: tests on fake and recorded trees"
);
suite!(
    PARITY,
    "R31",
    1,
    ["--workspace", "--test", "main", "parity"],
    "losses, gradients and states against torch's, by family: tests on committed records of torch"
);
suite!(
    EXPORT,
    "R33",
    1,
    ["--workspace", "--lib", "weights"],
    "weights in and out of Hugging Face directories: tests on committed models of transformers"
);

/// One step of a real model against transformers. `tests/golden/real_weights.py` describes the folder of the model.
pub const REAL_WEIGHTS: Campaign = Campaign {
    id: "R31b",
    what: "logits, loss and gradient norm of one step of SmolLM2-135M, with its real weights, against those of transformers in float64: within 1e-6",
    runs: 1,
    smoke: 0,
    start: |_| {
        let folder = std::env::var("SUPEROFFLOAD_REAL_WEIGHTS").unwrap_or_default();
        match Path::new(&folder).join("golden.safetensors").is_file() {
            true => Ok(Box::new(|_, turn| tests(turn, &["--workspace", "--test", "main", "real_weights"]))),
            false => Err("SUPEROFFLOAD_REAL_WEIGHTS names no folder made by tests/golden/real_weights.py".into()),
        }
    },
};

/// Runs these tests once and counts each as a run. `args` selects packages of the workspace, so the binaries of `cargo test` are reused
/// without a new build.
fn tests(turn: &mut Turn, args: &[&str]) -> Result<(), String> {
    turn.over = turn.index > 0;
    if turn.over {
        return Ok(());
    }
    turn.kind = "tests".into();
    let mut command = Command::new(env!("CARGO"));
    command.args(["test", "--quiet"]).args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let count = |what: &str| -> u64 { text.lines().filter_map(|line| counted(line, what)).sum() };
    let (passed, failed) = (count("passed"), count("failed"));
    turn.tries = passed + failed;
    expect(output.status.success() && failed == 0 && passed > 0, || format!("{passed} passed, {failed} failed"))
}

/// The number `N` in `test result: ok. N passed; ...`.
fn counted(line: &str, what: &str) -> Option<u64> {
    let result = line.strip_prefix("test result: ")?;
    result.split([';', '.']).find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok())
}
