//! The runs in `examples/`. Their losses must match their README.

use crate::program::{program, run};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

const EXAMPLES: [&str; 5] = ["plain-text", "chat", "preference", "distill", "resume"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn example(name: &str) -> PathBuf {
    root().join("examples").join(name)
}

/// Trains the example into `out`. Its file names are relative to the repository.
fn train(name: &str, out: &Path, more: &[&str]) -> crate::program::Outcome {
    let config = format!("examples/{name}/config.yaml");
    run(program(&["train", &config, "--device=cpu", "--output-dir"]).arg(out).args(more).current_dir(root()))
}

fn losses(out: &Path) -> Vec<Value> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get("loss").cloned()).collect()
}

/// A loss in the format of the README's table.
fn short(loss: &Value) -> String {
    format!("{:.4}", loss.as_f64().unwrap())
}

#[test]
fn examples_train_to_the_documented_losses() {
    let message = fs::read_to_string(example("README.md")).unwrap();
    for name in EXAMPLES {
        let dir = tempfile::tempdir().unwrap();
        let outcome = train(name, dir.path(), &[]);
        assert_eq!(outcome.code, 0, "{name}: {outcome:?}");
        let losses = losses(dir.path());
        let (first, last) = (short(&losses[0]), short(losses.last().unwrap()));
        let row = format!("| [{name}]({name}/config.yaml) | {} | {first} | {last} |", losses.len());
        assert!(message.contains(&row), "examples/README.md does not have the row {row}");
    }
}

/// The loop calls the program by name, and Python.
#[test]
fn rewards_grow_in_rounds_of_sampling_and_training() {
    if Process::new("python3").arg("--version").output().is_err() {
        // Not printed by a macro, because the test harness would capture the line.
        std::io::stderr().write_all(b"LEFT OUT: examples/grpo: there is no python3\n").unwrap();
        return;
    }
    let (dir, bin) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(program(&[]).get_program(), bin.path().join("superoffload")).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut rounds = Process::new("sh");
    let outcome = run(rounds.arg("examples/grpo/rounds.sh").arg(dir.path()).env("PATH", path).current_dir(root()));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let rewards: Vec<f64> = outcome.stderr.lines().filter_map(|line| line.strip_prefix("mean reward ")?.parse().ok()).collect();
    assert!(rewards.len() == 5 && rewards[4] > 1.5 * rewards[0], "{rewards:?}");
    for script in ["rounds.sh", "reward.py"] {
        assert!(fs::read_to_string(example("grpo").join(script)).unwrap().lines().count() <= 20, "{script}");
    }
}

/// The GPU run is not repeated. The test reads its committed log.
#[test]
fn the_run_on_a_gpu_is_shown_as_in_its_log() {
    let [message, log] = ["README.md", "metrics.jsonl"].map(|name| fs::read_to_string(example("gpu-chat").join(name)).unwrap());
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let evaluated: Vec<_> = lines.filter(|line| line.get("eval_loss").is_some()).collect();
    assert!(evaluated.windows(2).all(|two| two[1]["eval_loss"].as_f64() < two[0]["eval_loss"].as_f64()), "it falls at every evaluation");
    let of = |key: &str| {
        let is_shown = |line: &&Value| [50, 100, 200, 300, 400, 500].contains(&line["step"].as_u64().unwrap());
        let cells = evaluated.iter().filter(is_shown).map(|line| if key == "step" { line[key].to_string() } else { short(&line[key]) });
        cells.collect::<Vec<_>>().join(" | ")
    };
    assert!(
        message.contains(&format!("step | {} |", of("step"))) && message.contains(&format!("conversations | {} |", of("eval_loss"))),
        "{message}"
    );
}

#[test]
fn a_stopped_example_ends_with_the_bits_of_a_whole_one() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let digest = train("resume", whole.path(), &[]).digest().to_string();
    assert_ne!(train("resume", parts.path(), &["--max-steps=8"]).digest(), digest);
    assert_eq!(train("resume", parts.path(), &[]).digest(), digest);
}

#[test]
fn data_of_examples_is_read_at_a_glance() {
    for name in EXAMPLES {
        let config = fs::read_to_string(example(name).join("config.yaml")).unwrap();
        let data = config.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let rows = fs::read_to_string(root().join(data)).unwrap().lines().count();
        assert!((1..=20).contains(&rows), "{data}: {rows} rows");
        assert!(config.lines().next().unwrap().contains(&format!("superoffload train examples/{name}/config.yaml")), "{name}");
    }
}
