//! Losses of sampled completions: the numbers of TRL's GRPOTrainer, and bits that do not depend on devices, shares, timing, packing or
//! interruptions.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Losses and metrics differ by some roundings of float32; so do gradient norms, relative to their size.
const ERROR_MAX: f64 = 1e-5;
const RATIO: &str = "sampling/importance_sampling_ratio/mean";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Trains the model of the golden values on the completions `data`.
fn train(workspace: &Workspace, out: &str, data: &Path, flags: &[&str]) -> Outcome {
    let path = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    let paths = [path("model", &golden("trl/model")), path("data", data), path("output-dir", &workspace.path(out))];
    let shared = "--device=cpu --dtype=float32 --threads=2 --learning-rate=5e-4 --lr-scheduler-type=constant --weight-decay=0.1 \
        --max-grad-norm=1.0 --report-to=none --digest";
    let name = |flag: &str| flag.split('=').next().map(String::from);
    let open = shared.split_whitespace().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
    run(program(&["train"]).args(paths).args(open).args(flags))
}

/// Flags of a run of four steps, each of some of the completions.
const DAPO: [&str; 6] =
    ["--loss=dapo", "--seq-length=32", "--per-device-train-batch-size=1", "--max-steps=4", "--save-steps=2", "--beta=0.04"];

fn dapo(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    let name = |flag: &str| flag.split('=').next().map(String::from);
    let open = DAPO.into_iter().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
    train(workspace, out, &golden("rollouts/rollouts.jsonl"), &open.chain(flags.iter().copied()).collect::<Vec<_>>())
}

fn metric(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn steps_have_the_losses_gradients_and_clipped_fractions_of_trl() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(golden("rollouts/steps.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 6);
    for case in &cases {
        let (data, loss, beta) = (case["data"].as_str().unwrap(), case["loss"].as_str().unwrap(), case["beta"].as_f64().unwrap());
        let (workspace, steps) = (Workspace::new(), case["steps"].as_array().unwrap());
        // All completions are in the rows of a step.
        let flags = [
            format!("--loss={loss}"),
            format!("--max-steps={}", steps.len()),
            format!("--beta={beta}"),
            "--epsilon=0.2".into(),
            "--epsilon-high=0.28".into(),
            "--seq-length=32".into(),
            "--per-device-train-batch-size=3".into(),
            "--gradient-accumulation-steps=2".into(),
        ];
        let most = if loss == "dr_grpo" { &["--max-completion-length=16"][..] } else { &[] };
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(most.iter().copied()).collect();
        let outcome = train(&workspace, "out", &golden(&format!("rollouts/{data}.jsonl")), &flags);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        assert!(outcome.stdout.contains(" 6 sequences of 32"), "{outcome:?}");
        for (step, (have, want)) in workspace.metrics("out").iter().zip(steps).enumerate() {
            for (name, want) in want.as_object().unwrap() {
                let (have, want) = (metric(have, name), want.as_f64().unwrap());
                let most = ERROR_MAX * want.abs().max(1.0);
                assert!((have - want).abs() <= most, "{data} {loss} {beta} step {step}: {name} {have}, TRL {want}");
            }
            assert_eq!(have.get("kl").is_some(), beta > 0.0);
        }
    }
}

#[test]
fn devices_shares_timing_and_interruptions_change_no_bit() {
    let workspace = Workspace::new();
    let shares = ["--gradient-shares=2", "--gradient-accumulation-steps=2"];
    let whole = dapo(&workspace, "whole", &shares).digest().to_string();
    let ways: [(&str, &[&str]); 3] = [
        ("gpus", &["--gpus=2", "--gradient-shares=2", "--gradient-accumulation-steps=1"]),
        ("adversary", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--adversary=7"]),
        ("threads", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--threads=1"]),
    ];
    let names = ["loss", RATIO, "clip_ratio/region_mean", "kl"];
    let lines = |out: &str| workspace.metrics(out).iter().map(|line| names.map(|name| metric(line, name))).collect::<Vec<_>>();
    for (out, flags) in ways {
        assert_eq!(dapo(&workspace, out, flags).digest(), whole, "{out}");
        assert_eq!(lines(out), lines("whole"), "{out}");
    }
    workspace.copy_checkpoints("whole", "resumed", &[2]);
    assert_eq!(dapo(&workspace, "resumed", &[&shares[..], &["--resume-from-checkpoint=auto"]].concat()).digest(), whole);
    let refused = |flags: &[&str]| dapo(&workspace, "resumed", &[&shares[..], &["--resume-from-checkpoint=auto"], flags].concat());
    refused(&["--epsilon=0.3"]).refused(2, &["epsilon", "0.3", "--allow-changed numerics"]);
    refused(&["--loss=grpo"]).refused(2, &["--loss: loss was \"dapo\"", "is \"grpo\" now"]);
}

/// Log-probabilities of the weights that a run begins with have ratios near 1, and rows of prompts that the head leaves out change no number.
#[test]
fn numbers_follow_their_tokens_into_rows_and_selected_rows() {
    let numbers = |flags: &[&str]| {
        let workspace = Workspace::new();
        let outcome = dapo(&workspace, "out", &[&["--max-steps=1"], flags].concat());
        assert_eq!(outcome.code, 0, "{outcome:?}");
        ["loss", "grad_norm", RATIO, "kl"].map(|name| metric(&workspace.metrics("out")[0], name))
    };
    let all = numbers(&["--head-rows=all", "--per-device-train-batch-size=6"]);
    let near = |other: [f64; 4]| all.iter().zip(other).all(|(a, b)| (a - b).abs() <= ERROR_MAX * a.abs().max(1.0));
    assert!(near(numbers(&["--head-rows=trained", "--per-device-train-batch-size=6"])));
    assert!(near(numbers(&["--seq-length=24", "--per-device-train-batch-size=8"])), "other rows");
}

#[test]
fn evaluations_have_the_numbers_of_completions() {
    let workspace = Workspace::new();
    let eval = format!("--eval-data={}", golden("rollouts/rollouts.jsonl").display());
    let outcome =
        dapo(&workspace, "out", &["--max-steps=3", "--eval-on-start", "--eval-steps=3", "--per-device-train-batch-size=6", &eval]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let lines = workspace.metrics("out");
    let (steps, evals): (Vec<Value>, Vec<Value>) = lines.into_iter().partition(|line| line["eval_loss"].is_null());
    assert_eq!(evals.len(), 2);
    for name in ["loss", RATIO, "clip_ratio/low_mean", "kl"] {
        let (step, eval) = (metric(&steps[0], name), metric(&evals[0], &format!("eval_{name}")));
        assert!((step - eval).abs() <= ERROR_MAX, "{name}: {step}, {eval}");
    }
    assert!(metric(&evals[1], "eval_loss") < metric(&evals[0], "eval_loss"));
}

#[test]
fn impossible_combinations_are_refused_by_name() {
    let workspace = Workspace::new();
    let refused = |flags: &[&str], words: &[&str]| dapo(&workspace, "out", flags).refused(2, words);
    refused(&["--packing=wrapped"], &["--packing wrapped", "must be bfd with --loss"]);
    refused(&["--sequence-ranks=2", "--gpus=2"], &["--loss dapo", "--sequence-ranks"]);
    refused(&["--data-format=input-ids"], &["--data-format input-ids", "must be rollouts with --loss dapo"]);
    refused(&["--beta=-1"], &["--beta -1.0", "at least 0"]);
    refused(&["--epsilon=1.5"], &["--epsilon 1.5", "from 0 to 1"]);
    refused(&["--epsilon-high=-0.1"], &["--epsilon-high -0.1", "at least 0"]);
    refused(&["--max-completion-length=5"], &["--max-completion-length 5", "needs --loss dr-grpo"]);
    refused(&["--loss=dr-grpo", "--max-completion-length=0"], &["--max-completion-length 0", "at least 1"]);
    refused(&["--simpo-gamma=1"], &["--simpo-gamma", "needs a loss of pairs"]);
    refused(&["--pair-length=8"], &["--pair-length 8", "needs a loss of pairs"]);
    refused(&["--layer-order=segments:1,1"], &["--layer-order segments:1,1", "completions"]);
    let data = golden("rollouts/rollouts.jsonl");
    train(&workspace, "out", &data, &["--loss=dpo", "--epsilon=0.1"]).refused(2, &["--epsilon 0.1", "needs --loss dapo"]);
    train(&workspace, "out", &data, &["--epsilon=0.1"]).refused(2, &["--epsilon 0.1", "needs --loss"]);
    train(&workspace, "out", &data, &["--data-format=rollouts"]).refused(2, &["--data-format rollouts", "needs --loss"]);
    train(&workspace, "out", &data, &[]).refused(1, &["rollouts.jsonl", "train on completions with --loss dapo"]);
    let fresh = golden("rollouts/fresh.jsonl");
    train(&workspace, "out", &fresh, &["--loss=dapo", "--seq-length=32", "--beta=0.1"])
        .refused(1, &["completion 1 has no `ref_logps`", "--beta"]);
}

#[test]
fn faulty_completions_are_named_with_their_line_and_long_ones_are_counted() {
    let workspace = Workspace::new();
    let write = |rows: &[Value]| {
        let path = workspace.path("data.jsonl");
        fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        path
    };
    let row = |prompt: Vec<u32>, completion: Vec<u32>| json!({"prompt_ids": prompt, "completion_ids": completion, "advantage": 1.0});
    let flags = ["--loss=grpo", "--seq-length=16", "--per-device-train-batch-size=1", "--max-steps=1", "-v"];
    let mut bad = row(vec![1], vec![2, 3]);
    bad["old_logps"] = json!([-1.0]);
    let outcome = train(&workspace, "out", &write(&[row(vec![1], vec![2]), bad]), &flags);
    outcome.refused(1, &["line 2", "`old_logps` has 1 values for 2 tokens of the completion"]);
    let outcome = train(&workspace, "out", &write(&[row(vec![1], vec![]), row(vec![1], vec![2])]), &flags);
    outcome.refused(1, &["line 1", "`completion_ids` is empty"]);
    let outcome = train(&workspace, "out", &write(&[row(vec![1], vec![2]), row(vec![1; 9], vec![2; 8]), row(vec![1, 2], vec![2])]), &flags);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let counts = "packing bfd: 2 completions in 1 row, 68.8 % padding; 1 longer than a row and left out; a larger --seq-length";
    assert!(outcome.stderr.contains(counts) || outcome.stdout.contains(counts), "{outcome:?}");
}
