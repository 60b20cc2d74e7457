//! Which messages are trained, and where each begins and ends.

use super::mask::TrainOn;
use super::sample::{ChatSample, TrainedSpan};
use super::tests::{PLAIN, samples, trained, turn};
use serde_json::{Value, json};

/// A template of reasoning: the last message alone has it.
const LAST_THINKS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}()\
    {% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// A template like Phi-3's, which appends an end to any last message.
const APPENDS: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }};{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}";
const MARKS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
    {% generation %};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}";

fn chat(messages: &[Value]) -> Value {
    json!({"messages": messages})
}

/// `message` with keys that exclude it from training.
fn untrained(message: Value) -> [Value; 2] {
    [("train", json!(false)), ("weight", json!(0))].map(|(key, no)| {
        let mut message = message.clone();
        message[key] = no;
        message
    })
}

/// Text of all samples that is trained.
fn all_trained(template: &str, train_on: TrainOn, record: &Value) -> String {
    trained(template, train_on, record).unwrap().concat().join("|")
}

#[test]
fn an_excluded_message_is_not_trained_beside_others() {
    let (question, good) = (turn("user", "ask"), turn("assistant", "good"));
    for bad in untrained(turn("assistant", "bad")) {
        let in_a_row = chat(&[question.clone(), bad.clone(), good.clone()]);
        let apart = chat(&[question.clone(), bad.clone(), question.clone(), good.clone()]);
        let twice = chat(&[question.clone(), bad.clone(), bad.clone(), good.clone()]);
        for record in [&in_a_row, &apart, &twice] {
            for train_on in [TrainOn::Auto, TrainOn::Assistant, TrainOn::Last] {
                assert_eq!(all_trained(LAST_THINKS, train_on, record), "()good;", "{train_on:?} {record}");
                assert_eq!(all_trained(PLAIN, train_on, record), "good;", "{train_on:?} {record}");
                assert_eq!(all_trained(MARKS, train_on, record), "good|;", "{train_on:?} {record}");
            }
            for template in [LAST_THINKS, PLAIN, MARKS, APPENDS] {
                let all = all_trained(template, TrainOn::All, record);
                assert!(!all.contains("bad") && all.contains("ask") && all.contains("good"), "{template}: {all}");
            }
        }
        assert_eq!(all_trained(LAST_THINKS, TrainOn::All, &apart), "<user>ask;|<user>ask;|()good;");
        let last = chat(&[question.clone(), good.clone(), question.clone(), bad]);
        assert_eq!(all_trained(LAST_THINKS, TrainOn::Auto, &last), "()good;");
        assert_eq!(all_trained(LAST_THINKS, TrainOn::Last, &last), "");
        assert_eq!(all_trained(MARKS, TrainOn::Auto, &last), "good|;");
    }
}

#[test]
fn of_answers_in_a_row_each_is_trained_once_and_no_header() {
    let row = chat(&[turn("user", "ask"), turn("assistant", "yes"), turn("assistant", "good")]);
    assert_eq!(trained(LAST_THINKS, TrainOn::Auto, &row).unwrap(), [["()yes;"], ["()good;"]]);
    let joins = "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}{% if not loop.first %};{% endif %}\
        <{{ m.role }}>{% endif %}{{ m.content }}{% endfor %};{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(trained(joins, TrainOn::Auto, &row).unwrap(), [["yes", "good;"]], "the last end is that of both");
}

/// Each of these writes the messages in front otherwise once an answer follows, and their end can be found all the same.
#[test]
fn a_prefix_may_be_rendered_differently() {
    let chat = chat(&[turn("system", "s"), turn("user", "a"), turn("assistant", "b")]);
    let last_has_the_system_message = "{% for m in messages %}{% if m.role == 'user' %}[{% if loop.last %}{{ messages[0].content }} {% endif %}\
        {{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content }};{% endif %}{% endfor %}";
    for source in [
        &format!("{{{{ messages|length }}}}{PLAIN}"),
        &format!("<s>{{{{ messages|length }}}}{PLAIN}"),
        &format!("<s>{{{{ 'P' if add_generation_prompt else 'T' }}}}{PLAIN}"),
        last_has_the_system_message,
    ] {
        assert_eq!(trained(source, TrainOn::Auto, &chat).unwrap(), [["b;"]], "{source}");
    }
}

#[test]
fn a_template_that_would_have_a_prompt_trained_is_refused() {
    let chat = chat(&[turn("system", "s"), turn("user", "a"), turn("assistant", "b")]);
    let (otherwise, within) =
        ("the chat template renders it differently when an answer follows", "the chat template has it within {% generation %}");
    let omits_users = "{{ messages|length }}{% for m in messages %}{% if m.role != 'user' %}<{{ m.role }}>{{ m.content }};{% endif %}\
        {% endfor %}";
    let counts_behind = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{{ messages|length }}\
        {% if add_generation_prompt %}<assistant>{% endif %}";
    for (source, how) in [
        (omits_users, otherwise),
        (&PLAIN.replace("<{{ m.role }}>", "{{ messages|length }}<{{ m.role }}>"), otherwise),
        (&PLAIN.replace("<{{ m.role }}>", "{% if m.role == 'assistant' %}!{% endif %}<{{ m.role }}>"), otherwise),
        (&counts_behind.replace("<{{ m.role }}>", "{{ messages|length }}<{{ m.role }}>"), otherwise),
        (&format!("{{% generation %}}{PLAIN}{{% endgeneration %}}"), within),
    ] {
        let refused = trained(source, TrainOn::Auto, &chat).unwrap_err();
        assert!(refused.starts_with("text before message 2 would be trained: "), "{source}: {refused}");
        assert!(refused.contains(how) && refused.contains("{% endgeneration %} around the text of answers"), "{source}: {refused}");
        assert_eq!(trained(source, TrainOn::All, &chat).unwrap().len(), 1, "{source}");
    }
}

#[test]
fn an_end_that_is_appended_to_any_last_message_leaves_one_sample() {
    let turns: Vec<Value> = (0..10).flat_map(|n| [turn("user", &format!("ask {n}")), turn("assistant", &format!("say {n}"))]).collect();
    let [samples] = &trained(APPENDS, TrainOn::Auto, &chat(&turns)).unwrap()[..] else { panic!("not one sample") };
    // The next header begins with two characters of the end, and with none of its tokens.
    let answer = |n| if n == 9 { "say 9;<|end|>".into() } else { format!("say {n};<|") };
    assert_eq!(*samples, (0..10).map(answer).collect::<Vec<_>>());
    let reasoned = turns.iter().map(|turn| json!({"role": turn["role"], "content": "yes"})).collect::<Vec<_>>();
    assert_eq!(trained(LAST_THINKS, TrainOn::Auto, &chat(&reasoned)).unwrap().len(), 10, "that is no end");
}

#[test]
fn marks_are_obeyed_exactly_however_many_there_are() {
    let turns = [turn("user", "ask"), turn("assistant", "yes"), turn("user", "ask"), turn("assistant", "no")];
    assert_eq!(trained(MARKS, TrainOn::Auto, &chat(&turns)).unwrap(), [["yes", ";", "no", ";"]]);
    assert_eq!(trained(MARKS, TrainOn::Last, &chat(&turns)).unwrap(), [["no", ";"]]);
    let end = format!("{MARKS}{{% if not add_generation_prompt %}}{{% generation %}}</s>{{% endgeneration %}}{{% endif %}}");
    assert_eq!(trained(&end, TrainOn::Auto, &chat(&turns)).unwrap(), [["yes", ";", "no", ";", "</s>"]]);
    let [_, unwanted] = untrained(turns[3].clone());
    let all_but_last = chat(&[turns[0].clone(), turns[1].clone(), turns[2].clone(), unwanted]);
    assert_eq!(trained(&end, TrainOn::Auto, &all_but_last).unwrap(), [["yes", ";"]], "an end is the last answer's");
    let of_a_prompt = json!({"prompt": turns[..3], "completion": [turns[3]]});
    assert_eq!(trained(&end, TrainOn::Auto, &of_a_prompt).unwrap(), [["no", ";", "</s>"]]);
    let between = MARKS.replace("{% endgeneration %}{% generation %};", "{% endgeneration %}!{% generation %};");
    let [_, unwanted] = untrained(turns[1].clone());
    let in_a_row = chat(&[turns[0].clone(), unwanted, turns[3].clone()]);
    assert!(trained(&between, TrainOn::Auto, &in_a_row).unwrap_err().contains("cannot be matched to them"));
    let around_two = "{% generation %}{% for m in messages[1:] %}{{ m.content }}{% endfor %}{% endgeneration %}";
    let refused = trained(&format!("x{around_two}"), TrainOn::Auto, &all_but_last).unwrap_err();
    assert!(refused.starts_with("answers differ in their weights, and the {% generation %} spans"), "{refused}");
    let none =
        "{% for m in messages %}{% if m.role == 'nobody' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}x";
    assert!(trained(none, TrainOn::Auto, &chat(&turns)).unwrap().is_empty());
}

/// A message of any kind beside others may hold the marks of trial renderings.
#[test]
fn characters_that_mark_messages_are_refused_where_they_matter() {
    let odd = chat(&[turn("user", "ask\u{10fffe}"), turn("assistant", "yes"), turn("user", "ask"), turn("assistant", "no")]);
    assert_eq!(trained(MARKS, TrainOn::Auto, &odd).unwrap(), [["yes", ";", "no", ";"]]);
    let refused = trained(MARKS, TrainOn::Last, &odd).unwrap_err();
    assert!(refused.contains("message 0 holds a private character"), "{refused}");
}

/// Text of all spans with their weights.
fn all_weighted(template: &str, train_on: TrainOn, record: &Value) -> String {
    let samples = samples(template, train_on, record).unwrap();
    let span = |sample: &ChatSample, span: &TrainedSpan| format!("{}*{}", &sample.text[span.range.clone()], span.weight.value());
    samples.iter().flat_map(|sample| sample.trained.iter().map(|of| span(sample, of))).collect::<Vec<_>>().join("|")
}

#[test]
fn a_message_is_trained_with_its_weight() {
    let weighted = |weight: f64, content: &str| {
        let mut message = turn("assistant", content);
        message["weight"] = weight.into();
        message
    };
    let ask = || turn("user", "ask");
    let record = chat(&[ask(), weighted(0.25, "half"), ask(), weighted(0.0, "none"), ask(), turn("assistant", "good")]);
    assert_eq!(all_weighted(PLAIN, TrainOn::Auto, &record), "half;*0.25|good;*1");
    assert_eq!(all_weighted(MARKS, TrainOn::Auto, &record), "half*0.25|;*0.25|good*1|;*1");
    assert_eq!(all_weighted(PLAIN, TrainOn::Last, &record), "good;*1");
    let all = chat(&[ask(), weighted(0.25, "half")]);
    assert_eq!(all_weighted(PLAIN, TrainOn::All, &all), "<user>ask;*1|half;*0.25");
    let equal = chat(&[ask(), weighted(0.25, "one"), ask(), weighted(0.25, "two")]);
    assert_eq!(all_weighted(MARKS, TrainOn::Auto, &equal), "one*0.25|;*0.25|two*0.25|;*0.25");
    let joined = "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}{% generation %}\
        {% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }};{% endif %}{% endfor %}{% endgeneration %}";
    let refused = samples(joined, TrainOn::Auto, &record).unwrap_err();
    assert!(refused.starts_with("answers differ in their weights, and the {% generation %} spans"), "{refused}");
}
