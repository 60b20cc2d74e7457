//! Engines on this machine: which device a run gets, and how its engine comes up.

pub mod devices;
