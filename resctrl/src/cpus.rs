//! Sets of CPUs in the kernel's notation: `0-3,8`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Upper limit of CPU numbers. No kernel supports this many CPUs, so a larger number is an error in the file.
const CPU_MAX: u32 = 1 << 16;

/// A set of logical CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// The CPUs that are in both sets.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs that are in at least one of the sets.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }
}

impl FromStr for CpuSet {
    type Err = String;

    /// Parses `0-3,8`. An empty text is the empty set.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let mut cpus = BTreeSet::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.trim().parse(), last.trim().parse()) {
                (Ok(first), Ok(last)) if first <= last && last < CPU_MAX => cpus.extend::<std::ops::RangeInclusive<u32>>(first..=last),
                _ => return Err(format!("{text:?} is not a list of CPUs")),
            }
        }
        Ok(Self(cpus))
    }
}

impl TryFrom<String> for CpuSet {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(cpus: CpuSet) -> Self {
        cpus.to_string()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<_> = self.iter().collect();
        let runs = cpus.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            cpus => cpus[0].to_string(),
        });
        f.write_str(&runs.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_the_kernels_notation() {
        assert_eq!("0-3,8\n".parse::<CpuSet>().unwrap().iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert!("\n".parse::<CpuSet>().unwrap().is_empty());
        for bad in ["3-1", "a", "0-", "-1", "1,,2", "0-4000000000", "99999999999999999999"] {
            assert_eq!(bad.parse::<CpuSet>().unwrap_err(), format!("{bad:?} is not a list of CPUs"));
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "[0-9,\\- a]{0,20}") {
            let _ = text.parse::<CpuSet>();
        }

        #[test]
        fn printed_values_read_back(cpus in prop::collection::vec(0u32..300, 0..40)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
    }
}
