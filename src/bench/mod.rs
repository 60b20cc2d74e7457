//! `superoffload bench`: how fast training steps are on this machine, as one JSON line a run.
//!
//! [`options`] is what can be asked for, [`step`] runs it ([`simulate`] on a machine that is not here), [`record`] is the line; [`flops`] and [`ceiling`] are what its
//! figures are measured against.

pub mod ceiling;
pub mod gantt;
pub mod options;
pub mod record;
pub mod simulate;
pub mod step;
