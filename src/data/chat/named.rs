//! The chat templates of a model's directory, by name: from the places where `transformers` keeps or saves them.
//!
//! | place | names |
//! |---|---|
//! | `chat_template.jinja`, `additional_chat_templates/NAME.jinja` | `default`, NAME |
//! | `chat_template` in `tokenizer_config.json` | `default`, or those of a list |
//! | `chat_template` in `chat_template.json` | the same |
//!
//! A place counts where the places before it hold nothing.

use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The name of the template that is taken where none is asked for.
pub(super) const DEFAULT: &str = "default";
/// The name of the template that `transformers` takes for conversations with tools.
pub(super) const TOOL_USE: &str = "tool_use";

const SINGLE_FILE: &str = "chat_template.jinja";
const FOLDER: &str = "additional_chat_templates";
const KEY: &str = "chat_template";
/// No template is larger; the largest have some tens of kilobytes.
const BYTES_MAX: u64 = 16 << 20;

/// A template and the file that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundTemplate {
    pub(super) file: PathBuf,
    pub(super) source: String,
}

type ByName = BTreeMap<String, FoundTemplate>;

/// The templates of each place, the place that counts first.
pub(super) struct NamedTemplates([ByName; 3]);

impl NamedTemplates {
    /// The templates in `dir`.
    ///
    /// # Errors
    /// `Io` for a file that cannot be read; `Format` for one that is broken.
    pub(super) fn read(dir: &ModelDir) -> Result<Self> {
        Ok(Self([in_files(dir)?, in_json(&dir.file("tokenizer_config.json")?)?, in_json(&dir.file("chat_template.json")?)?]))
    }

    /// The template that `transformers` has under `name`.
    pub(super) fn counted(&self, name: &str) -> Option<FoundTemplate> {
        self.0.iter().find(|place| !place.is_empty())?.get(name).cloned()
    }

    /// The template under `name` in the first place that has one.
    pub(super) fn anywhere(&self, name: &str) -> Option<FoundTemplate> {
        self.0.iter().find_map(|place| place.get(name)).cloned()
    }

    /// The names of all templates, in words.
    pub(super) fn names(&self) -> String {
        let mut names: Vec<&str> = self.0.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    }
}

/// The text of the file at `path`, if there is one.
///
/// # Errors
/// `Io` when it cannot be read; `Format` when it is not UTF-8.
pub(super) fn read(path: &Path) -> Result<Option<String>> {
    let bytes = disk::read_if_present(path, BYTES_MAX)?;
    bytes.map(|bytes| String::from_utf8(bytes).map_err(|_| Error::format(path, "not UTF-8"))).transpose()
}

/// The content of the JSON file at `path`, null if there is none.
///
/// # Errors
/// As [`read`]; `Format` when it is no JSON.
pub(super) fn json(path: &Path) -> Result<Value> {
    let text = read(path)?;
    text.map_or(Ok(Value::Null), |text| serde_json::from_str(&text).map_err(|e| Error::format(path, e)))
}

/// Templates in files of their own.
fn in_files(dir: &ModelDir) -> Result<ByName> {
    let mut found = ByName::new();
    for name in files_in(&dir.file(FOLDER)?)? {
        let Some(template) = name.strip_suffix(".jinja") else { continue };
        let file = dir.file(&format!("{FOLDER}/{name}"))?;
        found.extend(read(&file)?.map(|source| (template.to_string(), FoundTemplate { file, source })));
    }
    let file = dir.file(SINGLE_FILE)?;
    found.extend(read(&file)?.map(|source| (DEFAULT.to_string(), FoundTemplate { file, source })));
    Ok(found)
}

/// The names of files in the folder at `path`, none if there is no folder.
fn files_in(path: &Path) -> Result<Vec<String>> {
    let unreadable = |e| Error::io("read", path, e);
    match std::fs::read_dir(path) {
        Ok(entries) => {
            let name = |entry: std::io::Result<std::fs::DirEntry>| entry.map(|entry| entry.file_name().into_string().ok());
            entries.map(name).filter_map(std::io::Result::transpose).collect::<std::io::Result<_>>().map_err(unreadable)
        }
        Err(e) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&e.kind()) => Ok(Vec::new()),
        Err(e) => Err(unreadable(e)),
    }
}

/// Templates under the key `chat_template` of the JSON file at `path`: one, a list of names and templates, or an object of them.
fn in_json(path: &Path) -> Result<ByName> {
    let content = json(path)?;
    let template = |name: &Value, source: &Value, place: &str| match (name.as_str(), source.as_str()) {
        (Some(name), Some(source)) => Ok((name.to_string(), FoundTemplate { file: path.into(), source: source.into() })),
        _ => Err(Error::format(path, format!("{KEY}: {place} is not a template with its name"))),
    };
    match &content[KEY] {
        Value::Null => Ok(ByName::new()),
        source @ Value::String(_) => template(&DEFAULT.into(), source, DEFAULT).map(|entry| ByName::from([entry])),
        Value::Array(list) => {
            let entry = |(at, entry): (usize, &Value)| template(&entry["name"], &entry["template"], &format!("entry {at}"));
            list.iter().enumerate().map(entry).collect()
        }
        Value::Object(named) => named.iter().map(|(name, source)| template(&name.as_str().into(), source, name)).collect(),
        _ => Err(Error::format(path, format!("{KEY}: neither a template nor a list of templates"))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::find::RecordFlags;
    use super::super::mask::TrainOn;
    use super::super::record::{Content, DataFormat};
    use super::*;
    use std::fs;

    const CONFIG: &str = "tokenizer_config.json";
    const LIST: &str =
        r#"{"chat_template": [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config tools"}]}"#;
    const TOOL_FILE: &str = "additional_chat_templates/tool_use.jinja";

    /// A model's directory with these files.
    fn model(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(FOLDER)).unwrap();
        files.iter().for_each(|(name, content)| fs::write(dir.path().join(name), content).unwrap());
        dir
    }

    /// The texts of a record without tools and of a record with tools, by the templates of a model with `files`.
    fn texts(files: &[(&str, &str)], template_name: Option<&str>) -> Result<[String; 2]> {
        let dir = model(files);
        let flags = RecordFlags {
            format: DataFormat::Auto,
            columns: &[],
            train_on: TrainOn::All,
            template: None,
            template_name,
            template_kwargs: None,
            date: None,
        };
        let rules = flags.rules(Some(&ModelDir::open(dir.path())?), |_| true)?;
        let text = |tools: &str| {
            let record = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "tools": {tools}}}"#);
            match rules.read(DataFormat::Messages, &record).map_err(Error::usage)? {
                Content::Rendered(chat) => Ok(chat.samples[0].text.clone()),
                other => panic!("{other:?}"),
            }
        };
        Ok([text("null")?, text(r#"[{"type": "function", "function": {"name": "f"}}]"#)?])
    }

    #[test]
    fn records_with_tools_take_tool_use_from_the_place_that_counts() {
        let (file, tool_file, json) = ((SINGLE_FILE, "file"), (TOOL_FILE, "file tools"), ("chat_template.json", LIST));
        let object = r#"{"chat_template": {"default": "config", "tool_use": "config tools"}}"#;
        for (files, expected) in [
            (&[(CONFIG, LIST)][..], ["config", "config tools"]),
            (&[(CONFIG, object)], ["config", "config tools"]),
            (&[(CONFIG, r#"{"chat_template": "config"}"#)], ["config", "config"]),
            (&[file], ["file", "file"]),
            (&[file, tool_file], ["file", "file tools"]),
            (&[file, tool_file, (CONFIG, LIST), json], ["file", "file tools"]),
            (&[file, (CONFIG, LIST)], ["file", "file"]),
            (&[json], ["config", "config tools"]),
            (&[("chat_template.json", r#"{"chat_template": "json"}"#)], ["json", "json"]),
            (&[(CONFIG, r#"{"chat_template": "config"}"#), json], ["config", "config"]),
        ] {
            assert_eq!(texts(files, None).unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn a_template_requested_by_name_is_used_for_all_records() {
        let files = [(SINGLE_FILE, "file"), (TOOL_FILE, "file tools"), ("additional_chat_templates/rag.jinja", "rag"), (CONFIG, LIST)];
        for (name, text) in [("default", "file"), ("tool_use", "file tools"), ("rag", "rag")] {
            assert_eq!(texts(&files, Some(name)).unwrap(), [text, text]);
        }
        assert_eq!(texts(&[(SINGLE_FILE, "file"), (CONFIG, LIST)], Some("tool_use")).unwrap(), ["config tools", "config tools"]);
        let refused = texts(&files, Some("tools")).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        let message = refused.to_string();
        assert!(message.starts_with("--chat-template-name tools: ") && message.ends_with("it has: default, rag, tool_use"), "{message}");
    }

    #[test]
    fn templates_that_cannot_be_used_are_errors_that_name_the_file() {
        let message = |files: &[(&str, &str)]| texts(files, None).unwrap_err().to_string();
        for (content, cause) in [
            (r#"{"chat_template": [{"name": "default"}]}"#, "chat_template: entry 0 is not a template with its name"),
            (r#"{"chat_template": {"default": 5}}"#, "chat_template: default is not a template with its name"),
            (r#"{"chat_template": 5}"#, "chat_template: neither a template nor a list of templates"),
        ] {
            let refused = message(&[(CONFIG, content)]);
            assert!(refused.contains("tokenizer_config.json: ") && refused.ends_with(cause), "{refused}");
        }
        let refused = message(&[(TOOL_FILE, "a"), ("additional_chat_templates/rag.jinja", "b")]);
        assert!(refused.contains("none of its chat templates (rag, tool_use) is named default"), "{refused}");
        assert!(refused.contains("--chat-template-name"), "{refused}");
        let refused = message(&[(SINGLE_FILE, "a"), (TOOL_FILE, "{% if %}")]);
        assert!(refused.starts_with("tool_use: the chat template, line 1: "), "{refused}");
        let dir = model(&[]);
        fs::remove_dir(dir.path().join(FOLDER)).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join(FOLDER)).unwrap();
        let outside = NamedTemplates::read(&ModelDir::open(dir.path()).unwrap()).err().unwrap().to_string();
        assert!(outside.contains("outside the model's directory"), "{outside}");
    }
}
