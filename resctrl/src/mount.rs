//! Mounts the tree if it is not mounted, and unmounts it only if this program mounted it.

use crate::{Error, Result};
use nix::mount::{MsFlags, mount, umount};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const SECOND_NS: i128 = 1_000_000_000;

/// Upper limit in nanoseconds of the duration of a mount.
const MOUNT_NS_MAX: i128 = 10 * SECOND_NS;

/// The current time in nanoseconds since 1970.
pub(crate) fn now_ns() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i128)
}

/// Mounts the tree with the kernel's defaults.
pub(crate) fn mount_tree(root: &Path) -> Result<()> {
    mount(Some("resctrl"), root, Some("resctrl"), MsFlags::empty(), None::<&str>).map_err(|errno| Error::io("mount", root, errno))
}

/// Unmounts the tree, which resets every limit and removes every group.
pub(crate) fn unmount_tree(root: &Path) -> Result<()> {
    umount(root).map_err(|errno| Error::io("unmount", root, errno))
}

/// Whether the file system at `root` is the one that was mounted at `at_ns`. The kernel creates the root directory at that time and keeps
/// its change time.
pub(crate) fn is_mount_of(root: &Path, at_ns: i128) -> Result<bool> {
    let meta = std::fs::metadata(root).map_err(|e| Error::io("read", root, e))?;
    let made_ns = i128::from(meta.ctime()) * SECOND_NS + i128::from(meta.ctime_nsec());
    // Timestamps of files come from a coarser clock, which may be one tick behind.
    Ok((at_ns - SECOND_NS..at_ns + MOUNT_NS_MAX).contains(&made_ns))
}
