//! From text and token files to batches: files ([`source`]) through a tokenizer ([`tokenizer`]) become one stream of
//! tokens ([`stream`]), which is cut into sequences of equal length ([`packing`]) and dealt in a seeded order
//! ([`loader`]).

pub mod checksum;
mod contain;
pub mod demo;
pub mod loader;
pub mod packing;
pub mod source;
pub mod stream;
pub mod token_file;
pub mod tokenizer;
