//! One error type: operation, file, what the system said, and what resctrl said beyond that.

use std::io;
use std::path::{Path, PathBuf};

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{operation} {}: {source}{}", path.display(), status.as_ref().map_or(String::new(), |status| format!(": {status}")))]
    Io {
        /// What was attempted, as a verb: `read`, `write`, `create`, `mount`.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// What `info/last_cmd_status` held then, if it belongs to this failure: `Out of CLOSIDs`.
        status: Option<String>,
    },
    /// A file holds something that this crate does not understand.
    #[error("read {}: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// A request that this machine cannot meet, found before anything was written.
    #[error("{subject}: {cause}")]
    Refused {
        /// What was asked for: `schemata of superoffload-adam`.
        subject: String,
        /// Why it cannot be.
        cause: String,
    },
    /// There is no mount point: the kernel found nothing to partition, or was built without resctrl.
    #[error("{}: not offered by this CPU or kernel", .0.display())]
    Absent(PathBuf),
    /// The mount point is there and nothing is mounted on it.
    #[error("{}: resctrl is not mounted", .0.display())]
    NotMounted(PathBuf),
    /// Another program holds a lock.
    #[error("lock {}: {holder}", path.display())]
    Locked {
        /// The file or directory.
        path: PathBuf,
        /// Who holds it, as far as is known.
        holder: String,
    },
}

/// What kind of failure an [`Error`] is, for programs: each has an exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A request that makes no sense on this machine. Exit status 2.
    Refused,
    /// Nothing to partition. 3.
    Absent,
    /// Not mounted. 4.
    NotMounted,
    /// Mounted read-only. 5.
    ReadOnly,
    /// The hardware has no group left to give: CLOSIDs, PARTIDs or RMIDs. 6.
    OutOfGroups,
    /// Not root, or root of a container. 7.
    NotAllowed,
    /// Another program is at it. 8.
    Locked,
    /// Anything else. 1.
    Other,
}

impl Error {
    /// An `Io` error about which resctrl has nothing to add.
    pub fn io(operation: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, path: path.as_ref().into(), source: source.into(), status: None }
    }

    /// A `Refused` error.
    pub(crate) fn refused(subject: impl ToString, cause: impl ToString) -> Self {
        Self::Refused { subject: subject.to_string(), cause: cause.to_string() }
    }

    /// What kind of failure it is.
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
    /// Exit status of a program that fails so.
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

    /// What a person can do about it; empty where the error says all there is.
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
