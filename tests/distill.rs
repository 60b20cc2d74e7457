//! Distillation from stored probabilities of a teacher: the numbers of PyTorch's autograd, and bits that do not depend on devices, shares,
//! timing or interruptions.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Losses and metrics differ by some roundings of float32; so do gradient norms, relative to their size.
const ERROR_MAX: f64 = 1e-5;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Trains the model of the golden values on the records `data`.
fn train(workspace: &Workspace, out: &str, data: &Path, flags: &[&str]) -> Outcome {
    let path = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    let paths = [path("model", &golden("trl/model")), path("data", data), path("output-dir", &workspace.path(out))];
    let shared = "--device=cpu --dtype=float32 --threads=2 --learning-rate=5e-4 --lr-scheduler-type=constant --weight-decay=0.1 \
        --max-grad-norm=0.5 --report-to=none --digest";
    let name = |flag: &str| flag.split('=').next().map(String::from);
    let open = shared.split_whitespace().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
    run(program(&["train"]).args(paths).args(open).args(flags))
}

/// Flags of a run of four steps, each of some of the records.
const DISTILL: [&str; 6] =
    ["--loss=distill", "--seq-length=32", "--per-device-train-batch-size=1", "--max-steps=4", "--save-steps=2", "--kd-ratio=0.75"];

fn distill(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    let name = |flag: &str| flag.split('=').next().map(String::from);
    let open = DISTILL.into_iter().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
    train(workspace, out, &golden("distill/top64.jsonl"), &open.chain(flags.iter().copied()).collect::<Vec<_>>())
}

fn metric(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn steps_have_the_losses_gradients_and_divergences_of_autograd() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(golden("distill/steps.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 7);
    for case in &cases {
        let (data, ratio, steps) = (case["data"].as_str().unwrap(), case["kd_ratio"].as_f64().unwrap(), case["steps"].as_array().unwrap());
        // All records are in the rows of a step.
        let flags = [
            "--loss=distill".into(),
            format!("--max-steps={}", steps.len()),
            format!("--kd-ratio={ratio}"),
            "--seq-length=64".into(),
            "--per-device-train-batch-size=1".into(),
            "--gradient-accumulation-steps=3".into(),
        ];
        let top_k = if data == "top1" { &["--loss-top-k=1"][..] } else { &[] };
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(top_k.iter().copied()).collect();
        let workspace = Workspace::new();
        let outcome = train(&workspace, "out", &golden(&format!("distill/{data}.jsonl")), &flags);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        assert!(outcome.stdout.contains(" 3 sequences of 64"), "{outcome:?}");
        for (step, (have, want)) in workspace.metrics("out").iter().zip(steps).enumerate() {
            for (name, want) in want.as_object().unwrap() {
                let (have, want) = (metric(have, name), want.as_f64().unwrap());
                let most = ERROR_MAX * want.abs().max(1.0);
                assert!((have - want).abs() <= most, "{data} {ratio} step {step}: {name} {have}, PyTorch {want}");
            }
        }
    }
}

#[test]
fn devices_shares_timing_and_interruptions_change_no_bit() {
    let workspace = Workspace::new();
    let shares = ["--gradient-shares=2", "--gradient-accumulation-steps=2"];
    let whole = distill(&workspace, "whole", &shares).digest().to_string();
    let ways: [(&str, &[&str]); 5] = [
        ("gpus", &["--gpus=2", "--gradient-shares=2", "--gradient-accumulation-steps=1"]),
        ("adversary", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--adversary=7"]),
        ("threads", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--threads=1"]),
        ("resident", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--strategy=no-offload"]),
        ("exact", &["--gradient-shares=2", "--gradient-accumulation-steps=2", "--loss-top-k=64"]),
    ];
    let names = ["loss", "kl", "cross_entropy"];
    let lines = |out: &str| workspace.metrics(out).iter().map(|line| names.map(|name| metric(line, name))).collect::<Vec<_>>();
    for (out, flags) in ways {
        assert_eq!(distill(&workspace, out, flags).digest(), whole, "{out}");
        assert_eq!(lines(out), lines("whole"), "{out}");
    }
    let all = [&shares[..], &["--head-rows=all", "--layer-order=segments:1,1"]].concat();
    assert_eq!(distill(&workspace, "segments", &all).digest(), distill(&workspace, "all", &all[..3]).digest());
    workspace.copy_checkpoints("whole", "resumed", &[2]);
    assert_eq!(distill(&workspace, "resumed", &[&shares[..], &["--resume-from-checkpoint=auto"]].concat()).digest(), whole);
    let refused = |flags: &[&str]| distill(&workspace, "resumed", &[&shares[..], &["--resume-from-checkpoint=auto"], flags].concat());
    refused(&["--kd-ratio=0.5"]).refused(2, &["kd_ratio", "0.5", "--allow-changed numerics"]);
}

/// Rows and the choice of rows regroup sums, and change no more than roundings.
#[test]
fn teachers_follow_their_tokens_into_rows_and_selected_rows() {
    let numbers = |flags: &[&str]| {
        let workspace = Workspace::new();
        let outcome = distill(&workspace, "out", &[&["--max-steps=1"], flags].concat());
        assert_eq!(outcome.code, 0, "{outcome:?}");
        ["loss", "grad_norm", "kl", "cross_entropy"].map(|name| metric(&workspace.metrics("out")[0], name))
    };
    let all = numbers(&["--head-rows=all", "--per-device-train-batch-size=5"]);
    let near = |other: [f64; 4]| all.iter().zip(other).all(|(a, b)| (a - b).abs() <= ERROR_MAX * a.abs().max(1.0));
    assert!(near(numbers(&["--head-rows=trained", "--per-device-train-batch-size=5"])));
    assert!(near(numbers(&["--seq-length=24", "--per-device-train-batch-size=7"])), "other rows");
}

#[test]
fn evaluations_have_the_numbers_of_distillation() {
    let workspace = Workspace::new();
    let eval = format!("--eval-data={}", golden("distill/top64.jsonl").display());
    let flags = ["--max-steps=3", "--eval-on-start", "--eval-steps=3", "--per-device-train-batch-size=5", &eval];
    let outcome = distill(&workspace, "out", &flags);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let (steps, evals): (Vec<Value>, Vec<Value>) = workspace.metrics("out").into_iter().partition(|line| line["eval_loss"].is_null());
    assert_eq!(evals.len(), 2);
    for name in ["loss", "kl", "cross_entropy"] {
        let (step, eval) = (metric(&steps[0], name), metric(&evals[0], &format!("eval_{name}")));
        assert!((step - eval).abs() <= ERROR_MAX, "{name}: {step}, {eval}");
    }
    assert!(metric(&evals[1], "eval_loss") < metric(&evals[0], "eval_loss"));
}

#[test]
fn impossible_combinations_are_refused_by_name() {
    let workspace = Workspace::new();
    let refused = |flags: &[&str], words: &[&str]| distill(&workspace, "out", flags).refused(2, words);
    refused(&["--packing=wrapped"], &["--packing wrapped", "must be bfd with --loss"]);
    refused(&["--sequence-ranks=2", "--gpus=2"], &["--loss distill", "--sequence-ranks"]);
    refused(&["--data-format=input-ids"], &["--data-format input-ids", "must be teacher with --loss distill"]);
    refused(&["--kd-ratio=1.5"], &["--kd-ratio 1.5", "must be from 0 to 1"]);
    refused(&["--loss-top-k=0"], &["--loss-top-k 0", "must be from 1 to 64"]);
    refused(&["--loss-top-k=65"], &["--loss-top-k 65", "must be from 1 to 64"]);
    refused(&["--beta=0.1"], &["--beta 0.1", "needs a loss of pairs or completions"]);
    refused(&["--epsilon=0.1"], &["--epsilon 0.1", "needs --loss dapo"]);
    refused(&["--pair-length=8"], &["--pair-length 8", "needs a loss of pairs"]);
    let data = golden("distill/top8.jsonl");
    train(&workspace, "out", &data, &["--loss=dpo", "--kd-ratio=0.5"]).refused(2, &["--kd-ratio 0.5", "needs --loss distill"]);
    train(&workspace, "out", &data, &["--loss=grpo", "--loss-top-k=5"]).refused(2, &["--loss-top-k 5", "needs --loss distill"]);
    train(&workspace, "out", &data, &["--kd-ratio=0.5"]).refused(2, &["--kd-ratio 0.5", "needs --loss"]);
    train(&workspace, "out", &data, &["--data-format=teacher"]).refused(2, &["--data-format teacher", "needs --loss"]);
    let whole = golden("distill/whole.jsonl");
    train(&workspace, "out", &whole, &[]).refused(1, &["whole.jsonl", "train on them with --loss distill"]);
    train(&workspace, "out", &data, &["--loss=distill", "--seq-length=32", "--loss-top-k=7"])
        .refused(1, &["has 8 teacher ids for a token; use --loss-top-k 8"]);
}

#[test]
fn faulty_teachers_are_named_with_their_line() {
    let workspace = Workspace::new();
    let write = |row: Value| {
        let path = workspace.path("data.jsonl");
        let good = json!({"input_ids": [1, 2], "teacher_ids": [[], [2]], "teacher_probs": [[], [1.0]]});
        fs::write(&path, format!("{good}\n{row}\n")).unwrap();
        path
    };
    let row =
        |ids: Value, probs: Value| json!({"input_ids": [1, 2, 3], "teacher_ids": [[], [2], ids], "teacher_probs": [[], [1.0], probs]});
    let flags = ["--loss=distill", "--seq-length=16", "--per-device-train-batch-size=1", "--max-steps=1"];
    for (ids, probs, cause) in [
        (json!([3, 4, 3]), json!([0.1, 0.1, 0.1]), "`teacher_ids` has id 3 twice for token 2"),
        (json!([3]), json!([-0.1]), "`teacher_probs` has -0.1 for token 2"),
        (json!([3, 4]), json!([0.9, 0.2]), "`teacher_probs` for token 2: probabilities add up to 1.1000"),
        (json!([320]), json!([0.5]), "id 320 of a teacher is outside the vocabulary of 320"),
    ] {
        train(&workspace, "out", &write(row(ids, probs)), &flags).refused(1, &["line 2", cause]);
    }
    let mut weighted = json!({"prompt_ids": [1], "completion_ids": [2], "teacher_ids": [[2]], "teacher_probs": [[1.0]]});
    weighted["weights"] = json!([1, 1]);
    let path = workspace.path("weighted.jsonl");
    fs::write(&path, format!("{weighted}\n")).unwrap();
    train(&workspace, "out", &path, &flags).refused(1, &["line 1", "`weights` is read beside `input_ids`"]);
}
