//! Snapshots of everything that a session could leave changed.

use crate::rig::ROOT;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// State of a thread. The start time identifies the thread.
#[derive(Debug, PartialEq, Eq)]
struct Thread {
    started: String,
    affinity: String,
    groups: String,
}

/// The tree with file modes and owners, and every thread with its groups and affinity.
pub struct Snapshot {
    files: BTreeMap<PathBuf, String>,
    threads: BTreeMap<String, Thread>,
}

impl Snapshot {
    /// Takes a snapshot.
    pub fn take() -> Self {
        let mut files = BTreeMap::new();
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let resctrl: Vec<_> = mounts.lines().filter(|line| line.contains(" resctrl ")).collect();
        files.insert("mounts".into(), resctrl.join("\n"));
        walk(Path::new(ROOT), &mut files);
        let mut threads = BTreeMap::new();
        for process in numbers("/proc") {
            for tid in numbers(&format!("/proc/{process}/task")) {
                threads.extend(Thread::read(&tid).map(|thread| (tid, thread)));
            }
        }
        Self { files, threads }
    }

    /// The differences, one per line. Threads that started or ended meanwhile are ignored.
    pub fn differences(&self, later: &Self) -> Vec<String> {
        let (mut differences, none) = (Vec::new(), String::new());
        for path in self.files.keys().chain(later.files.keys()) {
            let (was, is) = (self.files.get(path).unwrap_or(&none), later.files.get(path).unwrap_or(&none));
            if was != is {
                differences.push(format!("{}: was {was:?}, is {is:?}", path.display()));
            }
        }
        for (tid, was) in &self.threads {
            if let Some(is) = later.threads.get(tid).filter(|is| is.started == was.started && *is != was) {
                differences.push(format!("thread {tid}: was {was:?}, is {is:?}"));
            }
        }
        differences.dedup();
        differences
    }

    /// Number of files and threads.
    pub fn size(&self) -> (usize, usize) {
        (self.files.len(), self.threads.len())
    }
}

impl Thread {
    fn read(tid: &str) -> Option<Self> {
        let read = |file: &str| fs::read_to_string(format!("/proc/{tid}/{file}")).ok();
        let (stat, status) = (read("stat")?, read("status")?);
        let started = stat.rsplit_once(") ")?.1.split_ascii_whitespace().nth(19)?.to_owned();
        let affinity = status.lines().find(|line| line.starts_with("Cpus_allowed_list"))?.to_owned();
        Some(Self { started, affinity, groups: read("cpu_resctrl_groups")? })
    }
}

fn numbers(dir: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect()
}

/// Collects contents, modes and owners. Counters, threads and the last status are omitted, because they change by themselves.
fn walk(dir: &Path, files: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::metadata(&path).unwrap();
        let mut text = format!("{:o} {}:{}", meta.mode(), meta.uid(), meta.gid());
        let changing = ["tasks", "last_cmd_status"].iter().any(|name| path.ends_with(name)) || path.to_str().unwrap().contains("mon_data/");
        if meta.is_dir() {
            walk(&path, files);
        } else if !changing {
            text += &format!(" {}", fs::read_to_string(&path).unwrap_or_else(|e| e.to_string()));
        }
        files.insert(path, text);
    }
}
