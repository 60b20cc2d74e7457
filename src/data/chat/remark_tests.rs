//! Remarks that a run prints once: on tokens across the end of a prompt, answers without an end, reasoning that a template leaves out.

use super::tests::{golden, shipped, tokenizer, turn};
use crate::data::context::Preparation;
use crate::data::encode::documents::DocumentsInMemory;
use crate::data::encode::text_files::tokenize;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::loss_weight::UNTRAINED;
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use serde_json::{Value, json};

const ROLES: &str =
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// The trained text of each document that `records` become, and the remarks on them.
fn trained(records: &[Value], template: &str) -> (Vec<String>, Vec<String>) {
    let tokenizer = tokenizer(&golden("../masks/bytes"), template);
    let path = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap().into_temp_path();
    std::fs::write(&path, records.iter().map(|record| format!("{record}\n")).collect::<String>()).unwrap();
    let mut message = Vec::new();
    let mut preparation = Preparation::new(&StopFlag::default(), None, None, |event| {
        if let ProgressEvent::Note(line) | ProgressEvent::Warn(line) = event {
            message.push(line.split_once(": line ").unwrap_or(("", line)).1.to_string());
        }
    });
    let (totals, _) = tokenize(&[&path], &tokenizer, 2000, DocumentsInMemory::default(), &mut preparation).unwrap();
    drop(preparation);
    let (mut start, mut texts) = (0, Vec::new());
    for end in totals.sink.ends {
        let end = (end & !crate::data::encode::documents::SAME_RECORD) as usize;
        texts.push(text(&totals.sink.tokens[start..end], &tokenizer));
        start = end;
    }
    (texts, message)
}

/// The trained tokens among `tokens` as text.
fn text(tokens: &[u32], tokenizer: &Tokenizer) -> String {
    let library = tokenizers::Tokenizer::from_file(golden("../masks/bytes/tokenizer.json")).unwrap();
    assert!(tokens.iter().all(|token| ((token & !UNTRAINED) as usize) < library.get_vocab_size(true)), "{tokenizer}");
    let trained: Vec<u32> = tokens.iter().copied().filter(|token| token & UNTRAINED == 0).collect();
    library.decode(&trained, false).unwrap()
}

fn chat(messages: &[Value]) -> Value {
    json!({"messages": messages})
}

#[test]
fn the_token_that_ends_a_turn_is_trained_though_the_next_role_begins_with_it() {
    let two = chat(&[turn("user", "a"), turn("assistant", "yes"), turn("user", "b"), turn("assistant", "no")]);
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]});
    let observed = chat(&[turn("user", "a"), call.clone(), turn("tool", "4"), turn("assistant", "yes")]);
    let (texts, message) = trained(&[two, observed], &shipped("glm4moe.jinja"));
    assert_eq!(texts[0], "\n<think></think>\nyes<|user|>\n<think></think>\nno<|user|>");
    assert!(texts[1].contains("</tool_call><|observation|>") && texts[1].ends_with("yes<|user|>"), "{}", texts[1]);
    assert!(message.is_empty(), "{message:?}");
    let (texts, message) = trained(&[chat(&[turn("user", "a"), call])], &shipped("glm4moe.jinja"));
    assert!(texts[0].ends_with("</tool_call>"), "a call is answered by a tool: {texts:?}");
    assert!(message[0].starts_with("1: has an answer after which no end token is trained"), "{message:?}");
}

#[test]
fn a_template_without_an_end_is_one_warning() {
    let records = ["yes", "no", "yes\n"].map(|answer| chat(&[turn("user", "a"), turn("assistant", answer)]));
    // The tokenizer has the roles, and so the next one ends an answer; without, nothing does.
    assert!(trained(&records, ROLES).1.is_empty());
    let (texts, message) = trained(&records, &ROLES.replace("<|", "[").replace("|>", "]"));
    assert_eq!(texts, ["yes", "no", "yes\n"]);
    let remedy = "use --chat-template FILE with a template that writes \"<|endoftext|>\" after each answer";
    let remark = "1: has an answer after which no end token is trained, as 3 of 3 records do: the model does not learn to stop";
    assert_eq!(message, [format!("{remark}; {remedy}")]);
    let (_, message) = trained(&records, &ROLES.replace("{{ m.content }}", "{{ m.content }}<|endoftext|>\n"));
    assert!(message.is_empty(), "{message:?}");
    let marked = ROLES.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}<|endoftext|>");
    assert_eq!(trained(&records, &marked).1.len(), 1, "the end is not marked");
}

#[test]
fn tokens_across_the_end_of_a_prompt_are_trained_and_counted() {
    let record = |prompt: &str, completion: &str| json!({"prompt": prompt, "completion": completion});
    let records = [record("The mood is ", "positive"), record("The mood is:\n", "positive"), record("a ", "positive")];
    let (texts, message) = trained(&records, ROLES);
    assert_eq!(texts, [" positive<|endoftext|>", "positive<|endoftext|>", " positive<|endoftext|>"]);
    let remark = "1: has a token that begins in the prompt and ends in the answer, as 2 of 3 records do";
    assert_eq!(message, [format!("{remark}; such tokens are trained: 2")]);
    let spaced = ROLES.replace("|>\n", "|> ");
    let chats = [chat(&[turn("user", "a"), turn("assistant", "positive"), turn("user", "b"), turn("assistant", "positive")])];
    let (texts, message) = trained(&chats, &spaced);
    assert_eq!(texts, [" positive<|user|> positive<|user|>"]);
    assert_eq!(
        message,
        ["1: has a token that begins in the prompt and ends in the answer, as 1 of 1 records do; such tokens are trained: 2"]
    );
}

#[test]
fn reasoning_that_a_template_leaves_out_is_a_note() {
    let reasons = |content: &str| chat(&[turn("user", "2*3?"), turn("assistant", content)]);
    let aside = chat(&[turn("user", "2*3?"), json!({"role": "assistant", "content": "6", "reasoning_content": "Two times three."})]);
    let records = [reasons("<think>\nTwo times three.\n</think>\n\n6"), reasons("6"), reasons("<think></think>6"), aside];
    let (texts, message) = trained(&records, &shipped("deepseek_r1_distill.jinja"));
    assert!(texts.iter().all(|text| !text.contains("Two times")), "{texts:?}");
    let note = "1: has reasoning that the chat template leaves out, as 2 of 4 records do; it is not trained";
    assert_eq!(message, [note]);
    assert!(trained(&records, &shipped("qwen3.jinja")).1.is_empty());
}
