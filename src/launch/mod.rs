//! Creates engines on this machine for `train`, `bench` and `probe`. [`devices`] selects the device, and [`engine`] creates the engine on
//! it. [`gpu`] wraps the GPU functions for builds without CUDA, and [`open`] opens devices. [`context`] checks the sequence length against
//! the model, and [`peer_links`] describes the links between GPUs. For runs of several processes, [`process_info`] assigns GPUs and CPUs,
//! [`agreement`] compares settings and plans, and [`processes`] creates the engines of one process.

pub(crate) mod agreement;
pub(crate) mod context;
pub(crate) mod cpu_slice;
pub(crate) mod devices;
pub(crate) mod engine;
pub(crate) mod gpu;
pub(crate) mod open;
pub(crate) mod peer_links;
pub(crate) mod process_info;
pub(crate) mod processes;
pub(crate) mod ranks;
