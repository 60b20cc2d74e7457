//! The stream of tokens, the documents in it, and their division into rows and micro-batches.

pub(crate) mod batch;
pub(super) mod best_fit;
pub(super) mod bounds;
mod document_part;
pub(super) mod duplicate_text;
pub(crate) mod hold_out;
pub(super) mod lengths;
mod packer;
pub(super) mod rollout_numbers;
pub(crate) mod row_rules;
pub(super) mod row_table;
mod teacher_numbers;
mod token_references;
pub(crate) mod token_stream;
