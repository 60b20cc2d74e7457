//! One error type: operation, subject, cause, in one line.

use std::path::PathBuf;

/// Result of everything here that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The person asked for something that is not there.
    #[error("{0}")]
    Usage(String),
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something else than it should.
    #[error("{}: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// A program failed, or printed something else than it should.
    #[error("run {command}: {cause}")]
    Program {
        /// The command line.
        command: String,
        /// What it said last, or what is wrong with what it printed.
        cause: String,
    },
    /// A picture could not be drawn.
    #[error("draw {figure}: {cause}")]
    Draw {
        /// The figure's id.
        figure: String,
        /// What the drawing library said.
        cause: String,
    },
}

impl Error {
    /// 2 for usage, 1 for the world.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Usage(_)) { 2 } else { 1 }
    }
}
