//! The affinity and the limits of this process.

use super::cpu_list::CpuList;
use super::parse;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::unistd::Pid;
use std::fs;

/// Facts that only system calls provide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// CPUs that the calling thread may run on.
    pub(crate) affinity: Option<CpuList>,
    /// Limit of locked memory (`RLIMIT_MEMLOCK`); `u64::MAX`: unlimited.
    pub(crate) memlock_bytes: Option<u64>,
    /// Bytes left by the limits of address space and data (`RLIMIT_AS`, `RLIMIT_DATA`); `None` if unlimited.
    pub(crate) free_address_bytes: Option<u64>,
    /// Resident memory of the process, which counts towards the limit of its control group.
    pub rss_bytes: u64,
}

impl Process {
    /// The calling thread's affinity and the process's limits.
    pub fn current() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = |set: CpuSet| (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu) == Ok(true)).collect();
        Self {
            affinity: sched_getaffinity(Pid::from_raw(0)).ok().map(allowed),
            memlock_bytes: getrlimit(Resource::RLIMIT_MEMLOCK).ok().map(|(soft, _hard)| soft),
            free_address_bytes: free_address_bytes(&status),
            rss_bytes: parse::meminfo_bytes(&status, "VmRSS").unwrap_or(0),
        }
    }
}

/// Computes [`Process::free_address_bytes`]. `status` is the text of `/proc/self/status`.
fn free_address_bytes(status: &str) -> Option<u64> {
    let free_bytes = |limit, used: &str| {
        let (soft, _hard) = getrlimit(limit).ok().filter(|(soft, _hard)| *soft != RLIM_INFINITY)?;
        Some(soft.saturating_sub(parse::meminfo_bytes(status, used).unwrap_or(0)))
    };
    [free_bytes(Resource::RLIMIT_AS, "VmSize"), free_bytes(Resource::RLIMIT_DATA, "VmData")].into_iter().flatten().min()
}
