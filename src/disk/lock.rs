//! Advisory locks. They belong to an open file and are released when it is closed, also when the process dies.

use std::fs::{File, TryLockError};
use std::io;

/// Result of an attempt to lock a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lock {
    /// This process has the lock.
    Held,
    /// Another process has the lock.
    Taken,
    /// The file system does not support locks.
    Unsupported,
}

/// Tries to lock `file` without blocking.
pub(crate) fn try_lock(file: &File) -> io::Result<Lock> {
    judge(file.try_lock())
}

/// Classifies errors. EBADF: over NFS a lock needs a file that is open for writing, which a directory never is. EINVAL: the file does not
/// support locks.
fn judge(attempt: Result<(), TryLockError>) -> io::Result<Lock> {
    match attempt {
        Ok(()) => Ok(Lock::Held),
        Err(TryLockError::WouldBlock) => Ok(Lock::Taken),
        Err(TryLockError::Error(e)) => match e.raw_os_error() {
            Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EBADF | libc::EINVAL) => Ok(Lock::Unsupported),
            _ => Err(e),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_one_open_file_s() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let (first, second) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        assert_eq!((try_lock(&first).unwrap(), try_lock(&second).unwrap()), (Lock::Held, Lock::Taken));
        drop(first);
        assert_eq!(try_lock(&second).unwrap(), Lock::Held);
    }

    #[test]
    fn a_file_system_without_locks_is_distinguished_from_a_failing_one() {
        let text = |errno| judge(Err(TryLockError::Error(io::Error::from_raw_os_error(errno))));
        for errno in [libc::ENOLCK, libc::EOPNOTSUPP, libc::ENOSYS, libc::EBADF, libc::EINVAL] {
            assert_eq!(text(errno).unwrap(), Lock::Unsupported);
        }
        assert_eq!(text(libc::EIO).unwrap_err().raw_os_error(), Some(libc::EIO));
    }
}
