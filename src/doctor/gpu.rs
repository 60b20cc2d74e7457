//! The GPUs of this machine, and whether this program can use them.

use crate::error::Result;
use crate::hardware::gpu::{GpuFacts, GpuId};
use crate::hardware::topology::Topology;
use crate::launch::gpu as devices;
use crate::launch::peer_links::PeerLinks;
use crate::memory::Addressing;
use std::path::PathBuf;

/// Whether a GPU exists, and whether this program can compute on it.
#[derive(Debug)]
pub(crate) struct GpuReport {
    /// Facts of the GPU, or why they are unknown.
    pub facts: Result<GpuFacts>,
    /// Access of the GPU to host memory as CUDA reports it, or why CUDA cannot open the GPU.
    pub usable: Result<Addressing>,
    /// Paths of NVIDIA's libraries, or why one cannot be opened; empty without a usable GPU.
    pub libraries: Vec<(&'static str, Result<PathBuf>)>,
    /// Ids of several GPUs and the links between them; empty with fewer than two.
    pub several: Result<SeveralGpus>,
}

/// The GPUs of `--gpus all`.
#[derive(Debug, Default)]
pub(crate) struct SeveralGpus {
    gpus: Vec<GpuId>,
    pub(super) links: PeerLinks,
}

impl SeveralGpus {
    fn this_machine() -> Result<Self> {
        let gpus = devices::visible()?;
        if gpus.len() < 2 {
            return Ok(Self::default());
        }
        Ok(Self { links: PeerLinks::between(&gpus)?, gpus })
    }

    /// One line for each rank of `--gpus all` on the machine of `topology`: GPU, memory node and CPUs.
    pub(super) fn ranks(&self, topology: &Topology) -> Vec<String> {
        let gpu_nodes = devices::gpu_nodes(&self.gpus, topology);
        let rank = |(rank, gpu): (usize, &GpuId)| {
            let node = gpu_nodes[rank].map_or("unknown memory node".into(), |node| format!("memory node {node}"));
            let cpu_slice = topology.cpu_slice(rank, &gpu_nodes).and_then(|cpu_slice| cpu_slice.usable_cpus());
            let cpus = cpu_slice.map_or("shared with all".into(), |usable| usable.affinity.to_string());
            format!("{gpu}: {}, {node}, CPUs {cpus} of --gpus all", gpu.model)
        };
        self.gpus.iter().enumerate().map(rank).collect()
    }
}

impl GpuReport {
    pub(crate) fn this_machine() -> Self {
        #[cfg(feature = "cuda")]
        let (usable, libraries) = (crate::device::cuda::probe(0), crate::device::cuda::libraries);
        #[cfg(not(feature = "cuda"))]
        let (usable, libraries) = (Err(crate::hardware::gpu::no_cuda()), Vec::new);
        let libraries = if usable.is_ok() { libraries() } else { Vec::new() };
        let several = if usable.is_ok() { SeveralGpus::this_machine() } else { Ok(SeveralGpus::default()) };
        Self { facts: GpuFacts::read(), usable, libraries, several }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::two_sockets;

    #[test]
    fn several_gpus_have_a_line_each() {
        let gpu = |index: usize| GpuId { index, pci: format!("0000:{index}F:00.0"), model: "NVIDIA H200".into() };
        let several = SeveralGpus { gpus: (0..3).map(gpu).collect(), links: PeerLinks::default() };
        let mut topology = Topology::read(two_sockets().path(), Process::default());
        assert_eq!(several.ranks(&topology)[1], "GPU 1 (0000:1F:00.0): NVIDIA H200, unknown memory node, CPUs 1,5 of --gpus all");
        topology.place_gpus(&[("0000:0f:00.0", 0), ("0000:1f:00.0", 1), ("0000:2f:00.0", 0)]);
        let ranks = several.ranks(&topology);
        assert_eq!(ranks[0], "GPU 0 (0000:0F:00.0): NVIDIA H200, memory node 0, CPUs 0,4 of --gpus all");
        assert_eq!(ranks[1], "GPU 1 (0000:1F:00.0): NVIDIA H200, memory node 1, CPUs 2-3,6 of --gpus all");
        topology.process.affinity = crate::hardware::cpu_list::CpuList::parse("0-1");
        assert!(several.ranks(&topology)[2].ends_with("CPUs shared with all of --gpus all"));
    }
}
