//! Against `transformers` and TRL: see tests/golden/chat/generate.py.

use super::date::Day;
use super::mask::TrainOn;
use super::record::{Content, DataFormat, RecordRules};
use super::sample::ChatSample;
use super::template::ChatTemplate;
use crate::data::context::Preparation;
use crate::data::encode::text_files;
use crate::data::encode::text_work::{Done, TextWork};
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::loss_weight::UNTRAINED;
use crate::data::tokenizer::AddBos;
use crate::error::Error;
use crate::model_dir::ModelDir;
use crate::signals::StopFlag;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat").join(name)
}

fn golden_json(name: &str) -> Map<String, Value> {
    serde_json::from_str(&std::fs::read_to_string(golden(name)).unwrap()).unwrap()
}

/// The source of one of TRL's templates.
pub(super) fn shipped(name: &str) -> String {
    std::fs::read_to_string(golden("templates").join(name)).unwrap()
}

pub(super) fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn template(source: &str) -> Result<ChatTemplate, String> {
    let special = json!({"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"});
    ChatTemplate::new(source, special.as_object().unwrap().clone(), Day::parse("2026-11-23").unwrap())
}

pub(super) fn rules(source: &str, train_on: TrainOn) -> RecordRules {
    RecordRules { train_on, template: template(source), ..RecordRules::default() }
}

fn messages(conversation: &Value) -> Vec<Value> {
    conversation["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| super::message::normal(message.as_object().unwrap().clone()).unwrap())
        .collect()
}

fn rendered(template: &ChatTemplate, conversation: &Value, prompts: bool) -> Result<String, String> {
    let messages = messages(conversation);
    let mut renderings = template.renderings(&messages, conversation.get("tools"))?;
    renderings.render(messages.len(), prompts).map(|rendered| rendered.text)
}

#[test]
fn templates_are_rendered_byte_for_byte_as_by_jinja2() {
    let (conversations, renderings) = (golden_json("conversations.json"), golden_json("renderings.json"));
    let (mut equal, mut refused, mut wrong) = (0, 0, Vec::new());
    for (name, expected) in &renderings {
        let template = template(&shipped(name)).unwrap();
        for (key, expected) in expected.as_object().unwrap() {
            let (conversation_name, prompts) = key.strip_suffix("+prompt").map_or((key.as_str(), false), |key| (key, true));
            let conversation = &conversations[conversation_name];
            match (rendered(&template, conversation, prompts), expected.as_str()) {
                (Ok(rendered), Some(expected)) if rendered == expected => equal += 1,
                (Err(_), None) => refused += 1,
                (found, expected) => wrong.push(format!("{name} {key}:\n{found:?}\n{expected:?}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!((equal, refused), (820, 188));
}

#[test]
fn content_in_parts_is_written_as_by_a_processor() {
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(golden("parts.json")).unwrap()).unwrap();
    for case in &cases {
        let name = case["template"].as_str().unwrap();
        let record = json!({"messages": case["messages"]}).to_string();
        let content = rules(&shipped(name), TrainOn::All).read(DataFormat::Messages, &record);
        let Ok(Content::Rendered(chat)) = content else { panic!("{name}: {content:?}") };
        assert_eq!(chat.samples.iter().map(|sample| sample.text.as_str()).collect::<Vec<_>>(), [case["text"].as_str().unwrap()], "{name}");
    }
    assert_eq!(cases.len(), 6);
}

/// The tokenizer of the model in `dir`, with a template.
pub(super) fn tokenizer(dir: &Path, template_source: &str) -> Tokenizer {
    let model = ModelDir::open(dir).unwrap();
    Tokenizer::load_with(&model, None, AddBos::Auto, &rules(template_source, TrainOn::Auto).into()).unwrap().unwrap()
}

/// Ids and masks of `record`.
pub(super) fn tokens(record: &Value, tokenizer: &Tokenizer) -> (Vec<u32>, Vec<u32>) {
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), record.to_string()).unwrap();
    let (totals, _) = text_files::tokenize(&[file.path()], tokenizer, 400, Vec::new(), &mut Preparation::default()).unwrap();
    assert_eq!(totals.untrained, totals.sink.iter().filter(|&token| token & UNTRAINED > 0).count() as u64);
    totals.sink.iter().map(|token| (token & !UNTRAINED, 1 - (token >> 31))).unzip()
}

#[test]
fn ids_and_masks_are_those_of_trl() {
    let read = |name: &str| serde_json::from_str::<Vec<Value>>(&std::fs::read_to_string(golden(name)).unwrap()).unwrap();
    // Those of chat templates one by one, and those of whole data sets that its trainer is given.
    let (few, whole) = (read("tokens.json"), read("../trl/records.json"));
    for case in few.iter().chain(&whole) {
        let name = case["template"].as_str().unwrap();
        let (ids, trained) = tokens(&case["record"], &tokenizer(&golden("model"), &shipped(name)));
        assert_eq!((json!(ids), json!(trained)), (case["ids"].clone(), case["trained"].clone()), "{name}");
    }
    assert!(few.len() == 10 && whole.len() > 30);
}

pub(super) fn samples(template_source: &str, train_on: TrainOn, record: &Value) -> Result<Vec<ChatSample>, String> {
    let rules = rules(template_source, train_on);
    let record = record.to_string();
    match rules.read(rules.detect(&record)?, &record)? {
        Content::Rendered(chat) => Ok(chat.samples),
        other => panic!("{other:?}"),
    }
}

/// The trained texts of each sample.
pub(super) fn trained(template_source: &str, train_on: TrainOn, record: &Value) -> Result<Vec<Vec<String>>, String> {
    let texts = |sample: &ChatSample| sample.trained.iter().map(|span| sample.text[span.range.clone()].to_string()).collect();
    Ok(samples(template_source, train_on, record)?.iter().map(texts).collect())
}

pub(super) const PLAIN: &str =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn answers_are_trained_and_a_message_may_exclude_itself() {
    let chat = json!({"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]});
    assert_eq!(trained(PLAIN, TrainOn::Auto, &chat).unwrap(), [["b;", "d;"]]);
    assert_eq!(trained(PLAIN, TrainOn::Last, &chat).unwrap(), [["d;"]]);
    assert_eq!(trained(PLAIN, TrainOn::All, &chat).unwrap(), [["<user>a;<assistant>b;<user>c;<assistant>d;"]]);
    assert!(trained(PLAIN, TrainOn::Completion, &chat).unwrap_err().contains("--train-on completion"));
    for no in [("train", json!(false)), ("weight", json!(0))] {
        let mut chat = chat.clone();
        chat["messages"][1][no.0] = no.1;
        assert_eq!(trained(PLAIN, TrainOn::Assistant, &chat).unwrap(), [["d;"]]);
        let marks = PLAIN
            .replace("{{ m.content }};", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}");
        assert_eq!(trained(&marks, TrainOn::Assistant, &chat).unwrap(), [["d"]]);
        chat["messages"][3] = turn("user", "e");
        assert!(trained(PLAIN, TrainOn::Assistant, &chat).unwrap().is_empty());
    }
    let shared = json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"});
    assert_eq!(trained(PLAIN, TrainOn::All, &shared).unwrap(), [["<system>s;<user>a;<assistant>b;"]]);
    let call = |value: &str| {
        json!({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": value},
        {"from": "observation", "value": "o"}, {"from": "gpt", "value": "b"}]})
    };
    let calls = PLAIN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}",
    );
    let one = call(r#"{"name": "f", "arguments": {"x": 1}}"#);
    assert_eq!(trained(&calls, TrainOn::Auto, &one).unwrap(), [["f({\"x\": 1});", "b;"]]);
    let two = call(r#"[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "y"}]"#);
    assert_eq!(trained(&calls, TrainOn::Last, &two).unwrap(), [["b;"]]);
    assert_eq!(trained(&calls, TrainOn::Auto, &two).unwrap(), [["f({})g(\"y\");", "b;"]]);
    for odd in ["", "f(x)", "{}", "[]", "[1]", r#"{"name": "f"}"#] {
        let refused = trained(&calls, TrainOn::Auto, &call(odd)).unwrap_err();
        assert_eq!(refused, "message 1 of `conversations` is a function_call without the JSON of a name and arguments", "{odd}");
    }
    let part = |text: &str| json!({"type": "text", "text": text});
    let parts = json!({"messages": [turn("user", "a"), {"role": "assistant", "content": [part("b"), part("c")]}]});
    assert_eq!(trained(PLAIN, TrainOn::Auto, &parts).unwrap(), [["bc;"]]);
    let alpaca = json!({"instruction": "a", "input": "x", "output": "b"});
    assert_eq!(trained(PLAIN, TrainOn::All, &alpaca).unwrap(), [["<user>a\nx;<assistant>b;"]]);
}

#[test]
fn columns_may_have_each_others_names() {
    let columns =
        [("prompt", "completion"), ("completion", "prompt")].map(|(own_name, foreign_name)| (own_name.into(), foreign_name.into()));
    let rules = RecordRules { columns: columns.into(), ..RecordRules::default() };
    let record = json!({"prompt": "bc", "completion": "a"}).to_string();
    let Ok(Content::Completed(sample)) = rules.read(rules.detect(&record).unwrap(), &record) else { panic!("{record}") };
    assert_eq!((sample.text.as_str(), sample.trained.len(), sample.trained[0].range.clone()), ("abc", 1, 1..3));
}

#[test]
fn an_answer_that_is_written_otherwise_later_is_a_sample_of_its_own() {
    let template = "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }};\
        {% endfor %}{% if add_generation_prompt %}<assistant>(){% endif %}";
    let answer = |content: &str| json!({"role": "assistant", "content": content, "thinking": "hm"});
    let question = json!({"role": "user", "content": "a"});
    let chat = json!({"messages": [question, answer("b"), question, answer("d")]});
    // The prompt opens and closes the block that the answer fills.
    assert_eq!(trained(template, TrainOn::Auto, &chat).unwrap(), [["hm)b;"], ["hm)d;"]]);
}

#[test]
fn templates_that_raise_loop_grow_or_read_files_are_errors_in_a_line() {
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    for (source, cause) in [
        ("\n{{ raise_exception('roles must\nalternate') }}", "line 2: roles must alternate"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "loops for ever"),
        ("{% set n = namespace(s='aaaaaaaa') %}{% for i in range(100) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "too much text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template"),
        ("{% include '/etc/passwd' %}", "the chat template, line 1: unknown statement include"),
        // Where there are imports, minijinja 3.1 panics at this one.
        ("{% import 'x' as 1 %}", "unknown statement import"),
        ("{{ strftime_now('%Q') }}", "unknown format"),
        ("{% if %}", "the chat template, line 1"),
    ] {
        let refused = trained(source, TrainOn::Auto, &chat).unwrap_err();
        assert!(refused.contains(cause) && !refused.contains('\n'), "{source}: {refused}");
    }
}

/// Text before an answer, text after it, and the templates of TRL without marks that write an answer between the two.
#[rustfmt::skip]
const AROUND: &[(&str, &str, &[&str])] = &[
    ("", "<|END_OF_TURN_TOKEN|>", &["cohere"]),
    ("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", &["cohere2"]),
    ("", "<｜end▁of▁sentence｜>", &["deepseek_r1_distill", "deepseekv3"]),
    ("", "<turn|>\n", &["diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"]),
    ("", "<end_of_turn>\n", &["gemma", "gemma3"]),
    // Its end is the beginning of the next turn.
    ("\n<think></think>\n", "", &["glm4moe"]),
    ("<|channel|>final<|message|>", "<|return|>", &["gptoss"]),
    ("", "<|im_end|>\n", &["lfm2", "lfm2_v2", "qwen2_5", "qwen2_5_vl", "qwen3_5_nothink", "qwen3_instruct_2507", "qwen3_vl"]),
    ("", "<|eot_id|>", &["llama3", "llama3_1", "llama3_2"]),
    (" to=user<|message|>", "<|eot|>", &["muse_glimmer"]),
    ("</think>", "<|im_end|>\n", &["nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"]),
    ("", "<|end|>\n<|im_end|>", &["phi3", "phi3_5"]),
    ("<think>\n\n</think>\n\n", "<|im_end|>\n", &["qwen3"]),
    ("\n</think>\n\n", "<|im_end|>\n", &["qwen3_5_think", "qwen3_6", "qwen3_8"]),
];
/// These templates write only content in parts: they leave out an answer that is plain text.
const OF_PARTS: [&str; 3] = ["idefics3", "llava_next", "smolvlm"];

#[test]
fn each_answer_is_trained_with_its_end_and_no_prompt_is() {
    let turns = [turn("user", "Ask one?"), turn("assistant", "Say one."), turn("user", "Ask two?"), turn("assistant", "Say two.")];
    let with_system = [&[turn("system", "Be kind.")], &turns[..2]].concat();
    let tools = &golden_json("conversations.json")["tools"];
    let mut accepted = [0, 0];
    for (before, after, names) in AROUND {
        for name in *names {
            let source = shipped(&format!("{name}.jinja"));
            let texts = |record: &Value| trained(&source, TrainOn::Auto, record).map(|samples| samples.concat());
            let around = |answer: &str| format!("{before}{answer}{after}");
            let both = [around("Say one."), around("Say two.")];
            assert_eq!(texts(&json!({"messages": turns[..2]})).unwrap(), both[..1], "{name}");
            // The template of Phi-3 appends an end to any last message, with which the next header shares two characters, and no token.
            let first = if name.starts_with("phi3") { "Say one.<|end|>\n<|" } else { &both[0] };
            assert_eq!(texts(&json!({"messages": turns})).unwrap(), [first, both[1].as_str()], "{name}");
            if let Ok(found) = texts(&json!({"messages": with_system})) {
                assert_eq!(found, both[..1], "{name}");
                accepted[0] += 1;
            }
            if let Ok(found) = texts(tools) {
                let (all, last) = (found.concat(), found.last().unwrap());
                assert!(found.len() == 2 && last.ends_with(&format!("7.5 °C.{after}")), "{name}: {found:?}");
                assert!(!all.contains("Weather in") && !all.contains("celsius"), "{name}: {found:?}");
                accepted[1] += 1;
            }
        }
    }
    assert_eq!(accepted, [34, 29], "with a system message, with tools");
    let listed: BTreeSet<_> = AROUND.iter().flat_map(|(_, _, names)| *names).chain(&OF_PARTS).map(|name| format!("{name}.jinja")).collect();
    let names = std::fs::read_dir(golden("templates")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let without_marks = names.filter(|name| name.ends_with(".jinja") && !template(&shipped(name)).unwrap().has_marks());
    assert_eq!(without_marks.collect::<BTreeSet<_>>(), listed);
}

#[test]
fn an_answer_without_a_question_is_not_trained() {
    // As most do, it looks at the first message, and there is none before the first answer.
    let source = format!("{{% if messages[0].role == 'system' %}}!{{% endif %}}{PLAIN}");
    let chat = json!({"messages": [turn("assistant", "hi"), turn("user", "a"), turn("assistant", "b")]});
    assert_eq!(trained(&source, TrainOn::Auto, &chat).unwrap(), [["b;"]]);
    assert!(trained(&source, TrainOn::Last, &json!({"messages": [turn("assistant", "hi")]})).unwrap().is_empty());
    let mut but_the_last = chat.clone();
    but_the_last["messages"][2]["weight"] = 0.into();
    assert_eq!(trained(&source, TrainOn::All, &but_the_last).unwrap(), [["<assistant>hi;", "<user>a;"]], "all is all");
}

/// A prompt of DeepSeek-R1 ends with `<think>`, whose first character an answer may share; its tokens it does not.
#[test]
fn an_answer_is_trained_from_its_first_token_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut json = serde_json::from_str::<Value>(&std::fs::read_to_string(golden("model/tokenizer.json")).unwrap()).unwrap();
    for (id, content) in (320..).zip(["<think>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]) {
        let flags = json!({"single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let mut token = json!({"id": id, "content": content});
        token.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let tokenizer = tokenizer(dir.path(), &shipped("deepseek_r1_distill.jinja"));
    for answer in ["<b>x</b>", "", "4"] {
        let record = json!({"messages": [turn("user", "a"), turn("assistant", answer)]}).to_string();
        let shown =
            tokenizer.run(&[TextWork::ShownRecord(DataFormat::Messages, &record)], &StopFlag::default(), |_, cause| Error::usage(cause));
        let Done::Shown(documents) = shown.unwrap().remove(0) else { panic!("{record}") };
        let own = documents[0].1.iter().filter(|piece| piece.weight.is_trained()).map(|piece| piece.text.as_str());
        assert_eq!(own.collect::<String>(), format!("{answer}<｜end▁of▁sentence｜>"));
    }
}

/// The ids of bytes of `record`, by a sandbox that has the template `source`.
pub(super) fn in_sandbox(source: &str, record: &Value, stop: &StopFlag) -> crate::error::Result<Vec<Done>> {
    let rules = RecordRules { template_file: "t.jinja".into(), ..rules(source, TrainOn::Auto) };
    let tokenizer = Tokenizer::bytes_with(None, AddBos::No, rules.into())?;
    let record = record.to_string();
    tokenizer.run(&[TextWork::Record(DataFormat::Messages, &record)], stop, |_, cause| Error::format("chat.jsonl", cause))
}

/// Each answer has all that comes before it rendered, twice.
#[test]
fn a_long_record_may_take_so_much_in_all_and_is_stopped_at_once() {
    let turns = |count: usize| (0..count).map(|n| turn(["user", "assistant"][n % 2], "a")).collect::<Vec<_>>();
    let read = |count: usize, stop: &StopFlag| in_sandbox(PLAIN, &json!({"messages": turns(count)}), stop).map(|_| ());
    read(500, &StopFlag::default()).unwrap();
    let refused = read(20_000, &StopFlag::default()).unwrap_err().to_string();
    assert!(refused.starts_with("chat.jsonl: the chat template takes too long for 20000 messages"), "{refused}");
    let stop = StopFlag::default();
    let later = std::thread::spawn({
        let stop = stop.clone();
        move || {
            std::thread::sleep(Duration::from_millis(30));
            stop.request();
        }
    });
    let began = std::time::Instant::now();
    assert_eq!(read(20_000, &stop).unwrap_err().exit_code(), 75);
    assert!(began.elapsed() < crate::sweep::PROMPTLY);
    later.join().unwrap();
}
