//! The optimizer: the scalar specification, its vector forms, the gradient norm and the learning-rate schedules.
pub mod adam;
pub mod norm;
