//! A fake kernel for tests. It keeps a resctrl tree in an ordinary directory and executes commands like kernel 7.2, as far as sessions need
//! them.
//!
//! It can reject all commands from a given one on, which simulates the death of the process.

use crate::files::Kernel;
use crate::{CpuSet, Tree};
use nix::errno::Errno;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Number of control groups, including the default group.
const CLOSIDS: usize = 4;

/// The directory of the fake tree, and the number of commands before it rejects all others.
pub(crate) struct Fake {
    root: PathBuf,
    commands_left: Rc<Cell<usize>>,
}

impl Fake {
    /// Creates a tree with two caches and six CPUs in the default group.
    pub(crate) fn mount(root: &Path) {
        for (file, text) in [
            ("info/last_cmd_status", "ok\n"),
            ("info/L3/cbm_mask", "fff\n"),
            ("info/L3/min_cbm_bits", "1\n"),
            ("info/L3/sparse_masks", "0\n"),
            ("info/MB/bandwidth_gran", "10\n"),
            ("info/MB/min_bandwidth", "10\n"),
            ("info/MB/delay_linear", "1\n"),
            ("schemata", "    MB:0=100;1=100\n    L3:0=fff;1=fff\n"),
            ("cpus_list", "0-5\n"),
            ("tasks", ""),
        ] {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), text).unwrap();
        }
        fs::create_dir_all(root.join("mon_groups")).unwrap();
    }

    /// Opens the tree at `root`. The fake kernel accepts `commands` commands.
    pub(crate) fn open(root: &Path, commands: usize) -> (Tree, Rc<Cell<usize>>) {
        let commands_left = Rc::new(Cell::new(commands));
        let fake = Self { root: root.into(), commands_left: commands_left.clone() };
        (Tree::with_kernel(root, Box::new(fake)).unwrap(), commands_left)
    }

    /// The content of all files, with sorted lines.
    pub(crate) fn snapshot(root: &Path) -> BTreeMap<PathBuf, String> {
        let (mut found, mut folders) = (BTreeMap::new(), vec![root.to_path_buf()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path.clone());
                }
                let mut lines: Vec<_> = fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_owned).collect();
                lines.sort();
                found.insert(path, lines.join("\n"));
            }
        }
        found
    }

    fn count(&self) -> io::Result<()> {
        let left = self.commands_left.get().checked_sub(1).ok_or(Errno::EIO)?;
        self.commands_left.set(left);
        Ok(())
    }

    fn set_status(&self, status: &str, errno: Errno) -> io::Result<()> {
        fs::write(self.root.join("info/last_cmd_status"), format!("{status}\n"))?;
        if status == "ok" { Ok(()) } else { Err(errno.into()) }
    }

    fn controls(&self) -> Vec<PathBuf> {
        let groups = fs::read_dir(&self.root).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.join("schemata").exists());
        [self.root.clone()].into_iter().chain(groups).collect()
    }

    fn monitors(control: &Path) -> Vec<PathBuf> {
        fs::read_dir(control.join("mon_groups")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    fn set_cpus(&self, group: &Path, wanted: &CpuSet) -> io::Result<()> {
        let parent = group.parent().unwrap();
        if parent.ends_with("mon_groups") {
            let control = parent.parent().unwrap();
            if cpus(control).and(wanted) != *wanted {
                return self.set_status("Can only add CPUs to mongroup that belong to parent", Errno::EINVAL);
            }
            for other in Self::monitors(control) {
                write_cpus(&other, &without(&cpus(&other), wanted));
            }
        } else {
            let dropped = without(&cpus(group), wanted);
            if group == self.root && !dropped.is_empty() {
                return self.set_status("Can't drop CPUs from default group", Errno::EINVAL);
            }
            let added = without(wanted, &cpus(group));
            for control in self.controls() {
                write_cpus(&control, &without(&cpus(&control), &added));
                // Monitor groups of the changed control group lose all CPUs, including CPUs that the group keeps.
                let lost = if control == group { wanted.or(&dropped) } else { added.clone() };
                Self::monitors(&control).iter().for_each(|monitor| write_cpus(monitor, &without(&cpus(monitor), &lost)));
            }
            write_cpus(&self.root, &cpus(&self.root).or(&dropped));
        }
        write_cpus(group, wanted);
        self.set_status("ok", Errno::EINVAL)
    }

    fn move_task(&self, group: &Path, tid: &str) -> io::Result<()> {
        if !Path::new("/proc").join(tid).exists() {
            return self.set_status(&format!("No task {tid}\nError while processing task {tid}"), Errno::ESRCH);
        }
        let parent = group.parent().unwrap();
        if parent.ends_with("mon_groups") {
            let control = parent.parent().unwrap();
            if !tasks(control).contains(&tid.to_owned()) {
                return self.set_status("Can't move task to different control group", Errno::EINVAL);
            }
            Self::monitors(control).iter().for_each(|other| drop_task(other, tid));
        } else {
            for control in self.controls().into_iter().filter(|control| control != group) {
                drop_task(&control, tid);
                Self::monitors(&control).iter().for_each(|monitor| drop_task(monitor, tid));
            }
            drop_task(group, tid);
            // As in the kernel, the thread now has the control group's own monitoring ID.
            Self::monitors(group).iter().for_each(|monitor| drop_task(monitor, tid));
        }
        write_tasks(group, [tasks(group), vec![tid.into()]].concat());
        self.set_status("ok", Errno::EINVAL)
    }
}

impl Kernel for Fake {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.count()?;
        assert!(text.ends_with('\n'), "{text:?}");
        let (group, text) = (path.parent().unwrap(), text.trim_end());
        fs::metadata(path)?;
        match path.file_name().unwrap().to_str().unwrap() {
            "cpus_list" => self.set_cpus(group, &text.parse().unwrap()),
            "tasks" => self.move_task(group, text),
            "schemata" => fs::write(path, "    MB:0=20;1=20\n    L3:0=f;1=f\n"),
            other => panic!("{other}"),
        }
    }

    fn create(&self, dir: &Path) -> io::Result<()> {
        self.count()?;
        let control = dir.parent().unwrap() == self.root;
        if control && self.controls().len() == CLOSIDS {
            return self.set_status("Out of CLOSIDs", Errno::ENOSPC);
        }
        fs::create_dir(dir)?;
        let text = |file: &str| fs::copy(self.root.join(file), dir.join(file));
        if control {
            text("schemata")?;
            fs::create_dir(dir.join("mon_groups"))?;
        }
        fs::write(dir.join("cpus_list"), "\n")?;
        fs::write(dir.join("tasks"), "")?;
        self.set_status("ok", Errno::EINVAL)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        self.count()?;
        if dir.parent().unwrap() == self.root {
            write_cpus(&self.root, &cpus(&self.root).or(&cpus(dir)));
            write_tasks(&self.root, [tasks(&self.root), tasks(dir)].concat());
        }
        fs::remove_dir_all(dir)
    }
}

fn without(cpus: &CpuSet, fewer: &CpuSet) -> CpuSet {
    cpus.iter().filter(|&cpu| !fewer.contains(cpu)).collect()
}

fn cpus(group: &Path) -> CpuSet {
    fs::read_to_string(group.join("cpus_list")).unwrap().parse().unwrap()
}

fn write_cpus(group: &Path, cpus: &CpuSet) {
    fs::write(group.join("cpus_list"), format!("{cpus}\n")).unwrap();
}

fn tasks(group: &Path) -> Vec<String> {
    fs::read_to_string(group.join("tasks")).unwrap().lines().map(str::to_owned).collect()
}

fn write_tasks(group: &Path, tasks: Vec<String>) {
    fs::write(group.join("tasks"), tasks.into_iter().map(|tid| tid + "\n").collect::<String>()).unwrap();
}

fn drop_task(group: &Path, tid: &str) {
    write_tasks(group, tasks(group).into_iter().filter(|other| other != tid).collect());
}
