//! What this machine is: facts from `/proc` and `/sys`, and the report that a person reads.

pub mod cgroup;
pub mod cpu_list;
pub mod gpu;
pub mod limits;
pub(crate) mod parse;
pub mod profile;
pub mod rates;
pub mod selected_profile;
pub mod sourced;
pub mod topology;
