//! Paths with `*`, `?`, `[...]` and `**` in place of names, as shells have them.

use crate::error::{Error, Result};
use glob::{GlobError, MatchOptions};
use std::path::{Path, PathBuf};

/// Names that begin with a dot match nothing, and only `**` goes into directories.
const AS_IN_SHELLS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The files that match `path`, by name; `None` where it is no pattern.
///
/// # Errors
/// `Format` for a pattern that no file matches, and for a malformed pattern; `Io` for a directory that cannot be read.
pub(in crate::data) fn matching(path: &Path) -> Result<Option<Vec<PathBuf>>> {
    let Some(pattern) = path.to_str().filter(|path| path.contains(['*', '?', '['])) else { return Ok(None) };
    let found = glob::glob_with(pattern, AS_IN_SHELLS).map_err(|e| Error::format(path, format_args!("invalid file pattern: {e}")))?;
    let unreadable = |e: GlobError| {
        let dir = e.path().to_path_buf();
        Error::io("read", dir, e.into())
    };
    let found = found.map(|found| found.map_err(unreadable));
    let mut files = found.filter(|found| !found.as_ref().is_ok_and(|path| path.is_dir())).collect::<Result<Vec<_>>>()?;
    files.sort();
    if files.is_empty() { Err(Error::format(path, "no file matches this pattern")) } else { Ok(Some(files)) }
}

/// Whether a file at `path`, be it there or not, would match `pattern`.
pub(in crate::data) fn is_matched(pattern: &Path, path: &Path) -> bool {
    let pattern = pattern.to_str().filter(|pattern| pattern.contains(['*', '?', '['])).and_then(|pattern| glob::Pattern::new(pattern).ok());
    pattern.is_some_and(|pattern| pattern.matches_path_with(path, AS_IN_SHELLS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn patterns_are_those_of_shells_and_files_come_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for file in ["b.jsonl", "a.jsonl", ".hidden.jsonl", "c.txt", "2024/x.jsonl", "2024/01/y.jsonl", ".cache/z.jsonl"] {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), "").unwrap();
        }
        fs::create_dir(root.join("d.jsonl")).unwrap();
        let found = |pattern: &str| -> Result<Option<Vec<String>>> {
            let name = |path: PathBuf| path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
            Ok(matching(&root.join(pattern))?.map(|files| files.into_iter().map(name).collect()))
        };
        let names = |pattern: &str| found(pattern).unwrap().unwrap();
        assert_eq!(names("*.jsonl"), ["a.jsonl", "b.jsonl"]);
        assert_eq!(names("**/*.jsonl"), ["2024/01/y.jsonl", "2024/x.jsonl", "a.jsonl", "b.jsonl"]);
        assert_eq!(names("[!a].*"), ["b.jsonl", "c.txt"]);
        assert_eq!(names("20*/?.jsonl"), ["2024/x.jsonl"]);
        assert_eq!(found("a.jsonl").unwrap(), None);
        let refused = |pattern: &str| found(pattern).unwrap_err().to_string();
        assert_eq!(refused("*.parquet"), format!("{}/*.parquet: no file matches this pattern", root.display()));
        assert_eq!(refused("d*"), format!("{}/d*: no file matches this pattern", root.display()));
        assert!(refused("a***").contains("a***: invalid file pattern: "), "{}", refused("a***"));
    }
}
