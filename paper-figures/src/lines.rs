//! Files of JSON lines, access to fields by path, and comparison of fields with wanted values.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The objects in a file; empty if the file does not exist.
///
/// # Errors
/// Errors of reading the file; an error if a line is not a JSON object.
pub fn read(path: &Path) -> Result<Vec<Value>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|source| Error::Io { path: path.into(), source })?,
    };
    parse(&text).map_err(|cause| Error::Format { path: path.into(), cause })
}

fn parse(text: &str) -> std::result::Result<Vec<Value>, String> {
    let parse = |(index, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(format!("line {}: no object", index + 1)),
        Err(error) => Err(format!("line {}: {error}", index + 1)),
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
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

/// Whether `line` has all `wanted` values.
pub fn holds(line: &Value, wanted: &BTreeMap<String, toml::Value>) -> bool {
    wanted.iter().all(|(path, value)| field(line, path).is_some_and(|found| equals(found, value)))
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
        assert_eq!((number(&line, "settings.lr"), number(&line, "settings.strategy")), (Some(0.001), None));
    }

    #[test]
    fn keeps_or_replaces_the_content_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results/a.jsonl");
        assert!(read(&path).unwrap().is_empty());
        write(&path, &[json!({"a": 1})], true).unwrap();
        assert_eq!(read(&path).unwrap(), [json!({"a": 1})]);
        fs::write(&path, r#"{"a":  5e-05}"#).unwrap();
        write(&path, &[json!({"a": 2})], true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":  5e-05}\n{\"a\":2}\n", "another program's line stays as it wrote it");
        write(&path, &[json!({"a": 3})], false).unwrap();
        assert_eq!(read(&path).unwrap(), [json!({"a": 3})]);
    }

    #[test]
    fn names_the_line_that_is_no_object() {
        assert_eq!(parse("{}\n1\n").unwrap_err(), "line 2: no object");
        assert!(parse("{\n").unwrap_err().starts_with("line 1: "));
    }
}
