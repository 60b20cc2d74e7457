//! `superoffload bench`: measures the speed of training steps on this machine and prints one JSON line a run.
//!
//! [`options`] are the flags, [`step`] runs on this machine, [`simulate`] runs on a simulated machine, [`record`] is the JSON line. Speeds
//! are compared to [`crate::model::flops`] and [`ceiling`].

pub(crate) mod ceiling;
#[cfg(all(test, feature = "stv", feature = "repartition"))]
mod clip_tests;
pub(crate) mod gantt;
#[cfg(test)]
mod numbers_tests;
pub(crate) mod options;
pub(crate) mod record;
pub(crate) mod simulate;
pub(crate) mod step;
