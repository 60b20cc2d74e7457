//! Exchange between several ranks: each rank publishes its recorded events in the progress counters ([`ProgressCounters`]), and its peers
//! copy from its memory. Gradients of ranks of other processes arrive by [`TcpTransport`] (TCP) or [`NcclTransport`] (NCCL). So do weights:
//! a rank exchanges them with its *inter-node peers*, the ranks with the same local index in other processes, and *relays* them to the
//! other local ranks, which pull them from it.
//!
//! If the local ranks compute a whole group of partial sums in each round, its sum is computed within the process first: each rank pulls
//! the slices that it and its inter-node peers own, and the group's sum replaces its gradient there. Only the group's sum leaves the
//! process, to the inter-node peers.
//!
//! *Record, then publish, then wait*: waiting for an event that is not yet recorded has no effect. So a rank records an event before it
//! publishes it, and its peers enqueue a wait only afterwards.
//!
//! The state of each port is a struct in the file of its methods, which alone changes the struct's fields.
//!
//! [`NcclTransport`]: super::nccl_transport::NcclTransport

mod gradients;
mod inter_node;
mod meetings;
mod orders;
mod reports;
mod slice_memory;
mod weights;

pub(crate) use inter_node::PeerTransport;

use self::inter_node::InterNode;
use self::slice_memory::SliceMemory;
use super::exchange::Exchange;
use super::handover::Handovers;
use super::rendezvous::{RankHandles, Rendezvous};
use super::tcp_transport::TcpTransport;
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::device::{Device, Kernels, Lease, Peers, Sides};
use crate::error::Result;
use crate::planner::plan::Plan;
use crate::ranks::RankContext;
use crate::ranks::progress::ProgressCounters;
use std::sync::Arc;

/// The exchange of one of several ranks.
pub(crate) struct PeerExchange<C> {
    context: RankContext,
    /// Connection to ranks of other processes, if there are any.
    inter_node: Option<InterNode>,
    slices: Slices,
    own: SliceMemory,
    lease: Lease,
    /// Rendezvous entries of all ranks, once they are known.
    peers: Vec<RankHandles<C>>,
    handovers: Handovers,
    gradients: gradients::PeerGradients,
    weights: weights::PeerWeights,
    reports: reports::PeerReports,
    batches: orders::PeerBatches,
    meetings: meetings::PeerMeetings<C>,
}

impl<C> PeerExchange<C> {
    /// # Errors
    /// Errors of the device.
    pub(in crate::engine) fn new<D: Kernels>(
        dev: &mut D,
        plan: &Plan,
        context: RankContext,
        rendezvous: Arc<Rendezvous<C>>,
        transport: PeerTransport,
    ) -> Result<Self> {
        let slices = Slices::new(plan.placement.layout.clone(), context.rank, context.progress.ranks());
        let (mut lease, relays) = (Lease::default(), !matches!(transport, PeerTransport::Memory));
        Ok(Self {
            own: SliceMemory::take(&mut lease, dev, plan, &slices)?,
            inter_node: InterNode::new(dev, plan, &slices, context.progress.local_ranks(), transport)?,
            lease,
            gradients: gradients::PeerGradients::new(dev, plan, &slices)?,
            weights: weights::PeerWeights::new(dev, plan.placement.layout.count(), relays)?,
            reports: reports::PeerReports::new(),
            batches: orders::PeerBatches::new(plan, context.rank),
            meetings: meetings::PeerMeetings::new(rendezvous),
            handovers: Handovers::new(dev, context.rank, plan.recipe.step.sequence_ranks)?,
            peers: Vec::new(),
            slices,
            context,
        })
    }

    fn buckets(&self) -> u64 {
        self.slices.layout().count() as u64
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<C> {
        let own = self.context.rank;
        (0..self.context.progress.ranks()).filter(move |rank| *rank != own)
    }

    /// The local rank that receives the weights of `owner` first.
    fn relay_of(&self, owner: usize) -> usize {
        let local_ranks = self.context.progress.local_ranks();
        local_ranks.start + owner % local_ranks.len()
    }

    /// Waits for progress counters outside of a step's event loop.
    fn wait_until(&self, ready: impl Fn() -> bool) -> Result<()> {
        self.wait_advancing(ready, || Ok(false))
    }

    /// Like `wait_until`, and lets `advance` perform an operation at each turn under a turn token. It returns false if there is none.
    fn wait_advancing(&self, ready: impl Fn() -> bool, mut advance: impl FnMut() -> Result<bool>) -> Result<()> {
        while !ready() {
            self.context.check()?;
            if self.context.progress.turn_token().is_some() && advance()? {
                self.context.pass()?;
            } else if !self.context.pass_idle()? {
                self.context.progress.bell(self.context.rank).wait_until(|| ready() || self.context.progress.has_failed());
            }
        }
        self.context.check()
    }

    /// Like `wait_until`, but keeps sending and receiving slices for peers meanwhile. Under a turn token the device continues: it progresses
    /// only with its driver, and peers wait for the results of its last operations.
    fn wait_serving<D: Device>(&mut self, dev: &mut D, ready: impl Fn(&ProgressCounters) -> bool) -> Result<()> {
        let progress = self.context.progress.clone();
        if self.inter_node.is_none() {
            return self.wait_advancing(|| ready(&progress), || dev.idle());
        }
        let bell = progress.bell(self.context.rank);
        loop {
            let rung = bell.rings();
            self.tcp().map_or(Ok(()), |inter_node| inter_node.serve(dev))?;
            self.context.check()?;
            if ready(&progress) {
                return Ok(());
            }
            // The doorbell rings for everything that arrives from peers. Copies of this device do not ring it on every device, so it is
            // polled while they are pending.
            let is_quiet = match &self.inter_node {
                Some(InterNode::Tcp(inter_node)) => inter_node.is_quiet(),
                Some(InterNode::Nccl(nccl)) => nccl.is_quiet(dev)?,
                Some(InterNode::Images) | None => true,
            };
            if is_quiet || !dev.idle()? {
                bell.wait(rung);
            }
        }
    }

    fn tcp(&mut self) -> Option<&mut TcpTransport> {
        if let Some(InterNode::Tcp(tcp)) = &mut self.inter_node { Some(tcp) } else { None }
    }
}

impl<D: Kernels + Peers> Exchange<D> for PeerExchange<D::PeerHandle> {
    fn slices(&self) -> &Slices {
        &self.slices
    }

    fn rearrange(&mut self, (dev, _): Sides<'_, D>, layout: &BucketLayout) -> Result<()> {
        self.slices = Slices::new(layout.clone(), self.context.rank, self.context.progress.ranks());
        self.lease.give_back_device(dev)
    }

    fn take(&mut self, (dev, _): Sides<'_, D>, plan: &Plan) -> Result<()> {
        self.own = SliceMemory::take(&mut self.lease, dev, plan, &self.slices)?;
        self.gradients.reorder(dev, plan)
    }
}

#[cfg(test)]
#[path = "peer_exchange_tests.rs"]
mod tests;
