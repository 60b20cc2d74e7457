//! Placeholder lib doc (the owner writes it).
#![allow(missing_docs)]
pub mod bucket;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod device;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod hardware;
pub mod host;
pub mod model;
pub mod optim;
pub mod units;
