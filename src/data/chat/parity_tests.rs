//! Masks against `transformers` and TRL: see tests/golden/masks/generate.py.

use super::tests::{golden, shipped, tokenizer, tokens};
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::tokenizer::AddBos;
use crate::model_dir::ModelDir;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// Where runs of trained tokens begin and end.
fn runs(trained: &[u32]) -> Vec<[usize; 2]> {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for (at, _) in trained.iter().enumerate().filter(|(_, is_trained)| **is_trained == 1) {
        match runs.last_mut() {
            Some([_, end]) if *end == at => *end += 1,
            _ => runs.push([at, at + 1]),
        }
    }
    runs
}

fn masks(name: &str) -> PathBuf {
    golden("../masks").join(name)
}

/// Number of cases of `name` with the tokens and the mask of the golden file, for each result of `group`.
fn equal(name: &str, group: impl Fn(&Value) -> Option<&'static str>) -> BTreeMap<&'static str, usize> {
    let cases = std::fs::read_to_string(masks(name)).unwrap();
    let (mut tokenizers, mut counts, mut wrong) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for line in cases.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let Some(group) = group(&case) else { continue };
        let key = (case["tokenizer"].to_string(), case["template"].to_string());
        let tokenizer = tokenizers.entry(key).or_insert_with(|| of_case(&case));
        let (ids, trained) = tokens(&case["record"], tokenizer);
        match (json!(ids.len()), json!(runs(&trained))) == (case["tokens"].clone(), case["trained"].clone()) {
            true => *counts.entry(group).or_default() += 1,
            false => wrong.push(format!("{line}\nhere {} {:?}", ids.len(), runs(&trained))),
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
    counts
}

/// With the stock template of a model, plain answers are trained as with TRL's training template: the same tokens with the same mask. Where
/// not, TRL marks a part of the header or of the prompt's reasoning block, too.
#[test]
fn stock_templates_train_the_spans_that_training_templates_mark() {
    let mut other = BTreeSet::new();
    let mut equal = BTreeSet::new();
    for line in std::fs::read_to_string(masks("marked.jsonl")).unwrap().lines() {
        let mut case: Value = serde_json::from_str(line).unwrap();
        let messages = case["record"]["messages"].as_array().unwrap();
        let is_plain = ["Is it?", "One?"].contains(&messages[0]["content"].as_str().unwrap()) && messages.len().is_multiple_of(2);
        let stock = case["template"].as_str().unwrap().trim_end_matches("_training").to_string();
        if is_plain && case["template"] != stock.as_str() {
            case["template"] = stock.as_str().into();
            let (ids, trained) = tokens(&case["record"], &of_case(&case));
            let is_equal = (json!(ids.len()), json!(runs(&trained))) == (case["tokens"].clone(), case["trained"].clone());
            if is_equal {
                equal.insert(stock)
            } else {
                other.insert(stock)
            };
        }
    }
    let equal: Vec<&str> = equal.difference(&other).map(String::as_str).collect();
    assert_eq!(
        equal,
        [
            "cohere",
            "cohere2",
            "diffusion_gemma",
            "gemma",
            "gemma3",
            "glm4moe",
            "idefics3",
            "lfm2",
            "lfm2_v2",
            "llama3",
            "phi3",
            "phi3_5",
            "qwen2_5_vl",
            "qwen3_instruct_2507",
            "qwen3_vl",
            "smolvlm"
        ]
    );
}

fn of_case(case: &Value) -> Tokenizer {
    let dir = masks(case["tokenizer"].as_str().unwrap());
    match case["template"].as_str() {
        Some(template) => tokenizer(&dir, &shipped(&format!("{template}.jinja"))),
        None => Tokenizer::load_with(&ModelDir::open(&dir).unwrap(), None, AddBos::Auto, &Arc::default()).unwrap().unwrap(),
    }
}

#[test]
fn marked_text_is_trained_as_by_transformers() {
    assert_eq!(equal("marked.jsonl", |_| Some("all")), [("all", 458)].into());
}

#[test]
fn completions_are_trained_as_by_trl() {
    assert_eq!(equal("prompts.jsonl", |_| Some("all")), [("all", 110)].into());
}

#[test]
fn masks_beside_token_ids_are_obeyed_as_by_trl() {
    assert_eq!(equal("columns.jsonl", |_| Some("all")), [("all", 4)].into());
}
