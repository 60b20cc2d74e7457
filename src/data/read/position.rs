//! The position of a document in a file, for messages.

use super::compression::has_extension;
use crate::error::Error;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

/// Where a document stands, for messages.
#[derive(Clone, Debug)]
pub(in crate::data) struct DocumentPosition {
    pub(in crate::data) path: Arc<Path>,
    /// Which of the text files, from 0.
    pub(in crate::data) source: usize,
    /// Counted from 1; `None` where the file is one document.
    pub(in crate::data) line: Option<u64>,
}

impl DocumentPosition {
    pub(in crate::data) fn error(&self, cause: impl Display) -> Error {
        match self.line {
            Some(line) => Error::format(&self.path, format_args!("{} {line}: {cause}", place_word(&self.path))),
            None => Error::format(&self.path, cause),
        }
    }
}

/// The word for the place of a record in the file at `path`.
pub(in crate::data) fn place_word(path: &Path) -> &'static str {
    if has_extension(path, "parquet") { "row" } else { "line" }
}
