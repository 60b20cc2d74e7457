//! From text and token files to batches. Data files are found and read ([`read`]). A tokenizer ([`tokenizer`]) and rules for records
//! ([`chat`]) turn documents into tokens on all CPUs ([`encode`]). The tokens lie in a folder that the next run finds again ([`prepared`]),
//! even without the files ([`run_sources`]). All tokens are one stream, which is cut into sequences of equal length, or into rows of whole
//! documents ([`rows`]). A [`dataset`] holds the sequences, and a [`loader`] deals them in a seeded order as micro-batches.

pub(crate) mod chat;
pub(crate) mod checksum;
pub(crate) mod context;
pub(crate) mod dataset;
pub(crate) mod encode;
pub(crate) mod host_bytes;
pub(crate) mod loader;
pub(crate) mod loss_weight;
pub(in crate::data) mod number_words;
pub(crate) mod prepare_ahead;
pub(crate) mod prepared;
pub(crate) mod read;
pub(crate) mod rows;
pub(crate) mod run_sources;
mod sandbox;
mod stopped;
pub(crate) mod tokenizer;
pub(crate) mod view;
