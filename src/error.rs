//! The error type of the crate. An error names the operation, its subject and the cause, in one line.

pub(crate) mod terminal;

use std::fmt::Display;
use std::path::{Path, PathBuf};
pub(crate) use terminal::printable;

/// Exit code of a run that was interrupted and can be resumed: EX_TEMPFAIL.
pub(crate) const EXIT_INTERRUPTED: i32 = 75;

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error. `Usage` errors are corrected by the user and exit with code 2; `Interrupted` exits with 75; all others exit with 1.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid flag, configuration key or combination of them.
    #[error("{}", printable(.0))]
    Usage(String),
    /// The operating system refused an operation on a file.
    #[error("{operation} {}: {source}", printable(path.display()))]
    Io {
        /// The operation as a verb: `read`, `write`, `fsync`, `rename`.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file with invalid contents.
    #[error("{}: {}", printable(path.display()), printable(cause))]
    Format {
        /// The file.
        path: PathBuf,
        /// The invalid contents, and their location.
        cause: String,
    },
    /// A model or configuration that this build cannot train.
    #[error("unsupported: {}", printable(.0))]
    Unsupported(String),
    /// A resource that is not available: memory, threads, a device.
    #[error("{}: {}", printable(operation), printable(cause))]
    Resource {
        /// The operation and its subject: `allocate 3.2 GiB of pinned memory for adam m`.
        operation: String,
        /// Cause of the failure.
        cause: String,
    },
    /// A rank failed, so the run cannot continue.
    #[error("{name}: {}", printable(cause))]
    Rank {
        /// Name of the rank: `rank 1`, or `rank 1 (GPU 1)`.
        name: String,
        /// Cause of the failure.
        cause: String,
    },
    /// The program was asked to stop before there was anything to save.
    #[error("interrupted while {0}: nothing was trained")]
    Interrupted(String),
    /// An error, and a second error while handling it.
    #[error("{first}; then {then}")]
    Both {
        /// The first error.
        first: Box<Error>,
        /// The second error.
        then: Box<Error>,
    },
}

impl Error {
    /// An `Io` error for `operation` on `path`.
    pub fn io(operation: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { operation, path: path.as_ref().to_path_buf(), source }
    }

    /// A `Format` error: `path` has invalid contents.
    pub fn format(path: impl AsRef<Path>, cause: impl Display) -> Self {
        Self::Format { path: path.as_ref().to_path_buf(), cause: cause.to_string() }
    }

    /// A `Usage` error.
    pub fn usage(message: impl Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// A `Resource` error.
    pub fn resource(operation: impl Display, cause: impl Display) -> Self {
        Self::Resource { operation: operation.to_string(), cause: cause.to_string() }
    }

    /// This error, followed by the error `then`.
    pub fn and(self, then: Self) -> Self {
        Self::Both { first: Box::new(self), then: Box::new(then) }
    }

    /// The process exit code: 2 for `Usage`, 75 for `Interrupted`, 1 for all others.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Usage(_) => 2,
            Self::Interrupted(_) => EXIT_INTERRUPTED,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_printed() {
        let evil = "a\u{1b}[31mb\nc\u{9b}d\u{202e}\u{2028}é\"\\";
        let io = || std::io::Error::from_raw_os_error(2);
        let shown = "a\\u{1b}[31mb\\nc\\u{9b}d\\u{202e}\\u{2028}é\"\\";
        for error in [
            Error::usage(evil),
            Error::io("read", evil, io()),
            Error::format(evil, evil),
            Error::Unsupported(evil.into()),
            Error::resource(evil, evil),
        ] {
            let message = error.to_string();
            assert!(message.contains(shown) && !message.contains(char::is_control), "{message:?}");
        }
    }
}
