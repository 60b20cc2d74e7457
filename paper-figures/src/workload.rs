//! Workloads that several figures draw. One table names each workload's lines, so that a workload has one number in every figure.

use crate::error::{Error, Result};
use crate::lines;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// Name of the table in the folder of the figures.
pub const FILE: &str = "workloads.toml";

/// The one value that several lines of a category give.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Pick {
    /// The last line.
    Last,
    /// The median. The default of measured bars.
    Median,
    /// The line with the highest `speed.model_tflops`.
    Best,
}

/// A workload: its lines, and the number that they give.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// JSON lines files, relative to the folder of the figures.
    files: Vec<String>,
    /// Selects the lines.
    #[serde(rename = "where")]
    only: BTreeMap<String, toml::Value>,
    /// Selects the lines measured from this time on, in seconds of Unix time.
    #[serde(default)]
    since: f64,
    /// Selects one of several lines.
    #[serde(default)]
    pub pick: Option<Pick>,
}

/// Workloads by name.
pub type Workloads = BTreeMap<String, Workload>;

/// Reads the table in `dir`; empty without the file.
///
/// # Errors
/// Errors of reading or parsing the file.
pub fn read(dir: &Path) -> Result<Workloads> {
    let path = dir.join(FILE);
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        text => text.map_err(|source| Error::Io { path: path.clone(), source })?,
    };
    toml::from_str(&text).map_err(|error| Error::Format { path, cause: error.to_string() })
}

impl Workload {
    /// Files of the lines, relative to a figure's folder.
    pub fn files(&self) -> Vec<String> {
        self.files.iter().map(|file| format!("../{file}")).collect()
    }

    /// Whether a line of the files belongs to the workload.
    pub fn takes(&self, line: &Value) -> bool {
        lines::holds(line, &self.only) && (self.since == 0.0 || lines::number(line, "unix_seconds").is_some_and(|time| time >= self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_takes_the_lines_that_it_describes() {
        let text = "w1 = { files = [\"results/a-*.jsonl\"], where = { clip = \"never\" }, since = 7, pick = \"best\" }";
        let workloads: Workloads = toml::from_str(text).unwrap();
        assert_eq!((workloads["w1"].files(), workloads["w1"].pick), (vec!["../results/a-*.jsonl".into()], Some(Pick::Best)));
        let takes = |clip: &str, time: u32| workloads["w1"].takes(&serde_json::json!({"clip": clip, "unix_seconds": time}));
        assert!(takes("never", 7) && !takes("never", 6) && !takes("always", 7));
    }
}
