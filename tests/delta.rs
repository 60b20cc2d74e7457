//! Models with gated delta rules: a resume is exact on any number of threads and devices, rows of documents too, and options that such a model
//! lacks are refused before anything is written.

use crate::program::{Outcome, Workspace, copy_dir, program, run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const FLAGS: [&str; 8] = ["--init", "checkpoint", "--tokenizer", "bytes", "--device", "cpu", "--seq-length", "96"];

/// A workspace with the golden model and records of digits, which are tokens of a vocabulary of 64. Their lengths are from 2 to 91.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    fs::remove_dir_all(workspace.path("model")).unwrap();
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_5"), &workspace.path("model"));
    let record = |nth: usize| json!({"input_ids": (0..nth * 37 % 90 + 2).map(|i| (nth * 31 + i * 7) % 64).collect::<Vec<_>>()}).to_string();
    workspace.write("data.jsonl", (0..60).map(record).collect::<Vec<_>>().join("\n"));
    workspace
}

fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    let data = workspace.path("data.jsonl");
    run(&mut workspace.train(out, &[&FLAGS[..], &["--data", data.to_str().unwrap()], flags].concat()))
}

#[test]
fn packed_documents_end_with_the_same_bits_on_any_number_of_threads_devices_and_after_a_resume() {
    let workspace = workspace();
    let steps = ["--packing", "bfd", "--gradient-shares", "2", "--max-steps", "6", "--save-steps", "3"];
    let of = |out: &str, more: &[&str]| train(&workspace, out, &[&steps, more].concat());
    let whole = of("whole", &["--threads", "1"]);
    let digest = whole.digest();
    for (nth, more) in [
        &["--threads", "2"][..],
        &["--gpus", "2", "--threads", "2"],
        &["--activations", "recompute-cheap", "--bucket-mib", "0.0078"],
        &["--activations", "recompute-block", "--adversary", "5"],
        &["--activations", "host-attention", "--adversary", "6"],
        &["--activations", "host", "--strategy", "zero-offload"],
        &["--layer-order", "segments:1,1", "--strategy", "zero-offload"],
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(of(&format!("way-{nth}"), more).digest(), digest, "{more:?}");
    }
    workspace.copy_checkpoints("whole", "resumed", &[3]);
    assert_eq!(of("resumed", &["--resume-from-checkpoint", "auto", "--activations", "recompute-block"]).digest(), digest);
}

#[test]
fn options_that_gated_delta_rules_lack_are_refused_by_name_before_anything_is_written() {
    let workspace = workspace();
    for (flags, words) in [
        (&["--matmul-dtype", "fp8"][..], &["--matmul-dtype fp8: not supported for models with gated delta rules"][..]),
        (&["--gpus", "2", "--sequence-ranks", "2"], &["--sequence-ranks 2: ranks cannot share gated attention"]),
    ] {
        train(&workspace, "out", flags).refused(2, words);
        assert!(!workspace.path("out").exists());
    }
    let mut config: Value = serde_json::from_slice(&fs::read(workspace.path("model/config.json")).unwrap()).unwrap();
    config["linear_conv_kernel_dim"] = json!(3);
    workspace.write("model/config.json", config.to_string());
    train(&workspace, "out", &[]).refused(1, &["config.json: linear_conv_kernel_dim = 3 (only 4 is supported)"]);
    assert!(!workspace.path("out").exists());
}

#[test]
fn a_plan_and_random_weights_need_no_files() {
    let plan = |model: &str| run(&mut program(&["plan", "--model", model, "--hardware", "h200-pcie5", "--strategy", "no-offload"]));
    let planned = plan("qwen3.5-0.8b");
    assert!(planned.code == 0 && planned.stdout.contains("752.4 M parameters on NVIDIA H200"), "{planned:?}");
    let workspace = workspace();
    let data = workspace.path("data.jsonl");
    let flags = [&FLAGS[2..], &["--data", data.to_str().unwrap(), "--max-steps", "2"]].concat();
    run(&mut workspace.train("random", &flags)).digest();
}
