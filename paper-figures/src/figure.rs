//! Figures, each a folder `fig-NN_name` or `table-N_name` with `README.md`, `config.toml`, `expected.csv` and `results/`.

use crate::config::Config;
use crate::csv::Table;
use crate::error::{Error, Result};
use crate::lines;
use crate::workload::{self, Workloads};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A figure or table of the paper, as described in its folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name of the folder up to the underscore: `fig-06`.
    pub id: String,
    /// Name in the paper: `Figure 6`.
    pub label: String,
    /// Title of the figure.
    pub title: String,
    /// Claim of the paper for this figure, in one sentence.
    pub claim: String,
    /// Resources needed to reproduce it.
    pub needs: String,
    /// Plots, checks and sweeps.
    pub config: Config,
    /// Folder of the figure.
    pub folder: PathBuf,
    /// Folder for new files. Its files replace those of the same name in `folder`.
    pub scratch: Option<PathBuf>,
}

/// All figures and tables in `dir`, sorted by id.
///
/// # Errors
/// Errors of reading `dir`, a README or a `config.toml`, or of missing parts in them.
pub fn all(dir: &Path) -> Result<Vec<Figure>> {
    let io = |source| Error::Io { path: dir.into(), source };
    let (mut figures, workloads) = (Vec::new(), workload::read(dir)?);
    for entry in fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(id) = name.to_str().and_then(id) {
            figures.push(Figure::read(dir.join(&name), id, &workloads)?);
        }
    }
    figures.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(figures)
}

/// The id in the name of a folder: `fig-06` of `fig-06_weight-flow-efficiency`.
fn id(folder: &str) -> Option<&str> {
    let is_figure = folder.starts_with("fig-") || folder.starts_with("table-");
    folder.split_once('_').filter(|_| is_figure).map(|(id, _)| id)
}

impl Figure {
    fn read(folder: PathBuf, id: &str, workloads: &Workloads) -> Result<Self> {
        let path = folder.join("README.md");
        let text = read(&path)?;
        let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        let required =
            |start: &str| line(start).ok_or_else(|| Error::Format { path: path.clone(), cause: format!("no line begins with {start:?}") });
        let heading = required("# ")?;
        let (label, title) =
            heading.split_once(": ").ok_or_else(|| Error::Format { path: path.clone(), cause: format!("no colon in {heading:?}") })?;
        let (claim, needs) = (required("Claim: ")?.into(), required("Needs: ")?.trim_end_matches('.').into());
        let config = config(&folder.join("config.toml"), workloads)?;
        Ok(Self { id: id.into(), label: label.into(), title: title.into(), claim, needs, config, folder, scratch: None })
    }

    /// Returns the figure with `scratch` as the folder for new files, which it prefers for reading.
    pub fn with_scratch(mut self, scratch: &Path) -> Self {
        self.scratch = Some(scratch.join(self.folder_name()));
        self
    }

    /// Name of the folder.
    pub fn folder_name(&self) -> &str {
        self.folder.file_name().and_then(|name| name.to_str()).unwrap_or(&self.id)
    }

    /// Path of a file to write.
    pub fn output_path(&self, name: &str) -> PathBuf {
        self.scratch.as_ref().unwrap_or(&self.folder).join(name)
    }

    /// Returns the lines of `files`.
    ///
    /// # Errors
    /// Errors of reading a file.
    pub fn lines(&self, files: &[String]) -> Result<Vec<Value>> {
        self.select(files, |_| true)
    }

    /// Returns the lines of `files` that `is_wanted`.
    ///
    /// # Errors
    /// Errors of reading a file.
    pub fn select(&self, files: &[String], is_wanted: impl Fn(&Value) -> bool) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for name in files.iter().flat_map(|pattern| self.names(pattern)) {
            let fresh = self.output_path(&name);
            let lines = lines::read(&if fresh.exists() { fresh } else { self.folder.join(name) })?;
            all.extend(lines.iter().filter(|line| is_wanted(line)).cloned());
        }
        Ok(all)
    }

    /// Files that match `pattern`, new or published, in order.
    fn names(&self, pattern: &str) -> Vec<String> {
        let mut names = matching(&self.folder, pattern);
        names.extend(matching(&self.output_path(""), pattern));
        names.sort();
        names.dedup();
        names
    }

    /// Path of the paper's numbers.
    pub fn expected_path(&self) -> PathBuf {
        self.folder.join("expected.csv")
    }

    /// The paper's numbers.
    ///
    /// # Errors
    /// Errors of reading or parsing the file.
    pub fn expected(&self) -> Result<Table> {
        let path = self.expected_path();
        Table::parse(&read(&path)?).map_err(|cause| Error::Format { path, cause })
    }
}

fn config(path: &Path, workloads: &Workloads) -> Result<Config> {
    let format = |cause| Error::Format { path: path.into(), cause };
    let mut config = Config::parse(&read(path)?).map_err(format)?;
    config.series.iter_mut().try_for_each(|series| series.resolve(workloads)).map_err(format)?;
    Ok(config)
}

/// Names of the files in the folder of `pattern`, whose last part may contain one `*`, relative like `pattern`.
fn matching(base: &Path, pattern: &str) -> Vec<String> {
    let (folder, name) = pattern.rsplit_once('/').unwrap_or((".", pattern));
    let Some((start, end)) = name.split_once('*') else { return vec![pattern.into()] };
    let entries = fs::read_dir(base.join(folder)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_match = |name: &String| name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end);
    names.filter(is_match).map(|name| format!("{folder}/{name}")).collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}
