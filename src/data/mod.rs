//! From text and token files to batches: text files ([`files`], [`source`]) go through a tokenizer ([`tokenizer`]) in pieces, on all CPUs,
//! and lie in a prepared folder ([`prepared`]) that the next run finds again, even without them ([`known_sources`]). With token files
//! ([`token_file`]) they are one stream of tokens ([`stream`]), which is cut into sequences of equal length ([`packing`]) and dealt in a
//! seeded order ([`loader`]) as micro-batches ([`batch`]). Where documents stay apart, rows are made of whole ones ([`rows`]).

mod around;
pub(crate) mod batch;
mod best_fit;
mod bounds;
pub(crate) mod cache;
pub(crate) mod chat;
pub(crate) mod checked;
pub(crate) mod checksum;
mod codec;
mod compression;
pub(crate) mod demo;
mod documents;
mod duplicate_text;
mod elements;
mod encode;
pub(crate) mod files;
pub(crate) mod hold_out;
pub(crate) mod known_sources;
mod lengths;
pub(crate) mod loader;
pub(crate) mod packing;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod pattern;
mod pieces;
mod pipeline;
mod position;
pub(crate) mod preparation;
pub(crate) mod prepare;
pub(crate) mod prepared;
pub(crate) mod prompt;
mod remarks;
pub(crate) mod rows;
mod samples;
mod sandbox;
mod saved_dataset;
mod scan;
mod sentences;
pub(crate) mod shown;
pub(crate) mod source;
mod stopped;
pub(crate) mod stream;
mod text;
pub(crate) mod token_file;
mod token_spans;
pub(crate) mod tokenizer;
pub(crate) mod view;
mod work;
