//! The path of a new user: every command in README and guide runs as written and in order, with a small model and a few steps. Later
//! commands use the outputs of earlier ones.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Documented commands that need minutes, a large model or a GPU. They are covered by tests/selftest.rs, tests/readme.rs and the tests of
/// `src/probe` and `src/search`.
const UNTESTED: [&str; 5] = [
    "superoffload selftest",
    "superoffload bench step --model qwen3-4b",
    "superoffload probe",
    "superoffload plan",
    "superoffload train --gpus 2",
];

/// A minimal chat template.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

fn read(document: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(document)).unwrap()
}

/// README, then the chapters in the order of the guide.
fn documents() -> Vec<String> {
    let summary = read("docs/guide/SUMMARY.md");
    let chapters = summary.lines().filter_map(|line| line.split_once("](")?.1.strip_suffix(')'));
    std::iter::once("README.md".into()).chain(chapters.map(|chapter| format!("docs/guide/{chapter}"))).collect()
}

/// The lines of a document that call the program, without those inside a sentence.
fn commands(document: &str) -> Vec<String> {
    let text = read(document).replace("\\\n", " ");
    let words = |line: &str| line.split(['#', '>']).next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().filter(|line| line.trim_start().starts_with("superoffload ")).map(words).collect()
}

/// A directory with the files that the documents name: a model, a corpus, conversations, a DeepSpeed configuration.
fn newcomer() -> Workspace {
    let workspace = Workspace::new();
    run(&mut workspace.train("first", &["--max-steps=1"])).digest();
    let exported = run(program(&["export"]).arg(workspace.path("first")).arg(workspace.path("DIR")));
    assert_eq!(exported.code, 0, "{exported:?}");
    workspace.write("DIR/chat_template.jinja", TEMPLATE);
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let chat = |n: usize| json!({"messages": [turn("user", format!("{n}?")), turn("assistant", format!("{}!", n + 1))]}).to_string();
    workspace.write("chat.jsonl", (0..60).map(chat).collect::<Vec<_>>().join("\n"));
    let text = |n: usize| json!({"text": format!("document {n} has a few words of its own")}).to_string();
    workspace.write("corpus.jsonl", (0..60).map(text).collect::<Vec<_>>().join("\n"));
    let pair = |n: usize| json!({"prompt": format!("{n}?"), "chosen": format!(" {}", n + 1), "rejected": " no"}).to_string();
    workspace.write("pairs.jsonl", (0..60).map(pair).collect::<Vec<_>>().join("\n"));
    let rollout = |n: usize| json!({"prompt_ids": [n, 2], "completion_ids": [3, n], "advantage": 0.5, "old_logps": [-1.5, -2]}).to_string();
    workspace.write("rollouts.jsonl", (0..60).map(rollout).collect::<Vec<_>>().join("\n"));
    let taught = |n: usize| {
        let [ids, probs] = [json!([[3, n + 4]]), json!([[0.5, 0.25]])];
        json!({"prompt_ids": [n, 2], "completion_ids": [3], "teacher_ids": ids, "teacher_probs": probs}).to_string()
    };
    workspace.write("teacher.jsonl", (0..60).map(taught).collect::<Vec<_>>().join("\n"));
    workspace.write("axolotl.yml", "base_model: DIR\ndatasets: [chat.jsonl]\nsequence_len: 16\n");
    fs::create_dir_all(workspace.path("home/.local/share/man/man1")).unwrap();
    workspace.write("ds.json", json!({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}).to_string());
    workspace
}

/// Runs `command` with few steps of short rows on CPUs.
fn give(workspace: &Workspace, command: &str) -> Outcome {
    let short = command.replace("2048", "32").replace('~', "home");
    let mut words: Vec<&str> = short.split_whitespace().skip(1).map(|word| word.trim_matches('\'')).collect();
    if words[0] == "train" {
        for (names, flag) in [
            (&["--max-steps"][..], "--max-steps=2"),
            (&["--device"], "--device=cpu"),
            (&["--max-length", "--sequence-len", "--cutoff-len"], "--seq-length=16"),
        ] {
            words.extend((!names.iter().any(|name| words.contains(name))).then_some(flag));
        }
    }
    if words[0] == "export" {
        let _ = fs::remove_dir_all(workspace.path("OUT"));
    }
    run(program(&words).current_dir(workspace.path("")))
}

#[test]
fn every_command_that_is_shown_ends_well() {
    let workspace = newcomer();
    let (mut given, mut digests) = (0, Vec::new());
    for document in documents() {
        for command in commands(&document).iter().filter(|command| !UNTESTED.iter().any(|start| command.starts_with(start))) {
            let outcome = give(&workspace, command);
            assert_eq!(outcome.code, 0, "{document}: {command}: {outcome:?}");
            digests.extend(command.contains("--digest").then(|| outcome.digest().to_string()));
            given += 1;
        }
    }
    assert!(given >= 20, "{given} commands");
    let pairs = digests.chunks(2).all(|two| two[0] == two[1]);
    assert!(digests.len() == 4 && pairs, "several GPUs have the digest of one, and two groups that of one group: {digests:?}");
    for made in ["runs/mine/checkpoint-2", "runs/chat/checkpoint-2", "OUT/config.json", "report.html"] {
        assert!(workspace.path(made).exists(), "{made}");
    }
}

#[test]
fn commands_that_run_elsewhere_are_shown() {
    let all: Vec<String> = documents().iter().flat_map(|document| commands(document)).collect();
    let unshown = UNTESTED.iter().find(|start| !all.iter().any(|command| command.starts_with(**start)));
    assert_eq!(unshown, None);
}
