//! Sets of CPUs in the kernel's notation: `0-3,8`. The crate `resctrl` has its own parser, because it does not depend on this crate, which
//! uses `resctrl` for `mpam` only.

use std::fmt;

/// Upper bound of CPU numbers. No kernel uses larger ones, so a larger number in a file is an error.
const CPU_MAX: usize = 1 << 16;

/// Logical CPUs, ascending and without duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// Parses `0-3,8`. The empty text is the empty set. `None` if the text is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let parts = text.trim().split(',').filter(|_| !text.trim().is_empty());
        let ranges: Option<Vec<_>> = parts.map(range).collect();
        Some(ranges?.into_iter().flatten().collect())
    }

    /// The CPUs, ascending.
    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// The lowest CPU.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The CPUs that are also in `other`.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self(self.iter().filter(|&cpu| other.contains(cpu)).collect())
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }
}

/// Parses `0-3` or `8`.
fn range(part: &str) -> Option<std::ops::RangeInclusive<usize>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last && last < CPU_MAX).then_some(first..=last)
}

impl FromIterator<usize> for CpuList {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let runs = self.0.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
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
        assert_eq!(CpuList::parse("0-3,8\n").unwrap().as_slice(), [0, 1, 2, 3, 8]);
        assert_eq!(CpuList::parse("\n").unwrap(), CpuList::default());
        assert_eq!(CpuList::parse("8,0-1,1").unwrap().as_slice(), [0, 1, 8]);
        for bad in ["3-1", "a", "0-", "-1", "1,,2", "0-4000000000", "99999999999999999999"] {
            assert_eq!(CpuList::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn prints_runs() {
        let print = |cpus: &[usize]| cpus.iter().copied().collect::<CpuList>().to_string();
        assert_eq!(print(&[0, 1, 2, 8, 10, 11]), "0-2,8,10-11");
        assert_eq!(print(&[]), "none");
    }

    proptest! {
        #[test]
        fn never_panics(text in "[0-9,\\- a]{0,20}") {
            let _ = CpuList::parse(&text);
        }

        #[test]
        fn printed_values_read_back(cpus in prop::collection::vec(0usize..300, 1..40)) {
            let list: CpuList = cpus.into_iter().collect();
            prop_assert_eq!(CpuList::parse(&list.to_string()), Some(list));
        }
    }
}
