//! The machine, the program and the date of a profile.

use crate::facts::{BuildFacts, MachineFacts};
use crate::hardware::topology::Topology;
use crate::optim::simd::Isa;
use crate::units::{Bytes, date};
use std::time::{SystemTime, UNIX_EPOCH};

/// Facts about the machine in a profile.
pub(super) struct ProfileFacts {
    /// The machine in one line.
    pub machine: String,
    /// Versions for the reader.
    pub facts: Vec<String>,
    /// Date of today: `2026-11-21`.
    pub(crate) date: String,
}

impl ProfileFacts {
    /// Facts of the machine of `topology` and of the measured `device`.
    pub(super) fn new(topology: &Topology, device: &str) -> Self {
        let (build, machine) = (BuildFacts::this_program(), MachineFacts::new(topology));
        let gpu = machine.gpu.map(|gpu| format!("{gpu}, "));
        let (cpu, cpus) = (machine.cpu.as_deref().unwrap_or("an unnamed processor"), machine.usable_cpus.unwrap_or(1));
        let memory = machine.memory_bytes.map_or(String::new(), |bytes| format!(", {}", Bytes(bytes)));
        let commit = build.git_commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        let debug = if build.release { "" } else { ", without optimizations" };
        let facts = [
            Some(format!("device {device}")),
            machine.kernel.map(|kernel| format!("kernel {kernel}")),
            Some(format!("optimizer {}", Isa::detect())),
            Some(format!("superoffload {}{commit}{debug}", build.version)),
        ];
        let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400);
        Self {
            machine: format!("{}{cpus} CPUs of {cpu}{memory}", gpu.unwrap_or_default()),
            facts: facts.into_iter().flatten().collect(),
            date: date(days),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_a_processor_and_a_kernel() {
        let facts = ProfileFacts::new(&Topology::this_machine(), "cpu");
        assert!(facts.machine.contains(" CPUs of ") && facts.date.starts_with("20"), "{}", facts.machine);
        assert!(facts.facts.iter().any(|fact| fact.starts_with("kernel ")), "{:?}", facts.facts);
    }
}
