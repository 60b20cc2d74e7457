//! A figure is a folder: `fig-NN_name` or `table-N_name`, with `README.md` and `expected.csv`.

use crate::csv::Table;
use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A figure or table of the paper, as its folder's README describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The folder's name up to the underscore: `fig-06`.
    pub id: String,
    /// The paper's name: `Figure 6`.
    pub label: String,
    /// What it shows.
    pub title: String,
    /// What the paper says with it, in a sentence.
    pub claim: String,
    /// What it takes to reproduce it.
    pub needs: String,
    folder: PathBuf,
}

/// Every figure and table below `dir`, by id.
///
/// # Errors
/// When `dir` or a README cannot be read, or a README lacks its title, claim or needs.
pub fn all(dir: &Path) -> Result<Vec<Figure>> {
    let io = |source| Error::Io { path: dir.into(), source };
    let mut figures = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(id) = name.to_str().and_then(id) {
            figures.push(Figure::read(dir.join(&name), id)?);
        }
    }
    figures.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(figures)
}

/// `fig-06` of `fig-06_weight-flow-efficiency`.
fn id(folder: &str) -> Option<&str> {
    let is_figure = folder.starts_with("fig-") || folder.starts_with("table-");
    folder.split_once('_').filter(|_| is_figure).map(|(id, _)| id)
}

impl Figure {
    fn read(folder: PathBuf, id: &str) -> Result<Self> {
        let path = folder.join("README.md");
        let text = read(&path)?;
        let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        let required =
            |start: &str| line(start).ok_or_else(|| Error::Format { path: path.clone(), cause: format!("no line begins with {start:?}") });
        let heading = required("# ")?;
        let (label, title) =
            heading.split_once(": ").ok_or_else(|| Error::Format { path: path.clone(), cause: format!("no colon in {heading:?}") })?;
        let (claim, needs) = (required("Claim: ")?.into(), required("Needs: ")?.trim_end_matches('.').into());
        Ok(Self { id: id.into(), label: label.into(), title: title.into(), claim, needs, folder })
    }

    /// Where the paper's numbers are.
    pub fn expected_path(&self) -> PathBuf {
        self.folder.join("expected.csv")
    }

    /// The paper's numbers.
    ///
    /// # Errors
    /// When the file cannot be read or is no table.
    pub fn expected(&self) -> Result<Table> {
        let path = self.expected_path();
        Table::parse(&read(&path)?).map_err(|cause| Error::Format { path, cause })
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_name_figures() {
        assert_eq!(id("fig-06_weight-flow"), Some("fig-06"));
        assert_eq!(id("table-2_breakdown"), Some("table-2"));
        assert_eq!((id("src"), id("fig-06"), id("other_thing")), (None, None, None));
    }

    #[test]
    fn a_readme_without_its_parts_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("fig-01_x");
        fs::create_dir(&folder).unwrap();
        assert!(all(dir.path()).unwrap_err().to_string().contains("fig-01_x/README.md"));
        fs::write(folder.join("README.md"), "# Figure 1: x\n").unwrap();
        assert!(all(dir.path()).unwrap_err().to_string().ends_with("no line begins with \"Claim: \""));
    }
}
