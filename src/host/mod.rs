//! The CPU's side of the machine: thread placement, shared memory, the optimizer's pool.

pub mod affinity;
pub mod doorbell;
#[cfg(feature = "mpam")]
pub mod partition;
pub mod pinned;
pub mod pool;
pub mod step_job;
