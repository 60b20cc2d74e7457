//! Meetings of all ranks between two steps.

use super::PeerExchange;
use super::inter_node::InterNode;
use crate::device::{EventId, Kernels, Peers};
use crate::engine::ranks::exchange::RendezvousPort;
use crate::engine::ranks::rendezvous::{RankHandles, RankMemory, Rendezvous, check_same_bits};
use crate::engine::watch::driver_state::DriverState;
use crate::engine::watch::watchdog::Watched;
use crate::error::{Error, Result};
use std::sync::Arc;

/// The rendezvous of this process, and the number of meetings of all ranks so far.
pub(super) struct PeerMeetings<C> {
    pub(super) rendezvous: Arc<Rendezvous<C>>,
    arrivals: u64,
}

impl<C> PeerMeetings<C> {
    pub(super) fn new(rendezvous: Arc<Rendezvous<C>>) -> Self {
        Self { rendezvous, arrivals: 0 }
    }
}

impl<D: Kernels + Peers> RendezvousPort<D> for PeerExchange<D::PeerHandle> {
    fn leave(&mut self, dev: &mut D) -> Result<()> {
        self.meetings.rendezvous.leave(self.context.rank);
        self.peers.clear();
        dev.leave()?;
        self.meet_peers()?;
        dev.reclaim()
    }

    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        refusal.iter().for_each(|why| self.meetings.rendezvous.refuse(self.context.rank, why.to_string()));
        self.meet_peers()?;
        Ok(self.meetings.rendezvous.refusal().map(|(rank, why)| self.context.progress.error_of(rank, why)))
    }

    fn introduce(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, driver_state: &Arc<DriverState>) {
        let memory = RankMemory { shards: self.own.shards.clone(), ..memory };
        self.inter_node.iter_mut().for_each(|inter_node| inter_node.settle_down(&memory));
        let (peer_handle, products) = (dev.peer_handle(), dev.product_algorithms());
        let ((written, pulled), driver_state) = (self.gradients.events(), driver_state.clone());
        let ((relayed, fetched), handed) = (self.weights.events(), self.handovers.events());
        self.meetings.rendezvous.enter(
            self.context.rank,
            RankHandles { device: peer_handle, memory, written, pulled, stepped, relayed, fetched, handed, driver: driver_state, products },
        );
    }

    fn exchange_handles(&mut self, dev: &mut D) -> Result<()> {
        self.peers = self.meetings.rendezvous.handles(self.context.progress.ranks());
        check_same_bits(&self.peers[self.context.rank].products, &self.peers[0].products)?;
        dev.admit(self.context.clone(), self.peers.iter().map(|peer| peer.device.clone()).collect())
    }

    fn connect(&mut self, dev: &mut D) -> Result<()> {
        if self.inter_node.is_none() {
            return Ok(());
        }
        self.meet_peers()?;
        let Some(InterNode::Nccl(nccl)) = &mut self.inter_node else { return Ok(()) };
        nccl.connect(dev, self.gradients.staging())
    }

    fn meet_again(&mut self, dev: &mut D, memory: RankMemory, stepped: Vec<EventId>, driver_state: &Arc<DriverState>) -> Result<()> {
        RendezvousPort::introduce(self, dev, memory, stepped, driver_state);
        self.meet_peers()?;
        RendezvousPort::exchange_handles(self, dev)
    }

    fn check(&self) -> Result<()> {
        self.context.check()
    }

    fn attribute(&self, error: Error) -> Error {
        self.context.attribute(error)
    }

    fn watched(&self, _: Arc<DriverState>) -> Watched {
        // The driver state of ranks of other processes is not known here; their publications are in the progress counters.
        let known = self.peers.iter().take(self.context.progress.local_ranks().len());
        Watched { ranks: known.map(|peer| peer.driver.clone()).collect(), progress: Some(self.context.progress.clone()) }
    }

    fn pass(&self) -> Result<()> {
        self.context.pass()
    }

    fn pass_idle(&self) -> Result<()> {
        self.context.pass_idle().map(|_| ())
    }
}

impl<C> PeerExchange<C> {
    /// Waits until all ranks have arrived, between two steps.
    pub(super) fn meet_peers(&mut self) -> Result<()> {
        self.meetings.arrivals += 1;
        self.context.progress.publish_met(self.context.rank);
        self.wait_until(|| self.context.progress.all_met(self.meetings.arrivals))
    }
}
