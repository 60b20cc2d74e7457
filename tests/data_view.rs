//! `superoffload data` and `train --dry-run` show exactly the data that training reads, and write nothing.

use crate::program::{Workspace, program, run};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

/// Writes two hundred conversations of two forms, one without an answer. Returns the flags that train on them.
fn chats(workspace: &Workspace) -> Vec<String> {
    let output = |role: &str, content: &str| json!({"role": role, "content": content});
    let answered = json!({"messages": [output("user", "one \u{1b}[31mand two?"), output("assistant", "thr\u{e4}\u{e4}")]});
    let unanswered = json!({"messages": [output("user", "hello?")]});
    let longer = json!({"messages": [output("user", "a"), output("assistant", "b"), output("user", "c"), {"role": "assistant", "content": "d", "train": false}]});
    let rest = (0..197).map(|n| json!({"messages": [output("user", &format!("{n}?")), output("assistant", &format!("{}!", n + 1))]}));
    let lines: Vec<String> = [answered, longer, unanswered].into_iter().chain(rest).map(|line| line.to_string()).collect();
    let data = workspace.write("chat.jsonl", lines.join("\n"));
    let template = workspace.write("chat.jinja", TEMPLATE);
    vec![data.display().to_string(), format!("--chat-template={}", template.display()), "--seq-length=16".into()]
}

fn view(flags: &[String], more: &[&str]) -> crate::program::Outcome {
    run(program(&["data"]).args(flags).args(more))
}

#[test]
fn trained_tokens_are_marked_and_counted_as_in_training() {
    let workspace = Workspace::new();
    let flags = chats(&workspace);
    let seen = view(&flags, &["-n", "2", "--packing=bfd", "--eval-split=10"]);
    assert_eq!(seen.code, 0, "{seen:?}");
    for words in ["<u>one \\u{1b}[31mand two?\n<a>\u{27e6}thr\u{e4}\u{e4}\n\u{27e7}", "<a>\u{27e6}b\n\u{27e7}<u>c\n<a>d\n", ", line 2: "] {
        assert!(seen.stdout.contains(words), "{words:?} is not in {seen:?}");
    }
    assert!(!seen.stdout.contains('\u{1b}'), "text of data must not steer a terminal");
    assert!(seen.stdout.contains("no token is trained, as in 1 of 200 records; they are left out"), "{seen:?}");
    assert!(
        seen.stdout.contains("documents  199, 10 of them held out to evaluate on; 1 record without a trained token left out"),
        "{seen:?}"
    );
    let json: Value = serde_json::from_str(&view(&flags, &["--json", "--packing=bfd", "--eval-split=10"]).stdout).unwrap();
    let trained = format!("--data={}", flags[0]);
    let outcome = run(&mut workspace.train("out", &[&trained, &flags[1], "--packing=bfd", "--eval-split=10"]));
    outcome.digest();
    let trained = 100.0 * json["trained_tokens"].as_f64().unwrap() / json["tokens"].as_f64().unwrap();
    let message = format!("{} tokens ({trained:.1} % trained), {} sequences of 16", json["tokens"], json["sequences"]);
    assert!(outcome.stdout.contains(&message), "{message:?} is not in {outcome:?}");
    assert_eq!((json["lengths"]["documents"].as_u64(), json["first"].as_array().map(Vec::len)), (Some(199), Some(3)));
    assert!(json["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains("packing bfd: ")), "{json}");
}

#[test]
fn data_of_every_kind_is_shown_or_refused_as_training_would() {
    let workspace = Workspace::new();
    let shown = |name: &str, content: &[u8], flags: &[&str]| {
        let path = workspace.write(name, content);
        run(program(&["data", path.to_str().unwrap(), "--seq-length=2"]).args(flags))
    };
    let text = shown("a.txt", &"long text ".repeat(1000).into_bytes(), &[]);
    assert!(text.stdout.contains("the beginning; ") && text.stdout.contains("...\u{27e7}") && text.stdout.len() < 4000, "{text:?}");
    let ids = shown("ids.jsonl", b"{\"input_ids\": [7, 8, 9], \"labels\": [-100, 8, 9]}", &[]);
    assert!(ids.stdout.contains("<7>\u{27e6}<8><9>\u{27e7}"), "{ids:?}");
    let pairs = shown("pairs.jsonl", b"{\"prompt\": \"p\", \"completion\": \"cc\"}", &["--eos-token=0"]);
    assert!(pairs.stdout.contains("p\u{27e6}cc<0>\u{27e7}") && pairs.stdout.contains("4 tokens"), "{pairs:?}");
    let tokens = shown("ids.bin", &[1, 0, 2, 0, 3, 0], &[]);
    assert!(tokens.code == 0 && tokens.stdout.contains("token files do not mark where documents end"), "{tokens:?}");
    let table = workspace.write("a.csv", b"text\na");
    let refused = run(&mut program(&["data", table.to_str().unwrap()]));
    refused.refused(1, &["a.csv: not a .txt, ", "convert it: python -c", "read_csv", "a.jsonl"]);
    shown("bad.jsonl", b"{\"text\": 5}", &[]).refused(1, &["bad.jsonl: line 1: `text` is not a string"]);
    shown("chat.jsonl", b"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}]}", &[]).refused(1, &["--chat-template FILE"]);
}

#[test]
fn a_dry_run_shows_data_and_plan_and_writes_nothing() {
    let workspace = Workspace::new();
    let flags = chats(&workspace);
    let data = format!("--data={}", flags[0]);
    let dry = run(&mut workspace.train("dry", &[&data, &flags[1], "--dry-run"]));
    assert_eq!(dry.code, 0, "{dry:?}");
    for words in
        ["\u{27e6}thr\u{e4}\u{e4}\n\u{27e7}", "documents  199", "steps 1 to 12 would be trained", "dry run: no step was done", "plan"]
    {
        assert!(dry.stdout.contains(words), "{words:?} is not in {dry:?}");
    }
    assert!(!workspace.path("dry").exists());
    run(&mut workspace.train("out", &["--max-steps=4"])).digest();
    let before = workspace.names("out", "");
    let log = std::fs::read(workspace.path("out/metrics.jsonl")).unwrap();
    let resumed = run(&mut workspace.resume("out", &["--dry-run"]));
    assert!(resumed.stdout.contains("steps 5 to 12 would be trained"), "{resumed:?}");
    assert_eq!((workspace.names("out", ""), std::fs::read(workspace.path("out/metrics.jsonl")).unwrap()), (before, log));
    let missing = format!("--data={}", workspace.path("missing.txt").display());
    run(&mut workspace.train("dry", &[&missing, "--dry-run"])).refused(1, &["missing.txt"]);
}
