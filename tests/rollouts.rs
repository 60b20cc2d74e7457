//! Losses of sampled completions: the numbers of TRL's GRPOTrainer, references that the engine computes, and bits that do not depend on devices, shares, timing, packing or
//! interruptions.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Losses and metrics differ by some roundings of float32; so do gradient norms, relative to their size.
const ERROR_MAX: f64 = 1e-5;
const RECORD: &str = ".superoffload/token-reference.json";
const RATIO: &str = "sampling/importance_sampling_ratio/mean";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Trains the model of the golden values on the completions `data`.
fn train(workspace: &Workspace, out: &str, data: &Path, flags: &[&str]) -> Outcome {
    let path = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    let paths = [path("model", &golden("trl/model")), path("data", data), path("output-dir", &workspace.path(out))];
    let name = |flag: &str| flag.split('=').next().map(String::from);
    let paths = paths.into_iter().filter(|path| flags.iter().all(|given| name(given) != name(path)));
    let shared = "--device=cpu --dtype=float32 --threads=2 --learning-rate=5e-4 --lr-scheduler-type=constant --weight-decay=0.1 \
        --max-grad-norm=1.0 --report-to=none --digest";
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

/// Log-probabilities of the reference of each completion, as a run has kept them.
fn kept(workspace: &Workspace, out: &str, lengths: &[usize]) -> Vec<Vec<f32>> {
    let record = fs::read_to_string(workspace.path(out).join(RECORD)).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    let digits = record["content"]["train"]["logps"].as_str().unwrap();
    let logp = |digits: &[u8]| f32::from_bits(u32::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap());
    let mut logps = digits.as_bytes().chunks(8).map(logp);
    let kept = lengths.iter().map(|length| logps.by_ref().take(*length).collect()).collect();
    assert!(logps.next().is_none());
    kept
}

/// Each of four completions of a row of its own is in the rows in order. Advantages differ, and completions have other lengths.
const LENGTHS: [usize; 4] = [7, 4, 6, 5];

/// Completions, of which some have the log-probabilities of a reference.
fn completions(workspace: &Workspace, name: &str, references: &[Option<&[f32]>]) -> PathBuf {
    let row = |(at, reference): (usize, &Option<&[f32]>)| {
        let ids = |count: usize, by: usize| (0..count).map(|nth| (7 * at + by * nth) % 90 + 1).collect::<Vec<_>>();
        let mut row = json!({"prompt_ids": ids(10 - LENGTHS[at], 3), "completion_ids": ids(LENGTHS[at], 5), "advantage": at as f64 - 1.2});
        if let Some(reference) = reference {
            row["ref_logps"] = json!(reference);
        }
        format!("{row}\n")
    };
    let path = workspace.path(name);
    fs::write(&path, references.iter().enumerate().map(row).collect::<String>()).unwrap();
    path
}

/// Flags of steps of two of four rows.
const PASS: [&str; 6] =
    ["--loss=grpo", "--beta=0.2", "--seq-length=12", "--per-device-train-batch-size=1", "--gradient-accumulation-steps=2", "--max-steps=3"];

#[test]
fn a_pass_computes_the_reference_of_completions_that_come_without_one() {
    for flags in [&["--head-rows=all"][..], &["--head-rows=trained", "--dtype=bfloat16"]] {
        let workspace = Workspace::new();
        let run = |out: &str, data: &Path| train(&workspace, out, data, &[&PASS, flags].concat());
        let none = completions(&workspace, "none.jsonl", &[None; 4]);
        let passed = run("passed", &none);
        let steps = workspace.metrics("passed");
        assert_eq!((metric(&steps[0], "kl"), metric(&steps[0], RATIO)), (0.0, 1.0), "{flags:?}");
        assert!(metric(&steps[2], "kl") > 0.0);
        let references = kept(&workspace, "passed", &LENGTHS);
        let given: Vec<_> = references.iter().map(|logps| Some(&logps[..])).collect();
        let all = run("given", &completions(&workspace, "given.jsonl", &given));
        assert_eq!((all.digest(), workspace.path("given").join(RECORD).exists()), (passed.digest(), false), "{flags:?}");
        let some = completions(&workspace, "some.jsonl", &[None, given[1], None, given[3]]);
        assert_eq!(run("some", &some).digest(), passed.digest(), "{flags:?}");
        let other = [-1.5; 4];
        let some = run("other", &completions(&workspace, "other.jsonl", &[None, Some(&other), None, None]));
        assert_ne!(some.digest(), passed.digest());
        assert_eq!(kept(&workspace, "other", &LENGTHS)[1], other, "a reference in the data is kept");
    }
}

#[test]
fn devices_timing_and_interruptions_change_no_bit_of_a_reference() {
    let workspace = Workspace::new();
    let data = completions(&workspace, "none.jsonl", &[None; 4]);
    let run = |out: &str, flags: &[&str]| {
        let name = |flag: &str| flag.split('=').next().map(String::from);
        let open = PASS.into_iter().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
        train(
            &workspace,
            out,
            &data,
            &open.chain(["--save-steps=1", "--gradient-shares=2"]).chain(flags.iter().copied()).collect::<Vec<_>>(),
        )
    };
    let whole = run("whole", &["--adversary=3"]).digest().to_string();
    let all = ["--head-rows=all", "--layer-order=segments:1,1"];
    assert_eq!(run("segments", &all).digest(), run("all", &all[..1]).digest());
    assert_eq!(run("gpus", &["--gpus=2", "--gradient-accumulation-steps=1", "--adversary=5"]).digest(), whole);
    workspace.copy_checkpoints("whole", "resumed", &[1]);
    let resumed = |flags: &[&str]| run("resumed", &[&["--resume-from-checkpoint=auto"], flags].concat());
    let words = ["token-reference.json", "not the reference log-probabilities", "start a new run"];
    resumed(&[]).refused(1, &words);
    fs::copy(workspace.path("whole").join(RECORD), workspace.path("resumed").join(RECORD)).unwrap();
    let eval = format!("--eval-data={}", data.display());
    resumed(&[&eval]).refused(2, &["--eval-data", "the run began without a reference for this data"]);
    let record = workspace.path("resumed").join(RECORD);
    let kept = fs::read_to_string(&record).unwrap();
    let digit = kept.find("logps\":\"").unwrap() + 9;
    fs::write(&record, [&kept[..digit], "3", &kept[digit + 1..]].concat()).unwrap();
    resumed(&[]).refused(1, &words);
    fs::write(&record, kept).unwrap();
    assert_eq!(resumed(&[]).digest(), whole);
}

/// The divergence from another model is that of the log-probabilities at the first step of a run from that model.
#[test]
fn another_model_is_the_reference_of_completions_and_evaluations_have_one() {
    let workspace = Workspace::new();
    let data = completions(&workspace, "none.jsonl", &[None; 4]);
    let run = |out: &str, data: &Path, flags: &[&str]| train(&workspace, out, data, &[&PASS, flags].concat());
    assert_eq!(run("made", &data, &["--learning-rate=1e-2"]).code, 0);
    let exported = crate::program::run(program(&["export"]).arg(workspace.path("made")).arg(workspace.path("other")));
    assert_eq!(exported.code, 0, "{exported:?}");
    let model = format!("--model={}", workspace.path("other").display());
    let other = model.replace("--model", "--reference");
    let eval = format!("--eval-data={}", data.display());
    let with = run("with", &data, &[&other, &eval, "--eval-on-start", "-v"]);
    assert!(with.stdout.contains("reference log-probabilities of 44 tokens"), "{with:?}");
    let lines = workspace.metrics("with");
    let kl = ["eval_kl", "kl"].map(|name| metric(lines.iter().find(|line| line[name].is_number()).unwrap(), name));
    assert!(kl[0] > 1e-4 && kl[1] > 1e-4, "{kl:?}");
    assert_eq!(run("from", &data, &[&model, &eval, "--eval-on-start"]).code, 0);
    assert_eq!(metric(&workspace.metrics("from")[0], "eval_kl"), 0.0);
    assert_eq!(kept(&workspace, "with", &LENGTHS), kept(&workspace, "from", &LENGTHS));
    let given = completions(&workspace, "given.jsonl", &LENGTHS.map(|length| Some(&[-2.0; 7][..length])));
    let unused = run("unused", &given, &[&other]);
    assert_eq!(unused.code, 0, "{unused:?}");
    assert!(unused.stderr.contains("--reference has no effect: every completion has `ref_logps`"), "{unused:?}");
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
    let data = golden("rollouts/rollouts.jsonl");
    train(&workspace, "out", &data, &["--loss=dpo", "--epsilon=0.1"]).refused(2, &["--epsilon 0.1", "needs --loss dapo"]);
    train(&workspace, "out", &data, &["--epsilon=0.1"]).refused(2, &["--epsilon 0.1", "needs --loss"]);
    train(&workspace, "out", &data, &["--data-format=rollouts"]).refused(2, &["--data-format rollouts", "needs --loss"]);
    train(&workspace, "out", &data, &[]).refused(1, &["rollouts.jsonl", "train on completions with --loss dapo"]);
    refused(&["--beta=0", "--reference=/nowhere"], &["--reference /nowhere", "needs --beta above 0"]);
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
