//! Observation of a running step: the driver's published state, the watchdog that reads it, and faults that tests inject.

pub(super) mod driver_state;
pub(super) mod fault_injector;
mod wait_graph;
pub(crate) mod watchdog;
