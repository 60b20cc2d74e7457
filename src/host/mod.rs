//! The host side of the machine: thread placement, shared memory, the optimizer's pool.

pub(crate) mod affinity;
pub(crate) mod doorbell;
mod free_memory;
pub(crate) mod heartbeats;
#[cfg(all(loom, test))]
mod interleavings;
pub(crate) mod memory_policy;
pub(crate) mod memory_report;
pub(crate) mod pages;
#[cfg(feature = "mpam")]
pub(crate) mod partition;
pub(crate) mod perf;
pub(crate) mod pinned;
pub(crate) mod pool;
pub(crate) mod resctrl_group;
pub(crate) mod wakeup;
pub(crate) mod worker_nodes;
