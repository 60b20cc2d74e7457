//! Losses of pairs of answers: the numbers of TRL's trainers, reference log-probabilities, and bits that do not depend on devices, shares,
//! timing or interruptions.

use crate::processes::{LAUNCHERS, TOKEN, ends, free_port};
use crate::program::{Outcome, Workspace, program, run};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Losses, rewards and mean log-probabilities of a token differ by some roundings of float32.
const ERROR_MAX: f64 = 1e-5;
/// Sums of log-probabilities are about 120.
const SUM_ERROR_MAX: f64 = 1e-3;
const METRICS: [&str; 6] =
    ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The flags `defaults` that `flags` do not give, and `flags`.
fn over<'a>(defaults: &[&'a str], flags: &[&'a str]) -> Vec<&'a str> {
    let name = |flag: &'a str| flag.split('=').next();
    let open = defaults.iter().filter(|flag| flags.iter().all(|given| name(given) != name(flag)));
    open.chain(flags).copied().collect()
}

/// The command `train` on the pairs `data` of the golden values.
fn command(workspace: &Workspace, out: &str, data: &str, flags: &[&str]) -> Command {
    let path = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let paths = [
        path("model", golden("trl/model")),
        path("data", golden(&format!("preference/{data}.jsonl"))),
        path("chat-template", golden("chat/templates/llama3.jinja")),
        path("output-dir", workspace.path(out)),
    ];
    let shared = "--device=cpu --dtype=float32 --threads=2 --learning-rate=2e-3 --lr-scheduler-type=constant --weight-decay=0.1 \
        --max-grad-norm=1.0 --report-to=none --digest";
    let mut command = program(&["train"]);
    let shared: Vec<&str> = paths.iter().map(String::as_str).chain(shared.split_whitespace()).collect();
    command.args(over(&shared, flags));
    command
}

fn train(workspace: &Workspace, out: &str, data: &str, flags: &[&str]) -> Outcome {
    run(&mut command(workspace, out, data, flags))
}

/// Flags of a run of four steps with rows of 96 tokens.
const DPO: [&str; 5] = ["--loss=dpo", "--seq-length=96", "--per-device-train-batch-size=1", "--max-steps=4", "--save-steps=2"];

fn dpo(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    train(workspace, out, "text", &over(&DPO, flags))
}

fn metric(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn steps_have_the_losses_rewards_and_log_probabilities_of_trl() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(golden("preference/steps.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 20);
    for case in &cases {
        let (data, loss, length) = (case["data"].as_str().unwrap(), case["loss"].as_str().unwrap(), case["max_length"].as_u64().unwrap());
        let (workspace, steps) = (Workspace::new(), case["steps"].as_array().unwrap());
        // All pairs are in the rows of a step.
        let (rows, micro_batches) = if data == "text" { (10, 1) } else { (2, 4) };
        let smoothing = if loss == "robust" { &["--label-smoothing=0.2"][..] } else { &[] };
        let flags = [
            format!("--loss={loss}"),
            format!("--max-steps={}", steps.len()),
            format!("--seq-length={}", 2 * length),
            format!("--per-device-train-batch-size={rows}"),
            format!("--gradient-accumulation-steps={micro_batches}"),
            "--beta=0.3".into(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(smoothing.iter().copied()).collect();
        let outcome = train(&workspace, "out", data, &flags);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let all = format!(" {} sequences of ", rows * micro_batches);
        assert!(outcome.stdout.contains(&all), "not{all}: {outcome:?}");
        for (step, (have, want)) in workspace.metrics("out").iter().zip(steps).enumerate() {
            let names = ["loss"].into_iter().chain(METRICS);
            for name in names {
                let (have, want) = (metric(have, name), metric(want, name));
                let most = if name.starts_with("logps") { SUM_ERROR_MAX } else { ERROR_MAX * want.abs().max(1.0) };
                assert!((have - want).abs() <= most, "{data} {loss} step {step}: {name} {have}, TRL {want}");
            }
        }
    }
}

#[test]
fn at_the_first_step_every_margin_is_zero_and_the_loss_is_ln_2_to_the_bit() {
    for (out, flags) in [("all", "--head-rows=all"), ("trained", "--head-rows=trained"), ("narrow", "--dtype=bfloat16")] {
        let workspace = Workspace::new();
        let outcome = dpo(&workspace, out, &[flags, "--seed=3"]);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let lines = workspace.metrics(out);
        assert_eq!(metric(&lines[0], "loss") as f32, std::f32::consts::LN_2, "{flags}");
        for name in &METRICS[..4] {
            assert_eq!(metric(&lines[0], name), 0.0, "{flags}: {name}");
        }
        assert!(metric(&lines[2], "rewards/margins") != 0.0);
    }
}

/// The reward of an answer is beta times the difference of its log-probabilities under the model and under the reference. The latter are
/// the log-probabilities at the first step of a run from the reference.
#[test]
fn another_model_is_the_reference() {
    let workspace = Workspace::new();
    assert_eq!(dpo(&workspace, "made", &["--seed=3"]).code, 0);
    let exported = run(program(&["export"]).arg(workspace.path("made")).arg(workspace.path("other")));
    assert_eq!(exported.code, 0, "{exported:?}");
    let other = workspace.path("other").display().to_string();
    let with = dpo(&workspace, "with", &[&format!("--reference={other}")]).digest().to_string();
    assert_eq!(dpo(&workspace, "from", &[&format!("--model={other}")]).code, 0);
    let first = |out: &str| workspace.metrics(out)[0].clone();
    let (have, of_reference) = (first("with"), first("from"));
    for answer in ["chosen", "rejected"] {
        let [reward, sum, reference] =
            [(&have, "rewards"), (&have, "logps"), (&of_reference, "logps")].map(|(line, name)| metric(line, &format!("{name}/{answer}")));
        assert!(reward.abs() > 0.01 && (reward - 0.1 * (sum - reference)).abs() < 1e-4, "{answer}: {reward}, {sum}, {reference}");
    }
    assert_ne!(dpo(&workspace, "without", &[]).digest(), with);
    let same = format!("--reference={}", golden("trl/model").display());
    assert_eq!(dpo(&workspace, "same", &[&same]).digest(), dpo(&workspace, "again", &[]).digest());
    // A run that goes on has the sums, and does not need the model.
    workspace.copy_checkpoints("with", "resumed", &[2]);
    crate::program::copy_dir(&workspace.path("with/.superoffload"), &workspace.path("resumed/.superoffload"));
    fs::remove_dir_all(workspace.path("other")).unwrap();
    let resumed = dpo(&workspace, "resumed", &["--resume-from-checkpoint=auto", &format!("--reference={other}")]);
    assert_eq!(resumed.digest(), with);
}

#[test]
fn a_reference_without_use_or_of_another_shape_is_refused() {
    let workspace = Workspace::new();
    let model = golden("trl/model");
    let refused = |flags: &[&str]| {
        let outcome = dpo(&workspace, "refused", flags);
        assert_eq!(outcome.code, 2, "{outcome:?}");
        outcome.stderr
    };
    let same = format!("--reference={}", model.display());
    let message = refused(&["--loss=simpo", &same]);
    assert!(message.contains("--reference") && message.contains("needs a loss with a reference, such as --loss dpo"), "{message}");
    crate::program::copy_dir(&model, &workspace.path("wider"));
    let config = workspace.path("wider/config.json");
    let mut values: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    values["rms_norm_eps"] = 0.25.into();
    fs::write(&config, values.to_string()).unwrap();
    let message = refused(&[&format!("--reference={}", workspace.path("wider").display())]);
    assert!(message.contains("describes another model than that of --model"), "{message}");
    let message = refused(&["--reference=/nowhere/model"]);
    assert!(message.contains("/nowhere/model"), "{message}");
}

#[test]
fn devices_shares_timing_and_interruptions_change_no_bit() {
    let workspace = Workspace::new();
    let shares = ["--gradient-shares=2", "--gradient-accumulation-steps=4"];
    let whole = dpo(&workspace, "whole", &shares).digest().to_string();
    let ways: [(&str, &[&str]); 4] = [
        ("gpus", &["--gpus=2", "--gradient-shares=2", "--gradient-accumulation-steps=2"]),
        ("adversary", &["--gradient-shares=2", "--gradient-accumulation-steps=4", "--adversary=7"]),
        ("both", &["--gpus=2", "--gradient-shares=2", "--gradient-accumulation-steps=2", "--adversary=11"]),
        ("threads", &["--gradient-shares=2", "--gradient-accumulation-steps=4", "--threads=1"]),
    ];
    let lines = |out: &str| workspace.metrics(out).iter().map(|line| METRICS.map(|name| metric(line, name))).collect::<Vec<_>>();
    for (out, flags) in ways {
        assert_eq!(dpo(&workspace, out, flags).digest(), whole, "{out}");
        assert_eq!(lines(out), lines("whole"), "{out}");
    }
    let parts = processes(&workspace, "parts");
    assert_eq!((parts.digest(), lines("parts")), (&*whole, lines("whole")), "two processes");
    workspace.copy_checkpoints("whole", "resumed", &[2]);
    crate::program::copy_dir(&workspace.path("whole/.superoffload"), &workspace.path("resumed/.superoffload"));
    assert_eq!(dpo(&workspace, "resumed", &[&shares[..], &["--resume-from-checkpoint=auto"]].concat()).digest(), whole);
}

/// The output matrix is the embedding, so the first segment computes the losses of pairs again.
#[test]
fn segments_of_layers_change_no_bit() {
    let workspace = Workspace::new();
    let shared = ["--gradient-shares=2", "--gradient-accumulation-steps=4", "--head-rows=all"];
    let of = |out: &str, order: &str| dpo(&workspace, out, &[&shared[..], &[order]].concat()).digest().to_string();
    assert_eq!(of("segments", "--layer-order=segments:1,1"), of("whole", "--layer-order=whole"));
    let lines = |out: &str| workspace.metrics(out).iter().map(|line| METRICS.map(|name| metric(line, name))).collect::<Vec<_>>();
    assert_eq!(lines("segments"), lines("whole"));
    assert_eq!(lines("segments")[0][2], 0.0, "margins");
}

/// The outcome of process 0 of two processes with a device each.
fn processes(workspace: &Workspace, out: &str) -> Outcome {
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let start = |process: usize| {
        let (process, cut) = (format!("--process={process}"), ["--gradient-shares=2", "--gradient-accumulation-steps=2"]);
        let mut command = command(workspace, out, "text", &[&DPO[..], &cut, &["--processes=2", &rendezvous, &process]].concat());
        LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
        command.env(TOKEN.0, TOKEN.1).spawn().unwrap()
    };
    let mut outcomes = ends([0, 1].map(start).into());
    assert!(outcomes.iter().all(|outcome| outcome.code == 0), "{outcomes:?}");
    outcomes.swap_remove(0)
}

#[test]
fn a_run_does_not_go_on_with_another_reference_loss_or_length() {
    let workspace = Workspace::new();
    assert_eq!(dpo(&workspace, "out", &[]).code, 0);
    let resumed = |flags: &[&str]| dpo(&workspace, "out", &[&["--resume-from-checkpoint=auto", "--max-steps=6"], flags].concat());
    resumed(&["--loss=ipo"]).refused(2, &["--loss: loss was \"dpo\"", "is \"ipo\" now"]);
    resumed(&["--pair-length=20"]).refused(2, &["--pair-length", "was the default"]);
    resumed(&["--beta=0.2"]).refused(2, &["beta was 0.1 and is 0.2", "--allow-changed numerics"]);
    let record = workspace.path("out/.superoffload/pair-reference.json");
    let kept = fs::read_to_string(&record).unwrap();
    let digit = kept.rfind(|c: char| c.is_ascii_digit()).unwrap();
    let other = if kept.as_bytes()[digit] == b'1' { "2" } else { "1" };
    fs::write(&record, [&kept[..digit], other, &kept[digit + 1..]].concat()).unwrap();
    let words = ["pair-reference.json", "not the reference log-probabilities", "start a new run"];
    resumed(&[]).refused(1, &words);
    fs::remove_file(&record).unwrap();
    resumed(&[]).refused(1, &words);
    fs::write(&record, kept).unwrap();
    assert_eq!(resumed(&[]).code, 0);
}

#[test]
fn evaluations_have_the_numbers_of_pairs_and_a_reference_of_their_own() {
    let workspace = Workspace::new();
    let eval = format!("--eval-data={}", golden("preference/chat.jsonl").display());
    let flags = [
        "--loss=sigmoid",
        "--seq-length=128",
        "--per-device-train-batch-size=2",
        "--max-steps=3",
        "--eval-on-start",
        "--eval-steps=3",
        "-v",
    ];
    let outcome = train(&workspace, "out", "chat", &[&flags[..], &[&eval]].concat());
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(outcome.stdout.contains("reference log-probabilities of 16 pairs"), "{outcome:?}");
    let lines: Vec<Value> = workspace.metrics("out").into_iter().filter(|line| line["eval_loss"].is_number()).collect();
    assert_eq!((lines.len(), metric(&lines[0], "eval_rewards/margins")), (2, 0.0));
    assert!((metric(&lines[0], "eval_loss") - std::f64::consts::LN_2).abs() < 1e-7);
    assert!(metric(&lines[1], "eval_rewards/margins") > 0.0 && metric(&lines[1], "eval_rewards/accuracies") > 0.5, "{lines:?}");
    assert!(metric(&lines[1], "eval_logps/chosen") < 0.0);
}

#[test]
fn a_run_on_pairs_is_sampled() {
    let workspace = Workspace::new();
    assert_eq!(dpo(&workspace, "out", &["--max-steps=1", "--beta=0.2"]).code, 0);
    let outcome = run(program(&["sample"]).arg(workspace.path("out")).args(["--prompt=one", "--max-new-tokens=2"]));
    assert_eq!(outcome.code, 0, "{outcome:?}");
}

#[test]
fn impossible_combinations_are_refused_by_name() {
    let workspace = Workspace::new();
    let refused = |flags: &[&str], words: &[&str]| dpo(&workspace, "out", flags).refused(2, words);
    refused(&["--packing=wrapped"], &["--packing wrapped", "must be bfd with --loss"]);
    refused(&["--sequence-ranks=2", "--gpus=2"], &["--loss dpo", "--sequence-ranks"]);
    refused(&["--data-format=messages"], &["--data-format messages", "must be preference with --loss"]);
    refused(&["--pair-length=49"], &["--pair-length 49", "from 2 to 48"]);
    refused(&["--beta=0"], &["--beta 0.0", "above 0"]);
    refused(&["--label-smoothing=0.1"], &["--label-smoothing 0.1", "needs --loss robust"]);
    refused(&["--cpo-alpha=0.1"], &["--cpo-alpha 0.1", "needs --loss cpo or simpo"]);
    refused(&["--loss=cpo", "--cpo-alpha=-1"], &["--cpo-alpha -1.0", "at least 0"]);
    refused(&["--simpo-gamma=0.1"], &["--simpo-gamma 0.1", "needs --loss simpo"]);
    train(&workspace, "out", "text", &["--data-format=preference"]).refused(2, &["--data-format preference", "needs --loss"]);
    train(&workspace, "out", "text", &["--beta=0.3"]).refused(2, &["--beta 0.3", "needs --loss"]);
    train(&workspace, "out", "text", &[]).refused(1, &["text.jsonl", "train on pairs with --loss dpo"]);
}
