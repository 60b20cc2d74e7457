//! Rules of records by the program: tokens that stand around text, variables of templates, ids without a tokenizer, and what is told.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const TEMPLATE: &str = "{{ effort }}{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role[0] }}>{{ m.content }}\n{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<a>{% endif %}";

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

/// A training on `records`, by bytes, with `flags`.
fn train(workspace: &Workspace, out: &str, records: &[Value], flags: &[&str]) -> Outcome {
    let data = format!("--data={}", workspace.write(&format!("{out}.jsonl"), lines(records)).display());
    run(&mut workspace.train(out, &[&[data.as_str(), "--max-steps=2"], flags].concat()))
}

fn chats() -> Vec<Value> {
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    (0..40)
        .map(|n| json!({"messages": [turn("user", format!("what is {n} plus one?")), turn("assistant", format!("it is {}", n + 1))]}))
        .collect()
}

#[test]
fn text_that_ends_with_the_end_of_text_trains_to_the_bits_of_text_without_it() {
    let workspace = Workspace::new();
    let flags = ["--tokenizer=bytes", "--eos-token=10", "--seq-length=32"];
    // The last text has no end, which would stay behind it.
    let text = |end: &str| {
        let end = |n: usize| if n < 39 { end } else { "" };
        (0..40).map(|n| json!({"text": format!("some text of number {n}{}", end(n))})).collect::<Vec<_>>()
    };
    let pair =
        |end: &str| (0..40).map(|n| json!({"prompt": format!("number {n}"), "completion": format!(" is {n}{end}")})).collect::<Vec<_>>();
    for (name, [without, with, twice]) in [("text", ["", "\n", "\n\n"].map(text)), ("pair", ["", "\n", "\n\n"].map(pair))] {
        let digest = |out: &str, records: &[Value]| train(&workspace, &format!("{name}-{out}"), records, &flags).digest().to_string();
        let plain = digest("without", &without);
        assert_eq!(digest("with", &with), plain, "{name}");
        assert_ne!(digest("twice", &twice), plain, "{name}");
    }
}

#[test]
fn variables_reach_the_template_and_a_resume_keeps_them() {
    let workspace = Workspace::new();
    let template = |text: String| format!("--chat-template={}", workspace.write("chat.jinja", text).display());
    let (variable, written) = (TEMPLATE.to_string(), TEMPLATE.replace("{{ effort }}", "high"));
    let with = |out: &str, template: &str, more: &[&str]| {
        train(&workspace, out, &chats(), &[&[template, "--seq-length=64", "--save-steps=1"], more].concat())
    };
    let expected = with("written", &template(written), &[]).digest().to_string();
    let flag = "--chat-template-kwargs={\"effort\": \"high\"}";
    let template = template(variable);
    assert_eq!(with("flag", &template, &[flag]).digest(), expected);
    assert_ne!(with("none", &template, &[]).digest(), expected);
    let mut own = chats();
    own.iter_mut().for_each(|record| record["chat_template_kwargs"] = json!({"effort": "high"}));
    let of_records = train(&workspace, "own", &own, &[&template, "--seq-length=64", "--chat-template-kwargs={\"effort\": \"low\"}"]);
    assert_eq!(of_records.digest(), expected);
    workspace.copy_checkpoints("flag", "resumed", &[1]);
    let data = format!("--data={}", workspace.path("flag.jsonl").display());
    let resume = |flags: &[&str]| {
        let all = [&[data.as_str(), &template, "--seq-length=64", "--max-steps=2", "--resume-from-checkpoint=auto"], flags].concat();
        run(&mut workspace.train("resumed", &all))
    };
    resume(&["--chat-template-kwargs={}"]).refused(2, &["--chat-template-kwargs was "]);
    assert_eq!(resume(&[]).digest(), expected);
    for odd in ["[]", "enable_thinking=false", "{\"messages\": []}"] {
        with("odd", &template, &[&format!("--chat-template-kwargs={odd}")]).refused(2, &["--chat-template-kwargs "]);
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[test]
fn ids_need_no_tokenizer_and_text_does() {
    let workspace = Workspace::new();
    let model = format!("--model={}", golden("llama").display());
    let ids: Vec<Value> = (0..8).map(|n| json!({"input_ids": [n + 1, 2, 3, 4, 5]})).collect();
    let shown = |name: &str, records: &[Value]| {
        let data = workspace.write(name, lines(records));
        run(&mut program(&["data", data.to_str().unwrap(), &model, "--seq-length=4"]))
    };
    let outcome = shown("ids.jsonl", &ids);
    assert!(outcome.code == 0 && outcome.stdout.contains("none: the data are token ids"), "{outcome:?}");
    let mixed = [&ids[..], &[json!({"input_ids": [1, 2], "labels": [-100, 2]})]].concat();
    assert_eq!(shown("labels.jsonl", &mixed).code, 0);
    shown("text.jsonl", &[json!({"text": "a"})]).refused(1, &["no tokenizer.json"]);
}

#[test]
fn foreign_decisive_fields_are_warned_of_once() {
    let workspace = Workspace::new();
    let template = format!("--chat-template={}", workspace.write("chat.jinja", TEMPLATE).display());
    let mut records = chats();
    for (nth, record) in records.iter_mut().enumerate() {
        record["label"] = json!(nth % 2 == 0);
        record["score"] = json!(1);
        let messages = record["messages"].as_array_mut().unwrap();
        messages.insert(0, json!({"role": "developer", "content": "be kind"}));
    }
    let outcome = train(&workspace, "told", &records, &[&template, "--seq-length=64"]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for message in [
        "told.jsonl: line 1: column `label` (of TRL, ms-swift) is not read: unwanted answers would be trained like all other answers \
            (in 40 of 40 records)",
        "told.jsonl: line 1: the chat template omits a message of role \"developer\" (in 40 of 40 records)",
    ] {
        assert_eq!(outcome.stderr.matches(message).count(), 1, "{message}\n{outcome:?}");
    }
    assert!(!outcome.stderr.contains("score"), "{outcome:?}");
}
