//! superoffload trains language models with every parameter trainable, the matrix work on the device and the optimizer
//! on the CPU, and speculates exactly: the weights and moments are the bits of the synchronous step.
//!
//! The picture: [`train`] turns [`config`] into a [`planner::plan::Plan`], which [`planner`] fits into memory, and runs
//! steps. A step is the [`engine`] enqueuing the [`model`]'s passes on a [`device`] while [`engine::coordinator`], a
//! pure state machine, decides which [`bucket`] is copied, stepped by the [`host`]'s pool with the kernels of [`optim`],
//! redone, or restored. [`checkpoint`] keeps all of it; ARCHITECTURE.md walks through one step.
//!
//! The device is the CPU, which specifies every kernel's result, or a GPU (feature `cuda`), whose libraries are opened at run
//! time: one binary runs with and without.
//!
//! Unsafe code is denied; these modules allow it, each with a reason on every block, because they hand memory to other
//! threads, to vector instructions or to the GPU: `device::cpu`, `device::cuda`, `host::pages`, `host::pinned`,
//! `host::pool`, `engine::step_job`, `optim::simd`; and these make jobs, and say why the memory is theirs: `engine::hops`, `probe`.

pub mod bench;
pub mod bucket;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod device;
pub(crate) mod disk;
pub mod doctor;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod facts;
pub mod hardware;
pub mod host;
pub mod launch;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod model_dir;
pub mod optim;
pub mod planner;
pub mod probe;
pub mod search;
pub mod signals;
pub mod simulate;
mod sync;
pub mod trace;
pub mod train;
pub mod units;
