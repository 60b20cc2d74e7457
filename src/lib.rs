//! superoffload trains language models with every parameter trainable, the matrix work on the device and the optimizer
//! on the CPU, and speculates exactly: the weights and moments are the bits of the synchronous step.
//!
//! The device is the CPU, which specifies every kernel's result, or a GPU (feature `cuda`), whose libraries are opened at run
//! time: one binary runs with and without.
//!
//! # The face
//!
//! Training from data to a finished model, each command as a function: [`view_data()`] and [`prepare()`] before a run, [`plan()`] without
//! one, [`train()`], and [`digest`], [`export`] and [`report`] of what it wrote. [`TrainOptions`] is what can be asked of a run, and
//! [`Settings`] what that means; [`ExportOptions`] are those of an export. An [`Observer`] of a run hears its [`Plan`] and [`RunFacts`],
//! the [`StepMetrics`] of every step and an [`Alarm`] when threads stand still; a [`StopFlag`] ends it early, and a [`Summary`] says how
//! it ended. All fail with an [`Error`] in a [`Result`]. What measures machines and steps is the program's alone.
//!
//! ```no_run
//! use superoffload::{Observer, Plan, Result, RunFacts, Settings, StepMetrics, StopFlag, TrainOptions};
//!
//! struct Losses(Vec<f32>);
//!
//! impl Observer for Losses {
//!     fn begin(&mut self, plan: &Plan, facts: &RunFacts) {
//!         println!("{} on {}\n{plan}", facts.model, facts.device);
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
//! `train` turns `config` into a [`Plan`], which `planner` fits into memory, and runs steps. A step is the `engine` enqueuing the
//! `model`'s passes on a `device` while `engine::coordinator`, a pure state machine, decides which `bucket` is copied, stepped by the
//! `host`'s pool with the kernels of `optim`, redone, or restored. `checkpoint` keeps all of it; ARCHITECTURE.md walks through one step.
//!
//! Unsafe code is denied; these modules allow it, each with a reason on every block, because they hand memory to other
//! threads, to vector instructions or to the GPU: `device::cpu`, `device::cuda`, `host::pages`, `host::pinned`,
//! `host::pool`, `engine::step_job`, `optim::simd`; these make jobs, and say why the memory is theirs: `engine::hops`, `probe`; and
//! `launch::open` makes devices and promises that their streams are ordered. `data::sandbox::process` forks.

// What is `pub` can be reached from the face or the hidden door, so that the compiler says what nobody reaches.
#![warn(unreachable_pub)]
// `missing_docs` asks for words on what is behind the door, too; tests/style.rs asks for those on the face.
#![allow(missing_docs)]
// Docs of what is behind the door link to their neighbours, for `cargo doc --document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

// Tests of the library include some of the program's.
#[cfg(test)]
extern crate self as superoffload;

mod bench;
mod bucket;
mod checkpoint;
mod commands;
mod config;
mod data;
mod device;
mod disk;
mod doctor;
mod dtype;
mod engine;
mod error;
mod facts;
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
mod news;
mod optim;
mod planner;
mod probe;
mod ranks;
mod report;
mod search;
mod signals;
mod simulate;
#[cfg(test)]
mod sweep;
mod sync;
mod trace;
mod train;
mod units;

pub use commands::{ExportOptions, digest, export, plan, prepare, report, view_data};
pub use config::settings::{Settings, TrainOptions};
pub use engine::watchdog::Alarm;
pub use error::{Error, Result};
pub use metrics::StepMetrics;
pub use planner::plan::Plan;
pub use signals::StopFlag;
pub use train::{Observer, RunFacts, Summary, train};
