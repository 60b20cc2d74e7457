//! The conformance suite's parts; `tests/gpu.rs` says how to run it.

mod attention;
mod bounds;
mod casts;
mod copies;
mod cross_entropy;
mod embed;
mod experts;
pub mod faults;
mod formats;
pub mod harness;
mod heads;
pub mod kernels;
mod matmul;
mod norms;
mod optimizer;
pub mod peers;
mod planned;
mod pointwise;
mod products;
mod random;
pub mod report;
mod route;
mod sinks;
pub mod training;
