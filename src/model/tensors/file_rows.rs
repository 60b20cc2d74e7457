//! Rows of a tensor in a file that are a part of the table of tensors.

/// Rows of a tensor of the file that has more rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileRows {
    /// The first of the rows.
    pub(crate) first: usize,
    /// Number of rows of the file's tensor.
    pub(crate) all: usize,
}
