//! The conformance suite of devices, a part of the program (`selftest`): `run.rs` has what can be asked.

mod attention;
mod bounds;
mod casts;
mod copies;
mod cross_entropy;
mod embed;
mod experts;
mod faults;
mod formats;
mod fp8;
mod harness;
mod heads;
mod kernels;
mod key_gradients;
mod matmul;
mod norms;
mod optimizer;
mod peers;
mod planned;
mod pointwise;
mod products;
mod random;
mod report;
mod route;
pub mod run;
mod sinks;
mod training;
