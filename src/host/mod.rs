//! The CPU's side of the machine: thread placement, pinned memory, the optimizer's pool.
pub mod affinity;
pub mod pinned;
