//! The step: a pure state machine ([`coordinator`]) that decides, and an engine ([`executor`]) that does what it decided. README.md
//! beside this file walks a bucket through both.

pub mod coordinator;
pub mod counters;
pub mod executor;
mod exposed;
mod fault_injector;
mod hops;
pub mod loss_scale;
mod memory;
pub mod pool;
mod report;
mod route;
mod state_io;
mod step;
pub mod step_job;
mod transfers;
pub mod verdict;
pub mod vitals;
pub mod watchdog;
mod weight_flow;
