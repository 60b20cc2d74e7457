//! Cache and memory-bandwidth partitions of Linux through the kernel's resctrl filesystem, for Intel RDT, AMD QoS and Arm MPAM.
//!
//! Reading needs no privileges: resources of the machine ([`Info`]), groups and their limits ([`discover`], [`Tree`]), and counters of
//! groups ([`Counter`]). Changes need a [`Session`], which creates groups and assigns CPUs and threads to them. A session records on disk
//! how to undo each change before it makes the change. All changes are undone when the session ends or is dropped, or, if the process was
//! killed, at the next start. A [`Profile`] describes groups, and [`prepare`] creates them.
//!
//! Functions take the root of the tree; [`DEFAULT_ROOT`] is the kernel's default. Names are those of the kernel. README.md describes how
//! the privileged program and the trainer share the work.

mod check;
mod cpus;
mod error;
#[cfg(test)]
mod fake;
mod files;
mod fit;
mod group;
mod info;
mod journal;
mod machine;
mod monitor;
mod mount;
mod path;
mod prepare;
mod profile;
mod schemata;
mod session;
mod tasks;
mod tree;
mod undo;

pub use check::Rounded;
pub use cpus::CpuSet;
pub use error::{Condition, Error, Result};
pub use fit::Fitted;
pub use group::{CtrlGroup, MonGroup};
pub use info::{Info, Kind, Resource};
pub use journal::DEFAULT_JOURNAL;
pub use machine::{Core, DEFAULT_CPUS, Machine};
pub use monitor::{Counter, total};
pub use path::{GroupPath, PREFIX};
pub use prepare::prepare;
pub use profile::{ADAM_GROUP, Group, Profile, Reference};
pub use schemata::{Line, Schemata, Values};
pub use session::{Session, describe_journal, restore};
pub use tree::Tree;

use std::path::Path;

/// The kernel's mount point of resctrl. It exists if the kernel found hardware with partitions.
pub const DEFAULT_ROOT: &str = "/sys/fs/resctrl";

/// State of a resctrl root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// The directory does not exist: the kernel found no hardware with partitions, or was built without resctrl.
    NoMountPoint,
    /// The mount point exists, but nothing is mounted on it.
    NotMounted,
    /// The tree is mounted.
    Mounted(Partitions),
}

/// A mounted tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partitions {
    /// Resources that can be partitioned and monitored.
    pub info: Info,
    /// The control groups: the default group first, then the others by name.
    pub groups: Vec<CtrlGroup>,
}

/// Reads the tree at `root`.
///
/// # Errors
/// An error if an existing file cannot be read, or if a known file has unexpected content.
pub fn discover(root: &Path) -> Result<Discovery> {
    if !files::exists(root)? {
        return Ok(Discovery::NoMountPoint);
    }
    if !files::exists(&root.join("info"))? {
        return Ok(Discovery::NotMounted);
    }
    Ok(Discovery::Mounted(Partitions { info: Info::read(&root.join("info"))?, groups: group::read_all(root)? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn missing_parts_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(discover(&dir.path().join("resctrl")).unwrap(), Discovery::NoMountPoint);
        assert_eq!(discover(dir.path()).unwrap(), Discovery::NotMounted);
    }

    /// The tree of a Grace CPU: one L3 with an ID other than 0, masks that may have gaps, and lines that are newer than this crate.
    #[test]
    fn reads_an_mpam_tree() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("info/last_cmd_status", "ok\n"),
            ("info/L3/cbm_mask", "fff\n"),
            ("info/L3/min_cbm_bits", "1\n"),
            ("info/L3/num_closids", "40\n"),
            ("info/L3/shareable_bits", "fff\n"),
            ("info/L3/sparse_masks", "1\n"),
            ("info/MB/bandwidth_gran", "1\n"),
            ("info/MB/min_bandwidth", "1\n"),
            ("info/MB/num_closids", "40\n"),
            ("info/L3_MON/num_rmids", "1\n"),
            ("info/L3_MON/mon_features", "llc_occupancy\n"),
            ("cpus_list", "0-71\n"),
            ("mode", "shareable\n"),
            ("tasks", "1\n2\n3\n"),
            ("schemata", "    MB:36=100\n    L3:36=fff\nMB_HLIM:36=0\n"),
            ("p2/cpus_list", "7-71\n"),
            ("p2/mode", "shareable\n"),
            ("p2/tasks", ""),
            ("p2/schemata", "    MB:36=20\n    L3:36=00f\n"),
        ];
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let Discovery::Mounted(partitions) = discover(dir.path()).unwrap() else { panic!("is mounted") };
        assert_eq!(partitions.info.num_closids(), Some(40));
        let [default, adam] = &partitions.groups[..] else { panic!("two groups") };
        assert_eq!((default.name.as_str(), default.tasks, default.cpus_list.as_str()), ("", 3, "0-71"));
        assert_eq!(adam.schemata.to_string(), "MB:36=20 L3:36=f");
        assert_eq!(default.schemata.lines[2].values, Values::Text("36=0".into()));
    }
}
