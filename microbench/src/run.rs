//! Timed jobs on the engine's pool: the driver submits a job, waits for its end and submits the next one.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use superoffload::Result;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{
    CpuPlacement, Doorbell, HostMemory, HugePagesChoice, Job, MemoryPolicy, ResctrlGroup, Threads, join_optimizer, name_and_pin,
};
use superoffload::internals::trace::Recorder;

/// Jobs before the clock starts. They map pages, wake threads and train branch predictors.
const WARM_UP: usize = 2;

/// Maximum number of jobs in a run; a worker's recorder stores as many spans.
const JOBS_MAX: usize = 1 << 12;

/// Host memory as `train` maps it for this machine's CPUs: bound to the NUMA nodes of the workers and faulted in by them.
///
/// # Errors
/// `Resource` if huge pages are required but not available.
pub fn host_memory(pages: HugePagesChoice) -> Result<HostMemory> {
    policy(pages, workers_of_this_machine()).map(HostMemory::new)
}

fn workers_of_this_machine() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn policy(pages: HugePagesChoice, workers: usize) -> Result<MemoryPolicy> {
    let topology = Topology::this_machine();
    let cpus = CpuPlacement::on(&topology, workers).map_or(Vec::new(), |placement| placement.workers);
    MemoryPolicy::new(&topology, pages, &cpus, workers)
}

/// Duration and placement of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// Worker threads.
    pub threads: usize,
    /// Pin each worker to the CPU that `train` would choose; otherwise the scheduler places the workers.
    pub pin: bool,
    /// Duration of the run; at least one job runs.
    pub seconds: f64,
    /// Partition of cache and bandwidth that the workers join.
    pub group: &'a ResctrlGroup,
}

/// Timing of a run.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Number of timed jobs.
    pub jobs: usize,
    /// Whether each worker was pinned to a CPU.
    pub pinned: bool,
    /// Description of the workers' partition of cache and bandwidth.
    pub partition: String,
    /// Time from the first job's submission to the last job's end.
    pub wall_s: f64,
    /// Median time of a job, from submission to end.
    pub median_s: f64,
    /// Time in which the average worker runs pieces, over all jobs.
    pub busy_s: f64,
    /// Time from the first worker's start to the last worker's end, summed over all jobs.
    pub longest_s: f64,
}

impl Timing {
    /// Time in which the average worker waits for the last one, in percent of the run.
    pub fn skew_percent(&self) -> f64 {
        100.0 * (self.longest_s - self.busy_s) / self.wall_s
    }

    /// Time between jobs (from the last worker's end to the first worker's next start, including the wake-up), in percent of the run.
    pub fn handover_percent(&self) -> f64 {
        100.0 * (self.wall_s - self.longest_s) / self.wall_s
    }
}

/// Runs `job(0)`, `job(1)`, ... on a new pool. All workers start each job together, at the pool's barrier.
/// Runs `job(0)`, `job(1)`, ... on a new pool. All workers take part in every job.
///
/// # Errors
/// `Resource` if a thread cannot be started or pinned, if a group cannot be joined, or if a job panics.
pub fn run<J: Job>(setting: Setting<'_>, mut job: impl FnMut(usize) -> J) -> Result<Timing> {
    let bell = Arc::new(Doorbell::default());
    let placement = if setting.pin { CpuPlacement::on(&Topology::this_machine(), setting.threads) } else { None };
    let pinned = placement.is_some();
    let worker_nodes = policy(HugePagesChoice::Auto, setting.threads)?.worker_nodes();
    let on_start = move |worker: usize| placement.as_ref().map_or(Ok(()), |place| name_and_pin("adam", worker, place.workers[worker]));
    let mut pool = Threads::start(setting.threads, worker_nodes, bell.clone(), JOBS_MAX, on_start)?;
    let partition = join_optimizer(setting.group, Path::new("/sys/fs/resctrl"))?;
    let mut time = |index| -> Result<Duration> {
        let job = job(index);
        let started = Instant::now();
        pool.submit(job);
        let mut idle = Ok(false);
        bell.wait_until(|| {
            idle = pool.is_idle();
            !matches!(idle, Ok(false))
        });
        idle.map(|_| started.elapsed())
    };
    for index in 0..WARM_UP {
        time(index)?;
    }
    let (started, mut times) = (Instant::now(), Vec::new());
    while WARM_UP + times.len() < JOBS_MAX && (times.is_empty() || started.elapsed().as_secs_f64() < setting.seconds) {
        times.push(time(WARM_UP + times.len())?);
    }
    let wall_s = started.elapsed().as_secs_f64();
    times.sort_unstable();
    let (jobs, workers) = (times.len(), pool.finish()?);
    let (busy_s, longest_s) = (busy_s(&workers, jobs), (0..jobs).map(|job| longest_s(&workers, job)).sum());
    Ok(Timing { jobs, pinned, partition, wall_s, median_s: times[jobs / 2].as_secs_f64(), busy_s, longest_s })
}

fn busy_s(workers: &[Recorder], jobs: usize) -> f64 {
    let spans = workers.iter().flat_map(|worker| worker.spans().range(WARM_UP..WARM_UP + jobs));
    spans.map(|span| seconds(span.duration_ns)).sum::<f64>() / workers.len() as f64
}

fn longest_s(workers: &[Recorder], job: usize) -> f64 {
    let spans = || workers.iter().map(|worker| &worker.spans()[WARM_UP + job]);
    let start = spans().map(|span| span.start_ns).min().unwrap_or(0);
    seconds(spans().map(|span| span.start_ns + span.duration_ns).max().unwrap_or(0) - start)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;
    use superoffload::internals::host::Call;

    #[test]
    fn parts_of_the_time_add_up() {
        let sleep = |_| Call { label: ("sleep", 0), pieces: 4, run: |_| std::thread::sleep(Duration::from_millis(1)) };
        let timing = run(Setting { threads: 2, pin: false, seconds: 0.02, group: &ResctrlGroup::None }, sleep).unwrap();
        assert!(timing.jobs >= 1 && !timing.pinned);
        assert!(timing.busy_s <= timing.longest_s && timing.longest_s <= timing.wall_s, "{timing:?}");
        assert!(timing.median_s >= 0.001 && timing.wall_s >= 0.001 * timing.jobs as f64, "{timing:?}");
        assert!((0.0..=100.0).contains(&timing.skew_percent()) && (0.0..=100.0).contains(&timing.handover_percent()));
    }
}
