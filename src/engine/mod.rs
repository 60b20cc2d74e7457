//! The step: a pure state machine ([`coordinator`]) that decides, and an [`executor`] that does what it decided.

pub mod coordinator;
pub mod counters;
mod events;
pub mod executor;
pub mod loss_scale;
mod memory;
pub mod pool;
mod report;
pub mod step_job;
pub mod verdict;
pub mod vitals;
pub mod watchdog;
mod weight_flow;
