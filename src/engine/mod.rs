//! The step: a pure state machine ([`protocol::coordinator`]) that makes decisions, and an engine ([`executor`]) that executes them.
//! README.md beside this file follows a bucket through both.

mod all_ranks;
mod background_save;
mod early;
pub(crate) mod evaluate;
pub(crate) mod executor;
mod exposed;
mod hops;
mod idle_times;
mod late_rows;
mod logits;
pub(crate) mod memory;
mod module_events;
mod orders;
mod packed_mail;
pub(crate) mod part_saves;
mod passes;
pub(crate) mod pool;
pub(crate) mod protocol;
pub(crate) mod ranks;
mod reference_numbers;
mod replan;
mod reported_amounts;
pub(crate) mod save;
mod state_copies;
mod state_io;
mod step;
mod step_counters;
pub(crate) mod step_job;
mod step_results;
mod transfers;
mod visits;
pub(crate) mod watch;
