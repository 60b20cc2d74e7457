//! The error type of this crate. An error has the operation, the file, the system's error, and the message of resctrl.

use std::io;
use std::path::{Path, PathBuf};

/// Result of the fallible functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of an operation on partitions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{operation} {}: {source}{}", path.display(), status.as_ref().map_or(String::new(), |status| format!(": {status}")))]
    Io {
        /// The operation as a verb: `read`, `write`, `create`, `mount`.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// The message of resctrl in `info/last_cmd_status`, if it belongs to this failure: `Out of CLOSIDs`.
        status: Option<String>,
    },
    /// A file with unexpected content.
    #[error("read {}: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        cause: String,
    },
    /// A request that this machine does not support, rejected before anything was written.
    #[error("{subject}: {cause}")]
    Refused {
        /// The request: `schemata of superoffload-adam`.
        subject: String,
        /// The reason.
        cause: String,
    },
    /// The mount point does not exist: the kernel found no hardware with partitions, or was built without resctrl.
    #[error("{}: not offered by this CPU or kernel", .0.display())]
    Absent(PathBuf),
    /// The mount point exists, but nothing is mounted on it.
    #[error("{}: resctrl is not mounted", .0.display())]
    NotMounted(PathBuf),
    /// Another program holds a lock.
    #[error("lock {}: {holder}", path.display())]
    Locked {
        /// The file or directory.
        path: PathBuf,
        /// Description of the process that holds the lock, if known.
        holder: String,
    },
}

/// Category of an [`Error`]. Each category has its own exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A request that this machine does not support. Exit status 2.
    Refused,
    /// The machine has no partitions. Exit status 3.
    Absent,
    /// The tree is not mounted. Exit status 4.
    NotMounted,
    /// The tree is mounted read-only. Exit status 5.
    ReadOnly,
    /// The hardware has no free group: CLOSIDs, PARTIDs or RMIDs are used up. Exit status 6.
    OutOfGroups,
    /// The user is not root, or is root of a container only. Exit status 7.
    NotAllowed,
    /// Another process holds the lock. Exit status 8.
    Locked,
    /// Any other error. Exit status 1.
    Other,
}

impl Error {
    /// Creates an `Io` error without a message of resctrl.
    pub fn io(operation: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, path: path.as_ref().into(), source: source.into(), status: None }
    }

    /// Creates a `Refused` error.
    pub(crate) fn refused(subject: impl ToString, cause: impl ToString) -> Self {
        Self::Refused { subject: subject.to_string(), cause: cause.to_string() }
    }

    /// The category of the error.
    pub fn condition(&self) -> Condition {
        match self {
            Self::Refused { .. } => Condition::Refused,
            Self::Absent(_) => Condition::Absent,
            Self::NotMounted(_) => Condition::NotMounted,
            Self::Locked { .. } => Condition::Locked,
            Self::Format { .. } => Condition::Other,
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::ReadOnlyFilesystem => Condition::ReadOnly,
                io::ErrorKind::StorageFull => Condition::OutOfGroups,
                io::ErrorKind::PermissionDenied => Condition::NotAllowed,
                _ => Condition::Other,
            },
        }
    }
}

impl Condition {
    /// Exit status of a program that fails with this category.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Other => 1,
            Self::Refused => 2,
            Self::Absent => 3,
            Self::NotMounted => 4,
            Self::ReadOnly => 5,
            Self::OutOfGroups => 6,
            Self::NotAllowed => 7,
            Self::Locked => 8,
        }
    }

    /// Advice for the user; empty if the error message is sufficient.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Refused | Self::Locked | Self::Other => "",
            Self::Absent => "needs Intel RDT, AMD QoS or Arm MPAM, switched on in firmware and kernel, and is hidden from most containers",
            Self::NotMounted => "prepare mounts it",
            Self::ReadOnly => "remount it read-write, or ask whoever runs this container",
            Self::OutOfGroups => "every group of the hardware is taken: remove one",
            Self::NotAllowed => "needs root, and in a container the host's root",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_operation_file_and_status() {
        let error = Error::Io {
            operation: "create",
            path: "/r/adam".into(),
            source: io::Error::from_raw_os_error(28),
            status: Some("Out of CLOSIDs".into()),
        };
        assert_eq!(error.to_string(), "create /r/adam: No space left on device (os error 28): Out of CLOSIDs");
        assert_eq!(error.condition(), Condition::OutOfGroups);
        let denied = Error::io("mount", "/r", io::Error::from_raw_os_error(1));
        assert_eq!((denied.to_string().as_str(), denied.condition().exit_code()), ("mount /r: Operation not permitted (os error 1)", 7));
    }
}
