//! README's sample run is the run: its loss lines are the program's, bit for bit as far as they are printed.

use crate::program::{program, run};
use crate::support::emulator;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

const STEPS: u64 = 300;

/// What a step's line says and every machine computes alike: step, loss, norm of the gradients, learning rate, verdict. Speeds are a
/// machine's own.
fn steps(text: &str) -> Vec<(u64, Vec<&str>)> {
    let lines = text.lines().filter(|line| line.starts_with("step ") && line.contains("  loss "));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.map(|words| (words[1].parse().unwrap(), vec![words[3], words[5], words[7], words[words.len() - 1]])).collect()
}

/// Output of the demo until the line of step `until`; the run is then told to end.
fn demo(out: &Path, until: u64) -> String {
    let mut child = program(&["train", "--device", "cpu", "--output-dir"]).arg(out).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut told = String::new();
    for line in lines {
        told.push_str(&line);
        told.push('\n');
        if until < STEPS && line.starts_with(&format!("step {until:>6} ")) {
            kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        }
    }
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(if until < STEPS { 75 } else { 0 }), "{told}");
    told
}

/// Ten steps; `SUPEROFFLOAD_SAMPLE_STEPS=300 cargo test --release --test main sample_run` compares the whole run, which takes minutes.
#[test]
fn the_sample_run_is_the_run() {
    let asked = std::env::var("SUPEROFFLOAD_SAMPLE_STEPS").ok().map(|steps| steps.parse().unwrap());
    let until = asked.unwrap_or(if emulator().is_some() { 1 } else { 10 });
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let sample = steps(&readme);
    assert_eq!(sample.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 10, 100, 200, 300]);
    let dir = tempfile::tempdir().unwrap();
    let told = demo(dir.path(), until);
    let ours = steps(&told);
    for (step, line) in sample.iter().filter(|(step, _)| *step <= until) {
        let found = ours.iter().find(|(other, _)| other == step).unwrap_or_else(|| panic!("no line of step {step}: {told}"));
        assert_eq!(&found.1, line, "step {step} of README.md is not the program's");
    }
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let metrics: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sum = |key: &str| metrics.iter().map(|line| line[key].as_u64().unwrap()).sum::<u64>();
    let buckets = format!("bucket steps  {} committed, {} clipped, {} skipped;", sum("committed"), sum("clipped"), sum("skipped"));
    assert!(told.contains(&buckets), "the summary is not the sum of its steps: {buckets}");
    assert!(until < STEPS || readme.contains(&buckets), "README.md does not say {buckets}");
}

#[test]
fn the_help_of_train_says_how_the_built_in_model_runs() {
    let help = run(&mut program(&["train", "--help"])).stdout;
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("the built-in model runs with") && words.contains("--learning-rate 3e-3"), "{help}");
}
