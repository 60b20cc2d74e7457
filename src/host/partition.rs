//! Cache and bandwidth partitions: the optimizer's threads join a resctrl group that a privileged user has prepared
//! (`superoffload-resctrl prepare`). Training needs no privilege, and continues if joining fails.

use crate::error::{Error, Result};
use crate::host::perf::WORKER_ROLE;
use crate::host::resctrl_group::ResctrlGroup;
use std::fs;
use std::path::Path;
use superoffload_resctrl::{ADAM_GROUP, Discovery, GroupPath, Tree, discover};

/// Adds the running optimizer threads to the group of `choice` at `root`, and returns a short description of the result.
///
/// # Errors
/// When a named group, or the prepared one, cannot be joined. The error is meant for a warning; the run continues.
pub fn join_optimizer(choice: &ResctrlGroup, root: &Path) -> Result<String> {
    let name = match choice {
        ResctrlGroup::None => return Ok("not requested".into()),
        ResctrlGroup::Auto => match discover(root) {
            Ok(Discovery::NoMountPoint) => return Ok("not offered by this CPU or kernel".into()),
            Ok(Discovery::NotMounted) => return Ok("not mounted".into()),
            Ok(Discovery::Mounted(found)) if found.groups.iter().all(|group| group.name != ADAM_GROUP) => {
                return Ok(format!("no group {ADAM_GROUP} is prepared"));
            }
            Ok(Discovery::Mounted(_)) => ADAM_GROUP,
            Err(error) => return Err(failed(ADAM_GROUP, error)),
        },
        ResctrlGroup::Named(name) => name,
    };
    join(name, root)
}

fn join(name: &str, root: &Path) -> Result<String> {
    let group = GroupPath::control(name).map_err(|cause| failed(name, cause))?;
    let tree = Tree::open(root).map_err(|error| failed(name, error))?;
    let joined = tree.add_tasks(&group, &workers()?).map_err(|error| failed(name, error))?;
    let allotted = tree.schemata(&group).map_err(|error| failed(name, error))?;
    Ok(format!("{joined} optimizer threads in {name}: {allotted}"))
}

fn failed(name: &str, cause: impl std::fmt::Display) -> Error {
    Error::resource(format!("join resctrl group {name}"), format!("{cause}; the optimizer runs without a partition"))
}

fn workers() -> Result<Vec<i32>> {
    const TASKS: &str = "/proc/self/task";
    let mut tids = Vec::new();
    for task in fs::read_dir(TASKS).map_err(|e| Error::io("read", TASKS, e))? {
        let path = task.map_err(|e| Error::io("read", TASKS, e))?.path();
        // A thread may end between listing and reading.
        let is_worker = fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with(WORKER_ROLE));
        tids.extend(path.file_name().and_then(|tid| tid.to_str()?.parse::<i32>().ok()).filter(|_| is_worker));
    }
    Ok(tids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(groups: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("info")).unwrap();
        for group in [""].iter().chain(groups) {
            fs::create_dir_all(dir.path().join(group)).unwrap();
            for (file, text) in [("tasks", ""), ("cpus_list", "\n"), ("schemata", "    MB:36=20\n    L3:36=00f\n")] {
                fs::write(dir.path().join(group).join(file), text).unwrap();
            }
        }
        dir
    }

    fn auto(root: &Path) -> String {
        join_optimizer(&ResctrlGroup::Auto, root).unwrap()
    }

    #[test]
    fn a_missing_prepared_group_is_only_a_message() {
        let dir = tree(&["p0"]);
        assert_eq!(auto(dir.path()), "no group superoffload-adam is prepared");
        assert_eq!(auto(&dir.path().join("info")), "not mounted");
        assert_eq!(auto(&dir.path().join("nowhere")), "not offered by this CPU or kernel");
        assert_eq!(join_optimizer(&ResctrlGroup::None, dir.path()).unwrap(), "not requested");
    }

    #[test]
    fn a_group_that_cannot_be_joined_is_named_with_the_cause() {
        let dir = tree(&[]);
        let join = |name: &str, root: &Path| join_optimizer(&ResctrlGroup::Named(name.into()), root).unwrap_err().to_string();
        let error = join("p0", &dir.path().join("nowhere"));
        assert!(
            error.starts_with("join resctrl group p0: ") && error.contains("not offered") && error.contains("without a partition"),
            "{error}"
        );
        assert!(join("../p0", dir.path()).contains("cannot be the name of a group"));
    }

    #[test]
    fn the_workers_join_the_prepared_group() {
        let dir = tree(&[ADAM_GROUP]);
        let is_worker = || workers().unwrap().contains(&nix::unistd::gettid().as_raw());
        let (worker, message) = std::thread::scope(|scope| {
            let body = || (is_worker(), auto(dir.path()));
            std::thread::Builder::new().name("adam-77".into()).spawn_scoped(scope, body).unwrap().join().unwrap()
        });
        assert!(worker && !is_worker());
        assert!(message.ends_with(" optimizer threads in superoffload-adam: MB:36=20 L3:36=f"), "{message}");
        assert!(!fs::read_to_string(dir.path().join(ADAM_GROUP).join("tasks")).unwrap().is_empty());
    }
}
