//! Division of a machine among several ranks: the CPUs of each rank, which also determine its memory nodes.

use super::cpu_list::CpuList;
use super::gpu::is_same_pci;
use super::topology::{Cpu, Process, Topology};

impl Topology {
    /// The part of this machine that rank `rank` uses. `gpu_nodes` has the memory node near each rank's GPU, if known.
    ///
    /// The CPUs of a home node are divided among the ranks with this home, and those of other nodes among all ranks. If a home is unknown
    /// or has fewer CPUs than ranks, all CPUs are divided evenly, node by node. SMT siblings are kept adjacent in both cases. `None` if
    /// there are fewer CPUs than ranks.
    pub(crate) fn cpu_slice(&self, rank: usize, gpu_nodes: &[Option<usize>]) -> Option<Self> {
        let usable = self.usable_cpus()?.affinity;
        if usable.len() < gpu_nodes.len() {
            return None;
        }
        let cpus = self.neighbours_together(&usable);
        let count = |node: usize| cpus.iter().filter(|cpu| cpu.numa_node == Some(node)).count();
        let ranks_of = |node| (0..gpu_nodes.len()).filter(|&rank| gpu_nodes[rank] == node).collect::<Vec<_>>();
        let all_have_cpus = gpu_nodes.iter().all(|&gpu_node| gpu_node.is_some_and(|node| count(node) >= ranks_of(gpu_node).len()));
        let groups: Vec<_> = if all_have_cpus { cpus.chunk_by(|a, b| a.numa_node == b.numa_node).collect() } else { vec![&cpus[..]] };
        let part_of = |group: &[Cpu]| {
            let residents = ranks_of(group[0].numa_node);
            let members = if all_have_cpus && !residents.is_empty() { residents } else { (0..gpu_nodes.len()).collect() };
            let cut = |nth: usize| group.len() * nth / members.len();
            let part = members.iter().position(|&member| member == rank).map_or(0..0, |nth| cut(nth)..cut(nth + 1));
            group[part].iter().map(|cpu| cpu.id).collect::<Vec<_>>()
        };
        let affinity: CpuList = groups.into_iter().flat_map(part_of).collect();
        Some(Self { process: Process { affinity: Some(affinity), ..self.process.clone() }, ..self.clone() })
    }

    /// The memory node near the GPU at a PCI address.
    pub(crate) fn node_of_gpu(&self, pci: &str) -> Option<usize> {
        self.pci_gpus.iter().find(|gpu| is_same_pci(&gpu.address, pci)).and_then(|gpu| gpu.numa_node)
    }

    /// The facts of the `allowed` CPUs, sorted by node, cache and core. An unknown CPU counts as a separate core.
    fn neighbours_together(&self, allowed: &CpuList) -> Vec<Cpu> {
        let alone = |id| Cpu { id, package: None, core: Some(id), numa_node: None, l3: None };
        let known = |id| self.cpus.iter().find(|cpu| cpu.id == id).cloned().unwrap_or_else(|| alone(id));
        let mut cpus: Vec<_> = allowed.iter().map(known).collect();
        cpus.sort_by_key(|cpu| (cpu.numa_node, cpu.l3, cpu.core.unwrap_or(cpu.id), cpu.id));
        cpus
    }
}

#[cfg(test)]
mod tests {
    use super::super::topology::tests::{grace, tree, two_sockets};
    use super::*;
    use proptest::prelude::*;

    fn affinity(topology: &Topology) -> CpuList {
        topology.usable_cpus().unwrap().affinity
    }

    fn slices(topology: &Topology, gpu_nodes: &[Option<usize>]) -> Vec<String> {
        (0..gpu_nodes.len()).map(|rank| affinity(&topology.cpu_slice(rank, gpu_nodes).unwrap()).to_string()).collect()
    }

    #[test]
    fn a_rank_has_the_cpus_and_the_memory_of_its_gpus_node() {
        let server = Topology::read(two_sockets().path(), Process::default());
        assert_eq!(slices(&server, &[Some(1), Some(0)]), ["2-3,6", "0-1,4-5"]);
        let second = server.cpu_slice(0, &[Some(1), Some(0)]).unwrap();
        assert_eq!(second.nodes_beside(&affinity(&second)), [1]);
        // The numbers of siblings differ by four. A node that is no rank's home is shared by all.
        assert_eq!(slices(&server, &[Some(0), Some(0)]), ["0,2,4", "1,3,5-6"]);
        // The second home is unknown or too small, so CPUs are divided evenly, node by node.
        for gpu_nodes in [[Some(0), None], [None, None], [Some(0), Some(7)]] {
            assert_eq!(slices(&server, &gpu_nodes), ["0-1,4", "2-3,5-6"], "{gpu_nodes:?}");
        }
        let four = [Some(1), Some(1), Some(1), Some(1)];
        assert_eq!(slices(&server, &four), ["0", "1,4", "2,5", "3,6"], "three CPUs at home for four");
        assert_eq!(server.cpu_slice(0, &[None; 8]), None, "7 CPUs for 8");
    }

    #[test]
    fn one_rank_has_the_machine() {
        let process = Process { affinity: CpuList::parse("0-71"), ..Process::default() };
        for topology in [Topology::read(grace().path(), process), Topology::read(two_sockets().path(), Process::default())] {
            for gpu_node in [None, Some(0), Some(1)] {
                assert_eq!(affinity(&topology.cpu_slice(0, &[gpu_node]).unwrap()), affinity(&topology), "{gpu_node:?}");
            }
        }
    }

    #[test]
    fn a_gpus_node_is_that_of_its_pci_device() {
        let dir = tree(&[
            ("sys/bus/pci/devices/0000:0f:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:0f:00.0/class", "0x030200\n"),
            ("sys/bus/pci/devices/0000:0f:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:1f:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:1f:00.0/class", "0x030000\n"),
            ("sys/bus/pci/devices/0000:1f:00.0/numa_node", "-1\n"),
            ("sys/bus/pci/devices/0000:2f:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:2f:00.0/class", "0x068000\n"),
            ("sys/bus/pci/devices/0000:3f:00.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:3f:00.0/class", "0x030000\n"),
        ]);
        let topology = Topology::read(dir.path(), Process::default());
        let known: Vec<_> = topology.pci_gpus.iter().map(|gpu| (gpu.address.as_str(), gpu.numa_node)).collect();
        assert_eq!(known, [("0000:0f:00.0", Some(1)), ("0000:1f:00.0", None)], "no switch, and no other maker's");
        assert_eq!(["0000:0F:00.0", "0000:1F:00.0", "0000:4F:00.0"].map(|pci| topology.node_of_gpu(pci)), [Some(1), None, None]);
    }

    /// Machines with up to 48 CPUs and two threads per core on up to four nodes, and ranks with any homes.
    fn machines() -> impl Strategy<Value = (Topology, Vec<Option<usize>>)> {
        let gpu_nodes = prop::collection::vec(prop::option::weighted(0.9, 0usize..5), 1..9);
        (prop::collection::vec(prop::option::weighted(0.95, 0usize..4), 1..25), gpu_nodes).prop_map(|(nodes, gpu_nodes)| {
            let cores = nodes.len();
            let cpu = |id: usize| Cpu { id, package: None, core: Some(id % cores), numa_node: nodes[id % cores], l3: nodes[id % cores] };
            let nothing = Topology::read(tree(&[]).path(), Process::default());
            (Topology { cpus: (0..2 * cores).map(cpu).collect(), ..nothing }, gpu_nodes)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn shares_are_all_of_the_cpus_each_once((topology, gpu_nodes) in machines()) {
            let slice = |rank| topology.cpu_slice(rank, &gpu_nodes).map(|slice| affinity(&slice));
            let slices: Option<Vec<_>> = (0..gpu_nodes.len()).map(slice).collect();
            prop_assert_eq!(slices.is_none(), topology.cpus.len() < gpu_nodes.len());
            let Some(slices) = slices else { return Ok(()) };
            prop_assert!(slices.iter().all(|slice| !slice.is_empty()));
            prop_assert_eq!(slices.iter().map(CpuList::len).sum::<usize>(), topology.cpus.len());
            prop_assert_eq!(slices.iter().flat_map(CpuList::iter).collect::<CpuList>(), affinity(&topology));
            // Ranks with one home differ by at most one CPU of each node.
            for (rank, other) in (0..gpu_nodes.len()).flat_map(|rank| (0..rank).map(move |other| (rank, other))) {
                let differ = slices[rank].len().abs_diff(slices[other].len());
                prop_assert!(gpu_nodes[rank] != gpu_nodes[other] || differ <= 5, "{:?}", slices);
            }
        }

        #[test]
        fn local_cpus_are_not_lent_to_ranks_of_another_node((topology, gpu_nodes) in machines()) {
            let on = |node: usize| topology.cpus.iter().filter(|cpu| cpu.numa_node == Some(node)).map(|cpu| cpu.id).collect::<CpuList>();
            let at = |node: usize| gpu_nodes.iter().filter(|gpu_node| **gpu_node == Some(node)).count();
            if gpu_nodes.iter().all(|gpu_node| gpu_node.is_some_and(|node| on(node).len() >= at(node))) {
                for (rank, gpu_node) in gpu_nodes.iter().flatten().enumerate() {
                    let slice = affinity(&topology.cpu_slice(rank, &gpu_nodes).unwrap());
                    prop_assert!(!slice.intersection(&on(*gpu_node)).is_empty());
                    for other in gpu_nodes.iter().flatten().filter(|other| *other != gpu_node) {
                        prop_assert!(slice.intersection(&on(*other)).is_empty());
                    }
                }
            }
        }
    }
}
