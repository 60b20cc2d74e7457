//! A save that reads states while later steps run: the words that the driver and the writer's thread share, and the end of each.

pub(in crate::engine) mod board;
pub(in crate::engine) mod device_copies;
pub(crate) mod frozen_state;
pub(in crate::engine) mod running_save;
pub(crate) mod simulated_reader;
