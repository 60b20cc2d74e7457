//! Records that cannot be trained on. A run ends with one line that names the file and the record, and leaves no partial files, for text
//! read into memory and for text prepared in a folder. Errors of whole files (archives, tables, bytes) are tested next to
//! `src/data/encode/text_files.rs`.

use crate::program::{Outcome, Workspace, run};
use serde_json::{Value, json};

/// A template that rejects two consecutive turns of one role, and loops or grows on certain questions.
const TEMPLATE: &str = "{% for m in messages %}\
    {% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}\
    {% if m.content == 'loop' %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}\
    {% if m.content == 'grow' %}{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{% endif %}\
    <{{ m.role[0] }}>{% if loop.last and m.thinking %}({{ m.thinking }}){% endif %}{{ m.content + '' }}\n{% endfor %}\
    {% if add_generation_prompt %}<a>{% endif %}";

/// Number of valid conversations before and after the bad record.
const BEFORE: usize = 150;

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn requested(question: &str) -> Value {
    json!({"messages": [turn("user", question), turn("assistant", "yes.")]})
}

/// Trains on valid conversations with `bad` among them. If `large`, they exceed the size that is kept in memory.
fn train(workspace: &Workspace, bad: &str, large: bool) -> Outcome {
    let answer = "so. ".repeat(if large { 8000 } else { 1 });
    let good = json!({"messages": [turn("user", "why?"), turn("assistant", &answer)]}).to_string();
    let lines: Vec<&str> =
        std::iter::repeat_n(good.as_str(), BEFORE).chain([bad]).chain(std::iter::repeat_n(good.as_str(), BEFORE)).collect();
    let data = format!("--data={}", workspace.write("chat.jsonl", lines.join("\n")).display());
    let template = format!("--chat-template={}", workspace.write("chat.jinja", TEMPLATE).display());
    run(workspace.train("out", &[&data, &template, "--max-steps=1"]).env("SUPEROFFLOAD_CACHE", workspace.path("cache")))
}

#[test]
fn a_bad_record_ends_a_run_with_its_place_and_leaves_nothing() {
    let workspace = Workspace::new();
    let long = "x".repeat(10 << 20);
    let output = |messages: Value| json!({"messages": messages}).to_string();
    let with_key = |key: &str, value: Value| output(json!([turn("user", "a"), {"role": "assistant", "content": "b", key: value}]));
    let alternating = |count: usize, words: &str, thinking: &str| {
        let answer = json!({"role": "assistant", "content": words, "thinking": thinking});
        output(json!((0..count).flat_map(|_| [turn("user", words), answer.clone()]).collect::<Vec<_>>()))
    };
    let cases = [
        (output(json!([turn("user", "a"), turn("user", "b")])), "roles must alternate"),
        (output(json!([])), "`messages` is empty"),
        (output(json!([turn("user", "a"), "b"])), "message 1 of `messages` has neither role and content nor from and value"),
        (
            output(json!([turn("user", "a"), {"role": "assistant", "content": 4}])),
            "message 1 of `messages` has content that is neither text nor parts",
        ),
        (output(json!([{"role": "user", "content": {"text": "a"}}])), "message 0 of `messages` has content that is neither text nor parts"),
        (output(json!("[]")), "`messages` is not a list of messages"),
        (output(json!([turn("user", "a"), {"role": "assistant", "content": null}])), "the chat template"),
        (
            output(json!([{"role": "user", "content": [{"type": "image"}]}])),
            "message 0 of `messages` has a part of type \"image\": text parts only",
        ),
        (requested("loop").to_string(), "loops for ever"),
        (requested("grow").to_string(), "makes too much text"),
        (requested(&long).to_string(), "at most 4194304 go through a chat template"),
        (alternating(400, &"word ".repeat(40), "hm"), "its answers come to more than 16777216 bytes of text"),
        (alternating(5000, "word", ""), "the chat template takes too long for 10000 messages"),
        (with_key("train", json!("false")), "message 1 of `messages` has train \"false\": true or false are its possible values"),
        (with_key("weight", json!("0")), "message 1 of `messages` has weight \"0\": numbers from 0 to 1 are its possible values"),
        (with_key("weight", json!(1.5)), "has weight 1.5: numbers from 0 to 1"),
        (json!({"text": "a"}).to_string(), "lacks the columns of messages, which its file has"),
        ("{\"messages\": [".into(), "EOF while parsing"),
    ];
    let place = format!("chat.jsonl: line {}: ", BEFORE + 1);
    for (bad, cause) in &cases {
        train(&workspace, bad, false).refused(1, &[&place, cause]);
    }
    // Text that is prepared in a folder.
    for (bad, cause) in &cases[..2] {
        train(&workspace, bad, true).refused(1, &[&place, cause]);
        assert!(workspace.names("cache", "").iter().all(|name| name.ends_with(".lock")), "{:?}", workspace.names("cache", ""));
    }
    assert_eq!(workspace.names("out", "checkpoint-"), [""; 0]);
    assert!(!workspace.path("out/metrics.jsonl").exists());
}

/// Templates cannot read other files. A template that names one is rejected before any record is read.
#[test]
fn a_template_that_names_a_file_is_refused() {
    let workspace = Workspace::new();
    let data = format!("--data={}", workspace.write("chat.jsonl", requested("why?").to_string()).display());
    for (tag, cause) in [("include '/etc/passwd'", "unknown statement include"), ("import 'x' as 1", "unknown statement import")] {
        let template = format!("--chat-template={}", workspace.write("chat.jinja", format!("{{% {tag} %}}")).display());
        run(&mut workspace.train("out", &[&data, &template])).refused(1, &["chat.jinja", cause]);
    }
}

/// With either template every token of every record would be trained.
#[test]
fn a_template_that_has_prompts_trained_is_refused_at_the_first_record() {
    let workspace = Workspace::new();
    let lines = (0..40).map(|n| requested(&format!("why {n}?")).to_string()).collect::<Vec<_>>().join("\n");
    let data = format!("--data={}", workspace.write("chat.jsonl", lines).display());
    let all = format!("{{% generation %}}{TEMPLATE}{{% endgeneration %}}");
    let counts = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}{{ messages|length }}");
    for template in [counts, all] {
        let template = format!("--chat-template={}", workspace.write("chat.jinja", template).display());
        let message = ["chat.jsonl: line 1: text before message 1 would be trained", "{% generation %}", "--chat-template FILE"];
        run(&mut workspace.train("out", &[&data, &template])).refused(1, &message);
        let outcome = run(&mut workspace.train("all", &[&data, &template, "--train-on=all", "--max-steps=1"]));
        assert!(outcome.code == 0 && outcome.stdout.contains("(100.0 % trained)"), "{outcome:?}");
    }
}

#[test]
fn a_record_that_begins_with_an_answer_is_trained_from_its_question_on() {
    let workspace = Workspace::new();
    let greeted = json!({"messages": [turn("assistant", "hello!"), turn("user", "why?"), turn("assistant", "so.")]}).to_string();
    for large in [false, true] {
        let outcome = train(&workspace, &greeted, large);
        outcome.digest();
        let message = format!(
            "chat.jsonl: line {}: begins with an answer without a question, as 1 of {} records do; such answers are not trained",
            BEFORE + 1,
            2 * BEFORE + 1
        );
        assert!(outcome.stderr.contains(&message), "{message:?} is not in {outcome:?}");
    }
}

#[test]
fn a_record_without_an_answer_is_counted_and_left_out() {
    let workspace = Workspace::new();
    let unanswered = json!({"messages": [turn("system", "Be brief."), turn("user", "hello?")]}).to_string();
    for large in [false, true] {
        let outcome = train(&workspace, &unanswered, large);
        outcome.digest();
        let message =
            format!("chat.jsonl: line {}: no token is trained, as in 1 of {} records; they are left out", BEFORE + 1, 2 * BEFORE + 1);
        assert!(outcome.stderr.contains(&message), "{message:?} is not in {outcome:?}");
    }
}
