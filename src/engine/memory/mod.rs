//! Memory of one rank: optimizer state, scratch memory of the plan, streamed weights, and small buffers of the driver.

pub(super) mod bounce_buffer;
pub(super) mod boundaries;
mod device_state;
pub(crate) mod expert_rows;
pub(super) mod frozen_weights;
mod host_state;
pub(super) mod permanent;
mod prefetch_buffer;
pub(super) mod scratch;
mod split_masters;
pub(super) mod states;
pub(super) mod weight_flow;
