//! The rules of a record: null keys, marks, tools in strings, parts, history, variables, and names that mean something elsewhere.

use super::date::Day;
use super::record::{Content, DataFormat, ReadContent, RecordRules};
use super::sample::ChatSample;
use super::template::ChatTemplate;
use serde_json::{Map, Value, json};

/// Writes roles, content and calls.
const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(\
    {{ c.function.arguments|tojson }}){% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn rules(source: &str) -> RecordRules {
    let template = ChatTemplate::new(source, Map::new(), Day::parse("2026-11-23").unwrap());
    RecordRules { template, ..RecordRules::default() }
}

/// Trained text stands in brackets.
fn bracketed(ChatSample { text, trained, .. }: &ChatSample) -> String {
    let (mut out, mut done) = (String::new(), 0);
    for span in trained {
        out += &format!("{}[{}]", &text[done..span.range.start], &text[span.range.clone()]);
        done = span.range.end;
    }
    out + &text[done..]
}

fn read(rules: &RecordRules, record: &Value) -> Result<(Vec<String>, Vec<String>), String> {
    let line = record.to_string();
    let ReadContent { content, remarks } = rules.read_with_remarks(rules.detect(&line)?, &line)?;
    let samples = match content {
        Content::Rendered(chat) => chat.samples.iter().map(bracketed).collect(),
        Content::Completed(sample) => vec![bracketed(&sample)],
        other => panic!("{other:?}"),
    };
    Ok((samples, remarks.into_iter().collect()))
}

/// The samples of a record without remarks.
fn samples(source: &str, record: &Value) -> Result<Vec<String>, String> {
    let (samples, remarks) = read(&rules(source), record)?;
    assert!(remarks.is_empty(), "{remarks:?}");
    Ok(samples)
}

/// Remarks on a record, one a line.
fn remarks(source: &str, record: &Value) -> String {
    read(&rules(source), record).unwrap().1.join("\n")
}

fn chat(answer: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": "a"}, answer]})
}

#[test]
fn keys_that_are_null_are_no_keys() {
    let within = "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{% endfor %}CALLS\
        {% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let defined = within.replace("'tool_calls' in m", "m.tool_calls is defined and m.tool_calls|length > 0");
    let content = "{% for m in messages %}<{{ m.role }}>{% if m.content is defined %}{{ m.content }}{% endif %}{{ m.tool_calls|length if \
        m.tool_calls else '' }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let answer =
        json!({"role": "assistant", "content": "b", "tool_calls": null, "name": null, "thinking": null, "reasoning_content": null});
    for source in [within, &defined, content] {
        assert_eq!(samples(source, &chat(&answer)).unwrap(), ["<user>a;<assistant>[b;]"], "{source}");
    }
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]});
    assert_eq!(samples(content, &chat(&call)).unwrap(), ["<user>a;<assistant>[1;]"]);
    let named = json!({"conversations": [{"from": "human", "value": "a", "role": null}, {"from": "gpt", "value": "b", "content": null}]});
    assert_eq!(samples(PLAIN, &named).unwrap(), ["<user>a;<assistant>[b;]"]);
}

#[test]
fn reasoning_beside_a_null_of_another_name_is_kept() {
    let source = "{% for m in messages %}<{{ m.role }}>({{ m.thinking }}){{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let answer = json!({"role": "assistant", "content": "b", "thinking": null, "reasoning_content": "hm"});
    assert_eq!(samples(source, &chat(&answer)).unwrap(), ["<user>();<assistant>[(hm)b;]".replace("();", "()a;")]);
}

#[test]
fn each_mark_that_leaves_an_answer_out_does_so() {
    for mark in [
        json!({"loss": false}),
        json!({"loss_mask": 0}),
        json!({"masked": true}),
        json!({"train_on_turn": false}),
        json!({"trainable": false}),
    ] {
        let mut bad = json!({"role": "assistant", "content": "bad"});
        bad.as_object_mut().unwrap().extend(mark.as_object().unwrap().clone());
        let user = json!({"role": "user", "content": "a"});
        let record = json!({"messages": [user, bad, user, {"role": "assistant", "content": "good", "loss": true}]});
        assert_eq!(samples(PLAIN, &record).unwrap(), ["<user>a;<assistant>bad;<user>a;<assistant>[good;]"], "{mark}");
    }
    let refused = samples(PLAIN, &chat(&json!({"role": "assistant", "content": "b", "loss": 0.5}))).unwrap_err();
    assert!(refused.starts_with("message 1 of `messages` has loss 0.5: true or false are its possible values"), "{refused}");
}

#[test]
fn a_mark_that_trains_a_question_is_warned_of() {
    let requested =
        json!({"messages": [{"role": "user", "content": "a", "train": true}, {"role": "assistant", "content": "b", "train": true}]});
    assert!(
        remarks(PLAIN, &requested).starts_with("`train` of a message of role \"user\" is not read: "),
        "{}",
        remarks(PLAIN, &requested)
    );
}

#[test]
fn tools_and_calls_may_be_json_in_strings() {
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": null}}}]);
    let source = PLAIN.replace("{% for m in messages %}", "{{ tools|tojson if tools else '' }}{% for m in messages %}");
    let answer = |calls: Value| chat(&json!({"role": "assistant", "content": "", "tool_calls": calls}));
    for calls in [call.clone(), json!(call.to_string()), json!([call[0].to_string()])] {
        assert_eq!(samples(&source, &answer(calls)).unwrap(), ["<user>a;<assistant>[f({\"x\": null});]"]);
    }
    assert_eq!(samples(&source, &answer(json!(""))).unwrap(), ["<user>a;<assistant>[;]"]);
    let refused = samples(&source, &answer(json!("f()"))).unwrap_err();
    assert!(refused.starts_with("message 1 of `messages` has a `tool_calls` that is not the JSON of a list: "), "{refused}");
    let mut record = chat(&json!({"role": "assistant", "content": "b"}));
    for tools in [json!([{"name": "f", "strict": null}]), json!("[{\"name\": \"f\", \"strict\": null}]"), json!(["{\"name\": \"f\"}"])] {
        record["tools"] = tools;
        assert_eq!(samples(&source, &record).unwrap(), ["[{\"name\": \"f\"}]<user>a;<assistant>[b;]"]);
    }
    record["tools"] = json!("{}");
    assert_eq!(samples(&source, &record).unwrap_err(), "`tools` is not a list");
}

#[test]
fn parts_are_joined_in_every_role_unless_the_template_goes_over_them() {
    let part = |text: &str| json!({"type": "text", "text": text});
    let parts = json!([part("b"), part("c")]);
    let turn = |role: &str| json!({"role": role, "content": parts});
    let record = json!({"messages": [turn("system"), turn("user"), turn("assistant"), turn("tool"), turn("assistant")]});
    let joined = "<system>bc;<user>bc;<assistant>[bc;]<tool>bc;<assistant>[bc;]";
    assert_eq!(samples(PLAIN, &record).unwrap(), [joined]);
    let text_alone = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else '' }}");
    assert_eq!(samples(&text_alone, &record).unwrap(), [joined]);
    let over = PLAIN.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}",
    );
    let gone_over = "<system>(b)(c);<user>(b)(c);<assistant>[(b)(c);]<tool>(b)(c);<assistant>[(b)(c);]";
    assert_eq!(samples(&over, &record).unwrap(), [gone_over]);
    let of_user = over.replace("m.content is string", "m.content is string or m.role != 'user'");
    assert_eq!(samples(&of_user, &record).unwrap(), [joined.replace("<user>bc", "<user>(b)(c)")]);
    let mut with_image = record.clone();
    with_image["messages"][1]["content"][1] = json!({"type": "image"});
    for source in [PLAIN, &over] {
        let refused = samples(source, &with_image).unwrap_err();
        assert_eq!(refused, "message 1 of `messages` has a part of type \"image\": text parts only");
    }
    let answered = |content: Value| json!({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": content}, {"role": "assistant", "content": "b"}]});
    let json_of_tool = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content|tojson }}");
    assert_eq!(samples(&json_of_tool, &answered(json!([{"t": 7}]))).unwrap(), ["<user>a;<tool>[{\"t\": 7}];<assistant>[b;]"]);
}

#[test]
fn parts_are_joined_or_kept_as_the_template_in_use_takes_them() {
    let over = PLAIN.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}",
    );
    let template = |source: &str| ChatTemplate::new(source, Map::new(), Day::parse("2026-11-23").unwrap()).unwrap();
    let read_by = |of_all: &str, of_tools: &str, record: &Value| {
        let template = Ok(template(of_all).with_tool_use(template(&format!("{{{{ tools|length }}}}{of_tools}"))));
        read(&RecordRules { template, ..RecordRules::default() }, record).unwrap().0
    };
    let content = json!([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]);
    let mut record = chat(&json!({"role": "assistant", "content": content}));
    for none in [json!(null), json!([]), json!("[]")] {
        record["tools"] = none;
        assert_eq!(read_by(PLAIN, &over, &record), ["<user>a;<assistant>[bc;]"]);
        assert_eq!(read_by(&over, PLAIN, &record), ["<user>a;<assistant>[(b)(c);]"]);
    }
    for tools in [json!([{"name": "f"}]), json!("[{\"name\": \"f\"}]")] {
        record["tools"] = tools;
        assert_eq!(read_by(PLAIN, &over, &record), ["1<user>a;<assistant>[(b)(c);]"]);
        assert_eq!(read_by(&over, PLAIN, &record), ["1<user>a;<assistant>[bc;]"]);
    }
}

#[test]
fn an_empty_system_is_no_turn() {
    let shared = json!({"system": "", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
    assert_eq!(samples(PLAIN, &shared).unwrap(), ["<user>a;<assistant>[b;]"]);
    let alpaca = json!({"system": "", "instruction": "a", "output": "b"});
    assert_eq!(samples(PLAIN, &alpaca).unwrap(), ["<user>a;<assistant>[b;]"]);
    let message =
        json!({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    assert_eq!(samples(PLAIN, &message).unwrap(), ["<system>;<user>a;<assistant>[b;]"], "a turn that the record has");
}

#[test]
fn history_comes_before_the_instruction() {
    let with = |history: Value| json!({"instruction": "c", "input": "", "output": "d", "system": "s", "history": history});
    let all = "<system>s;<user>a;<assistant>[b;]<user>c;<assistant>[d;]";
    assert_eq!(samples(PLAIN, &with(json!([["a", "b"]]))).unwrap(), [all]);
    for none in [json!(null), json!([])] {
        assert_eq!(samples(PLAIN, &with(none)).unwrap(), ["<system>s;<user>c;<assistant>[d;]"]);
    }
    for odd in [json!("a"), json!(["a", "b"]), json!([["a"]]), json!([["a", null]]), json!([["a", "b", "c"]])] {
        let refused = samples(PLAIN, &with(odd)).unwrap_err();
        assert_eq!(refused, "`history` is not a list of pairs, each a question and its answer");
    }
    let mut foreign = chat(&json!({"role": "assistant", "content": "b"}));
    foreign["history"] = json!([["a", "b"]]);
    assert!(remarks(PLAIN, &foreign).contains("column `history` (of LLaMA-Factory, ms-swift) is not read"));
}

#[test]
fn variables_of_a_record_go_before_those_of_the_flag() {
    let source = format!("{{{{ effort }}}}:{PLAIN}");
    let mut record = chat(&json!({"role": "assistant", "content": "b"}));
    let of_flag = || RecordRules { template_variables: json!({"effort": "low"}).as_object().unwrap().clone(), ..rules(&source) };
    let first = |record: &Value, rules: &RecordRules| read(rules, record).map(|(samples, _)| samples[0].clone());
    assert_eq!(first(&record, &rules(&source)).unwrap(), ":<user>a;<assistant>[b;]");
    assert_eq!(first(&record, &of_flag()).unwrap(), "low:<user>a;<assistant>[b;]");
    for held in [json!({"effort": "high"}), json!("{\"effort\": \"high\"}")] {
        record["chat_template_kwargs"] = held;
        assert_eq!(first(&record, &of_flag()).unwrap(), "high:<user>a;<assistant>[b;]");
    }
    record["chat_template_kwargs"] = json!({"messages": []});
    let refused = first(&record, &of_flag()).unwrap_err();
    assert_eq!(refused, "`chat_template_kwargs` names `messages`, which every template already receives");
    assert_ne!(rules(&source).identity(), of_flag().identity());
    let marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
    record["chat_template_kwargs"] = json!({"x": "\u{10fffc}"});
    assert!(first(&record, &rules(marked)).unwrap_err().contains("a private character"));
}

#[test]
fn names_of_other_programs_are_refused_or_logged() {
    let answer = json!({"role": "assistant", "content": "b"});
    let with = |column: &str, value: Value| {
        let mut record = chat(&answer);
        record[column] = value;
        record
    };
    assert!(
        samples(PLAIN, &with("functions", json!([{"name": "f"}]))).unwrap_err().starts_with("column `functions` (of OpenAI) is not read: ")
    );
    assert!(remarks(PLAIN, &with("images", json!(["a.png"]))).starts_with("column `images` (of "));
    for (column, empty) in [("functions", json!([])), ("images", json!([])), ("label", json!(null)), ("id", json!(7))] {
        assert_eq!(remarks(PLAIN, &with(column, empty)), "", "{column}");
    }
    let legacy = chat(&json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}}));
    let refused = samples(PLAIN, &legacy).unwrap_err();
    assert!(refused.starts_with("message 1 of `messages` has the key `function_call` (of OpenAI), which is not read: "), "{refused}");
    let renamed = RecordRules { columns: [("messages".to_string(), "chosen".to_string())].into(), ..rules(PLAIN) };
    let chosen = json!({"chosen": chat(&answer)["messages"]});
    assert_eq!(read(&renamed, &chosen).unwrap().1, [""; 0], "a column that --columns names is read");
}

#[test]
fn messages_that_the_template_drops_are_warned_of() {
    let known = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<assistant>{% endif %}";
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let record =
        json!({"messages": [turn("developer", "be good"), turn("user", "a"), turn("tool_response", "result"), turn("assistant", "good")]});
    let message = |role: &str| format!("the chat template omits a message of role \"{role}\"");
    assert_eq!(remarks(known, &record), [message("developer"), message("tool_response")].join("\n"));
    let written = json!({"messages": [turn("developer", "be good"), turn("user", "a"), turn("assistant", "good")]});
    assert_eq!(samples(PLAIN, &written).unwrap(), ["<developer>be good;<user>a;<assistant>[good;]"]);
    let called = json!({"messages": [turn("user", "a"), turn("tool_call", "{}"), turn("tool", "c"), turn("assistant", "good")]});
    assert!(remarks(PLAIN, &called).contains("role `tool_call` (of ms-swift) is not read: messages of this role are not trained"));
}

#[test]
fn numbers_of_python_pass_in_columns_that_are_not_read() {
    let rules = RecordRules::default();
    let text = |line: &str| match rules.read(DataFormat::Text, line) {
        Ok(Content::Text(text)) => Ok(text),
        Ok(other) => panic!("{other:?}"),
        Err(cause) => Err(cause),
    };
    assert_eq!(text(r#"{"text": "NaN", "score": NaN, "bounds": [-Infinity, Infinity]}"#), Ok("NaN".into()));
    assert_eq!(text(r#"{"text": NaN}"#), Err("`text` holds NaN, which is not a JSON number".into()));
    assert_eq!(text(r#"{"text": "a", "score": NaN, "b": }"#), Err("expected value (column 24)".into()));
    assert_eq!(rules.detect(r#"{"score": NaN, "text": "a"}"#), Ok(DataFormat::Text));
}

#[test]
fn weights_of_ids_count_where_labels_and_masks_train_a_token() {
    let of = |record: &Value| {
        let line = record.to_string();
        let ReadContent { content, remarks } = RecordRules::default().read_with_remarks(DataFormat::InputIds, &line)?;
        let Content::Ids(ids) = content else { panic!("{content:?}") };
        Ok::<_, String>((ids.into_iter().map(|(id, weight)| (id, weight.value())).collect::<Vec<_>>(), remarks.len()))
    };
    let record = json!({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "weights": [0.5, 0.25, 1, 0]});
    assert_eq!(of(&record).unwrap(), (vec![(5, 0.0), (6, 0.25), (7, 1.0), (8, 0.0)], 0));
    let rounded = json!({"input_ids": [5, 6], "loss_mask": [1, 0], "weights": [0.3, 1]});
    assert_eq!(of(&rounded).unwrap(), (vec![(5, 1229.0 / 4096.0), (6, 0.0)], 1));
    let large = json!({"input_ids": [5, 1 << 19]});
    assert_eq!(of(&large).unwrap_err(), "token 1 has id 524288: ids are below 524288");
}

#[test]
fn weights_beside_anything_but_ids_are_a_remark_and_a_rounded_weight_of_a_message_is_one() {
    let mut record = chat(&json!({"role": "assistant", "content": "b", "weight": 0.1}));
    record["weights"] = json!([1]);
    let remarks = remarks(PLAIN, &record);
    assert!(remarks.contains("a weight is rounded to the nearest multiple of 1/4096"), "{remarks}");
    assert!(remarks.contains("column `weights`") && remarks.contains("only read beside `input_ids`"), "{remarks}");
}
