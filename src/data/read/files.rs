//! Data files and their kinds.
//!
//! `.txt` is one document of UTF-8; `.jsonl` or `.ndjson` holds one record a line, blank lines aside, and `.json` an array of them (see
//! [`crate::data::chat::record`] for their columns); `.gz` or `.zst` may follow these three; `.parquet` holds a record a row; `.bin` holds
//! token ids (see [`crate::data::prepared::token_file`]). Extensions may be written in capitals. A directory stands for the files of these kinds in
//! it, by name, and a pattern for the files that match it.

use crate::data::read::compression::{has_extension, is_compressed};
use crate::data::read::pattern::{self, matching};
use crate::data::read::saved_dataset;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(in crate::data) enum SourceKind {
    Text,
    JsonLines,
    JsonArray,
    Parquet,
    Tokens,
}

/// Extensions of [`SourceKind`] as messages list them.
const KINDS: &str = ".txt, .json, .jsonl, .ndjson (each may be .gz or .zst), .parquet or .bin";

/// The data files that `paths` name, directories and patterns replaced by their files, in order. A path that exists is no pattern.
///
/// # Errors
/// `Io` for a path that cannot be read; `Format` for a file of another kind, a directory without data and a pattern without a match.
pub(crate) fn find_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        match path.metadata() {
            Ok(metadata) if metadata.is_dir() => files.extend(files_in(path)?),
            Ok(_) => files.push(known(path.clone())?),
            Err(e) => match matching(path)? {
                Some(found) => files.extend(data_among(found)?),
                None => return Err(Error::io("read", path, e)),
            },
        }
    }
    Ok(files)
}

/// Whether a file at `path`, be it there or not, is among those that the pattern `named` stands for.
pub(crate) fn is_matched(named: &Path, path: &Path) -> bool {
    kind(path).is_some() && pattern::is_matched(named, path)
}

/// Selects the files among `found` that hold data.
fn data_among(found: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    let first = found.first().cloned();
    let data: Vec<_> = found.into_iter().filter(|path| kind(path).is_some() && !is_sidecar(path)).collect();
    match first {
        Some(other) if data.is_empty() => known(other).map(|file| vec![file]),
        _ => Ok(data),
    }
}

fn known(path: PathBuf) -> Result<PathBuf> {
    if kind(&path).is_some() { Ok(path) } else { Err(Error::format(&path, format!("not a {KINDS} file{}", conversion(&path)))) }
}

/// The command that makes JSON lines of a table in another format.
fn conversion(path: &Path) -> String {
    let (name, lines) = (path.display(), path.with_extension("jsonl"));
    let by_pandas = |read| {
        let lines = lines.display();
        format!("; convert it: python -c \"import pandas; pandas.{read}('{name}').to_json('{lines}', orient='records', lines=True)\"")
    };
    match () {
        () if has_extension(path, "csv") => by_pandas("read_csv"),
        () if saved_dataset::is_stream(path) => saved_dataset::file_conversion(path, &lines),
        () if has_extension(path, "arrow") || has_extension(path, "feather") => by_pandas("read_feather"),
        () => String::new(),
    }
}

/// Whether the file at `path` holds text, which needs a tokenizer.
pub(crate) fn is_text(path: &Path) -> bool {
    !matches!(kind(path), None | Some(SourceKind::Tokens))
}

/// Whether the file at `path` holds records.
pub(crate) fn holds_records(path: &Path) -> bool {
    matches!(kind(path), Some(SourceKind::JsonLines | SourceKind::JsonArray | SourceKind::Parquet))
}

pub(in crate::data) fn kind(path: &Path) -> Option<SourceKind> {
    let is_compressed = is_compressed(path);
    let name = if is_compressed { Path::new(path.file_stem()?) } else { path };
    match name.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "txt" => Some(SourceKind::Text),
        "jsonl" | "ndjson" => Some(SourceKind::JsonLines),
        "json" => Some(SourceKind::JsonArray),
        "parquet" if !is_compressed => Some(SourceKind::Parquet),
        "bin" if !is_compressed => Some(SourceKind::Tokens),
        _ => None,
    }
}

/// Whether the file at `path` gives the width of a token file, or describes a data set.
fn is_sidecar(path: &Path) -> bool {
    path.to_str().is_some_and(|name| name.ends_with(".bin.json")) || saved_dataset::is_description(path)
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io("read", dir, e))?;
    let paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>().map_err(|e| Error::io("read", dir, e))?;
    let mut files: Vec<PathBuf> = paths.into_iter().filter(|path| kind(path).is_some() && !is_sidecar(path) && !path.is_dir()).collect();
    if files.is_empty() {
        if let Some(command) = saved_dataset::folder_conversion(dir) {
            return Err(Error::format(dir, command));
        }
        return Err(Error::format(dir, format!("no {KINDS} file in this directory")));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::model_dir;

    #[test]
    fn directories_stand_for_their_data_files_by_name() {
        let dir = model_dir(&[("b.txt", "b"), ("a.jsonl", "{}"), ("c.bin", "cc"), ("c.bin.json", "{}"), ("README.md", "")]);
        std::fs::create_dir(dir.path().join("d.txt")).unwrap();
        let found = find_files(&[dir.path().join("c.bin"), dir.path().into()]).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c.bin", "a.jsonl", "b.txt", "c.bin"]);
        let refusal = |path: &str| find_files(&[dir.path().join(path)]).unwrap_err().to_string();
        assert!(
            refusal("d.txt")
                .contains("d.txt: no .txt, .json, .jsonl, .ndjson (each may be .gz or .zst), .parquet or .bin file in this directory")
        );
        assert!(refusal("README.md").contains("README.md: not a .txt"));
        let matching = find_files(&[dir.path().join("*"), dir.path().join("[ab].*")]).unwrap();
        let names: Vec<_> = matching.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.jsonl", "b.txt", "c.bin", "a.jsonl", "b.txt"], "of what matches the data files are taken");
        assert!(refusal("*.md").contains("README.md: not a .txt") && refusal("*.csv").ends_with("*.csv: no file matches this pattern"));
        for (name, found) in [("A.TXT", SourceKind::Text), ("a.NdJson.GZ", SourceKind::JsonLines), ("a.Json.Zst", SourceKind::JsonArray)] {
            assert_eq!(kind(Path::new(name)), Some(found), "{name}");
        }
        assert_eq!((kind(Path::new("a.PARQUET")), kind(Path::new("a.Bin"))), (Some(SourceKind::Parquet), Some(SourceKind::Tokens)));
        std::fs::write(dir.path().join("x*.txt"), "a file of this name").unwrap();
        assert_eq!(find_files(&[dir.path().join("x*.txt")]).unwrap(), [dir.path().join("x*.txt")]);
        assert!(refusal("missing.txt").starts_with("read ") && refusal("missing.txt").contains("missing.txt: No such file"));
    }
}
