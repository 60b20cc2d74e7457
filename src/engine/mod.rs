//! The step: a pure state machine ([`coordinator`]) that decides, and an [`executor`] that does what it decided.

pub mod coordinator;
pub mod counters;
pub mod executor;
mod havoc;
pub mod loss_scale;
mod memory;
pub mod pool;
mod report;
pub mod route;
pub mod step_job;
mod transfers;
pub mod verdict;
pub mod vitals;
pub mod watchdog;
mod weight_flow;
