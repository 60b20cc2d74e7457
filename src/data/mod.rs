//! From text and token files to batches: text files ([`source`]) go through a tokenizer ([`tokenizer`]) in pieces, on all CPUs, and lie
//! in a prepared folder ([`prepared`]) that the next run finds again, or in memory if they are small. With token files
//! ([`token_file`]) they are one stream of tokens ([`stream`]), which is cut into sequences of equal length ([`packing`]) and dealt in a
//! seeded order ([`loader`]) as micro-batches ([`batch`]).

pub mod batch;
mod cache;
mod checked;
pub mod checksum;
mod contain;
pub mod demo;
mod documents;
mod encode;
pub mod loader;
pub mod packing;
pub mod preparation;
pub mod prepared;
mod scan;
pub mod source;
pub mod stream;
mod text;
pub mod token_file;
pub mod tokenizer;
