//! The port of an exchange for rendezvous.

use crate::device::{EventId, Kernels};
use crate::engine::ranks::rendezvous::RankMemory;
use crate::engine::watch::driver_state::DriverState;
use crate::engine::watch::watchdog::Watched;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Arrival of all ranks between two steps, the memory and events that they publish there, and the failure that ends all of them.
///
/// Methods poll, unless their documentation says that they wait.
pub(crate) trait RendezvousPort<D: Kernels> {
    /// Drops all peer mappings and waits until the peers have dropped theirs. No work may be pending.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn leave(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Waits until all ranks have tried to allocate the memory of a new plan. `refusal` is this rank's failure, if it failed. Returns the
    /// first failure of any rank.
    ///
    /// # Errors
    /// The failure that ended another rank.
    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        Ok(refusal)
    }

    /// Publishes this rank's memory addresses and events to its peers. By bucket, `stepped` is the event after which this rank's slice of
    /// the weights is written.
    fn introduce(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _driver_state: &Arc<DriverState>) {}

    /// Reads the memory addresses and events that all peers have published.
    ///
    /// # Errors
    /// `Unsupported` when this rank would compute other bits than rank 0; errors of the device.
    fn exchange_handles(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Opens direct connections between devices of different processes, if the transport has them, once all ranks have arrived.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn connect(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Repeats [`RendezvousPort::introduce`] and [`RendezvousPort::exchange_handles`] after memory and events have changed.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn meet_again(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _driver_state: &Arc<DriverState>) -> Result<()> {
        Ok(())
    }

    /// Checks that no rank has failed so far.
    ///
    /// # Errors
    /// The failure of the first rank that failed.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Records `error` as the failure that ends all ranks, unless another rank failed before. Returns the first failure, with the name of
    /// its rank.
    fn attribute(&self, error: Error) -> Error {
        error
    }

    /// The driver states of the local ranks, including this rank's `driver_state`, and the progress counters, for the watchdog.
    fn watched(&self, driver_state: Arc<DriverState>) -> Watched {
        Watched::alone(driver_state)
    }

    /// Lets another rank run, in a test that schedules ranks.
    fn pass(&self) -> Result<()> {
        Ok(())
    }

    /// Reports that this rank has no runnable work, in a test that schedules ranks.
    ///
    /// # Errors
    /// `Resource` when no rank has runnable work: a deadlock.
    fn pass_idle(&self) -> Result<()> {
        Err(Error::resource("wait for the step", "no operation is in progress: a deadlock in the step protocol"))
    }
}
