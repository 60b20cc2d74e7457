//! Workloads that several figures draw. One table names each workload's lines, so that a workload has one number in every figure.

use crate::config::{Pick, Series};
use crate::error::{Error, Result};
use crate::lines;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// Name of the table in the folder of the figures.
const FILE: &str = "workloads.toml";

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
    pick: Option<Pick>,
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

/// Gives `series` the workloads that it names. The series' own conditions apply, too.
///
/// # Errors
/// A sentence if there is no such workload, or if the series names files besides.
pub fn apply(series: &mut Series, workloads: &Workloads) -> std::result::Result<(), String> {
    if !series.workloads.is_empty() && !series.files.is_empty() {
        return Err(format!("{:?} has workloads and files; the workloads name the files", series.name));
    }
    for name in &series.workloads {
        let workload = workloads.get(name).ok_or_else(|| format!("{:?}: {FILE} has no workload {name:?}", series.name))?;
        series.pick = series.pick.or(workload.pick);
        series.sources.push(workload.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_takes_its_workloads_lines() {
        let text = "w1 = { files = [\"results/a-*.jsonl\"], where = { clip = \"never\" }, since = 7, pick = \"best\" }";
        let workloads: Workloads = toml::from_str(text).unwrap();
        let series = |rest: &str| toml::from_str::<Series>(&format!("name = \"s\"\norigin = \"measured\"\ny = \"ms\"\n{rest}")).unwrap();
        let mut w1 = series("workloads = [\"w1\"]\n");
        apply(&mut w1, &workloads).unwrap();
        assert_eq!((w1.sources[0].files(), w1.pick), (vec!["../results/a-*.jsonl".into()], Some(Pick::Best)));
        let takes = |clip: &str, time: u32| w1.sources[0].takes(&serde_json::json!({"clip": clip, "unix_seconds": time}));
        assert!(takes("never", 7) && !takes("never", 6) && !takes("always", 7));
        assert!(apply(&mut series("workloads = [\"w9\"]\n"), &workloads).unwrap_err().contains("no workload \"w9\""));
        assert!(
            apply(&mut series("workloads = [\"w1\"]\nfiles = [\"a\"]\n"), &workloads).unwrap_err().contains("the workloads name the files")
        );
    }
}
