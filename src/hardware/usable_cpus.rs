//! The CPUs that a process can use.

use super::cpu_list::CpuList;
use std::fmt;

/// CPUs that this process can use, with the limits.
#[derive(Clone, Debug, PartialEq)]
pub struct UsableCpus {
    /// CPUs of the affinity mask.
    pub(crate) affinity: CpuList,
    /// CPU time granted by the control groups, in units of one CPU.
    pub(crate) quota: Option<f64>,
    /// Number of online CPUs of the machine.
    pub(crate) online: usize,
}

impl UsableCpus {
    /// Useful number of threads: the CPUs of the mask, at most the quota rounded up, and at least one.
    pub fn count(&self) -> usize {
        let quota = self.quota.map_or(usize::MAX, |quota| quota.ceil() as usize);
        self.affinity.len().min(quota).max(1)
    }
}

impl fmt::Display for UsableCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} CPUs (affinity {}, ", self.count(), self.online, self.affinity)?;
        match self.quota {
            Some(quota) => write!(f, "cgroup quota {quota:.1})"),
            None => f.write_str("no cgroup quota)"),
        }
    }
}
