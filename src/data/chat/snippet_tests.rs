//! Against jinja2: expressions and tags that templates may use. See tests/golden/chat/snippets.py.

use super::date::Day;
use super::integers;
use super::template::ChatTemplate;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Snippets {
    messages: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    snippet: String,
    text: Option<String>,
}

/// Each snippet begins so.
const BEGIN: &str = "{% set m = messages[0] %}";
/// Snippets with a text other than that of jinja2: the engine has one type for ranges, views of maps, and parts of lists, and one undefined value.
const OTHERWISE: [&str; 10] = [
    "{{ range(3) }}",
    "{{ m.map.keys() is sequence }}",
    "{{ m.map.items() is sequence }}",
    "{{ (m.list|map('abs')) is sequence }}",
    // A letter of Unicode that has a form for titles.
    "{{ m.unicode.title() }}",
    "{{ u is sameas u }}",
    "{{ {u: 1} }}",
    "{{ 'x'|int(u) }}",
    "{{ 'x'|float(u) }}",
    "{{ self }}",
];
/// Snippets that have a text where jinja2 raises an error.
const LENIENT: [&str; 4] = [
    "{{ m.map|tojson(ensure_ascii=False, ensure_ascii=True) }}",
    "{{ namespace(a=1)|tojson }}",
    "{{ 1 < u < 3 }}",
    "{{ m.list|select(u)|list }}",
];

#[test]
fn snippets_render_as_by_jinja2_or_are_refused() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat/snippets.json");
    let golden: Snippets = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let messages: Vec<Value> = integers::parse(&golden.messages).unwrap();
    let special = json!({"bos_token": "<s>"}).as_object().unwrap().clone();
    let (mut equal, mut both_refuse, mut refused, mut wrong) = (0, 0, 0, Vec::new());
    for Case { snippet, text } in &golden.cases {
        let template = ChatTemplate::new(snippet, special.clone(), Day::parse("2026-11-23").unwrap()).unwrap();
        let rendered = template.renderings(&messages, None).and_then(|mut renderings| renderings.whole());
        let own = snippet.strip_prefix(BEGIN).unwrap();
        match (rendered, text) {
            (Ok(rendered), Some(text)) if rendered.text == *text => equal += 1,
            (Err(_), None) => both_refuse += 1,
            (Err(_), Some(_)) => refused += 1,
            (Ok(_), Some(_)) if OTHERWISE.contains(&own) => {}
            (Ok(_), None) if LENIENT.contains(&own) => {}
            (Ok(rendered), text) => wrong.push(format!("{own}: {:?}, jinja2 {text:?}", rendered.text)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!((equal, both_refuse, refused), (817, 251, 82));
}
