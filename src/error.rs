//! One error type: it names the operation, the subject and the cause, in one line.

pub(crate) mod terminal;

use std::fmt::Display;
use std::path::{Path, PathBuf};
pub(crate) use terminal::printable;

/// Exit code of a run that was interrupted and can be resumed: EX_TEMPFAIL.
pub(crate) const EXIT_INTERRUPTED: i32 = 75;

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong. `Usage` is the person's to mend and exits 2, `Interrupted` exits 75; everything else is the world's and exits 1.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, a config key or a combination of them that makes no sense.
    #[error("{}", printable(.0))]
    Usage(String),
    /// The operating system refused an operation on a file.
    #[error("{operation} {}: {source}", printable(path.display()))]
    Io {
        /// What was attempted, as a verb: `read`, `write`, `fsync`, `rename`.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something that it must not hold.
    #[error("{}: {}", printable(path.display()), printable(cause))]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        cause: String,
    },
    /// A model or configuration that this build cannot train.
    #[error("unsupported: {}", printable(.0))]
    Unsupported(String),
    /// Something does not fit or cannot be had: memory, threads, a device.
    #[error("{}: {}", printable(operation), printable(cause))]
    Resource {
        /// What was attempted and on what: `allocate 3.2 GiB of pinned memory for adam m`.
        operation: String,
        /// Why it failed.
        cause: String,
    },
    /// One of the devices that train together cannot go on, and so none can.
    #[error("{name}: {}", printable(cause))]
    Rank {
        /// Which one: `rank 1`, or `rank 1 (GPU 1)`.
        name: String,
        /// Why.
        cause: String,
    },
    /// Somebody asked the program to stop before there was anything to save.
    #[error("interrupted while {0}: nothing was trained")]
    Interrupted(String),
    /// Something went wrong, and then what was done about it.
    #[error("{first}; then {then}")]
    Both {
        /// What went wrong first.
        first: Box<Error>,
        /// What went wrong after it.
        then: Box<Error>,
    },
}

impl Error {
    /// An `Io` error for `operation` on `path`.
    pub fn io(operation: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { operation, path: path.as_ref().to_path_buf(), source }
    }

    /// A `Format` error: `path` holds something wrong.
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

    /// This error, after which `then` went wrong as well.
    pub fn and(self, then: Self) -> Self {
        Self::Both { first: Box::new(self), then: Box::new(then) }
    }

    /// The process exit code: 2 for usage, that of an interrupted run, 1 for the world.
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
