//! Configuration files of other trainers: translates their keys.

mod convert;
mod datasets;
mod fate;
mod rules;

pub(crate) use convert::{HEAD, convert};
