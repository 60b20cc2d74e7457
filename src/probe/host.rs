//! CPUs and their memory: triad, optimizer passes and casts by threads, and wake-up time.

use super::product::doublings;
use super::samples::{curve, sourced};
use super::states::{States, Triad};
use super::workers::Workers;
use crate::engine::step_job::StepJob;
use crate::error::Result;
use crate::hardware::profile::Host;
use crate::hardware::topology::Topology;
use crate::host::affinity::{CpuPlacement, workers_beside_others};
use crate::host::wakeup::WakeUp;

/// Measures the host for about `time_s`. `states` are in its memory, and `cpus` is the number of usable CPUs.
///
/// # Errors
/// `Resource` if threads or memory are not available.
pub(crate) fn measure(topology: &Topology, cpus: usize, states: &States, time_s: f64) -> Result<Host> {
    let workers = workers_beside_others(cpus);
    let wake_up = WakeUp::measure(workers, CpuPlacement::on(topology, workers))?;
    let triad = Workers::<Triad>::new(topology, cpus)?.rates(0.1 * time_s, |_| states.triad())?;
    let counts = thread_counts(cpus);
    let each_s = 0.9 * time_s / counts.len() as f64;
    let (mut adam, mut cast) = (Vec::new(), Vec::new());
    for threads in counts {
        let mut workers = Workers::<StepJob>::new(topology, threads)?;
        adam.push((threads as f64, workers.rates(0.6 * each_s, |index| states.adam(index))?));
        cast.push((threads as f64, workers.rates(0.4 * each_s, |index| states.cast(index))?));
    }
    Ok(Host {
        cpus: sourced(cpus as f64, "CPUs that this process may use"),
        memory_bytes: sourced(topology.memory_usable_bytes().unwrap_or(0) as f64, "available now"),
        memory_bytes_per_s: triad.sourced(),
        adam_bytes_per_s_by_threads: curve(&adam),
        adam_scalar_bytes_per_s_by_threads: None,
        cast_bytes_per_s_by_threads: curve(&cast),
        wake_up_s: sourced(wake_up.spinning.ns_median as f64 * 1e-9, &wake_up.to_string()),
    })
}

/// Thread counts: powers of two, all CPUs, and the number of workers of a run on a GPU.
fn thread_counts(cpus: usize) -> Vec<usize> {
    let mut counts: Vec<_> = doublings(1, cpus).chain([workers_beside_others(cpus)]).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_double_and_workers_and_all_cpus_are_among_them() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(16), [1, 2, 4, 8, workers_beside_others(16), 16]);
        assert_eq!(thread_counts(72), [1, 2, 4, 8, 16, 32, 64, 65, 72]);
    }
}
