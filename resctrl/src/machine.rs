//! The cores that share an L3 cache.

use crate::{CpuSet, Error, Result, files};
use std::collections::BTreeMap;
use std::path::Path;

/// The kernel's folder that describes the CPUs.
pub const DEFAULT_CPUS: &str = "/sys/devices/system/cpu";

/// A physical core, as the set of its hardware threads.
pub type Core = CpuSet;

/// The online cores of each L3 cache, in order of their lowest CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The cores of each cache.
    pub l3_domains: Vec<Vec<Core>>,
}

impl Machine {
    /// Reads the kernel's description below `cpus`. CPUs without a known L3 cache are treated as CPUs of one common cache.
    ///
    /// # Errors
    /// An error if an existing file cannot be read or parsed.
    pub fn read(cpus: &Path) -> Result<Self> {
        let online = list(&cpus.join("online"))?;
        let mut domains: BTreeMap<Option<u32>, Vec<Core>> = BTreeMap::new();
        for cpu in online.iter() {
            let dir = cpus.join(format!("cpu{cpu}"));
            let siblings = dir.join("topology/thread_siblings_list");
            let core = if files::exists(&siblings)? { list(&siblings)?.and(&online) } else { CpuSet::from_iter([cpu]) };
            if core.iter().next() == Some(cpu) {
                domains.entry(l3(&dir)?).or_default().push(core);
            }
        }
        let mut l3_domains: Vec<_> = domains.into_values().collect();
        l3_domains.sort_by_key(|cores| cores.first().and_then(|core| core.iter().next()));
        Ok(Self { l3_domains })
    }
}

/// The lowest CPU that shares the L3 cache with the CPU at `dir`.
fn l3(dir: &Path) -> Result<Option<u32>> {
    let cache = dir.join("cache");
    if !files::exists(&cache)? {
        return Ok(None);
    }
    for index in files::names(&cache, true)? {
        let index = cache.join(index);
        if files::exists(&index.join("level"))? && files::read(&index.join("level"))?.trim() == "3" {
            return Ok(list(&index.join("shared_cpu_list"))?.iter().next());
        }
    }
    Ok(None)
}

fn list(path: &Path) -> Result<CpuSet> {
    files::read(path)?.parse().map_err(|cause| Error::Format { path: path.into(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn groups_threads_by_core_and_cores_by_cache() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // Two caches with two cores each. Sibling threads are four numbers apart, and CPU 7 is offline.
        write("online".into(), "0-6\n");
        for cpu in 0..7 {
            let (core, cache) = (cpu % 4, if cpu % 4 < 2 { "0-1,4-5" } else { "2-3,6-7" });
            write(format!("cpu{cpu}/topology/thread_siblings_list"), &format!("{core},{}\n", core + 4));
            write(format!("cpu{cpu}/cache/index0/level"), "1\n");
            write(format!("cpu{cpu}/cache/index3/level"), "3\n");
            write(format!("cpu{cpu}/cache/index3/shared_cpu_list"), cache);
        }
        let cores = |lists: &[&str]| lists.iter().map(|list| list.parse().unwrap()).collect::<Vec<Core>>();
        assert_eq!(Machine::read(dir.path()).unwrap().l3_domains, [cores(&["0,4", "1,5"]), cores(&["2,6", "3"])]);
    }

    #[test]
    fn without_caches_there_is_one_domain() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("online"), "0-2\n").unwrap();
        assert_eq!(Machine::read(dir.path()).unwrap().l3_domains.iter().map(Vec::len).collect::<Vec<_>>(), [3]);
        fs::write(dir.path().join("online"), "many\n").unwrap();
        assert!(Machine::read(dir.path()).unwrap_err().to_string().ends_with("online: \"many\" is not a list of CPUs"));
    }

    #[test]
    fn reads_this_machine() {
        assert!(!Machine::read(Path::new(DEFAULT_CPUS)).unwrap().l3_domains.is_empty());
    }
}
