//! `superoffload bench`: how fast training steps are on this machine, as one JSON line a run.
//!
//! [`options`] is what can be asked for, [`step`] runs it ([`simulate`] on a machine that is not here), [`record`] is the line; what its
//! figures are measured against are [`crate::model::flops`] and [`ceiling`].

pub(crate) mod ceiling;
pub(crate) mod gantt;
#[cfg(test)]
mod numbers_tests;
pub(crate) mod options;
pub(crate) mod record;
pub(crate) mod simulate;
pub(crate) mod step;
