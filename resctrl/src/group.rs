//! Control groups and their monitor groups.

use crate::{Error, Result, Schemata, files};
use std::fmt;
use std::path::Path;

/// A control group: threads and CPUs with common limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CtrlGroup {
    /// Name of the directory; empty for the default group.
    pub name: String,
    /// `shareable`, `exclusive` or `pseudo-locked`; `None` if the kernel has no such file.
    pub mode: Option<String>,
    /// CPUs of the group as ranges; empty if it has none.
    pub cpus_list: String,
    /// Number of threads in the group.
    pub tasks: usize,
    /// Limits of the group.
    pub schemata: Schemata,
    /// Monitor groups of this group, by name.
    pub mon_groups: Vec<MonGroup>,
}

/// A monitor group: threads and CPUs of a control group with their own counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonGroup {
    /// Name of the directory.
    pub name: String,
    /// CPUs of the group as ranges; empty if it has none.
    pub cpus_list: String,
    /// Number of threads in the group.
    pub tasks: usize,
}

/// Reads all groups: the default group first, then the others by name. A group that is removed meanwhile is skipped.
pub(crate) fn read_all(root: &Path) -> Result<Vec<CtrlGroup>> {
    let mut groups = vec![CtrlGroup::read(root, String::new())?];
    let names = files::names(root, true)?.into_iter().filter(|name| !["info", "mon_data", "mon_groups"].contains(&name.as_str()));
    groups.extend(read_present(root, names, CtrlGroup::read)?);
    Ok(groups)
}

/// Reads the groups `names` below `parent`. A group that has been removed since it was listed is skipped.
fn read_present<G>(parent: &Path, names: impl Iterator<Item = String>, read: fn(&Path, String) -> Result<G>) -> Result<Vec<G>> {
    let mut groups = Vec::new();
    for name in names {
        let dir = parent.join(&name);
        match read(&dir, name) {
            Ok(group) => groups.push(group),
            Err(Error::Io { .. }) if !files::exists(&dir)? => {}
            Err(error) => return Err(error),
        }
    }
    Ok(groups)
}

impl CtrlGroup {
    fn read(dir: &Path, name: String) -> Result<Self> {
        let mode = dir.join("mode");
        let mon_groups = dir.join("mon_groups");
        Ok(Self {
            name,
            mode: if files::exists(&mode)? { Some(files::read(&mode)?.trim().to_owned()) } else { None },
            cpus_list: cpus_list(dir)?,
            tasks: tasks(dir)?,
            schemata: Schemata::read(&dir.join("schemata"))?,
            mon_groups: if files::exists(&mon_groups)? {
                read_present(&mon_groups, files::names(&mon_groups, true)?.into_iter(), MonGroup::read)?
            } else {
                Vec::new()
            },
        })
    }
}

impl MonGroup {
    fn read(dir: &Path, name: String) -> Result<Self> {
        Ok(Self { name, cpus_list: cpus_list(dir)?, tasks: tasks(dir)? })
    }
}

fn cpus_list(dir: &Path) -> Result<String> {
    Ok(files::read(&dir.join("cpus_list"))?.trim().to_owned())
}

fn tasks(dir: &Path) -> Result<usize> {
    Ok(files::read(&dir.join("tasks"))?.lines().count())
}

impl fmt::Display for CtrlGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { "/" } else { &self.name };
        let cpus = if self.cpus_list.is_empty() { "none" } else { &self.cpus_list };
        write!(f, "{name}: {}, cpus {cpus}, {} tasks", self.schemata, self.tasks)?;
        if let Some(mode) = self.mode.as_deref().filter(|&mode| mode != "shareable") {
            write!(f, ", {mode}")?;
        }
        let monitored: Vec<_> = self.mon_groups.iter().map(|group| group.name.as_str()).collect();
        if monitored.is_empty() { Ok(()) } else { write!(f, ", mon_groups {}", monitored.join(" ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn group(dir: &Path, schemata: Option<&str>, tasks: &str, cpus: &str) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("tasks"), tasks).unwrap();
        fs::write(dir.join("cpus_list"), cpus).unwrap();
        if let Some(schemata) = schemata {
            fs::write(dir.join("schemata"), schemata).unwrap();
            fs::write(dir.join("mode"), "shareable\n").unwrap();
        }
    }

    #[test]
    fn lists_control_and_monitor_groups() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        group(root, Some("    MB:0=100;1=100\n    L3:0=fff;1=fff\n"), "1\n2\n", "0-1\n");
        group(&root.join("p0"), Some("    MB:0=50;1=100\n    L3:0=3;1=f0\n"), "253\n254\n", "2-3\n");
        fs::write(root.join("p0/mode"), "exclusive\n").unwrap();
        group(&root.join("p0/mon_groups/m0"), None, "254\n", "\n");
        group(&root.join("mon_groups/m9"), None, "", "\n");
        fs::create_dir_all(root.join("mon_data/mon_L3_00")).unwrap();
        fs::create_dir_all(root.join("info")).unwrap();

        let groups = read_all(root).unwrap();
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0].to_string(), "/: MB:0=100;1=100 L3:0=fff;1=fff, cpus 0-1, 2 tasks, mon_groups m9");
        assert_eq!(groups[1].to_string(), "p0: MB:0=50;1=100 L3:0=3;1=f0, cpus 2-3, 2 tasks, exclusive, mon_groups m0");
        assert_eq!(groups[1].mon_groups, [MonGroup { name: "m0".into(), cpus_list: String::new(), tasks: 1 }]);
    }

    #[test]
    fn a_directory_that_is_no_group_is_an_error_and_a_removed_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("empty")).unwrap();
        let error = read_present(dir.path(), ["empty".to_owned()].into_iter(), CtrlGroup::read).unwrap_err().to_string();
        assert!(error.contains("empty/cpus_list: "), "{error}");
        assert_eq!(read_present(dir.path(), ["gone".to_owned()].into_iter(), CtrlGroup::read).unwrap(), []);
    }
}
