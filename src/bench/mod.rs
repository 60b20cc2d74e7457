//! `superoffload bench`: how fast training steps are on this machine, as one JSON line a run.
//!
//! [`options`] is what can be asked for, [`step`] runs it ([`simulate`] on a machine that is not here), [`record`] is the line; what its
//! figures are measured against are [`crate::model::flops`] and [`ceiling`].

pub mod ceiling;
pub mod gantt;
pub mod options;
pub mod record;
pub mod simulate;
pub mod step;
