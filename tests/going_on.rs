//! A run goes on by its directory alone, says how when it is interrupted, and says before it starts how much it will do.

use crate::program::{Outcome, Workspace, program, run};
use crate::resume::{await_line, send};
use nix::sys::signal::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;

fn resume(dir: &Path, flags: &[&str]) -> Outcome {
    run(program(&["resume"]).arg(dir).args(flags))
}

/// `train` started in the workspace, all paths relative to it.
fn train_from_within(workspace: &Workspace, flags: &[&str]) -> Command {
    train_on(workspace, "data.txt", flags)
}

fn train_on(workspace: &Workspace, data: &str, flags: &[&str]) -> Command {
    let mut command = program(&["train", "--model", "model", "--data", data, "--tokenizer", "bytes"]);
    command.current_dir(workspace.path("")).args(["--seq-length=16", "--per-device-train-batch-size=2", "--init=random", "--digest"]);
    command.args(["--learning-rate=1e-2", "--lr-scheduler-type=constant", "--weight-decay=0.1", "--threads=2", "--device=cpu"]).args(flags);
    command
}

#[test]
fn a_directory_is_all_that_resume_needs_wherever_it_is_given() {
    let workspace = Workspace::new();
    let digest = run(&mut train_from_within(&workspace, &["--output-dir=whole", "--max-steps=8"])).digest().to_string();
    run(&mut train_from_within(&workspace, &["--output-dir=out", "--max-steps=4", "--save-steps=2"])).digest();
    let out = workspace.path("out");
    for name in ["moved", "copy"] {
        crate::program::copy_dir(&out, &workspace.path(name));
    }
    let resumed = resume(&out, &["--max-steps=8"]);
    assert_eq!(resumed.digest(), digest);
    assert!(!resumed.stdout.contains("built-in") && resumed.stdout.contains(" in steps 5 to 8; "), "{resumed:?}");
    // From a checkpoint, in a directory that has another name by now, by a path from where the run was started.
    let from = run(program(&["resume", "moved/checkpoint-2", "--max-steps=8"]).current_dir(workspace.path("")));
    assert_eq!(from.digest(), digest);
    assert!(workspace.path("moved/checkpoint-8").is_dir() && workspace.path("moved/previous-1/checkpoint-4").is_dir());
    // Epochs win over the steps of the record.
    let epochs = resume(&workspace.path("copy"), &["--num-train-epochs=0.01"]);
    assert!(epochs.stdout.contains("nothing to do: step 4 was already done, 1 were asked for"), "{epochs:?}");
    let again = resume(&out, &[]);
    assert!(again.stdout.contains("\nnothing to do: step 8 was already done"), "the newest record counts: {again:?}");
}

#[test]
fn a_model_that_is_gone_is_read_from_the_checkpoint() {
    let workspace = Workspace::new();
    run(&mut train_from_within(&workspace, &["--output-dir=out", "--max-steps=2"])).digest();
    fs::rename(workspace.path("model"), workspace.path("elsewhere")).unwrap();
    let resumed = resume(&workspace.path("out"), &["--max-steps=3"]);
    assert!(resumed.code == 0 && resumed.stdout.contains("finished 3 of 3 steps, 1 of them since the resume"), "{resumed:?}");
}

#[test]
fn resume_refuses_what_names_another_run() {
    let workspace = Workspace::new();
    run(&mut train_from_within(&workspace, &["--output-dir=out", "--max-steps=1"])).digest();
    let out = workspace.path("out");
    for flag in ["--output-dir=x", "--resume-from-checkpoint=auto"] {
        resume(&out, &[flag]).refused(2, &[flag.split('=').next().unwrap(), "leave the flag out"]);
    }
    resume(&out, &["--seed=1"]).refused(2, &["--seed", "was 42"]);
    resume(&workspace.path("model"), &[]).refused(1, &["model", "no good checkpoint"]);
    resume(&workspace.path("nowhere"), &[]).refused(1, &["nowhere", "no good checkpoint"]);
}

#[test]
fn an_incomplete_resume_by_hand_names_the_command_and_never_reads_the_built_in_text() {
    let workspace = Workspace::new();
    run(&mut train_from_within(&workspace, &["--output-dir=out", "--max-steps=1"])).digest();
    let (out, data) = (workspace.path("out"), workspace.path("data.txt"));
    let command = format!("superoffload resume {}", out.display());
    let by_hand = |flags: &[&str]| run(program(&["train", "--resume-from-checkpoint=auto", "--output-dir"]).arg(&out).args(flags));
    let data = format!("--data={}", data.display());
    for (flags, missing) in [(&[][..], "--model and --data: missing"), (&[data.as_str()], "--model: missing")] {
        let refused = by_hand(flags);
        refused.refused(2, &[missing, &command]);
        assert!(!refused.stdout.contains("built-in"), "{refused:?}");
    }
    by_hand(&[&format!("--model={}", workspace.path("model").display())]).refused(2, &["--data is missing", "superoffload resume DIR"]);
    // The built-in model's own run needs neither.
    let demo = format!("--output-dir={}", workspace.path("demo").display());
    let demo = |flags: &[&str]| run(program(&["train", "--seq-length=8", "--per-device-train-batch-size=1", &demo]).args(flags));
    assert_eq!(demo(&["--max-steps=1"]).code, 0);
    let resumed = demo(&["--max-steps=2", "--resume-from-checkpoint=auto"]);
    assert!(resumed.code == 0 && resumed.stdout.contains("finished 2 of 2 steps"), "{resumed:?}");
}

#[test]
fn an_interrupted_run_ends_with_the_command_that_goes_on_with_it() {
    let workspace = Workspace::new();
    let digest = run(&mut train_from_within(&workspace, &["--output-dir=whole", "--max-steps=40"])).digest().to_string();
    let flags = ["--output-dir=a run", "--max-steps=1000000", "--logging-steps=1"];
    let mut child = train_from_within(&workspace, &flags).spawn().unwrap();
    await_line(&mut child, "step      1");
    send(&child, Signal::SIGINT);
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, 75, "{ended:?}");
    // Behind it stands the digest alone, which was asked for.
    assert_eq!(ended.stdout.lines().rev().nth(1), Some("next: superoffload resume 'a run'"), "{ended:?}");
    let resumed = resume(&workspace.path("a run"), &["--max-steps=40"]);
    assert!(resumed.stdout.contains("nothing to do") || resumed.digest() == digest, "{resumed:?}");
}

#[test]
fn a_start_and_a_dry_run_show_passes_and_too_many_passes_are_a_warning() {
    let workspace = Workspace::new();
    let records: String = (0..6).map(|n| format!("{{\"prompt\": \"p{n}\", \"completion\": \"c{n}\"}}\n")).collect();
    workspace.write("records.jsonl", records);
    let message = |flags: &[&str]| run(train_on(&workspace, "records.jsonl", &["--output-dir=out", "--packing=off"]).args(flags));
    let dry = message(&["--dry-run", "--max-steps=9"]);
    assert!(dry.stdout.contains("\nsteps 1 to 9 would be trained: 3 passes over 6 rows\n"), "{dry:?}");
    assert!(!dry.stderr.contains("passes"), "{dry:?}");
    let often = message(&["--dry-run", "--max-steps=63"]);
    let warning = "warning: the run makes 21 passes over 6 rows of records; --num-train-epochs 3 trains each record three times";
    assert!(often.stderr.contains(warning), "{often:?}");
    let started = message(&["--max-steps=2"]);
    assert!(started.stdout.contains("; 0.7 passes in steps 1 to 2; from records.jsonl"), "{started:?}");
    let text = run(&mut train_from_within(&workspace, &["--output-dir=text", "--dry-run", "--max-steps=10000"]));
    assert!(text.stdout.contains(" passes over ") && !text.stderr.contains("passes"), "running text may pass often: {text:?}");
}

#[test]
fn the_command_of_a_report_begins_a_fresh_run() {
    let workspace = Workspace::new();
    run(&mut train_from_within(&workspace, &["--output-dir=out", "--max-steps=1"])).digest();
    let resumed = ["--output-dir=out", "--max-steps=2", "--resume-from-checkpoint=auto", "--allow-changed=data"];
    run(&mut train_from_within(&workspace, &resumed)).digest();
    let page = workspace.path("report.html");
    let report = run(program(&["report", "-o"]).arg(&page).arg(workspace.path("out")));
    assert_eq!(report.code, 0, "{report:?}");
    let page = fs::read_to_string(page).unwrap();
    let command = page.split("How to reproduce</h2>").nth(1).unwrap().split("</pre>").next().unwrap();
    assert!(command.contains("--output-dir out-again") && command.contains("--max-steps 2"), "{command}");
    assert!(!command.contains("resume") && !command.contains("allow-changed"), "{command}");
}

#[test]
fn a_path_at_which_nothing_lies_is_named_with_its_flag_and_its_nearest_neighbour() {
    let workspace = Workspace::new();
    let near = workspace.write("settings.json", "{}");
    let far = near.with_file_name("setings.json");
    let flags = ["--data", "--eval-data", "--chat-template", "--prompts", "--config", "--deepspeed"];
    for flag in flags {
        let mut command = train_from_within(&workspace, &["--output-dir=out", "--max-steps=1"]);
        let held = if flag == "--prompts" { "--eval-data=data.txt" } else { "--seed=42" };
        let refused = run(command.arg(held).arg(flag).arg(&far));
        let words = format!("setings.json: No such file or directory, named by {flag}; did you mean {}?", near.display());
        refused.refused(1, &[&words]);
    }
    run(&mut train_from_within(&workspace, &["--output-dir=runs", "--max-steps=1"])).digest();
    for command in ["resume", "export", "digest"] {
        let out = if command == "export" { &["x"][..] } else { &[] };
        let refused = run(program(&[command, "run"]).args(out).current_dir(workspace.path("")));
        refused.refused(1, &["run: no good checkpoint: there is no such directory; did you mean runs?"]);
    }
}

#[test]
fn a_model_has_one_flag_in_plan_simulate_and_bench() {
    let machine = ["--hardware=h200-pcie5", "--seq-length=512", "--per-device-train-batch-size=1", "--strategy=no-offload"];
    let (model, config) = ("--model=gpt-5b", "--model-config=gpt-5b");
    for flags in [["plan", config], ["simulate", model]] {
        let output = run(program(&flags).args(machine));
        assert_eq!(output.code, 0, "{flags:?}: {output:?}");
    }
    for flag in [model, config, "--model_config=gpt-5b", "--model_name_or_path=gpt-5b"] {
        let bench = run(&mut program(&["bench", "step", flag, "--device=cpu", "--seq-length=2048"]));
        bench.refused(2, &["1024 positions"]);
    }
    run(&mut program(&["simulate", "--model-config=nope", "--hardware=h100"])).refused(2, &["--model nope: neither a file"]);
    run(&mut program(&["simulate", "--hardware=h100"])).refused(2, &["--model is missing", "qwen3-4b"]);
}
