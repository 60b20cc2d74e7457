//! The protocol of a step without clock, thread or tensor memory: the coordinator, a bucket's route, the verdict, and what the driver counts.

pub(crate) mod coordinator;
pub(crate) mod counters;
pub(crate) mod loss_scale;
pub(super) mod order;
pub(super) mod route;
pub(crate) mod verdict;
