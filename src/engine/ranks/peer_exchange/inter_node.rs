//! Transports of slices between processes.

use crate::bucket::slices::Slices;
use crate::device::Device;
use crate::engine::ranks::nccl_transport::NcclTransport;
use crate::engine::ranks::rendezvous::RankMemory;
use crate::engine::ranks::tcp_transport::TcpTransport;
use crate::error::Result;
use crate::planner::plan::Plan;
use crate::ranks::NcclUniqueId;
use crate::ranks::links::ConnectionsByRank;
use std::ops::Range;

/// Transport of slices to and from ranks of other processes.
pub(super) enum InterNode {
    Tcp(Box<TcpTransport>),
    Nccl(Box<NcclTransport>),
    /// Nothing is sent: slices of mirrored ranks are pulled like those of local ranks.
    Images,
}

/// Connection of a rank to its peers.
pub(crate) enum PeerTransport {
    /// All ranks are local.
    Memory,
    /// TCP connections to each rank of another process, through host memory.
    Tcp(ConnectionsByRank),
    /// NCCL, from device to device.
    Nccl(NcclUniqueId),
    /// The peers are mirrored ranks; the simulated device stands for their memory.
    Images,
}

impl InterNode {
    pub(super) fn new<D: Device>(
        dev: &mut D,
        plan: &Plan,
        slices: &Slices,
        local_ranks: Range<usize>,
        transport: PeerTransport,
    ) -> Result<Option<Self>> {
        Ok(match transport {
            PeerTransport::Memory => None,
            PeerTransport::Images => Some(Self::Images),
            PeerTransport::Tcp(connections) => Some(Self::Tcp(Box::new(TcpTransport::new(dev, plan, slices, connections)?))),
            PeerTransport::Nccl(key) => Some(Self::Nccl(Box::new(NcclTransport::new(
                dev,
                slices,
                (local_ranks, plan.sums_within()),
                (key, plan.site.cuda_libraries.clone()),
            )?))),
        })
    }

    pub(super) fn settle_down(&mut self, memory: &RankMemory) {
        match self {
            Self::Tcp(tcp) => tcp.settle_down(memory.clone()),
            Self::Nccl(nccl) => nccl.settle_down(memory.clone()),
            Self::Images => {}
        }
    }
}
