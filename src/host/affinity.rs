//! Thread placement: choosing CPUs for the optimizer's workers, naming threads, pinning them.
//!
//! Pinning belongs to the cargo feature `mpam` (partitions and affinity). Without it threads are named and never pinned: [`pin_current`]
//! does nothing and [`thread_name`] omits the CPU.
//!
//! `core_affinity` pins a worker to its CPU. It supports single CPUs only and reports only success or failure, so `nix` sets masks of
//! several CPUs and reads back the kernel's result.

use crate::error::{Error, Result};
use crate::hardware::cpu_list::CpuList;
use crate::hardware::topology::{Cpu, Topology};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::thread;

/// Linux keeps this many bytes of a thread's name.
const NAME_BYTES_MAX: usize = 15;

/// CPUs for the threads of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuPlacement {
    /// CPUs without a worker, for all other threads: the driver, the loader, interrupts. Empty when the workers need all CPUs.
    pub others: CpuList,
    /// One CPU for each worker, ascending, so that neighbouring workers share caches.
    pub workers: Vec<usize>,
}

/// One CPU in this many has no worker: 7 of Grace's 72, as in the paper's partition.
const CPUS_PER_OTHER: usize = 10;

/// Number of CPUs among `cpus` without a worker, in a run on a GPU, whose driver thread needs one.
fn cpus_for_others(cpus: usize) -> usize {
    (cpus / CPUS_PER_OTHER).max(1)
}

/// Number of optimizer workers of a run on a GPU with `cpus` CPUs: one for each CPU except those without a worker.
pub fn workers_beside_others(cpus: usize) -> usize {
    cpus.saturating_sub(cpus_for_others(cpus)).max(1)
}

impl CpuPlacement {
    /// CPUs for `workers` optimizer workers on this machine. `None` when there are more workers than CPUs, when a CPU quota shows that
    /// other processes share the CPUs, or when the system does not allow pinning; nothing should be pinned then.
    pub fn on(topology: &Topology, workers: usize) -> Option<Self> {
        if pinning_refusal().is_some() {
            return None;
        }
        let usable = topology.usable_cpus().filter(|usable| usable.quota.is_none())?;
        Self::choose(&topology.cpus, &usable.affinity, &topology.gpu_interrupts, workers)
    }

    /// CPUs for `workers` optimizer workers among `allowed`; `None` when there are more workers than CPUs.
    ///
    /// With CPUs to spare, the lowest CPU has no worker, then the CPUs that serve `interrupts`, then the next lowest, up to a tenth of all.
    /// Every physical core gets a worker before an SMT sibling does. Workers are spread evenly over memory nodes and last-level caches,
    /// because their bandwidths add up. `cpus` describes the CPUs; a CPU without a description counts as a separate core.
    pub fn choose(cpus: &[Cpu], allowed: &CpuList, interrupts: &CpuList, workers: usize) -> Option<Self> {
        let spare = allowed.len().checked_sub(workers)?;
        let kept = kept(allowed, interrupts, spare.min(cpus_for_others(allowed.len())));
        let mut chosen: Vec<_> = spread(cpus, allowed).into_iter().filter(|cpu| !kept.contains(*cpu)).take(workers).collect();
        chosen.sort_unstable();
        Some(Self { others: allowed.iter().filter(|cpu| !chosen.contains(cpu)).collect(), workers: chosen })
    }

    /// Pins the calling thread, and threads that it will start, to the CPUs without a worker if there are several. With a single such CPU
    /// nothing is pinned, because all threads would share it.
    ///
    /// # Errors
    /// See [`pin_current`].
    pub(crate) fn keep_off_workers(&self, thread: &str) -> Result<()> {
        if self.others.len() > 1 { pin_current(thread, &self.others) } else { Ok(()) }
    }
}

/// `count` CPUs without a worker: the lowest of `allowed`, the CPUs that serve `interrupts`, then the next lowest.
fn kept(allowed: &CpuList, interrupts: &CpuList, count: usize) -> CpuList {
    let mut kept: Vec<usize> = Vec::with_capacity(count);
    let serving = interrupts.iter().filter(|&cpu| allowed.contains(cpu));
    for cpu in allowed.first().into_iter().chain(serving).chain(allowed.iter()) {
        if kept.len() < count && !kept.contains(&cpu) {
            kept.push(cpu);
        }
    }
    kept.into_iter().collect()
}

/// All of `allowed`, ordered so that each CPU shares as little as possible with the CPUs before it.
fn spread(cpus: &[Cpu], allowed: &CpuList) -> Vec<usize> {
    let alone = |id| Cpu { id, package: None, core: Some(id), numa_node: None, l3: None };
    let known = allowed.iter().map(|id| cpus.iter().find(|cpu| cpu.id == id).cloned().unwrap_or_else(|| alone(id)));
    let (mut threads, mut cores, mut caches) = (Counter::default(), Counter::default(), BTreeMap::new());
    let mut order: Vec<_> = known
        .map(|cpu| {
            let thread_of_core = threads.next((cpu.core.unwrap_or(cpu.id), None, None));
            let core_of_cache = cores.next((thread_of_core, cpu.numa_node, cpu.l3));
            let caches_of_node: &mut Vec<_> = caches.entry(cpu.numa_node).or_default();
            let cache_of_node = caches_of_node.iter().position(|&l3| l3 == cpu.l3).unwrap_or_else(|| {
                caches_of_node.push(cpu.l3);
                caches_of_node.len() - 1
            });
            (thread_of_core, core_of_cache, cache_of_node, cpu.numa_node, cpu.id)
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|rank| rank.4).collect()
}

/// Counts earlier occurrences of each key.
#[derive(Default)]
struct Counter(BTreeMap<(usize, Option<usize>, Option<usize>), usize>);

impl Counter {
    fn next(&mut self, key: (usize, Option<usize>, Option<usize>)) -> usize {
        let seen = self.0.entry(key).or_default();
        *seen += 1;
        *seen - 1
    }
}

/// Thread name `adam-03@cpu41`, or `adam-03` without pinning. The name has at most 15 bytes; a long role is shortened, the numbers are not.
pub(crate) fn thread_name(role: &str, index: usize, cpu: usize) -> String {
    let numbers = if cfg!(feature = "mpam") { format!("-{index:02}@cpu{cpu}") } else { format!("-{index:02}") };
    let mut name = role.to_owned();
    while name.len() + numbers.len() > NAME_BYTES_MAX && name.pop().is_some() {}
    name + &numbers
}

/// The reason why threads of this process cannot be pinned; sandboxes may forbid pinning, or ignore it. Tried once, on a separate thread.
pub(crate) fn pinning_refusal() -> Option<&'static str> {
    static REFUSAL: OnceLock<Option<String>> = OnceLock::new();
    let refusal = || thread::scope(|scope| thread::Builder::new().spawn_scoped(scope, try_pinning).ok()?.join().ok()?);
    REFUSAL.get_or_init(refusal).as_deref()
}

/// Pins the calling thread to its first allowed CPU, and returns the error if there is one.
fn try_pinning() -> Option<String> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).ok()?;
    let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap_or(false))?;
    pin_current("probe", &CpuList::from_iter([first])).err().map(|error| error.to_string())
}

/// Names the calling thread after `role`, `index` and `cpu` (see [`thread_name`]) and pins it to `cpu`.
///
/// # Errors
/// When the name cannot be written; `Resource` when the kernel refuses the CPU: it is offline, absent, or outside the cpuset.
pub fn name_and_pin(role: &str, index: usize, cpu: usize) -> Result<()> {
    let name = thread_name(role, index, cpu);
    let file = "/proc/thread-self/comm";
    std::fs::write(file, &name).map_err(|e| Error::io("write", file, e))?;
    pin_to_cpu(&name, cpu)
}

/// Pins the calling thread to `cpu` and verifies the result. `thread` is its name in errors.
///
/// # Errors
/// `Resource` when the kernel refuses: the CPU is offline, absent, or outside the cpuset.
#[cfg(feature = "mpam")]
fn pin_to_cpu(thread: &str, cpu: usize) -> Result<()> {
    let fail = |cause: String| Error::resource(format!("pin thread {thread} to CPU {cpu}"), cause);
    let mut wanted = CpuSet::new();
    wanted.set(cpu).map_err(|_| fail(format!("CPU {cpu} is beyond the {} of a mask", CpuSet::count())))?;
    if !core_affinity::set_for_current(core_affinity::CoreId { id: cpu }) {
        return Err(fail(std::io::Error::last_os_error().to_string()));
    }
    let got = sched_getaffinity(Pid::from_raw(0)).map_err(|e| fail(e.to_string()))?;
    if got == wanted { Ok(()) } else { Err(fail("the kernel pinned it elsewhere".into())) }
}

#[cfg(not(feature = "mpam"))]
fn pin_to_cpu(_thread: &str, _cpu: usize) -> Result<()> {
    Ok(())
}

/// Pins the calling thread to `cpus` and verifies the result. `thread` is its name in errors. Does nothing without the cargo feature
/// `mpam`.
///
/// # Errors
/// `Resource` when the kernel refuses, or omits a CPU (outside the cpuset, or offline).
pub(crate) fn pin_current(thread: &str, cpus: &CpuList) -> Result<()> {
    if !cfg!(feature = "mpam") {
        return Ok(());
    }
    let fail = |cause: String| Error::resource(format!("pin thread {thread} to CPU {cpus}"), cause);
    let this = Pid::from_raw(0);
    let mut wanted = CpuSet::new();
    for cpu in cpus.iter() {
        wanted.set(cpu).map_err(|_| fail(format!("CPU {cpu} is beyond the {} of a mask", CpuSet::count())))?;
    }
    sched_setaffinity(this, &wanted).map_err(|e| fail(e.to_string()))?;
    let got = sched_getaffinity(this).map_err(|e| fail(e.to_string()))?;
    if got == wanted { Ok(()) } else { Err(fail("the kernel left CPUs out".into())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::cgroup::Limit;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::two_sockets;

    /// CPUs in numerical order, each given by `(node, l3, core)`.
    fn cpus(of: &[(usize, usize, usize)]) -> Vec<Cpu> {
        let cpu = |(id, &(node, l3, core))| Cpu { id, package: Some(0), core: Some(core), numa_node: Some(node), l3: Some(l3) };
        of.iter().enumerate().map(cpu).collect()
    }

    fn choose(cpus: &[Cpu], allowed: &str, workers: usize) -> Option<(Option<usize>, Vec<usize>)> {
        let placement = CpuPlacement::choose(cpus, &CpuList::parse(allowed).unwrap(), &CpuList::default(), workers)?;
        Some((placement.others.first(), placement.workers))
    }

    /// Two nodes with one cache and two cores each; the numbers of siblings differ by four.
    fn two_nodes() -> Vec<Cpu> {
        cpus(&[(0, 0, 0), (0, 0, 1), (1, 2, 2), (1, 2, 3), (0, 0, 0), (0, 0, 1), (1, 2, 2), (1, 2, 3)])
    }

    #[test]
    fn physical_cores_come_before_siblings() {
        // The driver has core 0, so its sibling 4 comes after the cores 1, 2, 3.
        assert_eq!(choose(&two_nodes(), "0-7", 3), Some((Some(0), vec![1, 2, 3])));
        assert_eq!(choose(&two_nodes(), "0-7", 4), Some((Some(0), vec![1, 2, 3, 4])));
        assert_eq!(choose(&two_nodes(), "0-7", 7), Some((Some(0), (1..8).collect())));
    }

    #[test]
    fn workers_spread_over_nodes_and_caches() {
        assert_eq!(choose(&two_nodes(), "0-7", 2), Some((Some(0), vec![1, 2])));
        let four_caches = cpus(&[(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 3, 3), (0, 3, 4), (0, 3, 5), (1, 6, 6), (1, 6, 7), (1, 8, 8)]);
        assert_eq!(choose(&four_caches, "0-8", 4), Some((Some(0), vec![1, 3, 6, 8])));
        // The driver is on node 0 already.
        assert_eq!(choose(&four_caches, "0-8", 1), Some((Some(0), vec![6])));
    }

    #[test]
    fn the_driver_shares_when_there_is_no_cpu_to_spare() {
        assert_eq!(choose(&two_nodes(), "2-3", 1), Some((Some(2), vec![3])));
        assert_eq!(choose(&two_nodes(), "2-3", 2), Some((None, vec![2, 3])));
        assert_eq!(choose(&two_nodes(), "2-3", 3), None);
    }

    #[test]
    fn cpus_without_facts_count_as_cores() {
        assert_eq!(choose(&[], "4,9,11", 2), Some((Some(4), vec![9, 11])));
    }

    #[test]
    fn a_tenth_of_many_cpus_is_kept_free_with_those_that_serve_interrupts() {
        let all = CpuList::from_iter(0..72);
        let choose =
            |interrupts: &str| CpuPlacement::choose(&[], &all, &CpuList::parse(interrupts).unwrap(), workers_beside_others(72)).unwrap();
        assert_eq!(choose(""), CpuPlacement { others: CpuList::from_iter(0..7), workers: (7..72).collect() });
        assert_eq!(choose("40-41,90").others, CpuList::parse("0-4,40-41").unwrap());
        assert_eq!([16, 2, 1].map(workers_beside_others), [15, 1, 1]);
    }

    #[test]
    fn a_quota_means_that_nothing_is_pinned() {
        let mut topology = Topology::read(two_sockets().path(), Process::default());
        assert_eq!(CpuPlacement::on(&topology, 6).unwrap().workers.len(), 6);
        topology.cgroup.cpu_quota = Some(Limit { value: 6.0, file: "cpu.max".into() });
        assert_eq!(CpuPlacement::on(&topology, 6), None);
    }

    #[test]
    fn names_fit_and_keep_their_numbers() {
        if cfg!(feature = "mpam") {
            assert_eq!(thread_name("adam", 3, 41), "adam-03@cpu41");
            assert_eq!(thread_name("optimizer", 103, 287), "opti-103@cpu287");
            assert_eq!(thread_name("ärä", 1003, 1287), "ä-1003@cpu1287");
        } else {
            assert_eq!(thread_name("adam", 3, 41), "adam-03");
        }
    }

    /// Affinity and name of a new thread after `work`.
    fn in_thread<T: Send>(work: impl FnOnce(&CpuList) -> T + Send) -> (T, CpuList, String) {
        let run = || {
            let before = Process::current().affinity.unwrap();
            let result = work(&before);
            let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim().to_owned();
            (result, Process::current().affinity.unwrap(), name)
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn a_pinned_thread_runs_on_the_cpu_in_its_name() {
        let mut cpu = 0;
        let (result, after, name) = in_thread(|allowed| {
            cpu = *allowed.as_slice().last().unwrap();
            name_and_pin("adam", 3, cpu)
        });
        result.unwrap();
        assert_eq!(name, thread_name("adam", 3, cpu));
        if cfg!(feature = "mpam") {
            assert_eq!(after.as_slice(), [cpu]);
        }
    }

    #[cfg(feature = "mpam")]
    #[test]
    fn a_cpu_that_is_not_there_is_an_error_that_names_thread_and_cpu() {
        let to_cpu = |cpu| in_thread(|_| name_and_pin("adam", 0, cpu)).0.unwrap_err().to_string();
        assert_eq!(to_cpu(1023), "pin thread adam-00@cpu1023 to CPU 1023: Invalid argument (os error 22)");
        assert_eq!(to_cpu(5000), "pin thread adam-00@cpu5000 to CPU 5000: CPU 5000 is beyond the 1024 of a mask");
        let pin = |cpus: &'static str| in_thread(|_| pin_current("adam-00", &CpuList::parse(cpus).unwrap())).0.unwrap_err().to_string();
        assert_eq!(pin("1023"), "pin thread adam-00 to CPU 1023: EINVAL: Invalid argument");
        assert_eq!(pin("5000"), "pin thread adam-00 to CPU 5000: CPU 5000 is beyond the 1024 of a mask");
        let (result, ..) = in_thread(|allowed| pin_current("adam-00", &allowed.iter().chain([1023]).collect()));
        assert!(result.unwrap_err().to_string().ends_with("the kernel left CPUs out"));
    }

    #[cfg(feature = "mpam")]
    #[test]
    fn a_thread_keeps_off_the_workers_only_if_several_cpus_remain() {
        let (result, after, _) = in_thread(|allowed| {
            let lowest = CpuList::from_iter([allowed.as_slice()[0]]);
            CpuPlacement { others: lowest, workers: vec![1] }.keep_off_workers("driver").map(|()| allowed.clone())
        });
        assert_eq!(result.unwrap(), after);
        let nowhere = CpuPlacement { others: CpuList::from_iter([1022, 1023]), workers: vec![0] };
        assert!(in_thread(|_| nowhere.keep_off_workers("driver")).0.is_err());
    }

    #[cfg(not(feature = "mpam"))]
    #[test]
    fn without_the_feature_nothing_is_pinned() {
        let (result, after, _) = in_thread(|allowed| pin_current("adam-00", &CpuList::from_iter([1023])).map(|()| allowed.clone()));
        assert_eq!(result.unwrap(), after);
    }
}
