//! The error type: operation, subject and cause in one line.

use std::path::PathBuf;

/// Result of fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of `paper-figures`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user named something that does not exist.
    #[error("{0}")]
    Usage(String),
    /// An operation of the operating system failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file has the wrong content.
    #[error("{}: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem with the content.
        cause: String,
    },
    /// A program failed or printed wrong output.
    #[error("run {command}: {cause}")]
    Program {
        /// The command line.
        command: String,
        /// The last line of its error output, or the problem with its output.
        cause: String,
    },
    /// Drawing failed.
    #[error("draw {figure}: {cause}")]
    Draw {
        /// The figure's id.
        figure: String,
        /// The error of the drawing library.
        cause: String,
    },
}

impl Error {
    /// 2 for usage errors, otherwise 1.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Usage(_)) { 2 } else { 1 }
    }
}
