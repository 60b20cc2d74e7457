//! superoffload trains all parameters of a language model. The device runs the matrix products, and the CPU runs the optimizer. The
//! optimizer steps speculatively, before the gradient norm is known, and the results are exact: weights and moments are bit-identical to
//! those of synchronous steps.
//!
//! The device is a GPU (feature `cuda`), or the CPU, which specifies every kernel's result. NVIDIA's libraries are opened at run time, so
//! one binary runs with and without them.
//!
//! # Public API
//!
//! Each command is a function: [`view_data()`] and [`prepare()`] before a run, [`plan()`] without a run, [`train()`], and [`digest`],
//! [`export`] and [`report`] on the files of a run. [`TrainOptions`] are the options of a run, and [`Settings`] their resolved values;
//! [`ExportOptions`] are the options of an export. An [`Observer`] of a run receives its [`Plan`] and [`RunFacts`], the [`StepMetrics`] of
//! every step, and an [`Alarm`] when threads stall. A [`StopFlag`] ends a run early, and a [`Summary`] describes its end. Errors are an
//! [`Error`] in a [`Result`]. The commands that measure machines and steps are available in the program only.
//!
//! ```no_run
//! use superoffload::{Observer, Plan, Result, RunFacts, Settings, StepMetrics, StopFlag, TrainOptions};
//!
//! struct Losses(Vec<f32>);
//!
//! impl Observer for Losses {
//!     fn begin(&mut self, plan: &Plan, facts: &RunFacts) {
//!         println!("{facts}\n{plan}");
//!     }
//!     fn step(&mut self, metrics: &StepMetrics) {
//!         self.0.push(metrics.loss);
//!     }
//!     fn note(&mut self, line: &str) {
//!         println!("{line}");
//!     }
//!     fn warn(&mut self, line: &str) {
//!         eprintln!("warning: {line}");
//!     }
//! }
//!
//! fn main() -> Result<()> {
//!     // Without a model and data a small model learns the text that ships with the program.
//!     let settings = Settings::resolve(TrainOptions { max_steps: Some(10), ..TrainOptions::default() })?;
//!     let mut losses = Losses(Vec::new());
//!     let summary = superoffload::train(&settings, &StopFlag::on_signals(&settings.stop_signals)?, &mut losses)?;
//!     println!("{summary}\n{:?}", losses.0);
//!     Ok(())
//! }
//! ```
//!
//! # Inside
//!
//! `train` resolves `config` into a [`Plan`], which `planner` fits into memory, and runs steps. In a step, the `engine` enqueues the
//! `model`'s passes on a `device`. Meanwhile `engine::protocol::coordinator`, a pure state machine, decides which `bucket` is copied, stepped, redone
//! or restored. The `host`'s pool runs the kernels of `optim`. `checkpoint` saves and restores the state; ARCHITECTURE.md walks through one
//! step.
//!
//! Unsafe code is denied by default. These modules allow it, with a reason on every block. `device::cpu`, `device::cuda`, `host::pages`,
//! `host::pinned`, `host::pool`, `engine::step_job` and `optim::simd` pass memory to other threads, to vector instructions or to the GPU.
//! `engine::hops` and `probe` create jobs and guarantee their exclusive access to memory. `launch::open` creates devices and guarantees
//! that their streams are ordered. `data::sandbox::process` forks.

// `pub` is reserved for the public API and `internals`, so that the compiler reports unreachable items.
#![warn(unreachable_pub)]
// `missing_docs` would also require docs in `internals`; tests/style.rs requires them for the public API.
#![allow(missing_docs)]
// Docs of internal modules link to private items, for `cargo doc --document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

// Tests of the library include some tests of the program.
#[cfg(test)]
extern crate self as superoffload;

mod bench;
mod bucket;
mod checkpoint;
mod commands;
mod config;
mod data;
mod describe;
mod device;
mod disk;
mod doctor;
mod dtype;
mod engine;
mod error;
mod facts;
mod faults;
mod hardware;
mod host;
mod hub;
#[doc(hidden)]
pub mod internals;
mod launch;
mod memory;
mod metrics;
mod model;
mod model_dir;
mod objective;
mod optim;
mod pair_loss;
mod parallel;
mod planner;
mod policy_loss;
mod probe;
mod progress_event;
mod ranks;
mod recipe;
mod report;
mod request;
mod scalar;
mod search;
mod signals;
mod simulate;
mod superchip;
#[cfg(test)]
mod sweep;
mod sync;
mod teacher_loss;
mod trace;
mod train;
mod units;

pub use commands::{ExportOptions, digest, export, plan, prepare, report, view_data};
pub use config::settings::{Settings, TrainOptions};
pub use engine::watch::watchdog::Alarm;
pub use error::{Error, Result};
pub use metrics::StepMetrics;
pub use planner::plan::Plan;
pub use signals::StopFlag;
pub use train::{Observer, RunFacts, Summary, train};
