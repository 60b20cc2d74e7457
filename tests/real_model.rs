//! The fine-tuning of a real model in `examples/smollm2`: its scripts work, and the guide's table shows the recorded runs.

use crate::program::run;
use crate::support::emulator;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Both systems begin with the same weights and rows, and multiply in bfloat16.
const FIRST_LOSS_ERROR_MAX: f64 = 5e-3;

/// Runs the tests of the scripts. Tests whose Python packages are missing are skipped.
#[test]
fn scripts_of_the_example_pass_their_tests() {
    let python = std::env::var("SUPEROFFLOAD_TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let version = Command::new(&python).args(["-c", "import sys; assert sys.version_info >= (3, 10)"]).output();
    if emulator().is_some() || !version.is_ok_and(|version| version.status.success()) {
        let is_required = std::env::var_os("SUPEROFFLOAD_REQUIRE_PYTHON").is_some() && emulator().is_none();
        assert!(!is_required, "{python} is no Python from 3.10 on");
        return left_out(&format!("{python} is no Python from 3.10 on"));
    }
    let mut tests = Command::new(python);
    tests.args(["-W", "ignore", "-m", "unittest", "discover", "-s", "examples/smollm2"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let outcome = run(tests.env("SUPEROFFLOAD", env!("CARGO_BIN_EXE_superoffload")).env("PYTHONDONTWRITEBYTECODE", "1"));
    assert_eq!(outcome.code, 0, "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("Ran 11 tests"), "{}", outcome.stderr);
    if let Some((_, skipped)) = outcome.stderr.split_once("skipped=") {
        left_out(&format!("skipped tests, whose packages are missing: {}", skipped.trim_end().trim_end_matches(')')));
    }
}

fn left_out(why: &str) {
    // Not printed by a macro, because the test harness would capture the line.
    std::io::stderr().write_all(format!("LEFT OUT: examples/smollm2: {why}\n").as_bytes()).unwrap();
}

fn text_of(document: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(document)).unwrap()
}

fn number(line: &Value, pointer: &str) -> f64 {
    line.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {line}"))
}

/// The median of a number in the runs, and its range if there are several.
fn cell(runs: &[&Value], pointer: &str, factor: f64, digits: usize) -> String {
    let mut values: Vec<f64> = runs.iter().map(|line| factor * number(line, pointer)).collect();
    values.sort_by(f64::total_cmp);
    let [first, .., last] = values[..] else { return format!("{:.digits$}", values[0]) };
    format!("{:.digits$} ({first:.digits$} to {last:.digits$})", values[values.len() / 2])
}

fn row(name: &str, runs: &[&Value]) -> String {
    let (loss, score) = (cell(runs, "/after/held_out_loss", 1.0, 3), cell(runs, "/after/score", 100.0, 1));
    format!("| {name} | {} | {loss} | {score} | {} |", number(runs[0], "/tokens"), cell(runs, "/step_ms/median", 1.0, 0))
}

/// The guide's table has the recorded runs, with equal settings in both systems.
#[test]
fn the_table_of_the_real_model_is_of_recorded_runs() {
    let lines: Vec<Value> =
        text_of("paper-figures/results/h200-fine-tune.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [ours, trl] = ["superoffload", "trl"].map(|system| lines.iter().filter(|line| line["system"] == system).collect::<Vec<_>>());
    assert!(ours.len() == 3 && trl.len() == 3 && lines.len() == 6);
    for (have, like) in ours.iter().zip(&trl) {
        assert!(["seed", "settings", "before", "tokens"].iter().all(|key| have[key] == like[key]), "{have} {like}");
        assert!((number(have, "/loss/0") - number(like, "/loss/0")).abs() < FIRST_LOSS_ERROR_MAX, "{have} {like}");
    }
    let chance = 100.0 / 4.0;
    let before = (number(ours[0], "/before/held_out_loss"), 100.0 * number(ours[0], "/before/score"));
    assert!(before.1 < 1.5 * chance, "{before:?}");
    assert!(ours.iter().chain(&trl).all(|line| 100.0 * number(line, "/after/score") > 3.0 * chance));
    let guide = text_of("docs/guide/evaluation.md");
    let rows = [
        format!("| nothing | 0 | {:.3} | {:.1} | |", before.0, before.1),
        row("`superoffload train`", &ours),
        row("TRL's SFTTrainer", &trl),
    ];
    assert!(guide.contains(&rows.join("\n")), "docs/guide/evaluation.md does not have these rows:\n{}", rows.join("\n"));
    let cpu: Value = serde_json::from_str(&text_of("paper-figures/results/cpu-fine-tune.jsonl")).unwrap();
    let claim = format!(
        "a short run of {} steps of 512 tokens lowered the loss of {} held-out conversations from {:.3} to {:.3}",
        cpu["settings"]["steps"],
        cpu["before"]["held_out_conversations"],
        number(&cpu, "/before/held_out_loss"),
        number(&cpu, "/after/held_out_loss")
    );
    assert!(guide.contains(&claim), "docs/guide/evaluation.md does not have: {claim}");
}
