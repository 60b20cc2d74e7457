//! The machine as far as sweeps need it: CPUs, memory, GPUs and cargo.

use std::fmt;
use std::path::Path;

/// Words in the name of a GPU that shares a chip's memory with CPUs.
const SUPERCHIPS: [&str; 4] = ["GH200", "GB200", "GB300", "GB10"];

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Memory in GiB.
    pub memory_gib: u64,
    /// Names of the GPUs.
    pub gpus: Vec<String>,
}

impl Machine {
    /// This machine, from the files of the system.
    pub fn this() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self { cpus, memory_gib: memory_gib(&memory), gpus: gpus(Path::new("/proc/driver/nvidia/gpus")) }
    }

    /// Name of the superchip, if the first GPU is one.
    pub fn superchip(&self) -> Option<&str> {
        self.gpus.first().map(String::as_str).filter(|name| SUPERCHIPS.iter().any(|chip| name.contains(chip)))
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} CPUs, {} GiB of memory, ", self.cpus, self.memory_gib)?;
        match self.gpus.first() {
            None => write!(f, "no GPU"),
            Some(name) => write!(f, "{} x {name}", self.gpus.len()),
        }
    }
}

fn memory_gib(meminfo: &str) -> u64 {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 20
}

/// Names of the GPUs, each of which has a folder with a file of facts.
fn gpus(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let model = |text: String| text.lines().find_map(|line| line.strip_prefix("Model:")).map(|name| name.trim().to_owned());
    let mut names: Vec<_> = entries.filter_map(|entry| model(std::fs::read_to_string(entry.path().join("information")).ok()?)).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_describe_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        assert!(gpus(dir.path()).is_empty() && gpus(Path::new("/nowhere")).is_empty());
        let folder = dir.path().join("0000:01:00.0");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("information"), "Model: \t\t NVIDIA GH200 480GB\nIRQ:   1\n").unwrap();
        let machine = Machine { cpus: 72, memory_gib: memory_gib("MemTotal:       503316480 kB\n"), gpus: gpus(dir.path()) };
        assert_eq!(machine.to_string(), "72 CPUs, 480 GiB of memory, 1 x NVIDIA GH200 480GB");
        assert_eq!(machine.superchip(), Some("NVIDIA GH200 480GB"));
        assert_eq!(Machine { gpus: vec!["NVIDIA H200".into()], ..machine }.superchip(), None);
    }
}
