//! Training with the head on trained rows alone: results beside the head on all rows, resume, number of devices, and reported FLOPs.

use crate::program::{Outcome, Workspace, run};
use crate::resume_compare::manifest;
use serde_json::{Value, json};

/// Records of 16 tokens, of which the last four are trained.
fn prompts(workspace: &Workspace) -> String {
    let record = |nth: usize| {
        let tokens: Vec<usize> = (0..16).map(|i| (nth * 31 + i * 7) % 256).collect();
        let labels: Vec<i64> = (0..).zip(&tokens).map(|(at, token)| if at < 12 { -100 } else { *token as i64 }).collect();
        json!({"input_ids": tokens, "labels": labels}).to_string()
    };
    format!("--data={}", workspace.write("prompts.jsonl", (0..24).map(record).collect::<Vec<_>>().join("\n")).display())
}

fn train(workspace: &Workspace, out: &str, head_rows: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, &[&["--head-rows", head_rows, "--packing=bfd", "--seq-length=16"], flags].concat()))
}

#[test]
fn the_loss_is_that_of_all_rows_but_for_rounding_and_flops_are_those_of_trained_rows() {
    let workspace = Workspace::new();
    // The CPU adds long sums in blocks of 128 terms: with 192 rows the blocks of both runs have other rows.
    let flags = [&*prompts(&workspace), "--dtype=float32", "--per-device-train-batch-size=12"];
    let digests = ["all", "trained"].map(|rows| train(&workspace, rows, rows, &flags).digest().to_string());
    assert_ne!(digests[0], digests[1], "sums have other blocks");
    let lines = ["all", "trained"].map(|rows| workspace.metrics_and_facts(rows));
    let value = |rows: usize, step: usize, key: &str| lines[rows][step][key].as_f64().unwrap();
    for step in 1..lines[0].len() {
        for key in ["loss", "grad_norm"] {
            let [all, trained] = [0, 1].map(|rows| value(rows, step, key));
            assert!((all - trained).abs() < 1e-5 * all, "step {step}: {key} {all} and {trained}");
        }
    }
    let flops = |rows: usize| lines[rows][0]["facts"]["flops_per_step"].as_f64().unwrap();
    let tokens = lines[0][0]["facts"]["tokens_per_step"].as_f64().unwrap();
    let (saved, head) = (flops(0) - flops(1), 6.0 * 256.0 * 32.0 * tokens);
    assert!((saved / head - 0.75).abs() < 1e-9, "three of four tokens are prompts: {saved} of {head}");
    assert!(lines[1][0]["facts"]["flops_formula"].as_str().unwrap().contains("T_trained"));
}

#[test]
fn a_run_keeps_its_rows_when_it_resumes_and_other_rows_are_refused() {
    let workspace = Workspace::new();
    let data = prompts(&workspace);
    let whole = train(&workspace, "whole", "trained", &[&data]).digest().to_string();
    for (out, rows) in [("auto", "auto"), ("same", "trained"), ("other", "all")] {
        workspace.copy_checkpoints("whole", out, &[6]);
        let resumed = train(&workspace, out, rows, &[&data, "--resume-from-checkpoint", "auto"]);
        match rows {
            "all" => resumed.refused(2, &["head_rows was \"trained\" and is \"all\"", "--allow-changed numerics"]),
            _ => assert_eq!(resumed.digest(), whole, "{rows}"),
        }
    }
    let manifest = manifest(&workspace.path("whole/checkpoint-6"));
    assert_eq!(manifest["run"]["numerics"]["head_rows"], "trained");
}

#[test]
fn evaluation_and_any_number_of_devices_have_the_bits_of_one() {
    let workspace = Workspace::new();
    let data = prompts(&workspace);
    let flags = [&*data, "--gradient-shares=2", "--eval-split=4", "--eval-steps=3"];
    let one = train(&workspace, "one", "trained", &[&flags[..], &["--gradient-accumulation-steps=2"]].concat());
    let two = train(&workspace, "two", "trained", &[&flags[..], &["--gradient-accumulation-steps=1", "--gpus=2", "--device=cpu"]].concat());
    assert_eq!(one.digest(), two.digest());
    let losses = |out: &str| workspace.metrics(out).iter().map(|line| line["eval_loss"].clone()).collect::<Vec<_>>();
    assert!(losses("one") == losses("two") && losses("one").iter().any(Value::is_number), "{:?}", losses("one"));
}

#[test]
fn by_default_data_with_prompts_has_trained_rows_and_other_data_all() {
    let workspace = Workspace::new();
    let record = |nth: usize| json!({"prompt": format!("question {nth}"), "completion": format!("answer {nth}")}).to_string();
    let prompts = workspace.write("prompts.jsonl", (0..24).map(record).collect::<Vec<_>>().join("\n"));
    let text = workspace.write("text.txt", "no record ".repeat(200));
    for (out, data, flags, rows) in [
        ("prompts", &prompts, &[][..], "trained"),
        ("whole", &prompts, &["--train-on=all"][..], "all"),
        ("asked", &prompts, &["--head-rows=all"][..], "all"),
        ("text", &text, &[][..], "all"),
    ] {
        let data = format!("--data={}", data.display());
        run(&mut workspace.train(out, &[&[&*data, "--seq-length=32"], flags].concat())).digest();
        let checkpoint = workspace.path(out).join("checkpoint-6");
        assert_eq!(manifest(&checkpoint)["run"]["numerics"]["head_rows"], rows, "{out}");
    }
}
