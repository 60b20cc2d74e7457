//! Checks of the usable CPUs and of resource limits, so that no run is slow or killed without an explanation.

use super::topology::{Topology, UsableCpus};
use crate::error::{Error, Result};
use crate::units::Bytes;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::fmt::Display;

/// The optimizer of a GPU is rejected on less than this part of the machine's CPUs, unless the user set the number of threads. A GPU of
/// eight with its share of the CPUs is far above this limit.
const PART_REFUSED: usize = 16;

/// Below this part of the CPUs there is a warning.
const PART_WARNED: usize = 2;

/// Address space and data that the program needs before it parses its options: code, thread stacks, the allocator's arenas.
const ADDRESS_BYTES_MIN: u64 = 64 << 20;
const DATA_BYTES_MIN: u64 = 32 << 20;

/// Rejects memory limits (`ulimit -v`, `-d`) under which an allocation would soon abort the process without an error message.
///
/// # Errors
/// `Resource` with the limit, its value and the required value.
pub(crate) fn check_memory_limits() -> Result<()> {
    for (limit, flag, least) in [(Resource::RLIMIT_AS, "-v", ADDRESS_BYTES_MIN), (Resource::RLIMIT_DATA, "-d", DATA_BYTES_MIN)] {
        if let Ok((soft, _hard)) = getrlimit(limit)
            && soft < least
        {
            let [allowed, needed] = Bytes::apart([soft, least]);
            let cause = format!("ulimit {flag} allows {allowed}, the program alone needs {needed}; raise it");
            return Err(Error::resource("start", cause));
        }
    }
    Ok(())
}

/// Checks that the limit of file sizes (`ulimit -f`) permits files of `bytes` bytes for `operation`.
///
/// # Errors
/// `Resource` with the limit, both sizes and the required value.
pub(crate) fn check_file_size(operation: impl Display, bytes: u64) -> Result<()> {
    match getrlimit(Resource::RLIMIT_FSIZE) {
        Ok((soft, _hard)) if soft < bytes => {
            let [allowed, needed] = Bytes::apart([soft, bytes]);
            let cause = format!("ulimit -f allows files of {allowed}, the largest has {needed}; raise it (ulimit -f unlimited)");
            Err(Error::resource(operation, cause))
        }
        _ => Ok(()),
    }
}

/// Whether the address space is limited (`ulimit -v`).
pub(crate) fn has_address_limit() -> bool {
    getrlimit(Resource::RLIMIT_AS).is_ok_and(|(soft, _hard)| soft != RLIM_INFINITY)
}

/// Reasons why the process cannot use every CPU of the machine, each with a remedy.
pub(crate) fn reasons(topology: &Topology) -> Vec<String> {
    let Some(usable) = topology.usable_cpus() else { return Vec::new() };
    [quota(topology, &usable), mask(topology, &usable)].into_iter().flatten().collect()
}

fn quota(topology: &Topology, usable: &UsableCpus) -> Option<String> {
    let limit = topology.cgroup.cpu_quota.as_ref()?;
    let cpus = usable.affinity.len();
    let limits = limit.value < cpus as f64;
    limits.then(|| format!("the cgroup grants {:.1} of {cpus} CPUs' time: raise {}", limit.value, limit.file.display()))
}

fn mask(topology: &Topology, usable: &UsableCpus) -> Option<String> {
    let cpus = usable.affinity.len();
    let cause = match &topology.cgroup.cpus {
        Some(limit) if limit.value.len() <= cpus => format!("widen {}", limit.file.display()),
        _ => "start without taskset or numactl".into(),
    };
    (cpus < usable.online).then(|| format!("only {cpus} of {} CPUs are allowed ({}): {cause}", usable.online, usable.affinity))
}

/// Checks the requested number of threads, if any, against the usable CPUs. Returns a warning if the automatic choice is a small part of
/// the machine. With `on_gpu` a GPU waits for the optimizer.
///
/// # Errors
/// `Usage` if more threads are requested than can run; `Resource` if the automatic choice would be many times slower than the machine while
/// a GPU waits for it.
pub(crate) fn check_threads(topology: &Topology, requested: Option<usize>, on_gpu: bool) -> Result<Option<String>> {
    let Some(usable) = topology.usable_cpus() else { return Ok(None) };
    let (count, online, reasons) = (usable.count(), usable.online, reasons(topology).join("; "));
    match requested {
        Some(threads) if threads > count => {
            let why = if reasons.is_empty() { "it has no more".into() } else { reasons };
            Err(Error::usage(format!(
                "--threads {threads}: {count} of this machine's {online} CPUs can be used ({why}); or use --threads {count}"
            )))
        }
        None if on_gpu && count * PART_REFUSED < online => {
            let cause = format!(
                "{:.0} times slower than the machine; {reasons}; pass --threads {count} to run nevertheless",
                online as f64 / count as f64
            );
            Err(Error::resource(format!("run the optimizer on {count} of {online} CPUs"), cause))
        }
        None if count * PART_WARNED < online => Ok(Some(format!("{count} of {online} CPUs are used: {reasons}"))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpu_list::CpuList;
    use super::super::topology::Process;
    use super::super::topology::tests::{container, grace};
    use super::*;

    fn on(dir: &tempfile::TempDir, affinity: &str) -> Topology {
        Topology::read(dir.path(), Process { affinity: CpuList::parse(affinity), memlock_bytes: None, ..Process::default() })
    }

    #[test]
    fn two_of_72_cpus_are_an_error_with_the_numbers_or_a_wish() {
        let topology = on(&container(), "0-71");
        let error = check_threads(&topology, None, true).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("run the optimizer on 2 of 72 CPUs: 36 times slower than the machine; the cgroup grants 2.0 of 4"),
            "{message}"
        );
        assert!(
            message.contains("only 4 of 72 CPUs are allowed (8-11): widen ") && message.ends_with("; pass --threads 2 to run nevertheless"),
            "{message}"
        );
        assert_eq!((error.exit_code(), check_threads(&topology, Some(2), true).unwrap()), (1, None));
        let warning = check_threads(&topology, None, false).unwrap().unwrap();
        assert!(warning.starts_with("2 of 72 CPUs are used: the cgroup grants"), "{warning}");
    }

    #[test]
    fn more_threads_than_cpus_are_refused_with_a_remedy() {
        let error = check_threads(&on(&grace(), "0-15"), Some(17), true).unwrap_err();
        let message = "--threads 17: 16 of this machine's 72 CPUs can be used (only 16 of 72 CPUs are allowed (0-15): start without \
            taskset or numactl); or use --threads 16";
        assert_eq!((error.to_string().as_str(), error.exit_code()), (message, 2));
        let all = check_threads(&on(&grace(), "0-71"), Some(73), false).unwrap_err().to_string();
        assert!(all.contains("72 of this machine's 72 CPUs can be used (it has no more)"), "{all}");
    }

    #[test]
    fn a_fair_share_of_a_machine_is_no_news() {
        for affinity in ["0-71", "0-35"] {
            assert_eq!(check_threads(&on(&grace(), affinity), None, true).unwrap(), None);
        }
        assert!(check_threads(&on(&grace(), "0-8"), None, true).unwrap().is_some());
        let nowhere = tempfile::tempdir().unwrap();
        assert_eq!(check_threads(&Topology::read(nowhere.path(), Process::default()), Some(9), true).unwrap(), None);
    }
}
