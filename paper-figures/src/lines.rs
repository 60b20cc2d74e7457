//! Files of JSON lines, access to fields by path, and comparison of fields with wanted values.

use crate::error::{Error, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

/// Time of the last change and size in bytes of a file, and its lines.
type ReadFile = (Option<SystemTime>, u64, Rc<Vec<Value>>);

thread_local! {
    /// Lines of the files that were read: many series select from the same files.
    static READ: RefCell<HashMap<PathBuf, ReadFile>> = RefCell::default();
}

/// The objects in a file; empty if the file does not exist. Paths of models do not depend on the folder in which a program ran.
///
/// # Errors
/// Errors of reading the file; an error if a line is not a JSON object.
pub fn read(path: &Path) -> Result<Rc<Vec<Value>>> {
    let Ok(facts) = fs::metadata(path) else { return parse_file(path).map(Rc::new) };
    let (time, bytes) = (facts.modified().ok(), facts.len());
    let known = READ.with_borrow(|read| read.get(path).filter(|known| (known.0, known.1) == (time, bytes)).map(|known| known.2.clone()));
    if let Some(lines) = known {
        return Ok(lines);
    }
    let lines = Rc::new(parse_file(path)?);
    READ.with_borrow_mut(|read| read.insert(path.into(), (time, bytes, lines.clone())));
    Ok(lines)
}

fn parse_file(path: &Path) -> Result<Vec<Value>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|source| Error::Io { path: path.into(), source })?,
    };
    parse(&text).map_err(|cause| Error::Format { path: path.into(), cause })
}

fn parse(text: &str) -> std::result::Result<Vec<Value>, String> {
    let parse = |(index, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(mut value @ Value::Object(_)) => {
            shorten_model(&mut value);
            Ok(value)
        }
        Ok(_) => Err(format!("line {}: no object", index + 1)),
        Err(error) => Err(format!("line {}: {error}", index + 1)),
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}

/// Makes a model's path relative to the folder of the figures.
fn shorten_model(line: &mut Value) {
    let Some(path) = line.pointer_mut("/model/config") else { return };
    if let Some((_, short)) = path.as_str().and_then(|path| path.rsplit_once("paper-figures/")) {
        *path = Value::from(short);
    }
}

/// Writes `lines` to `path`, after its current content if `append`. The file is replaced atomically.
///
/// # Errors
/// Errors of writing the folder or the file.
pub fn write(path: &Path, lines: &[Value], append: bool) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    let mut text = match fs::read_to_string(path) {
        Ok(old) if append => old,
        Err(error) if append && error.kind() != ErrorKind::NotFound => return Err(io(error)),
        _ => String::new(),
    };
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.extend(lines.iter().map(|line| format!("{line}\n")));
    fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(io)?;
    let beside = path.with_extension("part");
    fs::write(&beside, text).and_then(|()| fs::rename(&beside, path)).map_err(io)
}

/// The field at `path`, a sequence of names separated by dots.
pub fn field<'a>(line: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(line, |value, name| value.get(name))
}

/// The number at `path`.
pub fn number(line: &Value, path: &str) -> Option<f64> {
    field(line, path)?.as_f64()
}

/// The value as an argument of a flag: strings without quotes, lists separated by commas.
pub fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

/// Whether `line` has all `wanted` values. A list allows each of its values. Older lines lack fields of newer settings: `"null"` stands for
/// a missing field, too.
pub fn holds(line: &Value, wanted: &BTreeMap<String, toml::Value>) -> bool {
    let is_one = |found: Option<&Value>, value: &toml::Value| match found {
        Some(found) => equals(found, value),
        None => value.as_str() == Some("null"),
    };
    wanted.iter().all(|(path, value)| match value {
        toml::Value::Array(values) => values.iter().any(|value| is_one(field(line, path), value)),
        value => is_one(field(line, path), value),
    })
}

/// Whether a value in a line equals the wanted value. Numbers compare by value: `1e-3` equals `0.001`.
pub fn equals(found: &Value, wanted: &toml::Value) -> bool {
    let wanted = plain(wanted);
    match (found.as_f64(), wanted.parse::<f64>()) {
        (Some(found), Ok(wanted)) => found == wanted,
        _ => text(found) == wanted,
    }
}

/// A TOML value as an argument of a flag.
pub fn plain(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn finds_fields_and_compares_them() {
        let line = json!({"settings": {"lr": 0.001, "strategy": "zero-offload", "without": ["stv", "mpam"]}});
        let wanted = |text: &str| toml::from_str::<BTreeMap<String, toml::Value>>(text).unwrap();
        assert!(holds(
            &line,
            &wanted("\"settings.lr\" = 1e-3\n\"settings.strategy\" = \"zero-offload\"\n\"settings.without\" = \"stv,mpam\"")
        ));
        assert!(!holds(&line, &wanted("\"settings.lr\" = 0.002")));
        assert!(!holds(&line, &wanted("\"settings.missing\" = 1")));
        assert!(holds(&line, &wanted("\"settings.missing\" = [\"null\", 1]")) && holds(&line, &wanted("\"settings.lr\" = [1, 1e-3]")));
        assert!(!holds(&line, &wanted("\"settings.lr\" = [1, \"null\"]")));
        assert_eq!((number(&line, "settings.lr"), number(&line, "settings.strategy")), (Some(0.001), None));
    }

    #[test]
    fn keeps_or_replaces_the_content_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results/a.jsonl");
        assert!(read(&path).unwrap().is_empty());
        write(&path, &[json!({"a": 1})], true).unwrap();
        assert_eq!(*read(&path).unwrap(), [json!({"a": 1})]);
        fs::write(&path, r#"{"a":  5e-05}"#).unwrap();
        write(&path, &[json!({"a": 2})], true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":  5e-05}\n{\"a\":2}\n", "another program's line stays as it wrote it");
        write(&path, &[json!({"a": 3})], false).unwrap();
        assert_eq!(*read(&path).unwrap(), [json!({"a": 3})]);
    }

    #[test]
    fn a_model_has_one_path_in_whichever_folder_a_program_ran() {
        let line = |path: &str| parse(&format!("{{\"model\":{{\"config\":\"{path}\"}}}}")).unwrap().remove(0)["model"]["config"].clone();
        assert_eq!(line("paper-figures/models/a.json"), "models/a.json");
        assert_eq!(line("models/a.json"), "models/a.json");
        assert_eq!(line("llama-8b"), "llama-8b");
    }

    #[test]
    fn names_the_line_that_is_no_object() {
        assert_eq!(parse("{}\n1\n").unwrap_err(), "line 2: no object");
        assert!(parse("{\n").unwrap_err().starts_with("line 1: "));
    }
}
