//! Names beside a path at which nothing lies: a person may have meant one of them.

use crate::error::Error;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Names are alike from here on, where 1 is the same: one letter more, less or another in a word of four.
const ALIKE: f64 = 0.85;
/// More names than a person looks through.
const NAMES_MAX: usize = 10_000;

/// The question whether the wanted name beside `path` that is most like its own was meant, as the end of a message; empty where none is like it.
pub(crate) fn did_you_mean(path: &Path, is_wanted: impl Fn(&Path) -> bool) -> String {
    nearest(path, is_wanted).map_or(String::new(), |near| format!("; did you mean {}?", near.display()))
}

/// `error` with the flag that names its path, and the nearest name beside that, where nothing lies at the path.
pub(crate) fn named_by(flag: &str, error: Error) -> Error {
    match error {
        Error::Io { operation, path, source } if source.kind() == ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            let cause = format!("No such file or directory, named by {flag}{}", did_you_mean(&path, |_| true));
            Error::io(operation, path, io::Error::new(ErrorKind::NotFound, cause))
        }
        other => other,
    }
}

fn nearest(path: &Path, is_wanted: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let (parent, name) = (path.parent()?, path.file_name()?.to_str()?);
    let dir = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let entries = std::fs::read_dir(dir).ok()?.flatten().take(NAMES_MAX).filter(|entry| is_wanted(&entry.path()));
    let likeness = |other: &str| strsim::jaro_winkler(other, name);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|other| likeness(other) >= ALIKE);
    names.max_by(|a, b| likeness(a).total_cmp(&likeness(b))).map(|near| parent.join(near))
}
