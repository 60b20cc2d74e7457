//! The step: a pure state machine ([`coordinator`]) that decides, and an engine ([`executor`]) that does what it decided. README.md
//! beside this file walks a bucket through both.

mod all_ranks;
mod awaited;
mod bounce;
pub(crate) mod coordinator;
pub(crate) mod counters;
mod early;
pub(crate) mod evaluate;
pub(crate) mod exchange;
pub(crate) mod executor;
pub(crate) mod expert_rows;
mod exposed;
mod fault_injector;
pub(crate) mod hall;
mod handover;
mod hops;
mod late_rows;
pub(crate) mod loss_scale;
mod memory;
pub(crate) mod orders;
pub(crate) mod pool;
mod pulls;
mod replan;
mod report;
mod route;
mod scratch;
pub(crate) mod sockets;
mod state_io;
mod states;
mod step;
pub(crate) mod step_job;
mod sums;
mod transfers;
pub(crate) mod verdict;
pub(crate) mod vitals;
pub(crate) mod watchdog;
mod weight_flow;
