//! No command sends control characters to a terminal. Those in paths, names, tokens and records are printed as escapes.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::Value;
use std::process::Command;

/// Sets red, moves the cursor (C0 and C1), and reverses the writing direction.
const EVIL: &str = "e\u{1b}[31mv\u{9b}2Ji\u{202e}l\u{2066}";
const OBEYED: [char; 5] = ['\u{1b}', '\u{9b}', '\u{202e}', '\u{2066}', '\r'];

/// A workspace in which every name contains these characters.
struct Evil(Workspace);

impl Evil {
    fn new() -> Self {
        let workspace = Workspace::new();
        let config = std::fs::read(workspace.path("model/config.json")).unwrap();
        workspace.write(&format!("{EVIL}/config.json"), &config);
        workspace.write(&format!("{EVIL}.json"), &config);
        workspace.write(&format!("{EVIL}.txt"), "Colourless green ideas sleep furiously. ".repeat(40));
        let record = serde_json::json!({"text": format!("{EVIL} and \u{9b}1m more\r")});
        workspace.write(&format!("{EVIL}.jsonl"), format!("{record}\n").repeat(20));
        Self(workspace)
    }

    fn path(&self, end: &str) -> String {
        self.0.path(&format!("{EVIL}{end}")).to_str().unwrap().into()
    }

    /// Runs the command, and checks that its output contains no control characters.
    fn shown(&self, command: &mut Command) -> Outcome {
        let outcome = run(command.current_dir(self.0.path("")));
        for output in [&outcome.stdout, &outcome.stderr] {
            assert!(!output.contains(OBEYED), "{command:?}: {output:?}");
            assert!(output.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control()), "{command:?}: {output:?}");
        }
        outcome
    }

    fn run(&self, args: &[&str]) -> Outcome {
        self.shown(&mut program(args))
    }

    fn flags(&self) -> [String; 8] {
        let [model, out] = [self.path(""), self.path("-out")];
        [
            format!("--model={model}"),
            format!("--output-dir={out}"),
            "--init=random".into(),
            "--tokenizer=bytes".into(),
            "--seq-length=16".into(),
            "--device=cpu".into(),
            "--threads=1".into(),
            "--max-steps=2".into(),
        ]
    }
}

#[test]
fn foreign_control_characters_are_shown_escaped() {
    let evil = Evil::new();
    let flags = evil.flags();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let data = format!("--data={}", evil.path(".jsonl"));
    let train = |more: &[&str]| evil.run(&[&["train", &data], &flags[..], more].concat());
    let trained = train(&[]);
    assert_eq!(trained.code, 0, "{trained:?}");
    assert!(trained.stdout.contains("; from ") && trained.stdout.contains("\\u{1b}[31mv\\u{9b}2Ji\\u{202e}l\\u{2066}"), "{trained:?}");
    for more in [
        &["--resume-from-checkpoint=auto", "--max-steps=3"][..],
        &["--dry-run"],
        &["--dtype", EVIL],
        &["--eos-token", EVIL],
        &["--trace", "/no/where/\u{1b}[31m"],
        &["--columns", &format!("text={EVIL}")],
        &[EVIL],
    ] {
        train(more);
    }
    let [out, exported, report] = [evil.path("-out"), evil.path("-exported"), evil.path(".html")];
    for args in [
        &["export", &out, &exported][..],
        &["digest", &out],
        &["digest", EVIL],
        &["report", &out, "-o", &report],
        &["report", EVIL],
        &["man", &evil.path("-man")],
        &["doctor"],
        &["doctor", "--json"],
        &["selftest", EVIL],
        &["selftest", EVIL, "--json"],
        &["probe", "--device=cpu", "--out", "/no/where/\u{1b}[31m"],
        &["completions", EVIL],
        &["completions", "zsh"],
        &[EVIL],
    ] {
        evil.run(args);
    }
    assert_eq!(evil.run(&["digest", &out]).code, 0);
}

#[test]
fn data_and_prepare_show_records_and_their_json_means_the_same() {
    let evil = Evil::new();
    let model = format!("--model={}", evil.path(""));
    let view = [&evil.path(".jsonl"), &model, "--tokenizer=bytes", "--seq-length=16"];
    assert!(evil.run(&[&["data"], &view[..]].concat()).stdout.contains("\\u{9b}1m more\\r"));
    let json = evil.run(&[&["data", "--json"], &view[..]].concat());
    let value: Value = serde_json::from_str(&json.stdout).unwrap_or_else(|e| panic!("{e}: {json:?}"));
    assert_eq!(value["first"][0]["file"].as_str().unwrap(), evil.path(".jsonl"), "escapes of JSON mean what stood there");
    assert!(value["first"][0]["pieces"][0]["text"].as_str().unwrap().starts_with(EVIL), "{value:#}");
    evil.shown(program(&[&["prepare"], &view[..]].concat()).env("XDG_CACHE_HOME", evil.path("-cache")));
    evil.run(&["data", EVIL]);
}

#[test]
fn plan_simulate_and_bench_show_names_of_models_and_profiles() {
    let evil = Evil::new();
    let config = evil.path(".json");
    // A JSON string is also a TOML string.
    let name = serde_json::to_string(EVIL).unwrap();
    let profile = format!("like = \"gh200-96\"\nname = {name}\nmachine = {name}\n");
    let hardware = evil.0.write(&format!("{EVIL}.toml"), profile);
    let hardware = format!("--hardware={}", hardware.display());
    let settled = ["--seq-length=16", "--weights=replicated", "--activations=keep", "--resident-buckets=0", "--bucket-mib=16", "--slots=8"];
    let settled = [&settled[..], &["--cast=host", "--threads=4", "--without=stv"]].concat();
    let (named, shape) = (format!("--model={config}"), format!("--model-config={config}"));
    let measured = ["bench", "step", &shape, "--device=cpu", "--threads=1", "--seq-length=16", "--steps=1", "--warmup=0"];
    for command in [&["plan", &named, &hardware][..], &["simulate", &shape, &hardware]] {
        for json in [&[][..], &["--json"]] {
            let output = evil.run(&[command, json, &settled].concat());
            assert_eq!(output.code, 0, "{output:?}");
            assert!(json.is_empty() || serde_json::from_str::<Value>(&output.stdout).is_ok(), "{output:?}");
        }
    }
    let output = evil.run(&measured);
    assert!(output.code == 0 && serde_json::from_str::<Value>(&output.stdout).is_ok(), "{output:?}");
    for args in [&["plan", EVIL][..], &["plan", "--model", EVIL, &hardware], &["simulate", "--model-config", EVIL, "--hardware", EVIL]] {
        evil.run(args);
    }
}
