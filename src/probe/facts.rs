//! What machine and program a profile is of, and the day.

use crate::bench::facts::{BuildFacts, MachineFacts};
use crate::hardware::topology::Topology;
use crate::optim::simd::Isa;
use crate::units::Bytes;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a profile says about the machine besides its numbers.
pub struct Facts {
    /// In one line.
    pub machine: String,
    /// Versions, for people.
    pub facts: Vec<String>,
    /// Today: `2026-11-21`.
    pub date: String,
}

impl Facts {
    /// Those of the machine of `topology` and of `device`, which was measured.
    pub fn new(topology: &Topology, device: &str) -> Self {
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

/// The day so many days after 1970 began, in the Gregorian calendar.
fn date(mut days: u64) -> String {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        for (days, expected) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_514, "2026-03-02"), (20_778, "2026-11-21")]
        {
            assert_eq!(date(days), expected, "{days}");
        }
    }

    #[test]
    fn a_machine_has_a_processor_and_a_kernel() {
        let facts = Facts::new(&Topology::this_machine(), "cpu");
        assert!(facts.machine.contains(" CPUs of ") && facts.date.starts_with("20"), "{}", facts.machine);
        assert!(facts.facts.iter().any(|fact| fact.starts_with("kernel ")), "{:?}", facts.facts);
    }
}
