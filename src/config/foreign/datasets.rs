//! Translates data set lists of other trainers to `--data` and `--columns`.

use super::fate::{Fate, set};
use crate::config::document::{DocumentEntry, DocumentNode, NodeValue, Place};
use crate::disk;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest size of a file with a list of data sets.
const BYTES_MAX: u64 = 16 << 20;
/// Data set types of axolotl that can be inferred from the columns of the records.
const TYPES: [&str; 6] = ["completion", "pretrain", "alpaca", "chat_template", "sharegpt", "text"];
/// Keys of a data set without effect here, because the default already matches.
const WITHOUT_MEANING: [&str; 6] = ["ds_type", "shards", "preprocess_shards", "revision", "trust_remote_code", "roles"];

/// Translates a list of tables with `path` and `type` to `flag` and `--columns`.
pub(super) fn listed(node: &DocumentNode, flag: &'static str) -> Fate {
    let NodeValue::List(sets) = &node.value else {
        return Fate::Missing("expected a list of data sets, each with a path".into());
    };
    let (mut paths, mut columns, mut causes) = (Vec::new(), Vec::new(), Vec::new());
    for set in sets {
        match &set.value {
            NodeValue::Table(entries) => one(entries, &mut paths, &mut columns, &mut causes),
            NodeValue::Text(_) => paths.push(set.clone()),
            _ => causes.push("expected a path or a table with one".into()),
        }
    }
    fate(flag, paths, columns, causes)
}

fn fate(flag: &'static str, paths: Vec<DocumentNode>, columns: Vec<String>, causes: Vec<String>) -> Fate {
    if !causes.is_empty() {
        return Fate::Missing(causes.join("; "));
    }
    if paths.is_empty() {
        return Fate::Missing("it contains no file and no name".into());
    }
    let mut flags = vec![set(flag, NodeValue::List(paths))];
    flags.extend(columns.into_iter().map(|column| set("columns", NodeValue::Text(column))));
    Fate::Used(flags, "the format of each file is detected from its columns".into())
}

/// A data set of axolotl, or of TRL's mixtures.
fn one(entries: &[DocumentEntry], paths: &mut Vec<DocumentNode>, columns: &mut Vec<String>, causes: &mut Vec<String>) {
    let value = |key: &str| entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node);
    match value("data_files").or(value("path")) {
        Some(DocumentNode { value: NodeValue::List(files), .. }) => paths.extend(files.iter().cloned()),
        Some(path) => paths.push(path.clone()),
        None => causes.push("a data set without a path".into()),
    }
    let cause = |entry: &DocumentEntry, why: &str| Some(format!("{} {}: {why}", entry.key, entry.node.text()));
    for entry in entries {
        let text = entry.node.text();
        let fault = match (entry.key.as_str(), text.as_str()) {
            ("path" | "data_files", _) | ("split", "train") | ("chat_template", "tokenizer_default") => None,
            ("train_on_eos", "turn" | "all") | ("roles_to_train", "assistant" | "gpt" | "assistant,gpt" | "gpt,assistant") => None,
            _ if entry.node.value == NodeValue::Null || WITHOUT_MEANING.contains(&entry.key.as_str()) => None,
            ("type", _) if matches!(entry.node.value, NodeValue::Table(_)) => cause(entry, "map the columns with columns: [OURS=THEIRS]"),
            ("type", of) if TYPES.contains(&of.split('.').next().unwrap_or(of)) => None,
            ("field", column) => set_column(columns, "text", column),
            ("field_messages", column) => set_column(columns, "messages", column),
            ("message_property_mappings", _) => properties(&entry.node),
            ("message_field_role" | "message_field_content", "role" | "from" | "content" | "value") => None,
            ("split", _) => cause(entry, "name the files of that part"),
            ("name", _) => cause(entry, "name the files of that configuration"),
            _ => cause(entry, "there is no equivalent setting"),
        };
        causes.extend(fault);
    }
}

/// Maps the column `foreign_name` of the data to the column `own_name`.
fn set_column(columns: &mut Vec<String>, own_name: &str, foreign_name: &str) -> Option<String> {
    let pair = format!("{own_name}={foreign_name}");
    if own_name != foreign_name && !columns.contains(&pair) {
        columns.push(pair);
    }
    None
}

/// Messages have `role` and `content`, or `from` and `value`.
fn properties(node: &DocumentNode) -> Option<String> {
    let NodeValue::Table(pairs) = &node.value else { return None };
    let is_known = |pair: &DocumentEntry| {
        let names: &[&str] = match pair.key.as_str() {
            "role" => &["role", "from"],
            "content" => &["content", "value"],
            _ => &[],
        };
        names.contains(&pair.node.text().as_str())
    };
    let other = pairs.iter().find(|pair| !is_known(pair))?;
    Some(format!("message_property_mappings {}: messages have role and content, or from and value", other.key))
}

/// The list of data sets that LLaMA-Factory keeps beside its data.
pub(super) struct LlamaFactoryData {
    dir: PathBuf,
    /// Null if the file does not exist.
    info: Value,
}

impl LlamaFactoryData {
    /// The list in the folder that a file of these entries names.
    pub(super) fn of(entries: &[DocumentEntry]) -> Self {
        let named = entries.iter().find(|entry| entry.key == "dataset_dir").map(|entry| entry.node.text());
        let dir = PathBuf::from(named.unwrap_or_else(|| "data".into()));
        let bytes = disk::read_if_present(&dir.join("dataset_info.json"), BYTES_MAX).ok().flatten();
        let info = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or(Value::Null);
        Self { dir, info }
    }

    /// The data sets `names`, separated by commas, as `flag` and `--columns`.
    pub(super) fn fate(&self, names: &str, flag: &'static str) -> Fate {
        let (mut paths, mut columns, mut causes) = (Vec::new(), Vec::new(), Vec::new());
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match self.path(name, &mut columns) {
                Ok(path) => paths.push(DocumentNode { at: Place::START, value: NodeValue::Text(path) }),
                Err(cause) => causes.push(cause),
            }
        }
        fate(flag, paths, columns, causes)
    }

    /// The file, or the name on the hub, that `name` stands for.
    fn path(&self, name: &str, columns: &mut Vec<String>) -> Result<String, String> {
        let entry = &self.info[name];
        if entry.is_null() {
            let list = self.dir.join("dataset_info.json");
            let missing = || format!("{name}: neither a file nor in {}; name files: dataset: FILE.jsonl", list.display());
            return if Path::new(name).exists() { Ok(name.into()) } else { Err(missing()) };
        }
        let of_tags = |tag: &str, known: &[&str]| entry["tags"][tag].as_str().is_none_or(|named| known.contains(&named));
        if !of_tags("role_tag", &["role", "from"]) || !of_tags("content_tag", &["content", "value"]) {
            return Err(format!("{name}: messages have role and content, or from and value"));
        }
        if entry["ranking"] == true {
            return Err(format!("{name}: data of pairs is not converted; name the file: --data FILE --loss dpo"));
        }
        for (foreign_name, column) in entry["columns"].as_object().into_iter().flatten() {
            if let (Some(own_name), Some(column)) = (column_of(foreign_name), column.as_str()) {
                set_column(columns, own_name, column);
            }
        }
        let file = entry["file_name"].as_str().map(|file| self.dir.join(file).display().to_string());
        let named = file.or_else(|| entry["hf_hub_url"].as_str().map(String::from));
        named.ok_or_else(|| format!("{name}: its entry names neither a file nor a name on the hub"))
    }
}

/// The column name here for LLaMA-Factory's column `foreign_name`.
fn column_of(foreign_name: &str) -> Option<&'static str> {
    match foreign_name {
        "prompt" => Some("instruction"),
        "query" => Some("input"),
        "response" => Some("output"),
        "messages" => Some("messages"),
        "system" => Some("system"),
        "tools" => Some("tools"),
        _ => None,
    }
}
