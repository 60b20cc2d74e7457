//! The CPU's side of the machine: thread placement, shared memory, the optimizer's pool.

pub mod affinity;
pub mod doorbell;
pub mod homes;
#[cfg(all(loom, test))]
mod interleavings;
pub mod memory_policy;
pub mod memory_report;
mod pages;
#[cfg(feature = "mpam")]
pub mod partition;
pub mod perf;
pub mod pinned;
pub mod pool;
pub mod pulse;
pub mod resctrl_group;
mod room;
pub mod wakeup;
