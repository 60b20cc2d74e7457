//! Description of the machine: facts from `/proc` and `/sys`, hardware profiles and rates.

pub(crate) mod cgroup;
pub(crate) mod cpu_list;
mod cpu_slice;
pub(crate) mod gpu;
pub(crate) mod grouped_rates;
pub(crate) mod limits;
mod machine_files;
mod machine_parts;
pub(crate) mod parse;
pub(crate) mod peer_route;
mod process;
pub(crate) mod profile;
pub(crate) mod rates;
pub(crate) mod selected_profile;
pub(crate) mod sourced;
pub(crate) mod topology;
mod usable_cpus;
