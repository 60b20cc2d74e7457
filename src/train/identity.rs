//! The identity of a run: its model, tokenizer and data, recorded in every checkpoint under `run` and compared when one
//! is continued. Contents decide; names and places may change.

use crate::data::chat::record::RULES_VERSION;
use crate::data::checksum::{self, Fingerprint};
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::read::demo::DEMO_TEXT;
use crate::data::read::files::{holds_records, is_text};
use crate::data::run_sources::KnownSources;
use crate::error::Result;
use crate::hub::cache::Snapshot;
use crate::model::shape::ModelShape;
use crate::optim::moments::Moments;
use crate::recipe::part::RunPart;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The entry `run` of checkpoints. Entries of other versions pass through untouched.
pub(super) type Run = Map<String, Value>;

/// In [`RunPart::Data`], key of the version of the rules of records; not there where they decide nothing, and before there were versions.
const RULES: &str = "record_rules";
/// Key of the changes that somebody accepted.
const CHANGED: &str = "changed";
/// Data files that a checkpoint lists; the checksum of all covers the rest.
const FILES_LISTED: usize = 1000;
/// Characters of a value in a message.
const SHOWN: usize = 72;

/// The run of this model, tokenizer and data; none of the latter is the text that ships with the program. Checksums of files are
/// kept in `output_dir`, those of missing ones are `known`; `progress` reports the reading.
pub(super) fn of(
    shape: &ModelShape,
    tokenizer: &Tokenizer,
    data: &[PathBuf],
    known: &KnownSources,
    output_dir: Option<&Path>,
    progress: &mut dyn FnMut(&Path, u64) -> Result<()>,
) -> Result<Run> {
    let paths = known.find_files(data)?;
    let files: Vec<Value> = match paths.as_slice() {
        [] => vec![described("the built-in text", "txt", DEMO_TEXT.len() as u64, &checksum::sha256(DEMO_TEXT.as_bytes()))],
        files => {
            let fingerprints = checksum::fingerprints(files, |path| known.missing(path).cloned(), output_dir, progress)?;
            files.iter().zip(fingerprints).map(|(path, file)| described_file(path, &file)).collect()
        }
    };
    let rules = has_rules(&paths, tokenizer).then_some(RULES_VERSION);
    let values = [shape.arithmetic().into(), tokenizer.identity(), data_identity(files, rules)];
    Ok(RunPart::ALL.into_iter().zip(values).map(|(part, value)| (part.name().to_string(), value)).collect())
}

/// Records the hub model of a run. It is not compared on resume: the parts of the run are.
pub(super) fn record_model(run: &mut Run, Snapshot { repo, commit }: &Snapshot) {
    run.insert("hub_model".into(), json!({"repo": repo, "commit": commit}));
}

/// Key of the directory from which a run was started.
pub(super) const DIRECTORY: &str = "directory";

/// Records the working directory, from which the run's relative paths lead. Nothing compares it.
pub(super) fn record_directory(run: &mut Run) {
    let directory = std::env::current_dir().ok().and_then(|path| path.to_str().map(Value::from));
    directory.and_then(|directory| run.insert(DIRECTORY.into(), directory));
}

fn described(name: &str, kind: &str, bytes: u64, sha256: &str) -> Value {
    json!({"name": name, "kind": kind, "bytes": bytes, "sha256": sha256})
}

fn described_file(path: &Path, file: &Fingerprint) -> Value {
    let kind = path.extension().unwrap_or_default().to_string_lossy();
    described(&path.to_string_lossy(), &kind, file.bytes, &file.sha256)
}

/// Whether the version of rules decides the tokens of `files`: those of records, and the tokens around text. Bytes and ids have none of
/// these.
fn has_rules(files: &[PathBuf], tokenizer: &Tokenizer) -> bool {
    let is_marked = tokenizer.end_of_text().is_some() || !tokenizer.begin_of_text().is_empty();
    files.iter().any(|path| holds_records(path) || is_marked && is_text(path))
}

/// The data of `files`, and the version of the rules by which they become tokens, where rules decide something.
fn data_identity(mut files: Vec<Value>, rules: Option<u32>) -> Value {
    let all: String = files.iter().map(|file| format!("{} {}\n", file["kind"], file["sha256"])).collect();
    files.truncate(FILES_LISTED);
    let mut data = json!({"sha256": checksum::sha256(all.as_bytes()), "files": files});
    if let Some(rules) = rules {
        data[RULES] = rules.into();
    }
    data
}

/// Parts that `then` lacks, so that they cannot be compared.
pub(super) fn unknown(then: &Run) -> Vec<&'static str> {
    RunPart::ALL.into_iter().map(RunPart::name).filter(|name| !then.contains_key(*name)).collect()
}

/// The parts that differ, each with its old and new value.
pub(super) fn changes(then: &Run, now: &Run) -> Vec<(RunPart, String)> {
    let changed = |part: RunPart| {
        let (then, now) = (then.get(part.name())?, now.get(part.name())?);
        let differences = match part {
            RunPart::Data => data_differences(then, now),
            RunPart::Moments => moments_differences(then, now),
            _ => differences(part.name(), then, now),
        };
        (!differences.is_empty()).then(|| (part, differences.join(", ")))
    };
    RunPart::ALL.into_iter().filter_map(changed).collect()
}

/// The record of a run that goes on from `step` of `then`: entries unknown here as they were, the parts as they are now, and the
/// `accepted` changes behind those of before.
pub(super) fn continued(then: &Run, now: Run, step: u64, accepted: &[(RunPart, String)]) -> Run {
    let mut run = then.clone();
    run.extend(now);
    if !accepted.is_empty() {
        let mut history = run.get(CHANGED).and_then(Value::as_array).cloned().unwrap_or_default();
        history.extend(accepted.iter().map(|(part, change)| json!({"step": step, "part": part.name(), "change": change})));
        run.insert(CHANGED.into(), history.into());
    }
    run
}

/// Fields of both sides that differ: `rope_theta was 10000.0 and is 7.0`. Objects without a common field are of different kinds.
pub(super) fn differences(name: &str, then: &Value, now: &Value) -> Vec<String> {
    match (then, now) {
        _ if then == now => vec![],
        (Value::Object(then), Value::Object(now)) if may_be_one_kind(then, now) => {
            let both = then.iter().filter_map(|(key, value)| Some((key, value, now.get(key)?)));
            both.flat_map(|(key, then, now)| differences(key, then, now)).collect()
        }
        (Value::Array(then), Value::Array(now)) if then.len() == now.len() => {
            let mut at_places = then.iter().zip(now).enumerate().map(|(at, (then, now))| differences(&format!("{name}[{at}]"), then, now));
            at_places.find(|found| !found.is_empty()).unwrap_or_default()
        }
        _ => vec![format!("{} was {} and is {}", brief_text(name), brief(then), brief(now))],
    }
}

/// Whether the two share a field or one of them is empty.
fn may_be_one_kind(then: &Map<String, Value>, now: &Map<String, Value>) -> bool {
    then.is_empty() || now.is_empty() || then.keys().any(|key| now.contains_key(key))
}

/// The differences of moments, with the effect of a conversion.
fn moments_differences(then: &Value, now: &Value) -> Vec<String> {
    // Every 8-bit moment is a number of bfloat16.
    let widens = *now == json!(Moments::Float32) || (*then == json!(Moments::Int8) && *now == json!(Moments::Bfloat16));
    let converted = if widens { "no value changes" } else { "rounded as the checkpoint's last step rounds" };
    let name = |value: &Value| value.as_str().map_or(brief(value), brief_text);
    if then == now { vec![] } else { vec![format!("they were {} and are {}: {converted}", name(then), name(now))] }
}

/// The first file that differs; files may have other names.
fn data_differences(then: &Value, now: &Value) -> Vec<String> {
    if then["sha256"] == now["sha256"] {
        return rules_differences(then, now);
    }
    let content = |file: &Value| ["kind", "bytes", "sha256"].map(|key| file[key].clone());
    let same = |idx: usize| content(&then["files"][idx]) == content(&now["files"][idx]);
    let listed = |data: &Value| data["files"].as_array().map_or(0, Vec::len);
    match (0..listed(then).max(listed(now))).find(|&idx| !same(idx)) {
        Some(idx) => vec![format!("file {} was {} and is {}", idx + 1, file(&then["files"][idx]), file(&now["files"][idx]))],
        None => vec![format!("the checksum of all files was {} and is {}", brief(&then["sha256"]), brief(&now["sha256"]))],
    }
}

/// A version that is not there decides nothing now, or was the first.
fn rules_differences(then: &Value, now: &Value) -> Vec<String> {
    let Some(version) = now[RULES].as_u64() else { return vec![] };
    let before = then[RULES].as_u64().unwrap_or(1);
    let rules = "the rules by which records become tokens and masks";
    (before != version).then(|| format!("{rules} had version {before} and have version {version} now")).into_iter().collect()
}

/// `corpus.txt (2000 bytes, sha256 "3f2a...")`.
fn file(described: &Value) -> String {
    match described {
        Value::Null => "nothing".into(),
        file => format!("{} ({} bytes, sha256 {})", brief(&file["name"]), brief(&file["bytes"]), brief(&file["sha256"])),
    }
}

/// The value for a message, cut to a readable length.
pub(super) fn brief(value: &Value) -> String {
    brief_text(&value.to_string())
}

fn brief_text(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::model_dir;
    use crate::device::ExpertProducts;
    use crate::recipe::record::{ATTENTION_BLOCK, EXPERT_PRODUCTS, GRADIENT_GROUP, MATMUL, MLP_TILE, PLAIN_MATMUL};
    use crate::recipe::tests::recipe;

    fn run_of(shape: &ModelShape, names: &[&str], dir: &Path) -> Run {
        let data: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
        of(shape, &Tokenizer::bytes(), &data, &KnownSources::default(), Some(dir), &mut |_, _| Ok(())).unwrap()
    }

    #[test]
    fn contents_in_their_order_decide_and_names_do_not() {
        let dir = model_dir(&[("a.txt", "one"), ("b.txt", "two"), ("c.txt", "one"), ("c.jsonl", "one")]);
        let run = |names: &[&str]| run_of(&ModelShape::demo(), names, dir.path());
        let then = run(&["a.txt", "b.txt"]);
        let change = |names: &[&str]| changes(&then, &run(names)).pop().map(|(part, change)| (part.name(), change));
        assert_eq!(change(&["c.txt", "b.txt"]), None);
        let (part, words) = change(&["b.txt", "a.txt"]).unwrap();
        assert!(part == "data" && words.starts_with("file 1 was ") && words.contains("a.txt\" (3 bytes, sha256 "), "{words}");
        assert!(words.contains(&checksum::sha256(b"one")) && words.contains(&checksum::sha256(b"two")), "{words}");
        assert!(change(&["a.txt"]).unwrap().1.ends_with("and is nothing"));
        assert!(change(&["c.jsonl", "b.txt"]).unwrap().1.contains("c.jsonl"), "another kind is other documents");
        assert!(change(&[]).unwrap().1.contains("the built-in text"));
    }

    #[test]
    fn a_list_of_very_many_files_is_cut_and_still_compared() {
        let file = |idx: usize| described(&format!("{idx}.txt"), "txt", 1, &format!("sum {idx}"));
        let of = |files: Vec<Value>| Run::from_iter([("data".to_string(), data_identity(files, None))]);
        let then = of((0..1500).map(file).collect());
        assert_eq!(then["data"]["files"].as_array().unwrap().len(), FILES_LISTED);
        let with_last = |last: usize| of((0..1499).chain([last]).map(file).collect());
        assert!(changes(&then, &with_last(1499)).is_empty());
        assert!(changes(&then, &with_last(7)).pop().unwrap().1.starts_with("the checksum of all files was "));
    }

    #[test]
    fn other_rules_of_records_are_a_change_of_the_data_and_bytes_of_text_have_none() {
        let dir = model_dir(&[("a.txt", "one"), ("a.jsonl", "{\"text\": \"one\"}")]);
        let run = |name: &str| run_of(&ModelShape::demo(), &[name], dir.path());
        let with = |name: &str, rules: Value| {
            let mut then = run(name);
            then["data"][RULES] = rules;
            changes(&then, &run(name)).pop().map(|(part, change)| (part.name(), change))
        };
        let words = |before: u32| {
            let rules = "the rules by which records become tokens and masks";
            Some(("data", format!("{rules} had version {before} and have version {RULES_VERSION} now")))
        };
        assert_eq!((with("a.jsonl", Value::Null), with("a.jsonl", json!(7))), (words(1), words(7)));
        assert_eq!((with("a.jsonl", json!(RULES_VERSION)), with("a.txt", Value::Null)), (None, None));
    }

    #[test]
    fn fields_of_the_model_are_named_with_both_values() {
        let dir = tempfile::tempdir().unwrap();
        let (then, mut shape) = (run_of(&ModelShape::demo(), &[], dir.path()), ModelShape::demo());
        shape.layers.iter_mut().for_each(|layer| layer.norm.eps = 0.5);
        shape.layers[3].attn.window = Some(9);
        let changed = changes(&then, &run_of(&shape, &[], dir.path()));
        let words = "norm_eps was 0.00001 and is 0.5, sliding_windows[3] was null and is 9";
        assert_eq!(changed, [(RunPart::Model, words.to_string())]);
    }

    #[test]
    fn another_kind_of_a_field_is_a_difference() {
        let of = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let between = |then: &str, now: &str| differences("ropes", &of(then), &of(now)).join(", ");
        let scaled = |scaling: &str| format!(r#"[{{"theta": 1}}, {{"theta": 1, "scaling": {scaling}}}]"#);
        let words = r#"scaling was {"llama3":[8]} and is {"linear":2}"#;
        assert_eq!(between(&scaled(r#"{"llama3": [8]}"#), &scaled(r#"{"linear": 2}"#)), words);
        // Fields that an older program did not write are not compared, and later differences are still found.
        assert_eq!(between(r#"[{"a": 1}, {"a": 2}]"#, r#"[{"a": 1, "b": 3}, {"a": 4}]"#), "a was 2 and is 4");
    }

    #[test]
    fn moments_default_to_float32() {
        let then = recipe().complete(Run::new());
        let now = |moments: Moments| Run::from_iter([("moments".to_string(), json!(moments))]);
        assert_eq!(changes(&then, &now(Moments::Float32)), []);
        let words = "they were float32 and are bfloat16: rounded as the checkpoint's last step rounds";
        assert_eq!(changes(&then, &now(Moments::Bfloat16)), [(RunPart::Moments, words.to_string())]);
        let between = |then: Moments, now: Moments| moments_differences(&json!(then), &json!(now)).join("");
        let widened = between(Moments::Int8, Moments::Bfloat16);
        assert_eq!(widened, "they were int8 and are bfloat16: no value changes");
        let rounded = between(Moments::Bfloat16, Moments::Int8);
        assert_eq!(rounded, "they were bfloat16 and are int8: rounded as the checkpoint's last step rounds");
    }

    #[test]
    fn products_default_to_the_format_of_weights_and_queries_to_one_block() {
        let numerics = |value: Value| Run::from_iter([("numerics".to_string(), value)]);
        let then = recipe().complete(numerics(json!({"attention": "plain"})));
        let then_or = |name: &str, value: Value| {
            let mut now = then.clone();
            now["numerics"][name] = value;
            now
        };
        let now = |matmul: &str| then_or(MATMUL, json!(matmul));
        let named = |name: &str, words: &str| [(RunPart::Numerics, format!("{name} {words}"))];
        assert_eq!(changes(&then, &then_or(ATTENTION_BLOCK, json!(8192))), named(ATTENTION_BLOCK, "was null and is 8192"));
        let by_cublaslt = then_or(EXPERT_PRODUCTS, json!(ExpertProducts::Cublaslt));
        assert_eq!(changes(&then, &by_cublaslt), named(EXPERT_PRODUCTS, "was \"own\" and is \"cublaslt\""));
        assert_eq!(changes(&then, &then_or(MLP_TILE, json!(32768))), named(MLP_TILE, "was null and is 32768"));
        assert_eq!(changes(&then, &then_or(GRADIENT_GROUP, json!(2))), named(GRADIENT_GROUP, "was 1 and is 2"));
        assert_eq!(changes(&then, &now(PLAIN_MATMUL)), []);
        let words = "matmul was \"in the format of weights\" and is \"fp8\"";
        assert_eq!(changes(&then, &now("fp8")), [(RunPart::Numerics, words.to_string())]);
        assert_eq!(recipe().complete(Run::new()).get("numerics"), None, "what is not there is not compared");
    }

    #[test]
    fn unknown_entries_stay_and_accepted_changes_add_up() {
        let parse = |text: &str| serde_json::from_str::<Run>(text).unwrap();
        let then = parse(r#"{"shares": [1, 2], "tokenizer": "bytes", "changed": [{"step": 3}]}"#);
        assert_eq!(unknown(&recipe().complete(then.clone())), ["model", "data", "numerics"]);
        let now = parse(r#"{"tokenizer": "other", "data": 5}"#);
        let accepted = changes(&then, &now);
        let run = continued(&then, now, 8, &accepted);
        assert_eq!((&run["shares"], &run["tokenizer"], &run["data"]), (&json!([1, 2]), &json!("other"), &json!(5)));
        let change = "tokenizer was \"bytes\" and is \"other\"";
        assert_eq!(run["changed"], json!([{"step": 3}, {"step": 8, "part": "tokenizer", "change": change}]));
    }
}
