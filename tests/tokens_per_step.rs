//! `--tokens-per-step`: the plan divides a step into micro-batches, and a run keeps the division.

use crate::program::{Outcome, Workspace, run};
use serde_json::Value;
use std::fs;

/// A workspace with settings that do not set the size of a micro-batch.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let settings = fs::read_to_string(workspace.path("run.toml")).unwrap();
    workspace.write("run.toml", settings.replace("per-device-train-batch-size = 2\n", "device = 'cpu'\n"));
    workspace
}

fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, flags))
}

#[test]
fn a_step_is_cut_as_the_flags_would_and_a_resume_keeps_it() {
    let workspace = workspace();
    for (requested, cut, words) in [
        (&["--tokens-per-step=64"][..], &["--per-device-train-batch-size=4"][..], "1 x 4 x 16 = 64 tokens"),
        (
            &["--tokens-per-step=64", "--gradient-accumulation-steps=2"],
            &["--per-device-train-batch-size=2", "--gradient-accumulation-steps=2"],
            "2 x 2 x 16 = 64 tokens",
        ),
        (&["--tokens-per-step=64", "--gpus=2"], &["--per-device-train-batch-size=2", "--gpus=2"], "2 ranks x 1 x 2 x 16 = 64 tokens"),
    ] {
        let whole = train(&workspace, "whole", requested);
        assert!(whole.stdout.contains(words), "{whole:?}");
        assert_eq!(whole.digest(), train(&workspace, "cut", cut).digest(), "{requested:?}");
        workspace.copy_checkpoints("whole", "resumed", &[6]);
        let resumed = run(&mut workspace.resume("resumed", requested));
        assert!(resumed.digest() == whole.digest() && resumed.stderr.is_empty(), "{resumed:?}");
        ["whole", "cut", "resumed"].iter().for_each(|out| fs::remove_dir_all(workspace.path(out)).unwrap());
    }
}

#[test]
fn a_run_that_resumes_with_other_tokens_is_warned_or_refused() {
    let workspace = workspace();
    let cut = ["--gradient-accumulation-steps=2", "--max-steps=2"];
    train(&workspace, "out", &[&cut[..], &["--tokens-per-step=64"]].concat()).digest();
    let saved = fs::read(workspace.path("out/checkpoint-2/trainer_state.json")).unwrap();
    let saved: Value = serde_json::from_slice(&saved).unwrap();
    let settings = &saved["manifest"]["trainer"]["settings"];
    assert_eq!((&settings["per_device_train_batch_size"], &settings["gradient_accumulation_steps"]), (&2.into(), &2.into()));
    let refused = run(&mut workspace.resume("out", &["--tokens-per-step=48"]));
    refused.refused(2, &["--tokens-per-step 48", "the checkpoint's steps have 2 micro-batches", "--gradient-accumulation-steps"]);
    let other = run(&mut workspace.resume("out", &["--tokens-per-step=128", "--max-steps=3"]));
    assert!(
        other.code == 0 && other.stderr.contains("--per-device-train-batch-size was 2") && other.stdout.contains("2 x 4 x 16"),
        "{other:?}"
    );
}

#[test]
fn contradicting_batch_sizes_are_refused() {
    let workspace = workspace();
    let flags = ["--tokens-per-step=64", "--per-device-train-batch-size=3"];
    train(&workspace, "out", &flags).refused(2, &["--tokens-per-step 64", "--per-device-train-batch-size 3"]);
    assert!(!workspace.path("out").exists());
}
