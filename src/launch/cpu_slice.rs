//! The share of each rank: CPUs, NUMA nodes, and the plan's thread count.

use crate::error::Result;
use crate::hardware::topology::Topology;
use crate::host::affinity::CpuPlacement;
use crate::planner::plan::Plan;

/// Difference between the random seeds of two successive ranks.
const SEED_STEP: u64 = 0x9e37_79b9;

/// The resources of one rank.
#[derive(Clone, Debug)]
pub(crate) struct CpuSlice {
    /// The plan, adapted to the rank.
    pub plan: Plan,
    /// A CPU for each of the rank's optimizer threads, if the rank has enough CPUs of its own.
    pub placement: Option<CpuPlacement>,
}

impl CpuSlice {
    /// Moves the calling thread (the rank's driver thread), and the threads it starts later, off the CPUs of the rank's optimizer threads.
    ///
    /// # Errors
    /// `Resource` if the kernel rejects the CPUs.
    pub(super) fn keep_off_workers(&self) -> Result<()> {
        if let Some(placement) = &self.placement { placement.keep_off_workers("driver") } else { Ok(()) }
    }
}

/// The share of a single rank, which has the whole machine of `topology`.
pub(crate) fn whole(plan: &Plan, topology: &Topology) -> CpuSlice {
    slice_of(plan, topology, topology.cpu_slice(0, &[None]), (0, 1))
}

/// The shares of the ranks of this process on the machine of `topology`. `gpu_nodes` are the NUMA nodes near the ranks' GPUs.
pub(crate) fn of(plan: &Plan, topology: &Topology, gpu_nodes: &[Option<usize>]) -> Vec<CpuSlice> {
    let cpu_slice = |place| slice_of(plan, topology, topology.cpu_slice(place, gpu_nodes), (place, gpu_nodes.len()));
    (0..gpu_nodes.len()).map(cpu_slice).collect()
}

/// The share of rank `place` of `ranks` ranks. Threads are divided in proportion to CPUs, so that each driver thread has a CPU, too.
fn slice_of(plan: &Plan, machine: &Topology, own: Option<Topology>, (place, ranks): (usize, usize)) -> CpuSlice {
    let cpus = |topology: &Topology| topology.usable_cpus().map_or(0, |usable| usable.affinity.len());
    let (part, whole) = own.as_ref().map_or((1, ranks), |own| (cpus(own), cpus(machine)));
    let threads = (plan.site.threads * part / whole).max(1);
    let placement = own.as_ref().filter(|_| plan.protocol.techniques.mpam).and_then(|own| CpuPlacement::on(own, threads));
    let workers = placement.as_ref().map_or(&[][..], |placement| &placement.workers);
    // A plan whose host memory is not touched in advance does not bind it to NUMA nodes either.
    let is_bound = !plan.site.host_memory.touchers.is_empty();
    let host_memory = own.filter(|_| is_bound).map(|own| plan.site.host_memory.within(&own, workers, threads));
    let mut plan = plan.clone().with_host_memory(host_memory.unwrap_or_else(|| plan.site.host_memory.clone()));
    plan.site.threads = threads;
    plan.site.adversary = plan.site.adversary.map(|seed| seed.wrapping_add(place as u64 * SEED_STEP));
    CpuSlice { plan, placement }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::two_sockets;
    use crate::host::memory_policy::{HugePagesChoice, MemoryPolicy};
    use crate::model::shape::ModelShape;
    use crate::planner::machine::Machine;

    /// The plan of `ranks` ranks with `threads` threads in total, on two sockets with seven CPUs.
    fn plan(ranks: usize, threads: usize, topology: &Topology) -> Plan {
        let settings = Settings { gpus: ranks, threads: Some(threads), ..Settings::demo() };
        let plan = Plan::new(&settings.request(&ModelShape::demo()), &Machine::cpu(7), false).unwrap();
        let host_memory = MemoryPolicy::new(topology, HugePagesChoice::Off, &[], threads).unwrap();
        plan.with_host_memory(host_memory)
    }

    #[test]
    fn a_rank_on_a_node_has_its_workers_and_its_memory_there() {
        let topology = Topology::read(two_sockets().path(), Process::default());
        let cpu_slices = of(&plan(2, 5, &topology), &topology, &[Some(1), Some(0)]);
        let of_each = |of: &dyn Fn(&CpuSlice) -> Vec<usize>| cpu_slices.iter().map(of).collect::<Vec<_>>();
        assert_eq!(of_each(&|cpu_slice| cpu_slice.plan.site.host_memory.nodes.clone()), [[1], [0]]);
        assert_eq!(
            of_each(&|cpu_slice| vec![cpu_slice.plan.site.threads, cpu_slice.plan.site.host_memory.touchers.len()]),
            [[2, 2], [2, 2]]
        );
        if cfg!(feature = "mpam") {
            assert_eq!(of_each(&|cpu_slice| cpu_slice.placement.as_ref().unwrap().workers.clone()), [[3, 6], [1, 4]]);
            assert_eq!(of_each(&|cpu_slice| cpu_slice.placement.as_ref().unwrap().others.as_slice().to_vec()), [vec![2], vec![0, 5]]);
        }
    }

    #[test]
    fn no_thread_is_pinned_where_cpus_are_fewer_than_ranks() {
        let topology = Topology::read(two_sockets().path(), Process::default());
        let plan = plan(8, 7, &topology);
        let cpu_slices = of(&plan, &topology, &[None; 8]);
        assert!(cpu_slices.iter().all(|cpu_slice| cpu_slice.placement.is_none() && cpu_slice.plan.site.threads == 1));
        assert!(cpu_slices.iter().all(|cpu_slice| cpu_slice.plan.site.host_memory == plan.site.host_memory));
    }

    #[test]
    fn one_rank_has_the_whole_machine() {
        let topology = Topology::read(two_sockets().path(), Process::default());
        let plan = plan(1, 6, &topology);
        let [cpu_slice] = &of(&plan, &topology, &[None])[..] else { panic!("one") };
        assert_eq!(cpu_slice.plan.site.threads, 6);
        assert_eq!(cpu_slice.placement, CpuPlacement::on(&topology, 6).filter(|_| plan.protocol.techniques.mpam));
    }
}
