//! The host side of the machine: thread placement, shared memory, the optimizer's pool.

pub(crate) mod affinity;
pub(crate) mod doorbell;
pub(crate) mod heartbeats;
pub(crate) mod homes;
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
mod room;
pub(crate) mod wakeup;
